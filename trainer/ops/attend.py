"""Attention of every query over the keys in its window, the compressed entries it sees, and a sink.

One softmax over all three (SPEC section 5): window keys and entries are keys and values at once, shared by all
heads; the sink is a learned logit per head that takes probability and gives nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from trainer.ops.splash import ATTENDED, splash
from trainer.sharding import varying_like


class Entries(struct.PyTreeNode):
    """Compressed keys and who sees them. Entry w ends at token (w + 1) S / T - 1 or later: no query before sees it."""

    kv: jax.Array  # [B, T, C]
    seen: jax.Array  # [B, S, T] bool


class Keys(struct.PyTreeNode):
    """What the queries of whole rows attend to."""

    kv: jax.Array  # [B, S, C]
    entries: Entries | None
    sinks: jax.Array  # [H] float32
    segment_ids: jax.Array  # [B, S] int32, 0 = padding
    window: int = struct.field(pytree_node=False)


# q [B, n, H, C] -> [B, n, H, C]: attention of some queries of the rows
AttendSome = Callable[[jax.Array], jax.Array]
# (inputs [B, n, ...] of some queries, their attention) -> their results [B, n, ...]: makes the queries, uses what they
# attend to. As it runs on chunks, neither exists for whole rows.
Heads = Callable[[Any, AttendSome], jax.Array]
# (heads, inputs [B, S, ...], keys) -> results [B, S, ...]
Attend = Callable[[Heads, Any, Keys], jax.Array]
# (q [B, n, H, C], keys [B, m, C], mask [B, n, m] bool, sinks [H] float32) -> [B, n, H, C]
AttendMasked = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

CHUNK_QUERIES = 256  # of the chunked form: float32 scores of one chunk and 8 heads are 37 MiB at 16384 tokens
SPLASH_QUERIES = 2048  # of one call of the kernel: its mask is 13 MB
# A chunk's queries, scores and outputs are made again on the way back; what the kernel gave is not.
KEEP_ATTENDED = jax.checkpoint_policies.save_only_these_names(ATTENDED)
HALVED_ENTRIES = 1024  # from so many entries on, queries of the row's first half are not scored against the second's


def softmax_masked(q: jax.Array, keys: jax.Array, mask: jax.Array, sinks: jax.Array) -> jax.Array:
    """The plain form: logits and softmax in float32, whole score matrices. See `AttendMasked`."""
    logits = jnp.einsum("bshc,btc->bhst", q, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    logits = jnp.where(mask[:, None], logits, -jnp.inf)
    sinks = sinks[None, :, None, None]
    top = lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks))
    weights = jnp.exp(logits - top)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top))
    return jnp.einsum("bhst,btc->bshc", weights.astype(q.dtype), keys)


def window_mask(queries: jax.Array, keys: jax.Array, distance: jax.Array, window: int) -> jax.Array:
    """Segments of queries [B, n] and keys [B, m], how far each key lies before each query [n, m] -> [B, n, m] bool:
    the last `window` keys of the query's own document, itself included."""
    near = (distance >= 0) & (distance < window)
    return near & (queries[:, :, None] == keys[:, None, :])


def dot_product(heads: Heads, inputs: Any, keys: Keys) -> jax.Array:
    """All scores at once: the reference for every other form."""
    index = jnp.arange(keys.kv.shape[1])
    mask = window_mask(keys.segment_ids, keys.segment_ids, index[:, None] - index[None, :], keys.window)
    kv = keys.kv
    if keys.entries is not None:
        kv = jnp.concatenate([kv, keys.entries.kv], axis=1)
        mask = jnp.concatenate([mask, keys.entries.seen], axis=2)
    return heads(inputs, lambda q: softmax_masked(q, kv, mask, keys.sinks))


