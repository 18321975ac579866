"""LoRA: a low-rank product beside a frozen weight, y = x W + (alpha / rank) (x A) B (Hu et al. 2021, eq. 3).

`adapt` turns a target `Param` of a model's spec into an `Adapted` node of three, and freezes all else. Adapters then
stack, shard, start, train and save like any other parameters. B starts at zero, so the first step is the base model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from trainer.models.config import ADAPTER_LETTERS, ModelConfig
from trainer.params import Param, Rows, Tree, constant, is_param, map_spec, param
from trainer.sharding import varying_like


@dataclass(frozen=True)
class LoRA:
    """Rank, scale and targets of the adapters."""

    rank: int
    scale: float  # alpha / rank
    dropout: float
    targets: tuple[str, ...]  # patterns over the keys of ADAPTER_LETTERS
    dtype: Any  # of the stored adapters


class Adapted(struct.PyTreeNode):
    """A frozen weight and its adapter. Einsum letters of A and B as in ADAPTER_LETTERS."""

    base: jax.Array
    a: jax.Array
    b: jax.Array
    seed: jax.Array | None  # [1] int32: of this step's dropout; None without dropout
    letters: tuple[str, str] = struct.field(pytree_node=False)
    scale: float = struct.field(pytree_node=False)
    dropout: float = struct.field(pytree_node=False)


def is_adapted(x: Any) -> bool:
    return isinstance(x, Adapted)


def matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def adapt(layer: Tree, lora: LoRA | None, c: ModelConfig) -> Tree:
    """One layer's spec with adapters at the targets and everything else frozen; without LoRA, as it is."""
    if lora is None:
        return layer

    def leaf(path: Any, p: Param) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        base = frozen(p)
        return (
            with_adapter(base, ADAPTER_LETTERS[name], lora, c)
            if name in ADAPTER_LETTERS and matches(name, lora.targets)
            else base
        )

    return jax.tree_util.tree_map_with_path(leaf, layer, is_leaf=is_param)


def frozen(spec: Tree) -> Tree:
    return map_spec(lambda p: replace(p, trainable=False), spec)


def uniform(bound: float) -> Rows:
    return lambda rng, shape: rng.uniform(-bound, bound, shape).astype(np.float32)


def any_seed(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.integers(0, 2**31, shape).astype(np.int32)


def with_adapter(p: Any, letters: tuple[str, str, str], lora: LoRA, c: ModelConfig) -> Any:
    """A is uniform within 1 / sqrt(inputs), as the PEFT library starts it; B is zero."""
    weight, a, b = letters
    sizes = dict(zip(weight, p.shape, strict=True)) | {"r": lora.rank}
    dims: dict[str, str | None] = dict(zip(weight, p.dims, strict=True)) | {"r": None}
    if "j" in a:
        per_group = c.num_query_heads // c.o_groups
        sizes |= {"j": per_group, "g": c.o_groups}
        dims |= {"j": None, "g": None, "o": None}
    inputs = [sizes[i] for i in a if i not in ("e", "g", "r")]
    return Adapted(
        base=p,
        a=param([sizes[i] for i in a], [dims[i] for i in a], uniform(np.prod(inputs) ** -0.5), dtype=lora.dtype),
        b=param([sizes[i] for i in b], [dims[i] for i in b], constant(0.0), dtype=lora.dtype),
        seed=param((1,), (None,), any_seed, dtype=jnp.int32, trainable=False) if lora.dropout else None,
        letters=(a, b),
        scale=lora.scale,
        dropout=lora.dropout,
    )


def attach(spec: Tree, base: Tree, adapters: Tree) -> Tree:
    """Base weights into the places of an adapted spec; A, B and seeds come from `adapters` (of `adapters_of`)."""

    def leaf(s: Any, weight: Any, adapter: Any) -> Any:
        return adapter.replace(base=weight) if is_adapted(s) else weight

    return jax.tree.map(leaf, spec, base, adapters, is_leaf=lambda x: is_adapted(x) or is_param(x) or x is None)


def adapters_of(spec: Tree) -> Tree:
    """An adapted spec without its frozen weights: Adapted nodes with no base, None elsewhere."""

    def leaf(s: Any) -> Any:
        return s.replace(base=None) if is_adapted(s) else None

    return jax.tree.map(leaf, spec, is_leaf=lambda x: is_adapted(x) or is_param(x))


def split_frozen(w: Any, frozen_base: bool) -> tuple[Any, Any]:
    """One weight -> (what trains of it, the rest), None in each other's places."""
    if not frozen_base:
        return w, None
    return (w.replace(base=None, seed=None), w.replace(a=None, b=None)) if is_adapted(w) else (None, w)


def at_step(params: Tree, step: jax.Array) -> Tree:
    """The parameters with this step's dropout seeds."""

    def leaf(x: Any) -> Any:
        return x.replace(seed=x.seed * 1_000_003 + step) if is_adapted(x) and x.seed is not None else x

    return jax.tree.map(leaf, params, is_leaf=is_adapted)


def for_loop(w: Any, *others: jax.Array) -> Any:
    """A weight for a loop whose turns work on `others`: its cotangents then add up in float32, and are summed over
    devices once, after the loop. Inside, `in_loop` takes it back."""

    def leaf(x: jax.Array) -> jax.Array:
        return varying_like(x.astype(jnp.float32), x, *others)

    return w.replace(a=leaf(w.a), b=leaf(w.b)) if is_adapted(w) else leaf(w)


def in_loop(weights: Tree, dtype: Any) -> Tree:
    """What `for_loop` was given, in the dtype of arithmetic. Adapters are cast where they are used."""
    return jax.tree.map(lambda w: w if is_adapted(w) else w.astype(dtype), weights, is_leaf=is_adapted)


def drop(x: jax.Array, w: Adapted) -> jax.Array:
    """Dropout of the adapter's input. Devices that hold the same `x` drop the same of it, others draw their own, so
    which values are dropped depends on the mesh."""
    if w.seed is None:
        return x
    key = jax.random.key(w.seed[0])
    for axis in sorted(jax.typeof(x).manual_axis_type.varying):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    kept = jax.random.bernoulli(key, 1 - w.dropout, x.shape)
    return jnp.where(kept, x / (1 - w.dropout), 0).astype(x.dtype)


def project(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`jnp.einsum(subscripts, x, w)`, and the adapter's part where w is `Adapted`. Adapters are kept in float32 and
    work in x's dtype: nothing of the activations' size is promoted."""
    if not isinstance(w, Adapted):
        return jnp.einsum(subscripts, x, w)
    y = jnp.einsum(subscripts, x, w.base)
    inputs, result = subscripts.split(",")[0], subscripts.split("->")[1]
    a, b = w.letters
    low = "".join(i for i in inputs if i not in a or i in result) + "".join(i for i in a if i not in inputs)
    u = jnp.einsum(f"{inputs},{a}->{low}", drop(x, w), w.a.astype(x.dtype))
    return y + (w.scale * jnp.einsum(f"{low},{b}->{result}", u, w.b.astype(x.dtype))).astype(y.dtype)
