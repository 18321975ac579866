"""Where every dim of every array lies on the mesh. The only place that knows.

The model runs inside one `jax.shard_map` over the whole mesh: `models/` and `ops/` are written for one device's
shard, and every collective in the program is a line of theirs. This module says how shards are cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

DATA, FSDP, EXPERT, TENSOR = AXES = ("data", "fsdp", "expert", "tensor")
BATCH_AXES = (DATA, FSDP, EXPERT)

Axes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Layout:
    """Logical dim name -> mesh axes. Weights and activations use different names on purpose.

    Weights are cut twice: `embed`, `rank` and `expert_embed` dims over fsdp (the first two over expert as well, if
    asked) and `inner` over tensor, to be gathered just before use, and `heads`, `vocab` and `experts` for good, because
    the work on them is split the same way.
    """

    batch: Axes = BATCH_AXES
    length: Axes = TENSOR
    embed: tuple[str, ...] = (FSDP,)
    rank: tuple[str, ...] = (FSDP,)
    expert_embed: tuple[str, ...] = (FSDP,)  # of weights whose experts are split over expert already
    heads: Axes = TENSOR
    inner: tuple[str, ...] = (TENSOR,)  # of weights that, gathered, are smaller than a row's activations
    vocab: Axes = TENSOR
    table: Axes = (TENSOR, FSDP)  # the embedding table's width: looking a token up needs no collective
    experts: Axes = (EXPERT, TENSOR)
    expert_mlp: Axes = None

    @classmethod
    def of(cls, expert_axes: Sequence[str], weight_axes: Sequence[str] = (FSDP,)) -> "Layout":
        """Experts over (expert, tensor), or over expert alone with each expert's width over tensor. Other weights are
        kept in parts over `weight_axes`: (fsdp), or (fsdp, expert)."""
        spread, kept = TENSOR in expert_axes, tuple(weight_axes)
        return cls(experts=tuple(expert_axes), expert_mlp=None if spread else TENSOR, embed=kept, rank=kept)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        return self.experts if isinstance(self.experts, tuple) else (EXPERT,)

    def pspec(self, *dims: str | None) -> P:
        """The PartitionSpec of an array with these dims; an unknown name is an AttributeError naming it."""
        return P(*(None if d is None else getattr(self, d) for d in dims))


def gather_weight(x: jax.Array, dims: Sequence[str | None], layout: Layout) -> jax.Array:
    """A weight's shard with the dims made whole that it is only kept in parts along: an all-gather each (backward:
    reduce-scatter)."""
    kept = {"embed": layout.embed, "rank": layout.rank, "inner": layout.inner, "expert_embed": layout.expert_embed}
    for axis, dim in enumerate(dims):
        if dim in kept:
            x = lax.all_gather(x, kept[dim], axis=axis, tiled=True)
    return x


def gather_length(x: jax.Array) -> jax.Array:
    """[B, S / tensor, ...] -> [B, S, ...]: one all-gather over tensor (backward: reduce-scatter).

    A single row loses its dim on the way, here and below: XLA for TPU turns the reduce-scatter of a [1, S, D] into
    an all-reduce and a slice, and does not where it has no dim of 1.
    """
    if x.shape[0] == 1:
        return lax.all_gather(x[0], TENSOR, axis=0, tiled=True)[None]
    return lax.all_gather(x, TENSOR, axis=1, tiled=True)


def scatter_length(x: jax.Array) -> jax.Array:
    """Partial sums [B, S, ...] -> summed [B, S / tensor, ...]: one reduce-scatter over tensor."""
    if x.shape[0] == 1:
        return lax.psum_scatter(x[0], TENSOR, scatter_dimension=0, tiled=True)[None]
    return lax.psum_scatter(x, TENSOR, scatter_dimension=1, tiled=True)


def channels_to_length(x: jax.Array) -> jax.Array:
    """[B, S, M / tensor] -> [B, S / tensor, M]: one all-to-all over tensor."""
    return lax.all_to_all(x, TENSOR, split_axis=1, concat_axis=2, tiled=True)


def varying_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """The same values, typed as different on every device the others differ on: what a loop's first carry has to be."""
    axes = {axis for other in others for axis in jax.typeof(other).manual_axis_type.varying}
    missing = tuple(axis for axis in AXES if axis in axes - jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x
