"""What spans several keys of a config: ranges, the model's numbers, the mesh, and whether shapes divide. No JAX.

Every message has the key, its value, the number it has to fit, and the nearest values that do.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from trainer.config import BYTE_TOKENIZER, Config, value_of
from trainer.config_values import nearest
from trainer.errors import ConfigError
from trainer.libtpu import check_flags
from trainer.models.config import ModelConfig, adaptable
from trainer.parallel import (
    AXIS_KEYS,
    THE_REST,
    Degrees,
    batch_shape,
    device_count,
    divisors,
    given_degrees,
    planned_slice,
    resolve_degrees,
)
from trainer.topology import CPU
from trainer.torus import assign, torus

BYTE_TOKENIZER_VOCABULARY = 257  # 256 bytes and the end of a document

_AT_LEAST_0 = "at least 0"
_AT_LEAST_1 = "at least 1"
_ABOVE_0 = "above 0"
_ABOVE_1 = "above 1"
_FRACTION = "from 0 to 1"
_DECAY = "at least 0 and below 1"

_RANGES: dict[str, Callable[[float], bool]] = {
    _AT_LEAST_0: lambda value: value >= 0,
    _AT_LEAST_1: lambda value: value >= 1,
    _ABOVE_0: lambda value: value > 0,
    _ABOVE_1: lambda value: value > 1,
    _FRACTION: lambda value: 0 <= value <= 1,
    _DECAY: lambda value: 0 <= value < 1,
    "from 0 to 4294967295": lambda value: 0 <= value < 2**32,
    "above 0, or -1 for the worst case": lambda value: value == -1 or value > 0,
}
RANGE_OF = {
    "seed": "from 0 to 4294967295",
    "steps": _AT_LEAST_0,
    "log_period": _AT_LEAST_1,
    "num_cpu_devices": _AT_LEAST_1,
    "per_device_batch_size": _ABOVE_0,
    "max_target_length": _AT_LEAST_1,
    "gradient_accumulation_steps": _AT_LEAST_1,
    "moe_capacity_factor": "above 0, or -1 for the worst case",
    "loss_chunk_tokens": _AT_LEAST_1,
    "eval_interval": _AT_LEAST_0,
    "eval_steps": _AT_LEAST_1,
    "lora_rank": _AT_LEAST_0,
    "lora_alpha": _ABOVE_0,
    "lora_dropout": _DECAY,
    "load_balance_loss_weight": _AT_LEAST_0,
    "routed_bias_update_rate": _AT_LEAST_0,
    "learning_rate": _ABOVE_0,
    "warmup_steps_fraction": _FRACTION,
    "cosine_learning_rate_final_fraction": _FRACTION,
    "adam_b1": _DECAY,
    "adam_b2": _DECAY,
    "adam_eps": _ABOVE_0,
    "adam_weight_decay": _AT_LEAST_0,
    "gradient_clipping_threshold": _AT_LEAST_0,
    "checkpoint_period": _AT_LEAST_1,
    "max_num_checkpoints_to_keep": _AT_LEAST_1,
    "model.vocab_size": _AT_LEAST_1,
    "model.emb_dim": _AT_LEAST_1,
    "model.num_query_heads": _AT_LEAST_1,
    "model.head_dim": _AT_LEAST_1,
    "model.qk_rope_head_dim": _AT_LEAST_1,
    "model.q_lora_rank": _AT_LEAST_1,
    "model.o_groups": _AT_LEAST_1,
    "model.o_lora_rank": _AT_LEAST_1,
    "model.num_experts": _AT_LEAST_1,
    "model.num_experts_per_tok": _AT_LEAST_1,
    "model.moe_mlp_dim": _AT_LEAST_1,
    "model.indexer_n_heads": _AT_LEAST_1,
    "model.indexer_head_dim": _AT_LEAST_1,
    "model.indexer_topk": _AT_LEAST_1,
    "model.csa_compress_ratio": _AT_LEAST_1,
    "model.sliding_window_size": _AT_LEAST_1,
    "model.first_num_hash_layers": _AT_LEAST_0,
    "model.shared_experts": _AT_LEAST_1,
    "model.routed_scaling_factor": _ABOVE_0,
    "model.mlp_activations_limit": _ABOVE_0,
    "model.mhc_expansion_rate": _AT_LEAST_1,
    "model.sinkhorn_iterations": _AT_LEAST_1,
    "model.mhc_epsilon": _ABOVE_0,
    "model.normalization_layer_epsilon": _ABOVE_0,
    "model.rope_max_timescale": _ABOVE_1,
    "model.compressed_rope_max_timescale": _ABOVE_1,
    "model.yarn_factor": _AT_LEAST_1,
    "model.yarn_beta_fast": _ABOVE_0,
    "model.yarn_beta_slow": _ABOVE_0,
    "model.yarn_original_max_position": _AT_LEAST_1,
}


def validate(config: Config, num_devices: int | None = None) -> None:
    """Raise ConfigError for a config that cannot run.

    `num_devices` is for tpu and gpu, where None means that it is not known yet: the degrees then make it up, and with
    a degree of -1 only what holds for every number of devices is checked. On the CPU `num_cpu_devices` counts.
    """
    for key, allowed in RANGE_OF.items():
        value = value_of(config, key)
        if not _RANGES[allowed](value):
            raise ConfigError(f"{key}={value} is not possible; it must be {allowed}")
    _check_model(config.model)
    _check_data(config)
    if config.num_cpu_devices != 1 and config.hardware != "cpu":
        raise ConfigError(
            f"num_cpu_devices={config.num_cpu_devices} needs hardware=cpu, and hardware={config.hardware}; "
            "set hardware=cpu, or leave num_cpu_devices at 1"
        )
    if config.moe_expert_axes not in (["expert", "tensor"], ["expert"]):
        axes = ", ".join(config.moe_expert_axes)
        raise ConfigError(f"moe_expert_axes=[{axes}] is not possible; it must be [expert, tensor] or [expert]")
    if config.weight_axes not in (["fsdp"], ["fsdp", "expert"]):
        axes = ", ".join(config.weight_axes)
        raise ConfigError(f"weight_axes=[{axes}] is not possible; it must be [fsdp] or [fsdp, expert]")
    _check_lora(config)
    check_flags(config.libtpu_init_args, f"libtpu_init_args={config.libtpu_init_args!r}")
    if config.compile_topology != CPU:
        planned_slice(replace(config, hardware="tpu"))  # a wrong name is wrong on every hardware
    _check_mesh(config, num_devices)


def validate_run(config: Config) -> None:
    """Raise ConfigError where a run has no folder to write to."""
    name = config.run_name
    if not name:
        raise ConfigError("run_name is empty, and the run's folder is called by it; set run_name=NAME")
    if name in (".", "..") or any(character in name for character in "/\\\0"):
        raise ConfigError(f"run_name={name!r} names one folder below base_output_directory; it can hold no / or \\")
    if not config.base_output_directory:
        raise ConfigError("base_output_directory is empty; set it to the folder that runs are written to")


def _check_model(model: ModelConfig) -> None:
    layers = model.num_layers
    if not layers or min(model.compress_ratios) < 0:
        raise ConfigError(
            f"model.compress_ratios={model.compress_ratios} is not possible; it must hold one number per layer, "
            "each at least 0"
        )
    if model.num_experts_per_tok > model.num_experts:
        raise ConfigError(
            f"model.num_experts_per_tok={model.num_experts_per_tok} is more than model.num_experts="
            f"{model.num_experts}; it must be from 1 to {model.num_experts}"
        )
    if model.first_num_hash_layers > layers:
        raise ConfigError(
            f"model.first_num_hash_layers={model.first_num_hash_layers} is more than the {layers} layers of "
            f"model.compress_ratios; it must be from 0 to {layers}"
        )
    rope = model.qk_rope_head_dim
    limit = min(model.head_dim, model.indexer_head_dim)
    if rope % 2 or rope > limit:
        pairs = {min(rope // 2, limit // 2), min(rope // 2 + 1, limit // 2)} - {0}
        raise ConfigError(
            f"model.qk_rope_head_dim={rope} must be even (channels rotate in pairs), and at most "
            f"model.head_dim={model.head_dim} and model.indexer_head_dim={model.indexer_head_dim}; "
            f"nearest that work: {' or '.join(str(2 * pair) for pair in sorted(pairs)) or 'none'}"
        )
    if model.yarn_beta_fast < model.yarn_beta_slow:
        raise ConfigError(
            f"model.yarn_beta_fast={model.yarn_beta_fast:g} is below model.yarn_beta_slow={model.yarn_beta_slow:g}"
        )
    heads = {"model.num_query_heads": model.num_query_heads}
    _divides(heads, {"model.o_groups": model.o_groups}, "an output group is whole heads")


def _check_data(config: Config) -> None:
    if config.dataset_type != "text":
        return
    if config.eval_interval and not config.eval_dataset_path:
        raise ConfigError(
            f"eval_interval={config.eval_interval} needs eval_dataset_path, the held-out files, and it is empty; "
            "eval_interval=0 turns evaluation off"
        )
    if len(config.train_data_columns) not in (1, 2):
        raise ConfigError(
            f"train_data_columns={config.train_data_columns} is not possible; it must be one field (a text or "
            "messages), or two (a prompt and its completion)"
        )
    if not config.dataset_path:
        raise ConfigError("dataset_type=text needs dataset_path, a file, a glob or a list of them, and it is empty")
    if config.tokenizer_path == BYTE_TOKENIZER and config.model.vocab_size < BYTE_TOKENIZER_VOCABULARY:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is too small for tokenizer_path={BYTE_TOKENIZER}, which has "
            f"{BYTE_TOKENIZER_VOCABULARY} tokens; it must be at least {BYTE_TOKENIZER_VOCABULARY}"
        )


def _check_lora(config: Config) -> None:
    if not config.lora_rank:
        if config.init_adapter_path:
            raise ConfigError(
                f"init_adapter_path={config.init_adapter_path} needs adapters to train; set lora_rank to its rank"
            )
        return
    names = adaptable(config.model)
    if not config.lora_targets:
        raise ConfigError(f"lora_targets is empty; it can name any of {', '.join(names)}")
    for pattern in config.lora_targets:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = nearest(pattern, names)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"lora_targets: {pattern!r} matches none of {', '.join(names)}{hint}")
    if config.load_balance_loss_weight:
        raise ConfigError(
            f"load_balance_loss_weight={config.load_balance_loss_weight:g} has nothing to train with lora_rank="
            f"{config.lora_rank}: the routers are frozen; set load_balance_loss_weight=0"
        )


def _check_mesh(config: Config, num_devices: int | None) -> None:
    devices = device_count(config, num_devices)
    given = list(given_degrees(config).values())
    if devices is None and given.count(THE_REST) == 1 and all(degree > 0 for degree in given if degree != THE_REST):
        # Every rule asks that a product of degrees divides a size, so what fails with 1 for the rest fails with any.
        fixed = math.prod(degree for degree in given if degree != THE_REST)
        _check_shapes(config, resolve_degrees(config, fixed), 0)
        return
    degrees = resolve_degrees(config, num_devices)
    _check_shapes(config, degrees, devices or 0)
    batch_shape(config, degrees)
    planned = planned_slice(config)
    if planned is not None:  # refuses a mesh that has no place on the slice's torus
        on = torus(planned.dims, planned.wraps, planned.chip.devices)
        on_slice = {axis: getattr(degrees, axis) for axis in AXIS_KEYS} | {"data": 1}
        assign(on_slice, on, config.allow_split_physical_axes)


def _check_shapes(config: Config, degrees: Degrees, devices: int) -> None:
    """Refuse a mesh that would split something into unequal parts. `devices` is 0 where their number is not known."""
    model = config.model
    fsdp = {AXIS_KEYS["fsdp"]: degrees.fsdp}
    tensor = {AXIS_KEYS["tensor"]: degrees.tensor}
    divides = partial(_divides, devices=devices)
    divides(
        {"max_target_length": config.max_target_length},
        tensor | {"the least common multiple of model.compress_ratios": model.compress_multiple},
        "sequences split over tensor, into whole compress windows",
    )
    divides({"model.num_query_heads": model.num_query_heads}, tensor, "heads split over tensor")
    divides(
        {"model.o_lora_rank": model.o_lora_rank, "model.o_groups": model.o_groups},
        tensor,
        "the output projection's ranks split over tensor",
    )
    divides({"model.vocab_size": model.vocab_size}, tensor, "the vocabulary splits over tensor")
    divides({"model.emb_dim": model.emb_dim}, fsdp | tensor, "the embedding's width splits over fsdp and tensor")
    kept = {AXIS_KEYS[axis]: getattr(degrees, axis) for axis in config.weight_axes}
    over = " and ".join(config.weight_axes)
    divides({"model.q_lora_rank": model.q_lora_rank}, kept, f"the query's rank splits over {over}")
    divides({"model.o_lora_rank": model.o_lora_rank}, kept, f"the output projection's rank splits over {over}")
    divides({"model.emb_dim": model.emb_dim}, kept, f"weights split along the embedding's width over {over}")
    divides(
        {"model.moe_mlp_dim": model.moe_mlp_dim, "model.shared_experts": model.shared_experts},
        tensor,
        "the shared expert's width splits over tensor",
    )
    _check_experts(config, degrees, devices)


def _check_experts(config: Config, degrees: Degrees, devices: int) -> None:
    experts = {"model.num_experts": config.model.num_experts}
    width = {"model.moe_mlp_dim": config.model.moe_mlp_dim}
    expert = {AXIS_KEYS["expert"]: degrees.expert}
    tensor = {AXIS_KEYS["tensor"]: degrees.tensor}
    if config.moe_expert_axes == ["expert"]:
        _divides(experts, expert, "experts split over expert", devices)
        _divides(width, tensor, "with moe_expert_axes=[expert], each expert's width splits over tensor", devices)
        return
    fits_by_width = config.model.num_experts % degrees.expert == 0 and config.model.moe_mlp_dim % degrees.tensor == 0
    why = "with moe_expert_axes=[expert, tensor], experts split over both"
    _divides(experts, expert | tensor, why, devices, "moe_expert_axes=[expert]" if fits_by_width else "")


def _divides(sizes: dict[str, int], parts: dict[str, int], why: str, devices: int = 0, fix: str = "") -> None:
    """Refuse sizes whose product is no multiple of the parts' product.

    The message has the nearest values that work: of the first size, and of each part that can do it alone (a mesh
    degree has to divide `devices` as well, where they are known). `fix` is one more way out.
    """
    size, divisor = math.prod(sizes.values()), math.prod(parts.values())
    if size % divisor == 0:
        return
    key, value = next(iter(sizes.items()))
    step = divisor // math.gcd(divisor, size // value)
    works = [fix] if fix else []
    works.append(_either(key, [value // step * step, value // step * step + step]))
    for key, value in parts.items():
        rest = divisor // value
        if " " not in key and size % rest == 0:
            options = divisors(math.gcd(size // rest, devices))
            works.append(_either(key, [max(d for d in options if d <= value), *(d for d in options if d > value)][:2]))
    raise ConfigError(
        f"{_product(sizes)} is not divisible by {_product(parts)} ({why}); nearest that work: {', or '.join(works)}"
    )


def _product(factors: dict[str, int]) -> str:
    """`key=8`, or `key x other = 8 x 16 = 128`; a factor of 1 is left out where there is another."""
    shown = {key: value for key, value in factors.items() if value != 1} or dict([next(iter(factors.items()))])
    names = [f"{key}={value}" if len(shown) == 1 else key for key, value in shown.items()]
    if len(shown) == 1:
        return names[0]
    return f"{' x '.join(names)} = {' x '.join(str(value) for value in shown.values())} = {math.prod(shown.values())}"


def _either(key: str, values: list[int]) -> str:
    return " or ".join(f"{key}={value}" for value in values if value > 0)
