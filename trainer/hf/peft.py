"""Adapters in the form of the PEFT library: adapter_config.json and adapter_model.safetensors.

Modules are named as `transformers` names those of its DeepSeek-V4. A module's weight is [out, in], its adapter
`lora_A` [r, in] and `lora_B` [out, r], and the product is scaled by lora_alpha / r.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from etils import epath

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.hf.files import read_header
from trainer.hf.names import stacked_layers
from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import DeepSeekV4
from trainer.models.lora import Adapted, is_adapted
from trainer.step import lora_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model.model.layers"

MODULES = {
    "attention/wq_a": "self_attn.q_a_proj",
    "attention/wq_b": "self_attn.q_b_proj",
    "attention/wkv": "self_attn.kv_proj",
    "attention/wo_a": "self_attn.o_a_proj",
    "attention/wo_b": "self_attn.o_b_proj",
    "attention/compressor/wkv": "self_attn.compressor.kv_proj",
    "attention/compressor/wgate": "self_attn.compressor.gate_proj",
    "moe/shared/gate": "mlp.shared_experts.gate_proj",
    "moe/shared/up": "mlp.shared_experts.up_proj",
    "moe/shared/down": "mlp.shared_experts.down_proj",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model: matrices by (decoder layer, path within it)."""

    rank: int
    scale: float  # alpha / rank
    matrices: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]  # lora_A [.., r, in], lora_B [.., out, r]

    def product(self, layer: int, path: str) -> np.ndarray:
        """What is added to the published tensor [.., out, in], in float32."""
        a, b = self.matrices[layer, path]
        return self.scale * (b.astype(np.float32) @ a.astype(np.float32))


def to_matrices(path: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One layer's A and B, laid out as ADAPTER_LETTERS says -> lora_A and lora_B; per expert for routed ones."""
    if path == "attention/wo_a":  # A [heads of a group, C, r], B [G, r, O]
        return a.reshape(-1, a.shape[-1]).T, b.transpose(0, 2, 1).reshape(-1, b.shape[1])
    if path == "attention/wq_b":  # B [r, H, C]
        return a.T, b.reshape(len(b), -1).T
    return np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2)


