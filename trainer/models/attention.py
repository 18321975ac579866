"""The attention sub-layer: low-rank queries, one shared key-value head, compressed entries, grouped output."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from trainer.models.compression import Compressor, Indexer, compress, select
from trainer.models.config import ModelConfig
from trainer.models.lora import Adapted, at_step, drop, for_loop, in_loop, project
from trainer.models.normalization import rms_norm
from trainer.models.rope import Rotation, rotate
from trainer.models.rows import RowContext, visible
from trainer.ops.attend import Attend, AttendSome, Entries, Keys
from trainer.params import constant, param
from trainer.sharding import TENSOR, channels_to_length, gather_length

OUTPUT = "attention_output"


class Attention(struct.PyTreeNode):
    """SPEC section 5. `compressor` is None in sliding-only layers, `indexer` in all but compressed-sparse ones."""

    wq_a: jax.Array  # [D, Q]
    q_norm: jax.Array  # [Q] float32
    wq_b: jax.Array  # [Q, H, C]
    wkv: jax.Array  # [D, C]
    kv_norm: jax.Array  # [C] float32
    sinks: jax.Array  # [H] float32
    wo_a: jax.Array  # [H, C, O]: head h belongs to group h // (H / G)
    wo_b: jax.Array  # [G O, D]
    compressor: Compressor | None
    indexer: Indexer | None

    @classmethod
    def spec(cls, c: ModelConfig, ratio: int) -> "Attention":
        sparse = ratio == c.csa_compress_ratio
        return cls(
            wq_a=param((c.emb_dim, c.q_lora_rank), ("embed", None)),
            q_norm=param((c.q_lora_rank,), (None,), constant(1.0), dtype=jnp.float32),
            wq_b=param((c.q_lora_rank, c.num_query_heads, c.head_dim), ("rank", "heads", None)),
            wkv=param((c.emb_dim, c.head_dim), ("embed", None)),
            kv_norm=param((c.head_dim,), (None,), constant(1.0), dtype=jnp.float32),
            sinks=param((c.num_query_heads,), ("heads",), constant(0.0), dtype=jnp.float32),
            wo_a=param((c.num_query_heads, c.head_dim, c.o_lora_rank), ("heads", None, "rank")),
            wo_b=param((c.o_groups * c.o_lora_rank, c.emb_dim), ("inner", "embed")),
            compressor=Compressor.spec(c, ratio, c.head_dim) if ratio else None,
            indexer=Indexer.spec(c) if ratio and sparse else None,
        )


def attention(
    p: Attention, x: jax.Array, rows: RowContext, attend: Attend, c: ModelConfig, remat: Callable[[Callable], Callable]
) -> jax.Array:
    """Normed input [B, S / tensor, D] -> [B, S / tensor, D].

    Each device projects its own tokens down, attends with its own heads over the whole row, and projects its own
    tokens' low-rank outputs up, which an all-to-all brings from the heads' devices. `remat` goes around all of it; the
    result carries the name OUTPUT for policies of rematerialisation.
    """

    def whole(p: Attention, x: jax.Array, rows: RowContext) -> jax.Array:
        return project("bsi,id->bsd", channels_to_length(low_output(p, x, rows, attend, c)), p.wo_b)

    return checkpoint_name(remat(whole)(p, x, rows), OUTPUT)


def low_output(p: Attention, x: jax.Array, rows: RowContext, attend: Attend, c: ModelConfig) -> jax.Array:
    """Normed input [B, S / tensor, D] -> this device's groups of the grouped projection, [B, S, G O / tensor].

    Queries and what they attend to are made and used inside `attend`'s chunks.
    """
    turn = rows.plain if p.compressor is None else rows.compressed
    epsilon = c.normalization_layer_epsilon
    q_low = rms_norm(project("bsd,dq->bsq", x, p.wq_a), p.q_norm, epsilon)
    kv = rotate(gather_length(rms_norm(project("bsd,dc->bsc", x, p.wkv), p.kv_norm, epsilon)), turn)
    entries = None if p.compressor is None else compressed_entries(p, p.compressor, x, q_low, rows, c)
    q_low = gather_length(q_low)
    index = jnp.broadcast_to(jnp.arange(q_low.shape[1], dtype=jnp.int32), q_low.shape[:2])
    wq_b, wo_a = (for_loop(w, q_low, p.sinks) for w in (p.wq_b, p.wo_a))

    def heads(some: tuple[jax.Array, jax.Array, Rotation], attend_some: AttendSome) -> jax.Array:
        index, q_low, turn = some
        up, down = at_step(in_loop((wq_b, wo_a), q_low.dtype), index[0, 0])  # dropout differs between chunks
        q = rotate(rms_norm(project("bsq,qhc->bshc", q_low, up), None, epsilon), turn)
        o = rotate(attend_some(q), turn, inverse=True)
        low = whole_groups if c.o_groups % lax.axis_size(TENSOR) == 0 else straddling_groups
        return low(o, down, c)

    keys = Keys(kv, entries, p.sinks, rows.segment_ids, c.sliding_window_size)
    return attend(heads, (index, q_low, turn), keys)


def compressed_entries(
    p: Attention, compressor: Compressor, x: jax.Array, q_low: jax.Array, rows: RowContext, c: ModelConfig
) -> Entries:
    """The layer's compressed keys, and which of them each query of the row sees."""
    w = rows.windows[compressor.position_bias.shape[0]]
    kv = compress(compressor, x, w, rows.compressed, c)
    if p.indexer is None:
        return Entries(kv=kv, seen=visible(w, rows.segment_ids, jnp.arange(rows.segment_ids.shape[1])))
    with jax.named_scope("indexer"):
        return Entries(kv=kv, seen=gather_length(select(p.indexer, x, q_low, rows, c)))


