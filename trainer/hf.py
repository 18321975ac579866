"""Hugging Face DeepSeek-V4 folders: config.json and safetensors, read shard by shard.

Tensors are named here as the published files name them (`layers.3.attn.wq_a.weight`). `transformers` writes two more
spellings, with `model.` in front and some names of its own: `release_name` maps all three. Names and shapes: SPEC
section 14.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open

from trainer.errors import ConfigError
from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import DeepSeekV4, layer_kinds, segments
from trainer.params import Param, dtype_of, is_param, named_leaves
from trainer.step import Program

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
class Source:
    """How one parameter of one layer is made: `convert(config, *tensors)`. With `{e}` in the names, one expert's
    part of it."""

    names: tuple[str, ...]
    convert: Callable[..., np.ndarray]

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.names[0]


def _same(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    return w


def _transpose(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    return w.T


def _gate_up(c: ModelConfig, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[F, D] twice -> [D, 2, F]."""
    return np.stack([gate.T, up.T], axis=1)


def _streams(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    """[M, N D] -> [M, N, D]."""
    return w.reshape(len(w), c.mhc_expansion_rate, c.emb_dim)


def _query_heads(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    """[H C, Q] -> [Q, H, C]."""
    return w.T.reshape(-1, c.num_query_heads, c.head_dim)


def _indexer_heads(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    return w.T.reshape(-1, c.indexer_n_heads, c.indexer_head_dim)


def _grouped_output(c: ModelConfig, w: np.ndarray) -> np.ndarray:
    """[G O, (H / G) C] -> [H, C, O]."""
    grouped = w.reshape(c.o_groups, c.o_lora_rank, c.num_query_heads // c.o_groups, c.head_dim)
    return grouped.transpose(0, 2, 3, 1).reshape(c.num_query_heads, c.head_dim, c.o_lora_rank)


def _connection(path: str, name: str) -> dict[str, Source]:
    convert = {"fn": _streams, "base": _same, "scale": _same}
    return {f"{path}/{leaf}": Source((f"{name}_{leaf}",), fn) for leaf, fn in convert.items()}


def _compressor(path: str, name: str) -> dict[str, Source]:
    return {
        f"{path}/wkv": Source((f"{name}.wkv.weight",), _transpose),
        f"{path}/wgate": Source((f"{name}.wgate.weight",), _transpose),
        f"{path}/position_bias": Source((f"{name}.ape",), _same),
        f"{path}/norm": Source((f"{name}.norm.weight",), _same),
    }


GLOBALS = {
    "embedding": Source(("embed.weight",), _same),
    "norm": Source(("norm.weight",), _same),
    "head": Source(("head.weight",), _transpose),
    **_connection("head_connection", "hc_head"),
}

LAYER = {
    "attention_norm": Source(("attn_norm.weight",), _same),
    "moe_norm": Source(("ffn_norm.weight",), _same),
    **_connection("attention_connection", "hc_attn"),
    **_connection("moe_connection", "hc_ffn"),
    "attention/wq_a": Source(("attn.wq_a.weight",), _transpose),
    "attention/q_norm": Source(("attn.q_norm.weight",), _same),
    "attention/wq_b": Source(("attn.wq_b.weight",), _query_heads),
    "attention/wkv": Source(("attn.wkv.weight",), _transpose),
    "attention/kv_norm": Source(("attn.kv_norm.weight",), _same),
    "attention/sinks": Source(("attn.attn_sink",), _same),
    "attention/wo_a": Source(("attn.wo_a.weight",), _grouped_output),
    "attention/wo_b": Source(("attn.wo_b.weight",), _transpose),
    **_compressor("attention/compressor", "attn.compressor"),
    "attention/indexer/wq_b": Source(("attn.indexer.wq_b.weight",), _indexer_heads),
    "attention/indexer/weights_proj": Source(("attn.indexer.weights_proj.weight",), _transpose),
    **_compressor("attention/indexer/compressor", "attn.indexer.compressor"),
    "moe/routed/router": Source(("ffn.gate.weight",), _transpose),
    "moe/routed/bias": Source(("ffn.gate.bias",), _same),
    "moe/routed/tid2eid": Source(("ffn.gate.tid2eid",), _same),
    "moe/routed/gate_up": Source(("ffn.experts.{e}.w1.weight", "ffn.experts.{e}.w3.weight"), _gate_up),
    "moe/routed/down": Source(("ffn.experts.{e}.w2.weight",), _transpose),
    "moe/shared/gate_up": Source(("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"), _gate_up),
    "moe/shared/down": Source(("ffn.shared_experts.w2.weight",), _transpose),
}


@dataclass(frozen=True)
class Leaf:
    """One parameter of the model and where its layers' values come from."""

    path: str
    param: Param
    source: Source
    layers: tuple[int, ...]  # decoder layers stacked in it, in order; empty for globals

    def tensors(self, layer: int | None, expert: int | None) -> list[str]:
        prefix = "" if layer is None else f"layers.{layer}."
        return [prefix + name.format(e=expert) for name in self.source.names]

    def parts(self, c: ModelConfig) -> list[list[str]]:
        """The tensors of every part that is converted on its own."""
        experts = range(c.num_experts) if self.source.per_expert else [None]
        return [self.tensors(layer, e) for layer in self.layers or [None] for e in experts]

    @property
    def part_shape(self) -> tuple[int, ...]:
        return self.param.shape[(1 if self.layers else 0) + (1 if self.source.per_expert else 0) :]


def leaves(c: ModelConfig, spec: DeepSeekV4) -> list[Leaf]:
    """Every parameter of the model, in the tree's order."""
    numbers: dict[str, tuple[int, ...]] = {}
    first = 0
    for i, segment in enumerate(segments(layer_kinds(c))):
        size = len(segment.block)
        for j in range(size):
            numbers[f"segments/{i}/{j}/"] = tuple(first + r * size + j for r in range(segment.repeats))
        first += size * segment.repeats
    found = []
    for path, leaf in named_leaves(spec):
        prefix = next((p for p in numbers if path.startswith(p)), "")
        source = LAYER[path.removeprefix(prefix)] if prefix else GLOBALS[path]
        found.append(Leaf(path, leaf, source, numbers.get(prefix, ())))
    return found


def model_values(folder: Path) -> dict[str, Any]:
    """config.json -> values for the `model.` keys. Reads the published spelling and the one `transformers` saves."""
    path = folder / "config.json"
    try:
        hf = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face folder holds config.json and *.safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    _refuse_unknown_architecture(path, hf)
    names = {
        "vocab_size": "vocab_size",
        "emb_dim": "hidden_size",
        "num_query_heads": "num_attention_heads",
        "head_dim": "head_dim",
        "q_lora_rank": "q_lora_rank",
        "o_groups": "o_groups",
        "o_lora_rank": "o_lora_rank",
        "num_experts": "n_routed_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_mlp_dim": "moe_intermediate_size",
        "indexer_n_heads": "index_n_heads",
        "indexer_head_dim": "index_head_dim",
        "indexer_topk": "index_topk",
        "sliding_window_size": "sliding_window",
        "shared_experts": "n_shared_experts",
        "routed_scaling_factor": "routed_scaling_factor",
        "mlp_activations_limit": "swiglu_limit",
        "mhc_expansion_rate": "hc_mult",
        "sinkhorn_iterations": "hc_sinkhorn_iters",
        "mhc_epsilon": "hc_eps",
        "normalization_layer_epsilon": "rms_norm_eps",
    }
    missing = [hf_name for hf_name in names.values() if hf.get(hf_name) is None]
    if missing:
        raise ConfigError(f"{path}: missing {', '.join(missing)}")
    values = {ours: hf[theirs] for ours, theirs in names.items()}
    rope_dim = hf.get("qk_rope_head_dim") or round(hf["head_dim"] * hf.get("partial_rotary_factor", 0.125))
    return values | {"qk_rope_head_dim": rope_dim} | _layer_values(path, hf) | _rope_values(path, hf)


def _refuse_unknown_architecture(path: Path, hf: Mapping[str, Any]) -> None:
    if not isinstance(hf, dict) or hf.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise ConfigError(f"{path}: not a DeepSeek-V4 config (model_type is not deepseek_v4)")
    only = {
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    for key, value in only.items():
        if hf.get(key, value) != value:
            raise ConfigError(f"{path}: {key}={hf[key]!r} is not supported, only {value!r}")


def _layer_values(path: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """compress_ratios and the number of hash layers."""
    layers = hf.get("num_hidden_layers")
    if hf.get("layer_types") is not None:
        rates = {"sliding_attention": 0} | hf.get("compress_rates", {})
        unknown = set(hf["layer_types"]) - set(rates)
        if unknown:
            raise ConfigError(f"{path}: layer_types holds {sorted(unknown)}, for which compress_rates has no rate")
        ratios = [rates[kind] for kind in hf["layer_types"]]
        sparse = rates.get("compressed_sparse_attention", 4)
        if sparse == rates.get("heavily_compressed_attention"):
            raise ConfigError(f"{path}: both kinds of compressed attention have rate {sparse}; not supported")
    elif hf.get("compress_ratios") is not None:
        if "compress_rate_csa" in hf or "compress_rate_hca" in hf:
            raise ConfigError(f"{path}: compress_rate_csa and compress_rate_hca are not read; use compress_rates")
        ratios, sparse = hf["compress_ratios"][:layers], 4
    else:
        # `transformers` falls back to another model's pattern here; a wrong model that trains is worse than none.
        raise ConfigError(f"{path}: has neither compress_ratios nor layer_types, so the layers' kinds are unknown")
    if hf.get("mlp_layer_types") is not None:
        hashed = [kind == "hash_moe" for kind in hf["mlp_layer_types"]]
        num_hash = sum(hashed)
        if not all(hashed[:num_hash]):
            raise ConfigError(f"{path}: mlp_layer_types must have its hash_moe layers first")
    elif hf.get("num_hash_layers") is not None:
        num_hash = min(hf["num_hash_layers"], len(ratios))
    else:
        raise ConfigError(f"{path}: has neither num_hash_layers nor mlp_layer_types")
    return {"compress_ratios": ratios, "csa_compress_ratio": sparse, "first_num_hash_layers": num_hash}


def _rope_values(path: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Bases and YaRN. Without rope_scaling YaRN is off, as in `transformers`."""
    nested = hf.get("rope_parameters") or {}
    yarn = nested.get("compress") or hf.get("rope_scaling") or {}
    values = {
        "rope_max_timescale": (nested.get("main") or {}).get("rope_theta", hf.get("rope_theta")),
        "compressed_rope_max_timescale": yarn.get("rope_theta", hf.get("compress_rope_theta")),
    }
    if None in values.values():
        raise ConfigError(f"{path}: rope_theta or compress_rope_theta is missing")
    kind = yarn.get("rope_type", yarn.get("type", "default"))
    if kind == "default":
        return values | {"yarn_factor": 1.0}
    if kind != "yarn" or yarn.get("attention_factor", 1.0) != 1.0:
        raise ConfigError(f"{path}: compressed layers take rope type yarn with attention_factor 1, or default; not {yarn}")
    if not {"factor", "original_max_position_embeddings"} <= set(yarn):
        raise ConfigError(f"{path}: yarn needs factor and original_max_position_embeddings")
    return values | {
        "yarn_factor": yarn["factor"],
        "yarn_beta_fast": yarn.get("beta_fast", 32),
        "yarn_beta_slow": yarn.get("beta_slow", 1),
        "yarn_original_max_position": yarn["original_max_position_embeddings"],
    }


class TensorFiles:
    """The tensors of a folder's *.safetensors under their published names; opened lazily, read one at a time."""

    DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": "bfloat16", "I64": np.int64, "I32": np.int32}

    def __init__(self, folder: Path, stack: ExitStack):
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{folder}: no *.safetensors file here")
        self._slices: dict[str, Any] = {}
        for path in paths:
            try:
                handle = stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from None
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if not release_name(name).startswith("mtp."):
                    self._slices[release_name(name)] = (path, handle, name)

    def shape(self, name: str) -> tuple[int, ...]:
        path, handle, stored = self._slices[name]
        view = handle.get_slice(stored)
        if view.get_dtype() not in self.DTYPES:
            raise ConfigError(f"{path}: {stored} is stored as {view.get_dtype()}; only {', '.join(self.DTYPES)} are read")
        return tuple(view.get_shape())

    def read(self, name: str) -> np.ndarray:
        _, handle, stored = self._slices[name]
        return handle.get_tensor(stored)

    @property
    def names(self) -> set[str]:
        return set(self._slices)


def check_tensors(files: TensorFiles, wanted: list[Leaf], c: ModelConfig, folder: Path) -> None:
    """Every tensor is there, none is left over, and each has its shape; all faults in one message."""
    needed = {name for leaf in wanted for part in leaf.parts(c) for name in part}
    faults = [f"missing: {name}" for name in sorted(needed - files.names)]
    faults += [f"unexpected: {name}" for name in sorted(files.names - needed)]
    for leaf in wanted:
        for part in leaf.parts(c):
            if not files.names.issuperset(part):
                continue
            shapes = [files.shape(name) for name in part]
            try:
                made = leaf.source.convert(c, *(np.broadcast_to(np.int8(0), shape) for shape in shapes)).shape
            except ValueError:
                made = None
            if made != leaf.part_shape:
                faults.append(f"wrong shape: {', '.join(f'{n} {s}' for n, s in zip(part, shapes, strict=True))}")
    if faults:
        shown = "\n  ".join(faults[:20]) + (f"\n  and {len(faults) - 20} more" if len(faults) > 20 else "")
        raise ConfigError(f"{folder} does not hold this model ({len(faults)} faults):\n  {shown}")


def read_shard(files: TensorFiles, leaf: Leaf, index: tuple[slice, ...], c: ModelConfig, dtype: Any) -> np.ndarray:
    """The values of one device's shard, reading only the layers and experts it holds."""
    lead = [range(*s.indices(n)) for s, n in zip(index, leaf.param.shape, strict=True)]
    layers = [leaf.layers[i] for i in lead.pop(0)] if leaf.layers else [None]
    experts = lead.pop(0) if leaf.source.per_expert else [None]
    inner = tuple(slice(r.start, r.stop) for r in lead)
    parts = [
        leaf.source.convert(c, *map(files.read, leaf.tensors(layer, e)))[inner].astype(dtype)
        for layer in layers
        for e in experts
    ]
    return np.stack(parts).reshape([r.stop - r.start for r in _ranges(index, leaf.param.shape)])


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[range]:
    return [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]


def load(folder: Path, program: Program) -> DeepSeekV4:
    """A folder's weights, straight into their shards. Raises ConfigError before reading if anything does not fit."""
    c = program.model
    with ExitStack() as stack:
        files = TensorFiles(folder, stack)
        wanted = leaves(c, program.spec)
        check_tensors(files, wanted, c, folder)

        def build(leaf: Leaf) -> jax.Array:
            dtype = dtype_of(leaf.param, program.weight_dtype)
            sharding = NamedSharding(program.mesh, program.layout.pspec(*leaf.param.dims))
            return jax.make_array_from_callback(
                leaf.param.shape, sharding, lambda index: read_shard(files, leaf, index, c, dtype)
            )

        values = [build(leaf) for leaf in wanted]
    return jax.tree.structure(program.spec, is_leaf=is_param).unflatten(values)
