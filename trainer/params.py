"""Parameters before they have values: shapes, dims, dtypes and how to start them, as data.

A model is described by a tree of `Param` in the same dataclasses that later hold arrays. What is abstract, sharded,
counted, initialised or trained is then a map over that tree, and no host ever holds a whole model.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from trainer.sharding import Layout, gather_weight

Tree = Any
Rows = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]  # generator, (rows, columns) -> values

BLOCK_ROWS = 1024  # rows drawn from one seed: a shard draws only the blocks it touches


def normal(stddev: float) -> Rows:
    return lambda rng, shape: rng.standard_normal(shape, dtype=np.float32) * np.float32(stddev)


def constant(value: float) -> Rows:
    return lambda _, shape: np.full(shape, value, np.float32)


def distinct_ids(num: int) -> Rows:
    """Each column: distinct ids below `num`, balanced over many columns (a random permutation's head)."""
    return lambda rng, shape: np.argsort(rng.random((shape[1], num)), axis=1)[:, : shape[0]].T.astype(np.int32)


@dataclass(frozen=True)
class Param:
    """One parameter: shape, logical dims (see `sharding.Layout`), and how it is kept, started and trained.

    `dtype` None means the run's `weight_dtype`; the others are kept as SPEC section 12 says, whatever the run.
    """

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    init: Rows
    dtype: Any
    trainable: bool  # False: never sees a gradient (routing tables, the router's balance bias, the indexer)
    decay: bool  # whether weight decay applies

    def block(self, seed: int, path: str, lead: tuple[int, ...], rows: slice) -> np.ndarray:
        """Rows of the matrix at leading index `lead`; the same values whatever the mesh or the other parameters."""
        columns, total = self.shape[-1], self.shape[-2] if len(self.shape) > 1 else 1
        first, last = rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)
        drawn = []
        for i in range(first, last):
            key = [seed, zlib.crc32(repr((path, *lead, i)).encode())]
            count = min(BLOCK_ROWS, total - i * BLOCK_ROWS)
            drawn.append(self.init(np.random.Generator(np.random.Philox(key=key)), (count, columns)))
        return np.concatenate(drawn)[rows.start - first * BLOCK_ROWS : rows.stop - first * BLOCK_ROWS]

    def shard(self, seed: int, path: str, index: Any, dtype: Any) -> np.ndarray:
        """The values of one device's shard; `index` is a slice per dim, as jax gives it."""
        ranges = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)]
        out = np.empty([len(r) for r in ranges], dtype)
        if len(ranges) == 1:
            out[:] = self.block(seed, path, (), slice(0, 1))[0, ranges[0].start : ranges[0].stop]
            return out
        rows, columns = slice(ranges[-2].start, ranges[-2].stop), slice(ranges[-1].start, ranges[-1].stop)
        for at in np.ndindex(*out.shape[:-2]):
            lead = tuple(r[i] for r, i in zip(ranges, at, strict=False))
            out[at] = self.block(seed, path, lead, rows)[:, columns]
        return out


def param(
    shape: Sequence[int],
    dims: Sequence[str | None],
    init: Rows | None = None,
    *,
    dtype: Any = None,
    trainable: bool = True,
    decay: bool | None = None,
) -> Any:
    """A `Param`; typed Any because the forward pass sees an array in its place. One-dim parameters do not decay."""
    return Param(
        tuple(shape), tuple(dims), init or normal(0.02), dtype, trainable, len(shape) > 1 if decay is None else decay
    )


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def map_spec(fn: Callable[..., Any], spec: Tree, *trees: Tree) -> Tree:
    """Map over a tree of `Param`; `fn(param, leaf, ...)`."""
    return jax.tree.map(fn, spec, *trees, is_leaf=is_param)


def stack(spec: Tree, num: int) -> Tree:
    """The parameters of `num` equal layers, stacked along a new first dim."""
    return map_spec(lambda p: replace(p, shape=(num, *p.shape), dims=(None, *p.dims)), spec)


def pspecs(spec: Tree, layout: Layout) -> Tree:
    return map_spec(lambda p: layout.pspec(*p.dims), spec)


def shardings(spec: Tree, layout: Layout, mesh: Mesh) -> Tree:
    return map_spec(lambda p: NamedSharding(mesh, layout.pspec(*p.dims)), spec)


def dtype_of(p: Param, weight_dtype: Any) -> Any:
    return weight_dtype if p.dtype is None else p.dtype


def abstract(spec: Tree, layout: Layout, mesh: Mesh, weight_dtype: Any) -> Tree:
    """The model as `jax.ShapeDtypeStruct`s with shardings: enough to trace, compile and restore."""

    def leaf(p: Param) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, layout.pspec(*p.dims))
        return jax.ShapeDtypeStruct(p.shape, dtype_of(p, weight_dtype), sharding=sharding)

    return map_spec(leaf, spec)


def named_leaves(spec: Tree) -> list[tuple[str, Any]]:
    """(path such as `segments/0/1/attention/wq_a`, leaf) for every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(spec, is_leaf=is_param)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def initialize(spec: Tree, layout: Layout, mesh: Mesh, weight_dtype: Any, seed: int) -> Tree:
    """Draw every shard where it lives. Values depend on (seed, path, index) alone."""

    def leaf(path: str, p: Param) -> jax.Array:
        dtype = dtype_of(p, weight_dtype)
        sharding = NamedSharding(mesh, layout.pspec(*p.dims))
        return jax.make_array_from_callback(p.shape, sharding, lambda index: p.shard(seed, path, index, dtype))

    treedef = jax.tree.structure(spec, is_leaf=is_param)
    return treedef.unflatten([leaf(path, p) for path, p in named_leaves(spec)])


def count(spec: Tree) -> int:
    """Parameters in all, integer tables aside."""
    leaves = jax.tree.leaves(spec, is_leaf=is_param)
    return sum(int(np.prod(p.shape)) for p in leaves if p.dtype is not jnp.int32)


def trained(spec: Tree) -> int:
    """Parameters that a gradient reaches."""
    return count(map_spec(lambda p: p if p.trainable else None, spec))


def gather_leaf(p: Param, x: jax.Array, dtype: Any, layout: Layout) -> jax.Array:
    """A weight as arithmetic wants it: cast to `dtype` unless it is kept in its own, then whole along what it is kept
    in parts over. Inside `shard_map`; casting first halves what the all-gather moves."""
    return gather_weight(x.astype(dtype) if p.dtype is None else x, p.dims, layout)


def gather(spec: Tree, params: Tree, dtype: Any, layout: Layout) -> Tree:
    """`gather_leaf` over a tree, such as one layer's weights."""
    return map_spec(lambda p, x: gather_leaf(p, x, dtype, layout), spec, params)


def split_trainable(spec: Tree, params: Tree) -> tuple[Tree, Tree]:
    """(what a gradient reaches, the rest): two trees of the same classes with None in each other's places."""
    trainable = map_spec(lambda p, x: x if p.trainable else None, spec, params)
    fixed = map_spec(lambda p, x: None if p.trainable else x, spec, params)
    return trainable, fixed


def merge(first: Tree, second: Tree) -> Tree:
    """Inverse of `split_trainable`."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None)