def of_matrices(path: str, lora_a: np.ndarray, lora_b: np.ndarray, c: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `to_matrices`."""
    if path == "attention/wo_a":
        per_group = c.num_query_heads // c.o_groups
        b = lora_b.reshape(c.o_groups, c.o_lora_rank, -1).transpose(0, 2, 1)
        return lora_a.T.reshape(per_group, c.head_dim, -1), b
    if path == "attention/wq_b":
        return lora_a.T, lora_b.T.reshape(-1, c.num_query_heads, c.head_dim)
    return lora_a.T, lora_b.T


def adapted_leaves(spec: DeepSeekV4, c: ModelConfig) -> list[tuple[str, tuple[int, ...], str, Adapted]]:
    """(path in the tree, the layers stacked there, path within a layer, node) of every adapter."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=lambda x: is_adapted(x))
    numbers = stacked_layers(c)
    found = []
    for path, node in nodes:
        if is_adapted(node):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            prefix = next(p for p in numbers if name.startswith(p))
            found.append((name, numbers[prefix], name.removeprefix(prefix), node))
    return found


def of_arrays(config: Config, read: Callable[[str], np.ndarray]) -> Adapter:
    """From a run's own arrays: `read` gives one by its path in the tree."""
    lora = lora_of(config)
    if lora is None:
        raise ConfigError("lora_rank=0: this run trained the whole model, and has no adapter; use `convert to-hf`")
    matrices = {}
    for path, layers, within, _ in adapted_leaves(DeepSeekV4.spec(config.model, lora), config.model):
        a, b = read(f"{path}/a"), read(f"{path}/b")
        for at, layer in enumerate(layers):
            matrices[layer, within] = to_matrices(within, a[at], b[at])
    return Adapter(lora.rank, lora.scale, matrices)


def save(adapter: Adapter, folder: epath.Path, base: str, dropout: float) -> None:
    """Raises ConfigError for adapters of routed experts: `transformers` has no module for a single one."""
    from safetensors.numpy import save as as_safetensors

    routed = sorted({path for _, path in adapter.matrices if path not in MODULES})
    if routed:
        raise ConfigError(
            f"{', '.join(routed)}: transformers keeps all experts of a layer in one parameter, which PEFT has no "
            "module for; fold this adapter into its base with `convert merge`"
        )
    tensors = {}
    for (layer, path), (a, b) in sorted(adapter.matrices.items()):
        module = f"{_PREFIX}.{layer}.{MODULES[path]}"
        tensors[f"{module}.lora_A.weight"] = np.ascontiguousarray(a, np.float32)
        tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(b, np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank,
        "lora_dropout": dropout,
        "use_rslora": False,  # the scale is lora_alpha / r
        "target_modules": sorted({MODULES[path] for _, path in adapter.matrices}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{TENSORS}.partial"
    partial.write_bytes(as_safetensors(tensors, metadata={"format": "pt"}))
    partial.rename(folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2))


def read_adapter(folder: epath.Path) -> Adapter:
    """A PEFT folder. Raises ConfigError for what is missing, of another kind, or of other modules than this model's."""
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a PEFT adapter is {CONFIG} and {TENSORS}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the config of a PEFT adapter: {error!r}") from None
    for key, value in {"peft_type": "LORA", "use_rslora": False, "use_dora": False, "bias": "none"}.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{path}: {key}={config[key]!r} is not supported, only {value!r}")
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(key):
            raise ConfigError(f"{path}: {key} is not supported")
    if not (folder / TENSORS).exists():
        raise ConfigError(f"{folder / TENSORS}: no such file")
    stored = {tensor.name: tensor for tensor in read_header(folder / TENSORS)}
    paths = {module: path for path, module in MODULES.items()}
    matrices = {}
    for name in [name for name in stored if name.endswith(".lora_A.weight")]:
        stem = name.removesuffix(".lora_A.weight")
        layer, _, module = stem.removeprefix(f"{_PREFIX}.").partition(".")
        other = f"{stem}.lora_B.weight"
        if not stem.startswith(_PREFIX) or not layer.isdigit() or module not in paths or other not in stored:
            raise ConfigError(f"{folder / TENSORS}: {name} belongs to no module of this model's")
        matrices[int(layer), paths[module]] = (stored.pop(name).read(), stored.pop(other).read())
    if stored:
        raise ConfigError(f"{folder / TENSORS}: {sorted(stored)[0]} is no part of an adapter of this model")
    return Adapter(rank, alpha / rank, matrices)


def load(folder: str, config: Config, spec: DeepSeekV4) -> dict[str, np.ndarray]:
    """A PEFT folder as the adapter that this run trains: arrays by their path in the tree.

    Raises ConfigError where rank, scale or the adapted modules are others.
    """
    adapter, lora, c = read_adapter(epath.Path(folder)), lora_of(config), config.model
    where = f"init_adapter_path={folder}"
    if lora is None or (adapter.rank, adapter.scale) != (lora.rank, lora.scale):
        alpha = f"{adapter.rank * adapter.scale:g}"
        raise ConfigError(
            f"{where} has rank {adapter.rank} and alpha {alpha}; set lora_rank={adapter.rank} lora_alpha={alpha}"
        )
    nodes = adapted_leaves(spec, c)
    wanted = {(layer, within) for _, layers, within, _ in nodes for layer in layers}
    for what, keys in (("lacks", wanted - adapter.matrices.keys()), ("also has", adapter.matrices.keys() - wanted)):
        if keys:
            layer, path = min(keys)
            raise ConfigError(
                f"{where} {what} {len(keys)} modules of this run's {len(wanted)}, such as layer {layer}'s {path}; "
                "lora_targets has to be what the adapter was trained with"
            )
    arrays = {}
    for path, layers, within, node in nodes:
        weight = node.base.shape
        for layer in layers:
            a, b = adapter.matrices[layer, within]
            if a.size * len(layers) != np.prod(node.a.shape) or b.size * len(layers) != np.prod(node.b.shape):
                raise ConfigError(f"{where}: layer {layer}'s {within} is {b.shape} {a.shape}, for a weight of {weight}")
        pairs = [of_matrices(within, *adapter.matrices[layer, within], c) for layer in layers]
        arrays[f"{path}/a"], arrays[f"{path}/b"] = (np.stack(side) for side in zip(*pairs, strict=True))
    return arrays