def whole_groups(o: jax.Array, wo_a: jax.Array, c: ModelConfig) -> jax.Array:
    """The groups whose heads this device has: [B, S, H / tensor, C] -> [B, S, G O / tensor]."""
    weight = wo_a.base if isinstance(wo_a, Adapted) else wo_a
    width = c.num_query_heads // c.o_groups * c.head_dim
    grouped = o.reshape(*o.shape[:2], -1, width)
    low = jnp.einsum("bsgi,gio->bsgo", grouped, weight.reshape(-1, width, c.o_lora_rank))
    if isinstance(wo_a, Adapted):
        u = jnp.einsum("bsgi,ir->bsgr", drop(grouped, wo_a), wo_a.a.reshape(width, -1).astype(o.dtype))
        start = lax.axis_index(TENSOR) * u.shape[2]
        low = low + adapted_groups(u, lax.dynamic_slice_in_dim(wo_a.b, start, u.shape[2]), wo_a.scale)
    return low.reshape(*low.shape[:2], -1)


def straddling_groups(o: jax.Array, wo_a: jax.Array, c: ModelConfig) -> jax.Array:
    """Where a group's heads lie on several devices: partial sums of every group, then one reduce-scatter over tensor
    along the groups' channels. -> [B, S, G O / tensor]."""
    weight = wo_a.base if isinstance(wo_a, Adapted) else wo_a
    local, per_group = o.shape[2], c.num_query_heads // c.o_groups
    head = lax.axis_index(TENSOR) * local + jnp.arange(local)
    member = (head[:, None] // per_group == jnp.arange(c.o_groups)).astype(o.dtype)
    low = jnp.einsum("bshc,hco,hg->bsgo", o, weight, member)
    if isinstance(wo_a, Adapted):
        a = wo_a.a[head % per_group].astype(o.dtype)
        u = jnp.einsum("bshc,hcr,hg->bsgr", drop(o, wo_a), a, member)
        low = low + adapted_groups(u, wo_a.b, wo_a.scale)
    return lax.psum_scatter(low.reshape(*low.shape[:2], -1), TENSOR, scatter_dimension=2, tiled=True)


def adapted_groups(u: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """The adapter's part of groups: u [B, S, g, r], b [g, r, O] -> [B, S, g, O]."""
    return (scale * jnp.einsum("bsgr,gro->bsgo", u, b.astype(u.dtype))).astype(u.dtype)
