"""Compressed keys: windows of tokens pooled into one entry each, and the indexer that picks among them.

SPEC sections 6 and 7.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from trainer.models.config import ModelConfig
from trainer.models.lora import project
from trainer.models.normalization import rms_norm
from trainer.models.rope import Rotation, rotate
from trainer.models.rows import RowContext, Windows, own_share, visible
from trainer.ops.top_mask import top_mask
from trainer.params import constant, param
from trainer.sharding import TENSOR, gather_length, varying_like


class Compressor(struct.PyTreeNode):
    """Pools windows into entries of width C. Overlapping (compressed-sparse) ones have two halves of channels: the
    first is used by the window after, the second by the window itself."""

    wkv: jax.Array  # [D, C or 2C]
    wgate: jax.Array  # [D, C or 2C]
    position_bias: jax.Array  # [ratio, C or 2C] float32
    norm: jax.Array  # [C] float32

    @classmethod
    def spec(cls, c: ModelConfig, ratio: int, width: int, trainable: bool = True) -> "Compressor":
        channels = 2 * width if ratio == c.csa_compress_ratio else width
        return cls(
            wkv=param((c.emb_dim, channels), ("embed", None), trainable=trainable),
            wgate=param((c.emb_dim, channels), ("embed", None), trainable=trainable),
            position_bias=param((ratio, channels), (None, None), dtype=jnp.float32, decay=False, trainable=trainable),
            norm=param((width,), (None,), constant(1.0), dtype=jnp.float32, trainable=trainable),
        )


def pool(values: jax.Array, gates: jax.Array, bias: jax.Array, w: Windows, overlap: bool) -> jax.Array:
    """Softmax-pool each window's values, channel by channel, in float32.

    values, gates [B, S, M]; bias [ratio, M] -> [B, T, C]. With `overlap` M = 2C, and an entry pools its own tokens'
    second half together with the previous window's first half (weight exactly 0 where there is no window before).
    """
    batch, num = w.end.shape

    def window(x: jax.Array, back: int) -> jax.Array:
        slots = w.end[..., None] - back - jnp.arange(w.ratio - 1, -1, -1)  # [B, T, ratio]
        slots = jnp.clip(slots, 0, x.shape[1] - 1).reshape(batch, -1, 1)
        taken = jnp.take_along_axis(x, slots, axis=1)
        return taken.reshape(batch, num, w.ratio, -1).astype(jnp.float32)

    if overlap:
        v_before, v_own = jnp.split(values, 2, axis=-1)
        g_before, g_own = jnp.split(gates, 2, axis=-1)
        b_before, b_own = jnp.split(bias, 2, axis=-1)
        before = jnp.where(w.first[..., None, None], -jnp.inf, window(g_before, w.ratio) + b_before)
        scores = jnp.concatenate([before, window(g_own, 0) + b_own], axis=2)
        pooled = jnp.concatenate([window(v_before, w.ratio), window(v_own, 0)], axis=2)
    else:
        scores, pooled = window(gates, 0) + bias, window(values, 0)
    return jnp.sum(jax.nn.softmax(scores, axis=2) * pooled, axis=2)


def compress(p: Compressor, x: jax.Array, w: Windows, turn: Rotation, c: ModelConfig) -> jax.Array:
    """Normed input [B, S / tensor, D] -> every entry of the row, rotated: [B, T, C] in x's dtype.

    Each device projects its own tokens and pools its own share of windows: the all-gathers over tensor move the
    projections (a window may span shards) and the entries.
    """
    values = gather_length(project("bsd,dm->bsm", x, p.wkv))
    gates = gather_length(project("bsd,dm->bsm", x, p.wgate))
    share = own_share(w)
    pooled = pool(values, gates, p.position_bias, share, overlap=w.ratio == c.csa_compress_ratio)
    entries = rms_norm(pooled, p.norm, c.normalization_layer_epsilon)
    first_token = jnp.clip(share.end - (w.ratio - 1), 0, values.shape[1] - 1)
    return gather_length(rotate(entries, turn.take(first_token)).astype(x.dtype))


class Indexer(struct.PyTreeNode):
    """The lightning indexer: scores entries per query; the attention keeps the best. It sees no gradient of the
    language-model loss (SPEC section 6), so it is frozen: weight decay alone would shrink it."""

    wq_b: jax.Array  # [Q, Hi, Ci]
    weights_proj: jax.Array  # [D, Hi]
    compressor: Compressor  # of width Ci

    @classmethod
    def spec(cls, c: ModelConfig) -> "Indexer":
        heads, width = c.indexer_n_heads, c.indexer_head_dim
        return cls(
            wq_b=param((c.q_lora_rank, heads, width), ("rank", None, None), trainable=False),
            weights_proj=param((c.emb_dim, heads), ("embed", None), trainable=False),
            compressor=Compressor.spec(c, c.csa_compress_ratio, width, trainable=False),
        )


def select(p: Indexer, x: jax.Array, q_low: jax.Array, rows: RowContext, c: ModelConfig) -> jax.Array:
    """Which entries each of this device's queries attends to: [B, S / tensor, T] bool.

    x [B, S / tensor, D], q_low [B, S / tensor, Q]. Scores are summed head by head, so [heads, S, T] never exists. At
    equal scores the lower index wins; -0.0 counts as 0.0.
    """
    w, turn = rows.windows[c.csa_compress_ratio], rows.compressed
    x, q_low = lax.stop_gradient((x, q_low))
    batch, local, _ = x.shape
    start = lax.axis_index(TENSOR) * local
    here = jax.tree.map(lambda t: lax.dynamic_slice_in_dim(t, start, local, axis=1), (turn, rows.segment_ids))
    keys = compress(p.compressor, x, w, turn, c)
    queries = rotate(jnp.einsum("bsq,qhc->bshc", q_low, p.wq_b), here[0])
    head_weights = jnp.einsum("bsd,dh->bsh", x, p.weights_proj, preferred_element_type=jnp.float32)
    head_weights = head_weights * (c.indexer_n_heads * c.indexer_head_dim) ** -0.5

    def add_head(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        q, a = head  # [B, s, Ci], [B, s]
        match = jnp.einsum("bsc,btc->bst", q, keys, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return total + a[..., None] * jax.nn.relu(match), None

    heads = (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(head_weights, 2, 0))
    zero = varying_like(jnp.zeros((batch, local, keys.shape[1]), jnp.float32), queries, keys)
    scores, _ = lax.scan(add_head, zero, heads)
    return top_mask(scores, visible(w, here[1], start + jnp.arange(local)), c.indexer_topk)
