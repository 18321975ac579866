"""Attention of every query over the keys in its window, the compressed entries it sees, and a sink.

One softmax over all three (SPEC section 5): window keys and entries are keys and values at once, shared by all
heads; the sink is a learned logit per head that takes probability and gives nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from trainer.ops.splash import splash
from trainer.sharding import varying_like


class Entries(struct.PyTreeNode):
    """Compressed keys and who sees them. Entry w ends at token (w + 1) S / T - 1 or later: no query before sees it."""

    kv: jax.Array  # [B, T, C]
    seen: jax.Array  # [B, S, T] bool


# (q [B, S, H, C], kv [B, S, C], entries or None, sinks [H] float32, segment ids [B, S], window) -> [B, S, H, C]
Attend = Callable[[jax.Array, jax.Array, "Entries | None", jax.Array, jax.Array, int], jax.Array]
# (q [B, n, H, C], keys [B, m, C], mask [B, n, m] bool, sinks [H] float32) -> [B, n, H, C]
AttendMasked = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

CHUNK_QUERIES = 256  # of the chunked form: float32 scores of one chunk and 8 heads are 37 MiB at 16384 tokens
SPLASH_QUERIES = 2048  # of one call of the kernel: its mask is 13 MB
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


def dot_product(
    q: jax.Array, kv: jax.Array, entries: Entries | None, sinks: jax.Array, segment_ids: jax.Array, window: int
) -> jax.Array:
    """All scores at once: the reference for every other form."""
    index = jnp.arange(q.shape[1])
    mask = window_mask(segment_ids, segment_ids, index[:, None] - index[None, :], window)
    if entries is not None:
        kv = jnp.concatenate([kv, entries.kv], axis=1)
        mask = jnp.concatenate([mask, entries.seen], axis=2)
    return softmax_masked(q, kv, mask, sinks)


def in_chunks(attend: AttendMasked, num_queries: int, *, halves: bool) -> Attend:
    """Attention chunk by chunk of queries, each over a band of window keys and the entries some query of its part of
    the row can see; with `halves` the first half of a long row is not scored against the second's entries. What it
    holds beside inputs and outputs does not grow with the length."""

    def whole_row(
        q: jax.Array, kv: jax.Array, entries: Entries | None, sinks: jax.Array, segment_ids: jax.Array, window: int
    ) -> jax.Array:
        length = q.shape[1]
        size = min(num_queries, length)
        padding = -length % size
        q, kv, segment_ids = (
            jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, kv, segment_ids)
        )
        num, back = q.shape[1] // size, window - 1
        distance = back + jnp.arange(size)[:, None] - jnp.arange(back + size)[None, :]
        chunks = (_chunks(q, size), _band(kv, size, back), _chunks(segment_ids, size), _band(segment_ids, size, back))

        def one_chunk(entry_kv: jax.Array | None, chunk: tuple) -> jax.Array:
            (q, keys, of_queries, of_keys), seen = chunk
            # A band's first keys may lie before the row: they are padding, segment 0, as padded queries are.
            mask = window_mask(of_queries, jnp.where(of_keys == 0, -1, of_keys), distance, window)
            if entry_kv is not None:
                keys = jnp.concatenate([keys, entry_kv.astype(keys.dtype)], axis=1)
                mask = jnp.concatenate([mask, seen], axis=2)
            return attend(q, keys, mask, sinks)

        out = []
        for first, last in _parts(num, entries.kv.shape[1] if halves and entries is not None else 0):
            of_part = jax.tree.map(lambda x, f=first, t=last: x[f:t], chunks)
            visible, seen = None, None
            if entries is not None:
                num_entries = -(-entries.kv.shape[1] * last * size // length)
                # Summed over chunks in float32 on the way back.
                visible = entries.kv[:, :num_entries].astype(jnp.float32)
                seen = jnp.pad(entries.seen, ((0, 0), (0, padding), (0, 0)))[
                    :, first * size : last * size, :num_entries
                ]
                seen = _chunks(seen, size)
            step = jax.checkpoint(lambda chunk, v=visible: one_chunk(v, chunk))
            out.append(lax.map(step, (of_part, seen)))
        whole = jnp.concatenate(out)
        return jnp.moveaxis(whole, 0, 1).reshape(q.shape)[:, :length]

    return whole_row


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
