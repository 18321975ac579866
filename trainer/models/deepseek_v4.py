"""DeepSeek-V4: embedding, decoder layers in scanned blocks, collapse of the streams, head (SPEC section 2).

Everything below `embed` and above `Segment` runs inside `shard_map`, on one device's shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from trainer.models.attention import Attention, attention
from trainer.models.config import ModelConfig
from trainer.models.hyper_connections import HyperConnection, HyperHead, collapse, connect
from trainer.models.lora import LoRA, adapt, frozen
from trainer.models.moe import MoE, MoEOptions, MoEStats, moe
from trainer.models.normalization import rms_norm
from trainer.models.rows import RowContext, row_context
from trainer.ops.attend import Attend
from trainer.params import constant, gather, gather_leaf, param, stack
from trainer.sharding import Layout, channels_to_length, gather_length


@dataclass(frozen=True)
class Remat:
    """What the backward computes again: wrappers of a whole layer, and inside it of attention up to
    `attention.OUTPUT`."""

    layer: Callable[[Callable], Callable]
    attention: Callable[[Callable], Callable]


@dataclass(frozen=True)
class Options:
    """How the model runs; chosen once, when the step is built."""

    dtype: Any
    layout: Layout
    attend: Attend
    moe: MoEOptions
    remat: Remat
    loss_chunk_tokens: int
    lora: LoRA | None


@dataclass(frozen=True)
class LayerKind:
    """What tells layers apart; equal kinds have equal parameters."""

    ratio: int
    hashed: bool


@dataclass(frozen=True)
class SegmentKind:
    """A block of layers, repeated."""

    block: tuple[LayerKind, ...]
    repeats: int


def layer_kinds(c: ModelConfig) -> list[LayerKind]:
    return [LayerKind(ratio, i < c.first_num_hash_layers) for i, ratio in enumerate(c.compress_ratios)]


def segments(kinds: list[LayerKind]) -> list[SegmentKind]:
    """Cut the layers into repeated blocks so that as few layers as possible are compiled.

    Flash's 43 layers become 2 x [sliding], 1 x [CSA], 20 x [HCA, CSA]: four layers of program. Dynamic programming
    over prefixes; of equal cuts, the one with fewer segments.
    """
    best: list[tuple[int, int, list[SegmentKind]]] = [(0, 0, [])]  # (layers compiled, segments, the cut), by length
    for end in range(1, len(kinds) + 1):
        cuts = []
        for start in range(end):
            cost, num, cut = best[start]
            for size in range(1, end - start + 1):
                repeats, rest = divmod(end - start, size)
                if rest == 0 and kinds[start:end] == kinds[start : start + size] * repeats:
                    cuts.append(
                        (cost + size, num + 1, [*cut, SegmentKind(tuple(kinds[start : start + size]), repeats)])
                    )
                    break
        best.append(min(cuts, key=lambda c: c[:2]))
    return best[-1][2]


class Layer(struct.PyTreeNode):
    """One decoder layer."""

    attention_connection: HyperConnection
    attention_norm: jax.Array  # [D] float32
    attention: Attention
    moe_connection: HyperConnection
    moe_norm: jax.Array  # [D] float32
    moe: MoE

    @classmethod
    def spec(cls, c: ModelConfig, kind: LayerKind, lora: LoRA | None) -> "Layer":
        norm = param((c.emb_dim,), (None,), constant(1.0), dtype=jnp.float32)
        layer = cls(
            attention_connection=HyperConnection.spec(c),
            attention_norm=norm,
            attention=Attention.spec(c, kind.ratio),
            moe_connection=HyperConnection.spec(c),
            moe_norm=norm,
            moe=MoE.spec(c, kind.hashed),
        )
        return adapt(layer, lora, c)


class DeepSeekV4(struct.PyTreeNode):
    """The whole model. `segments[i][j]` is layer j of segment i's block, stacked over the segment's repeats."""

    embedding: jax.Array  # [V, D]
    segments: tuple[tuple[Layer, ...], ...]
    head_connection: HyperHead
    norm: jax.Array  # [D] float32
    head: jax.Array  # [D, V]

    @classmethod
    def spec(cls, c: ModelConfig, lora: LoRA | None = None) -> "DeepSeekV4":
        """With `lora`, targets are `Adapted` nodes and every other parameter is frozen."""
        blocks = tuple(
            tuple(stack(Layer.spec(c, kind, lora), s.repeats) for kind in s.block) for s in segments(layer_kinds(c))
        )
        model = cls(
            embedding=param((c.vocab_size, c.emb_dim), (None, "table")),
            segments=(),
            head_connection=HyperHead.spec(c),
            norm=param((c.emb_dim,), (None,), constant(1.0), dtype=jnp.float32),
            head=param((c.emb_dim, c.vocab_size), ("embed", "vocab")),
        )
        return (model if lora is None else frozen(model)).replace(segments=blocks)


def active_params(c: ModelConfig, total: int) -> int:
    """Parameters that work on one token: all but the experts it does not visit and the embedding table."""
    idle_experts = c.num_experts - c.num_experts_per_tok
    return total - c.num_layers * idle_experts * 3 * c.emb_dim * c.moe_mlp_dim - c.vocab_size * c.emb_dim


class Batch(struct.PyTreeNode):
    """One microbatch, laid out (batch, length). The step takes [A, B, S], A microbatches."""

    tokens: Any  # [B, S] int32
    targets: Any  # [B, S] int32: the token to predict, or IGNORE
    segment_ids: Any  # [B, S] int32: the document within the row, 0 = padding
    positions: Any  # [B, S] int32: position within the document


def embed(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Table [V, D / (fsdp tensor)], tokens [B, S / tensor] -> [B, S / tensor, D].

    The table is split along its width, so a look-up needs no collective; its rows then go to the devices that hold
    the tokens: an all-gather over fsdp where there is one, an all-to-all over tensor (length against width).
    """
    part = lax.all_gather(table.astype(dtype), "fsdp", axis=1, tiled=True)[gather_length(tokens)]
    return channels_to_length(part)


