"""Cross-entropy over a vocabulary split on the tensor axis, in chunks of tokens: [B, S, V] logits never exist."""

import jax
import jax.numpy as jnp
from jax import lax

from trainer.sharding import TENSOR, varying_like

IGNORE = -100  # the target of a token without loss


def chunk_loss(h: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """Summed loss of one chunk: h [n, D], head [D, V / tensor], targets [n] -> [] float32.

    The chunk's tokens are gathered over tensor, each device takes its part of the vocabulary, and the parts meet in
    three [n] reductions: the maximum, the sum of exponentials, the target's logit.
    """
    h = lax.all_gather(h, TENSOR, axis=0, tiled=True)
    targets = lax.all_gather(targets, TENSOR, axis=0, tiled=True)
    logits = jnp.einsum("nd,dv->nv", h, head.astype(h.dtype), preferred_element_type=jnp.float32)
    top = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), TENSOR)
    total = lax.psum(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1), TENSOR)
    column = targets - lax.axis_index(TENSOR) * logits.shape[-1]
    mine = (column >= 0) & (column < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(mine, column, 0)[:, None], axis=-1)[:, 0]
    picked = lax.psum(jnp.where(mine, picked, 0.0), TENSOR)
    losses = jnp.where(targets == IGNORE, 0.0, jnp.log(total) + top - picked)
    return jnp.sum(losses)


def cross_entropy(h: jax.Array, head: jax.Array, targets: jax.Array, chunk_tokens: int) -> jax.Array:
    """Loss of this device's tokens, summed: h [n, D], head [D, V / tensor], targets [n] -> [] float32.

    Logits of `chunk_tokens` tokens per device are alive at a time, in the backward too. The sum is the same on every
    device of a tensor group, since each has seen the group's tokens; it is divided among them.
    """
    chunk = min(chunk_tokens, h.shape[0])
    padding = -h.shape[0] % chunk
    h = jnp.pad(h, ((0, padding), (0, 0))).reshape(-1, chunk, h.shape[-1])
    targets = jnp.pad(targets, (0, padding), constant_values=IGNORE).reshape(-1, chunk)

    @jax.checkpoint
    def add(total: jax.Array, of_chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + chunk_loss(of_chunk[0], head, of_chunk[1]), None

    total, _ = lax.scan(add, varying_like(jnp.zeros((), jnp.float32), h), (h, targets))
    return total / lax.axis_size(TENSOR)
