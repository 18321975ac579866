"""Manifold-constrained hyper-connections: N residual streams, read, written and mixed per token (SPEC section 3)."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from trainer.models.config import ModelConfig
from trainer.params import constant, param

Other = TypeVar("Other")


class HyperConnection(struct.PyTreeNode):
    """How one sub-layer reads, writes and mixes the streams; all float32. Rows: pre (N), post (N), mix (N x N)."""

    fn: jax.Array  # [(2 + N) N, N, D]
    base: jax.Array  # [(2 + N) N]
    scale: jax.Array  # [3]: pre, post, mix

    @classmethod
    def spec(cls, c: ModelConfig) -> "HyperConnection":
        n = c.mhc_expansion_rate
        return cls(
            fn=param(((2 + n) * n, n, c.emb_dim), (None, None, "embed"), dtype=jnp.float32),
            base=param(((2 + n) * n,), (None,), constant(0.0), dtype=jnp.float32),
            scale=param((3,), (None,), constant(0.01), dtype=jnp.float32),
        )


class HyperHead(struct.PyTreeNode):
    """How the streams collapse into one after the last layer; all float32."""

    fn: jax.Array  # [N, N, D]
    base: jax.Array  # [N]
    scale: jax.Array  # [1]

    @classmethod
    def spec(cls, c: ModelConfig) -> "HyperHead":
        n = c.mhc_expansion_rate
        return cls(
            fn=param((n, n, c.emb_dim), (None, None, "embed"), dtype=jnp.float32),
            base=param((n,), (None,), constant(0.0), dtype=jnp.float32),
            scale=param((1,), (None,), constant(0.01), dtype=jnp.float32),
        )


def stream_logits(fn: jax.Array, x: jax.Array, epsilon: float) -> jax.Array:
    """fn . rms(all channels of a token): [M, N, D], [B, S, N, D] -> [B, S, M] float32.

    The norm has no gain, so it commutes with the product: one pass over the streams instead of two.
    """
    x32 = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(x32), axis=(-2, -1)) + epsilon)
    logits = jnp.einsum("bsnd,mnd->bsm", x32, fn, precision=lax.Precision.HIGHEST)
    return logits * inverse_rms[..., None]


def sinkhorn(logits: jax.Array, iterations: int, epsilon: float) -> jax.Array:
    """[..., N, N] logits -> nearly doubly stochastic matrices: row softmax, then alternating column and row sums.

    One scan over the rounds, differentiated as it stands; unrolled, it would be a third of the whole program.
    """

    def normalized(m: jax.Array, axis: int) -> jax.Array:
        return m / (jnp.sum(m, axis=axis, keepdims=True) + epsilon)

    def one_round(m: jax.Array, _: None) -> tuple[jax.Array, None]:
        return normalized(normalized(m, -1), -2), None

    first = normalized(jax.nn.softmax(logits, axis=-1) + epsilon, -2)
    return lax.scan(one_round, first, length=iterations - 1)[0]


def read_streams(pre: jax.Array, x: jax.Array) -> jax.Array:
    """Weighted sum of the streams: [B, S, N], [B, S, N, D] -> [B, S, D], summed in float32, in x's dtype."""
    return jnp.sum(pre[..., None] * x.astype(jnp.float32), axis=2).astype(x.dtype)


def connect(
    p: HyperConnection, x: jax.Array, sublayer: Callable[[jax.Array], tuple[jax.Array, Other]], c: ModelConfig
) -> tuple[jax.Array, Other]:
    """Run a sub-layer on the streams: x [B, S, N, D] -> (x of the same shape and dtype, the sub-layer's other output).

    Stream k becomes post_k y + sum_j mix[j, k] x_j: the sum runs over the FIRST index of the mixing matrix.
    """
    n = c.mhc_expansion_rate
    with jax.named_scope("hyper_connections"):
        logits = stream_logits(p.fn, x, c.normalization_layer_epsilon)
        pre, post, mix = jnp.split(logits, [n, 2 * n], axis=-1)
        pre = jax.nn.sigmoid(p.scale[0] * pre + p.base[:n]) + c.mhc_epsilon
        post = 2 * jax.nn.sigmoid(p.scale[1] * post + p.base[n : 2 * n])
        mix = (p.scale[2] * mix + p.base[2 * n :]).reshape(*mix.shape[:-1], n, n)
        mix = sinkhorn(mix, c.sinkhorn_iterations, c.mhc_epsilon)
        read = read_streams(pre, x)
    y, other = sublayer(read)
    with jax.named_scope("hyper_connections"):
        mixed = jnp.einsum("bsjk,bsjd->bskd", mix, x.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        out = post[..., None] * y.astype(jnp.float32)[:, :, None] + mixed
    return out.astype(x.dtype), other


def collapse(p: HyperHead, x: jax.Array, c: ModelConfig) -> jax.Array:
    """The streams after the last layer [B, S, N, D] -> [B, S, D]."""
    logits = stream_logits(p.fn, x, c.normalization_layer_epsilon)
    return read_streams(jax.nn.sigmoid(p.scale[0] * logits + p.base) + c.mhc_epsilon, x)
