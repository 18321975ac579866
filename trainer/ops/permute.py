"""Tokens into expert order and back, without K copies of the activations.

The K assignments of every token are sorted by expert. Row j of the sorted order belongs to assignment
`order[j]` = token * K + slot, so the sorted rows are gathered straight from the tokens at `order // K`. The way back
needs the inverse permutation: it is made once, by one scatter, and everything that needs it shares it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from trainer.sharding import varying_like

CHUNK = 512  # rows worked on at once: what a sum over slots holds beside its input and output


class Permutation(struct.PyTreeNode):
    """The sorted order of n tokens' K assignments. Assignments of padding tokens sort last and are in no group."""

    token: jax.Array  # [n K] int32: the token each sorted row comes from
    inverse: jax.Array  # [n, K] int32: the sorted row of each assignment
    group_sizes: jax.Array  # [E] int32: rows per expert


def sort_by_expert(experts: jax.Array, valid: jax.Array, num_experts: int) -> Permutation:
    """experts [n, K] int32, valid [n] bool -> Permutation. Stable: token-major within an expert."""
    num_tokens, k = experts.shape
    flat = jnp.where(valid[:, None], experts, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    iota = jnp.arange(flat.size, dtype=jnp.int32)
    inverse = jnp.zeros_like(order).at[order].set(iota, unique_indices=True)
    group_sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    return Permutation(order // k, inverse.reshape(num_tokens, k), group_sizes)


def _for_each_chunk(out: Any, compute: Callable[[jax.Array, int], Any]) -> Any:
    """Fill arrays of equal length chunk by chunk: `compute(start, size)` gives rows start .. start + size of each.

    The last chunk is moved back to end at `length`, so nothing is padded; its overlap is computed twice, equally.
    """
    length = jax.tree.leaves(out)[0].shape[0]
    size = min(CHUNK, length)

    def fill(i: jax.Array, out: Any) -> Any:
        start = jnp.minimum(i * size, length - size)
        return jax.tree.map(lambda o, c: lax.dynamic_update_slice_in_dim(o, c, start, 0), out, compute(start, size))

    return lax.fori_loop(0, -(-length // size), fill, out)


def _sum_slots(rows: jax.Array, inverse: jax.Array, weights: jax.Array | None) -> jax.Array:
    """sum_k weights[t, k] rows[inverse[t, k]], in float32, slot after slot: [n K, D] -> [n, D] in rows' dtype."""
    num_tokens, k = inverse.shape

    def sum_chunk(start: jax.Array, size: int) -> jax.Array:
        index = lax.dynamic_slice_in_dim(inverse, start, size)
        total = jnp.zeros((size, rows.shape[1]), jnp.float32)
        for slot in range(k):
            row = rows[index[:, slot]].astype(jnp.float32)
            if weights is not None:
                row = row * lax.dynamic_slice_in_dim(weights, start, size)[:, slot, None]
            total = total + row
        return total.astype(rows.dtype)

    empty = jnp.zeros((num_tokens, rows.shape[1]), rows.dtype)
    return _for_each_chunk(varying_like(empty, rows, inverse), sum_chunk)


def _no_gradient(x: jax.Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


@jax.custom_vjp
def _gather_replicated_activations(x: jax.Array, token: jax.Array, inverse: jax.Array) -> jax.Array:
    """x [n, D] -> rows [n K, D] in sorted order, each token K times. The backward sums a token's K cotangents in
    float32 and rounds once."""
    del inverse
    return x[token]


def _gather_forward(x: jax.Array, token: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple]:
    return x[token], (token, inverse)


def _gather_backward(residuals: tuple, cotangent: jax.Array) -> tuple:
    token, inverse = residuals
    return _sum_slots(cotangent, inverse, None), _no_gradient(token), _no_gradient(inverse)


_gather_replicated_activations.defvjp(_gather_forward, _gather_backward)


def gather(x: jax.Array, p: Permutation) -> jax.Array:
    """Activations [n, D] -> sorted rows [n K, D], gathered from the originals."""
    return _gather_replicated_activations(x, p.token, p.inverse)


@jax.custom_vjp
def _weighted_sum(rows: jax.Array, weights: jax.Array, token: jax.Array, inverse: jax.Array) -> jax.Array:
    del token
    return _sum_slots(rows, inverse, weights)


def _weighted_sum_forward(rows: jax.Array, weights: jax.Array, token: jax.Array, inverse: jax.Array) -> tuple:
    return _sum_slots(rows, inverse, weights), (rows, weights, token, inverse)


def _weighted_sum_backward(residuals: tuple, cotangent: jax.Array) -> tuple:
    """Row j's cotangent is its weight times its token's; a weight's is the product of its row and its token's
    cotangent. Both are taken in sorted order, chunk by chunk, so the token's cotangent is never spread K times."""
    rows, weights, token, inverse = residuals
    sorted_weights = jnp.zeros(token.shape, weights.dtype).at[inverse.reshape(-1)].set(weights.reshape(-1))

    def row_chunk(start: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        row, weight, at = (lax.dynamic_slice_in_dim(a, start, size) for a in (rows, sorted_weights, token))
        upstream = cotangent[at].astype(jnp.float32)
        d_weight = jnp.sum(row.astype(jnp.float32) * upstream, axis=1)
        return (weight[:, None] * upstream).astype(rows.dtype), d_weight

    empty = (jnp.zeros(rows.shape, rows.dtype), jnp.zeros(token.shape, weights.dtype))
    empty = jax.tree.map(lambda x: varying_like(x, rows, cotangent, token), empty)
    d_rows, d_weights = _for_each_chunk(empty, row_chunk)
    return d_rows, d_weights[inverse], _no_gradient(token), _no_gradient(inverse)


_weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)


def combine(rows: jax.Array, weights: jax.Array, p: Permutation) -> jax.Array:
    """Expert outputs [n K, D] in sorted order, weights [n, K] float32 -> [n, D], summed in float32."""
    return _weighted_sum(rows, weights, p.token, p.inverse)


def repeat_gather(x: jax.Array, p: Permutation) -> jax.Array:
    """What `gather` replaces: K copies of every token, then sorted; autodiff takes it backwards."""
    num_tokens, k = p.inverse.shape
    order = jnp.zeros_like(p.token).at[p.inverse.reshape(-1)].set(jnp.arange(num_tokens * k, dtype=jnp.int32))
    return jnp.repeat(x, k, axis=0)[order]


def repeat_combine(rows: jax.Array, weights: jax.Array, p: Permutation) -> jax.Array:
    """What `combine` replaces: the rows of all K slots side by side, then summed; autodiff takes it backwards."""
    copies = rows[p.inverse].astype(jnp.float32)
    return jnp.sum(copies * weights[..., None], axis=1).astype(rows.dtype)


@dataclass(frozen=True)
class Permute:
    """A way into expert order and the way back."""

    gather: Callable[[jax.Array, Permutation], jax.Array]
    combine: Callable[[jax.Array, jax.Array, Permutation], jax.Array]


PERMUTE = {"gather": Permute(gather, combine), "repeat": Permute(repeat_gather, repeat_combine)}
