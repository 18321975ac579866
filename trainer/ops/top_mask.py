"""Which of many scores are the k largest, without sorting them."""

import jax
import jax.numpy as jnp
from jax import lax


def sortable(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order, -0.0 being 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def top_mask(scores: jax.Array, candidates: jax.Array, k: int) -> jax.Array:
    """The k largest of each row's candidates, or all where there are fewer; of equal scores, the first.

    scores [..., T] float32, candidates [..., T] bool -> [..., T] bool. The k-th largest is found bit by bit, by 32
    counts over the row: a compiler's sort, of which `lax.top_k` is made on TPU, costs far more.
    """
    keys = jnp.where(candidates, sortable(scores), jnp.iinfo(jnp.int32).min)

    def add_bit(i: jax.Array, floor: jax.Array) -> jax.Array:
        """`floor`, offset to be unsigned, is the k-th largest cut off below bit 32 - i."""
        raised = floor + jnp.left_shift(jnp.int32(1), 31 - i)
        return jnp.where(jnp.sum(keys >= raised, axis=-1, keepdims=True, dtype=jnp.int32) >= k, raised, floor)

    lowest = jnp.full_like(keys[..., :1], jnp.iinfo(jnp.int32).min)
    kth = lax.fori_loop(0, 32, add_bit, lowest)
    above, equal = keys > kth, keys == kth
    room = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return candidates & (above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room)))
