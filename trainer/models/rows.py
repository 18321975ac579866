"""What the layers know of the rows they work on: documents, rotations, and the compress windows.

A window belongs to one document: it is counted from the document's first token, not from the row's, so a packed
document has the very entries it has alone. With one document per row the two are the same.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from trainer.models.config import ModelConfig
from trainer.models.rope import Rotation, rotation
from trainer.sharding import TENSOR, gather_length


class Windows(struct.PyTreeNode):
    """Where the whole windows of a row end, in order; made once per ratio and batch, shared by all layers.

    A row of S tokens holds at most T = S // ratio whole windows. Unused places end at S, after every token.
    """

    end: jax.Array  # [B, T] int32: row index of the window's last token
    segment: jax.Array  # [B, T] int32: the document it lies in, 0 for unused places
    first: jax.Array  # [B, T] bool: the document's first window, which has none before it
    ratio: int = struct.field(pytree_node=False)


def windows(segment_ids: jax.Array, positions: jax.Array, ratio: int) -> Windows:
    """[B, S] segments (0 = padding) and positions in the document -> the row's windows."""
    batch, length = segment_ids.shape
    ends = (positions % ratio == ratio - 1) & (segment_ids > 0)
    place = jnp.where(ends, jnp.cumsum(ends, axis=1) - 1, length)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    end = jnp.full((batch, length // ratio), length, jnp.int32)
    end = jax.vmap(lambda e, at, i: e.at[at].set(i, mode="drop"))(end, place, index)
    used, at = end < length, jnp.minimum(end, length - 1)
    segment = jnp.where(used, jnp.take_along_axis(segment_ids, at, axis=1), 0)
    return Windows(end, segment, jnp.take_along_axis(positions, at, axis=1) < ratio, ratio)


def own_share(w: Windows) -> Windows:
    """The windows this device pools: T / tensor of each row."""
    share = w.end.shape[1] // lax.axis_size(TENSOR)
    start = lax.axis_index(TENSOR) * share
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, share, axis=1), w)


def visible(w: Windows, segment_ids: jax.Array, index: jax.Array) -> jax.Array:
    """Whether queries at row positions `index` [S] with segments [B, S] see each window whole in their past.

    Returns [B, S, T] bool. A window that ends at the query itself is seen.
    """
    same_document = segment_ids[:, :, None] == w.segment[:, None, :]
    return same_document & (w.end[:, None, :] <= index[None, :, None])


class RowContext(struct.PyTreeNode):
    """What attention needs to know of the rows, whole along the length; made once per batch, used by all layers."""

    segment_ids: jax.Array  # [B, S] int32, 0 = padding
    plain: Rotation  # for sliding-only layers
    compressed: Rotation  # for the others
    windows: dict[int, Windows]  # by compress ratio


def row_context(segment_ids: jax.Array, positions: jax.Array, c: ModelConfig) -> RowContext:
    """From this device's [B, S / tensor]: two all-gathers over tensor."""
    segment_ids, positions = gather_length(segment_ids), gather_length(positions)
    return RowContext(
        segment_ids=segment_ids,
        plain=rotation(c, positions, compressed=False),
        compressed=rotation(c, positions, compressed=True),
        windows={r: windows(segment_ids, positions, r) for r in sorted(set(c.compress_ratios) - {0})},
    )