def in_chunks(attend: AttendMasked, num_queries: int, *, halves: bool) -> Attend:
    """Attention chunk by chunk of queries, each over a band of window keys and the entries some query of its part of
    the row can see; with `halves` the first half of a long row is not scored against the second's entries. What it
    holds beside inputs and results does not grow with the length."""

    def whole_row(heads: Heads, inputs: Any, keys: Keys) -> jax.Array:
        length, entries = keys.kv.shape[1], keys.entries
        size = min(num_queries, length)
        padding = -length % size
        kv, of_tokens, inputs = jax.tree.map(lambda x: _pad_length(x, padding), (keys.kv, keys.segment_ids, inputs))
        num, back = kv.shape[1] // size, keys.window - 1
        distance = back + jnp.arange(size)[:, None] - jnp.arange(back + size)[None, :]
        chunks = jax.tree.map(lambda x: _chunks(x, size), (inputs, of_tokens))
        bands = (_band(kv, size, back), _band(of_tokens, size, back))

        def one_chunk(entry_kv: jax.Array | None, chunk: tuple) -> jax.Array:
            (inputs, of_queries), (near, of_near), seen = chunk
            # A band's first keys may lie before the row: they are padding, segment 0, as padded queries are.
            mask = window_mask(of_queries, jnp.where(of_near == 0, -1, of_near), distance, keys.window)
            if entry_kv is not None:
                near = jnp.concatenate([near, entry_kv.astype(near.dtype)], axis=1)
                mask = jnp.concatenate([mask, seen], axis=2)
            return heads(inputs, lambda q: attend(q, near, mask, keys.sinks))

        out = []
        for first, last in _parts(num, entries.kv.shape[1] if halves and entries is not None else 0):
            of_part = jax.tree.map(lambda x, f=first, t=last: x[f:t], (chunks, bands))
            visible, seen = None, None
            if entries is not None:
                num_entries = -(-entries.kv.shape[1] * last * size // length)
                # Summed over chunks in float32 on the way back.
                visible = entries.kv[:, :num_entries].astype(jnp.float32)
                seen = _pad_length(entries.seen, padding)[:, first * size : last * size, :num_entries]
                seen = _chunks(seen, size)
            step = jax.checkpoint(lambda chunk, v=visible: one_chunk(v, chunk), policy=KEEP_ATTENDED)
            out.append(lax.map(step, (*of_part, seen)))
        whole = jnp.moveaxis(jnp.concatenate(out), 0, 1)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :length]

    return whole_row


def _pad_length(x: jax.Array, padding: int) -> jax.Array:
    """[B, S, ...] -> [B, S + padding, ...] with zeros."""
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """[B, S, ...] -> [S / size, B, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _band(x: jax.Array, size: int, back: int) -> jax.Array:
    """[B, S, ...] -> [S / size, B, back + size, ...]: each chunk and the `back` rows before it (zeros before all)."""
    chunks = _chunks(x, size)
    num_before = -(-back // size)
    zeros = varying_like(jnp.zeros((num_before, *chunks.shape[1:]), x.dtype), x)
    padded = jnp.concatenate([zeros, chunks])
    before = [padded[i : i + chunks.shape[0]] for i in range(num_before)]
    return jnp.concatenate([*before, chunks], axis=2)[:, :, num_before * size - back :]


def _parts(num_chunks: int, num_entries: int) -> list[tuple[int, int]]:
    """The row's parts as ranges of chunks, each scored against its own prefix of the entries. Every part is one more
    loop to compile, so there are two at most."""
    if num_entries < HALVED_ENTRIES or num_chunks == 1:
        return [(0, num_chunks)]
    return [(0, num_chunks // 2), (num_chunks // 2, num_chunks)]


def attention_forms(interpret: bool) -> dict[str, Attend]:
    """By name; `interpret` runs the TPU kernel in Pallas' interpreter, where there is no TPU."""
    return {
        "dot_product": dot_product,
        "chunked": in_chunks(softmax_masked, CHUNK_QUERIES, halves=True),
        # The kernel skips blocks that nobody sees by itself.
        "dynamic_splash": in_chunks(splash(interpret), SPLASH_QUERIES, halves=False),
    }
