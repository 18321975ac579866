"""Attention of every query over the keys in its window, the compressed entries it sees, and a sink.

One softmax over all three (SPEC section 5): window keys and entries are keys and values at once, shared by all
heads; the sink is a learned logit per head that takes probability and gives nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


class Entries(struct.PyTreeNode):
    """Compressed keys and who sees them."""

    kv: jax.Array  # [B, T, C]
    seen: jax.Array  # [B, S, T] bool


Attend = Callable[[jax.Array, jax.Array, "Entries | None", jax.Array, jax.Array, int], jax.Array]


def window_mask(segment_ids: jax.Array, window: int) -> jax.Array:
    """[B, S] -> [B, S, S] bool: the last `window` keys of the query's own document, itself included."""
    index = jnp.arange(segment_ids.shape[1])
    distance = index[:, None] - index[None, :]
    near = (distance >= 0) & (distance < window)
    return near & (segment_ids[:, :, None] == segment_ids[:, None, :])


def dot_product(
    q: jax.Array, kv: jax.Array, entries: Entries | None, sinks: jax.Array, segment_ids: jax.Array, window: int
) -> jax.Array:
    """The plain form, whole score matrices and all: the reference for every other form.

    q [B, S, H, C]; kv [B, S, C]; sinks [H] float32 -> [B, S, H, C] in q's dtype. Logits and softmax in float32.
    """
    mask = window_mask(segment_ids, window)
    if entries is not None:
        kv = jnp.concatenate([kv, entries.kv], axis=1)
        mask = jnp.concatenate([mask, entries.seen], axis=2)
    logits = jnp.einsum("bshc,btc->bhst", q, kv, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    logits = jnp.where(mask[:, None], logits, -jnp.inf)
    sinks = sinks[None, :, None, None]
    top = lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks))
    weights = jnp.exp(logits - top)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top))
    return jnp.einsum("bhst,btc->bshc", weights.astype(q.dtype), kv)


ATTENTION: dict[str, Attend] = {"dot_product": dot_product}
