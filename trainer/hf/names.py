"""Tensor names of a Hugging Face DeepSeek-V4 folder, and how this model's parameters are made of them.

Tensors are named here as the published files name them (`layers.3.attn.wq_a.weight`). `transformers` writes two more
spellings, with `model.` in front and some names of its own: `release_name` maps all three. Names and shapes: SPEC
section 14.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import DeepSeekV4, layer_kinds, segments
from trainer.params import Param, named_leaves

# In-memory names of `transformers` (and of its save_pretrained) -> published names.
_RENAMES = [
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\bself_attn\.", "attn."),
    (r"\battn\.norm\.", "attn.kv_norm."),
    (r"\bcompressor\.indexer\.scorer\.weights_proj\.", "indexer.weights_proj."),
    (r"\bcompressor\.indexer\.q_b_proj\.", "indexer.wq_b."),
    (r"\bcompressor\.indexer\.", "indexer.compressor."),
    (r"\bcompressor\.kv_proj\.", "compressor.wkv."),
    (r"\bcompressor\.gate_proj\.", "compressor.wgate."),
    (r"\bcompressor\.position_bias$", "compressor.ape"),
    (r"\bcompressor\.kv_norm\.", "compressor.norm."),
    (r"\bq_a_proj\.", "wq_a."),
    (r"\bq_a_norm\.", "q_norm."),
    (r"\bq_b_proj\.", "wq_b."),
    (r"\bkv_proj\.", "wkv."),
    (r"\bsinks$", "attn_sink"),
    (r"\bo_a_proj\.", "wo_a."),
    (r"\bo_b_proj\.", "wo_b."),
    (r"\binput_layernorm\.", "attn_norm."),
    (r"\bpost_attention_layernorm\.", "ffn_norm."),
    (r"\battn_hc\.", "hc_attn_"),
    (r"\bffn_hc\.", "hc_ffn_"),
    (r"\bmlp\.", "ffn."),
    (r"\be_score_correction_bias$", "bias"),
    (r"\bshared_experts\.gate_proj\.", "shared_experts.w1."),
    (r"\bshared_experts\.up_proj\.", "shared_experts.w3."),
    (r"\bshared_experts\.down_proj\.", "shared_experts.w2."),
]


def release_name(name: str) -> str:
    """Any of the three spellings -> the published one."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def split_experts(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor under its published name; fused experts (`gate_up_proj` [E, 2F, D], gate rows first) one by one."""
    name = release_name(name)
    stem, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        halves = {"w1": array[:, : array.shape[1] // 2], "w3": array[:, array.shape[1] // 2 :]}
        return {f"{stem}.{e}.{w}.weight": half[e] for w, half in halves.items() for e in range(len(array))}
    if leaf == "down_proj":
        return {f"{stem}.{e}.w2.weight": array[e] for e in range(len(array))}
    return {name: array}


@dataclass(frozen=True)
class Conversion:
    """Between a published tensor and a parameter's part of one layer or expert; each is the other's inverse."""

    to_part: Callable[[ModelConfig, np.ndarray], np.ndarray]
    to_tensor: Callable[[ModelConfig, np.ndarray], np.ndarray]
    rows_along: int | None = None  # the part's dim that the tensor's rows become, where some can be converted alone


SAME = Conversion(lambda c, w: w, lambda c, w: w, rows_along=0)
TRANSPOSE = Conversion(lambda c, w: w.T, lambda c, w: w.T, rows_along=1)
# [M, N D] <-> [M, N, D]
STREAMS = Conversion(
    lambda c, w: w.reshape(len(w), c.mhc_expansion_rate, c.emb_dim), lambda c, w: w.reshape(len(w), -1)
)
# [H C, Q] <-> [Q, H, C]
QUERY_HEADS = Conversion(
    lambda c, w: w.T.reshape(-1, c.num_query_heads, c.head_dim), lambda c, w: w.reshape(len(w), -1).T
)
INDEXER_HEADS = Conversion(
    lambda c, w: w.T.reshape(-1, c.indexer_n_heads, c.indexer_head_dim), lambda c, w: w.reshape(len(w), -1).T
)


def _heads_of_groups(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    grouped = w.reshape(c.o_groups, c.o_lora_rank, c.num_query_heads // c.o_groups, c.head_dim)
    return grouped.transpose(0, 2, 3, 1).reshape(c.num_query_heads, c.head_dim, c.o_lora_rank)


def _groups_of_heads(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    grouped = w.reshape(c.o_groups, c.num_query_heads // c.o_groups, c.head_dim, c.o_lora_rank)
    return grouped.transpose(0, 3, 1, 2).reshape(c.o_groups * c.o_lora_rank, -1)


# [G O, (H / G) C] <-> [H, C, O]
GROUPED_OUTPUT = Conversion(_heads_of_groups, _groups_of_heads)


@dataclass(frozen=True)
class Source:
    """The published tensor of one parameter of one layer. With `{e}` in the name, of one expert of it."""

    name: str
    conversion: Conversion

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.name


def _connection(path: str, name: str) -> dict[str, Source]:
    conversions = {"fn": STREAMS, "base": SAME, "scale": SAME}
    return {f"{path}/{leaf}": Source(f"{name}_{leaf}", conversion) for leaf, conversion in conversions.items()}


def _compressor(path: str, name: str) -> dict[str, Source]:
    return {
        f"{path}/wkv": Source(f"{name}.wkv.weight", TRANSPOSE),
        f"{path}/wgate": Source(f"{name}.wgate.weight", TRANSPOSE),
        f"{path}/position_bias": Source(f"{name}.ape", SAME),
        f"{path}/norm": Source(f"{name}.norm.weight", SAME),
    }


GLOBALS = {
    "embedding": Source("embed.weight", SAME),
    "norm": Source("norm.weight", SAME),
    "head": Source("head.weight", TRANSPOSE),
    **_connection("head_connection", "hc_head"),
}

LAYER = {
    "attention_norm": Source("attn_norm.weight", SAME),
    "moe_norm": Source("ffn_norm.weight", SAME),
    **_connection("attention_connection", "hc_attn"),
    **_connection("moe_connection", "hc_ffn"),
    "attention/wq_a": Source("attn.wq_a.weight", TRANSPOSE),
    "attention/q_norm": Source("attn.q_norm.weight", SAME),
    "attention/wq_b": Source("attn.wq_b.weight", QUERY_HEADS),
    "attention/wkv": Source("attn.wkv.weight", TRANSPOSE),
    "attention/kv_norm": Source("attn.kv_norm.weight", SAME),
    "attention/sinks": Source("attn.attn_sink", SAME),
    "attention/wo_a": Source("attn.wo_a.weight", GROUPED_OUTPUT),
    "attention/wo_b": Source("attn.wo_b.weight", TRANSPOSE),
    **_compressor("attention/compressor", "attn.compressor"),
    "attention/indexer/wq_b": Source("attn.indexer.wq_b.weight", INDEXER_HEADS),
    "attention/indexer/weights_proj": Source("attn.indexer.weights_proj.weight", TRANSPOSE),
    **_compressor("attention/indexer/compressor", "attn.indexer.compressor"),
    "moe/routed/router": Source("ffn.gate.weight", TRANSPOSE),
    "moe/routed/bias": Source("ffn.gate.bias", SAME),
    "moe/routed/tid2eid": Source("ffn.gate.tid2eid", TRANSPOSE),
    "moe/routed/gate": Source("ffn.experts.{e}.w1.weight", TRANSPOSE),
    "moe/routed/up": Source("ffn.experts.{e}.w3.weight", TRANSPOSE),
    "moe/routed/down": Source("ffn.experts.{e}.w2.weight", TRANSPOSE),
    "moe/shared/gate": Source("ffn.shared_experts.w1.weight", TRANSPOSE),
    "moe/shared/up": Source("ffn.shared_experts.w3.weight", TRANSPOSE),
    "moe/shared/down": Source("ffn.shared_experts.w2.weight", TRANSPOSE),
}


@dataclass(frozen=True)
class Leaf:
    """One parameter of the model and where its layers' values come from."""

    path: str
    param: Param
    source: Source
    layers: tuple[int, ...]  # decoder layers stacked in it, in order; empty for globals

    def tensor(self, layer: int | None, expert: int | None) -> str:
        prefix = "" if layer is None else f"layers.{layer}."
        return prefix + self.source.name.format(e=expert)

    def tensors(self, c: ModelConfig, layer: int | None) -> list[str]:
        """The tensors of one layer (or, for globals, of None): one, or one per expert."""
        experts = range(c.num_experts) if self.source.per_expert else [None]
        return [self.tensor(layer, e) for e in experts]

    def all_tensors(self, c: ModelConfig) -> list[str]:
        return [name for layer in self.layers or [None] for name in self.tensors(c, layer)]

    @property
    def part_shape(self) -> tuple[int, ...]:
        return self.param.shape[(1 if self.layers else 0) + (1 if self.source.per_expert else 0) :]


def stacked_layers(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Where layers lie in the tree, such as `segments/2/0/` -> the decoder layers stacked there, in order."""
    numbers: dict[str, tuple[int, ...]] = {}
    first = 0
    for i, segment in enumerate(segments(layer_kinds(c))):
        size = len(segment.block)
        for j in range(size):
            numbers[f"segments/{i}/{j}/"] = tuple(first + r * size + j for r in range(segment.repeats))
        first += size * segment.repeats
    return numbers


def leaves(c: ModelConfig, spec: DeepSeekV4) -> list[Leaf]:
    """Every parameter of the model, in the tree's order."""
    numbers = stacked_layers(c)
    found = []
    for path, leaf in named_leaves(spec):
        prefix = next((p for p in numbers if path.startswith(p)), "")
        source = LAYER[path.removeprefix(prefix)] if prefix else GLOBALS[path]
        found.append(Leaf(path, leaf, source, numbers.get(prefix, ())))
    return found