def decoder_layer(
    p: Layer, x: jax.Array, batch: Batch, rows: RowContext, c: ModelConfig, o: Options
) -> tuple[jax.Array, MoEStats]:
    """Streams [B, S / tensor, N, D] -> (the same, the layer's routing statistics)."""

    def attend(y: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("attention"):
            y = rms_norm(y, p.attention_norm, c.normalization_layer_epsilon)
            return attention(p.attention, y, rows, o.attend, c, o.remat.attention), None

    def experts(y: jax.Array) -> tuple[jax.Array, MoEStats]:
        with jax.named_scope("moe"):
            y = rms_norm(y, p.moe_norm, c.normalization_layer_epsilon)
            return moe(p.moe, y, batch.tokens, batch.segment_ids > 0, c, o.moe)

    x, _ = connect(p.attention_connection, x, attend, c)
    return connect(p.moe_connection, x, experts, c)


def decode(
    p: DeepSeekV4, batch: Batch, c: ModelConfig, o: Options, *, keep_streams: bool = False
) -> tuple[jax.Array, list[MoEStats], list[jax.Array]]:
    """Tokens -> (final hidden [B, S / tensor, D], routing statistics per layer, streams out of each layer if kept)."""
    with jax.named_scope("embedding"):
        x = embed(p.embedding, batch.tokens, o.dtype)
        x = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], c.mhc_expansion_rate, x.shape[-1]))
    rows = row_context(batch.segment_ids, batch.positions, c)
    stats: list[MoEStats] = []
    streams: list[jax.Array] = []
    for kind, stacked in zip(segments(layer_kinds(c)), p.segments, strict=True):

        def block(x: jax.Array, layers: tuple[Layer, ...], kind: SegmentKind = kind) -> tuple[jax.Array, list]:
            outs = []
            for layer_kind, layer in zip(kind.block, layers, strict=True):
                spec = Layer.spec(c, layer_kind, o.lora)

                def run(layer: Layer, x: jax.Array, spec: Layer = spec) -> tuple[jax.Array, MoEStats]:
                    # Gathered inside what is rematerialised, so that whole weights are never stored.
                    return decoder_layer(gather(spec, layer, o.dtype, o.layout), x, batch, rows, c, o)

                x, stat = o.remat.layer(run)(layer, x)
                outs.append((stat, x if keep_streams else None))
            return x, outs

        x, outs = lax.scan(block, x, stacked)
        for repeat in range(kind.repeats):
            for stat, stream in jax.tree.map(lambda a, r=repeat: a[r], outs):
                stats.append(stat)
                streams.append(stream)
    head = gather(HyperHead.spec(c), p.head_connection, o.dtype, o.layout)
    h = rms_norm(collapse(head, x, c), p.norm, c.normalization_layer_epsilon)
    return h, stats, streams


def logits(spec: Any, p: DeepSeekV4, h: jax.Array, o: Options) -> jax.Array:
    """Final hidden [B, S / tensor, D] -> logits of every token over this device's vocabulary [B, S, V / tensor]."""
    head = gather_leaf(spec.head, p.head, o.dtype, o.layout)
    return jnp.einsum("bsd,dv->bsv", gather_length(h), head, preferred_element_type=jnp.float32)
