"""Changes of a config that would make a step fit that does not, each with what it saves on a device.

Arguments are counted exactly. What temporaries shrink by is estimated from the sizes of the arrays that go; each
estimate says from which. Every change is checked: the config it makes is a valid one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import Config
from trainer.dryrun.memory import ArgumentBytes
from trainer.errors import ConfigError
from trainer.parallel import BatchShape, Degrees, batch_shape, divisors, resolve_degrees
from trainer.topology import SLICES, find_slice
from trainer.validate import validate

ITEM_SIZE = {"bfloat16": 2, "float32": 4}
ROUNDS_FACTOR = 1.5  # receive buffer over the mean load; what lies over it takes a further round


@dataclass(frozen=True)
class Step:
    """A step that does not fit, and how to count another config's arguments."""

    config: Config
    degrees: Degrees
    shape: BatchShape
    arguments: ArgumentBytes
    temporary_bytes: int
    over_bytes: int  # that have to go
    arguments_of: Callable[[Config], ArgumentBytes]


@dataclass(frozen=True)
class Change:
    values: dict[str, Any]  # config keys and their new values
    saves_bytes: int
    why: str

    def __str__(self) -> str:
        return " ".join(f"{key}={_text(value)}" for key, value in self.values.items())


def changes(step: Step) -> list[Change]:
    """What would save memory, the largest first. Of several values of the same keys, the mildest that is enough."""
    found = [
        _mildest(step, [change for change in propose(step) if change.saves_bytes > 0 and _possible(step, change)])
        for propose in (
            _smaller_microbatches, _recompute, _attention_in_chunks, _receive_buffer, _spread_experts, _split_weights,
            _smaller_weights, _adapters, _larger_slice,
        )
    ]  # fmt: skip
    return sorted((change for change in found if change is not None), key=lambda change: -change.saves_bytes)


def _mildest(step: Step, proposed: Sequence[Change]) -> Change | None:
    """Proposals come mildest first."""
    enough = (change for change in proposed if change.saves_bytes >= step.over_bytes)
    return next(enough, max(proposed, key=lambda change: change.saves_bytes, default=None))


def _text(value: Any) -> str:
    return (
        f"[{','.join(value)}]" if isinstance(value, list) else repr(value) if isinstance(value, float) else str(value)
    )


def _possible(step: Step, change: Change) -> bool:
    config = replace(step.config, **change.values)
    try:
        validate(config)
        batch_shape(config, resolve_degrees(config))
    except ConfigError:
        return False
    return True


def _smaller_microbatches(step: Step) -> Iterator[Change]:
    for factor in divisors(step.shape.rows_per_shard)[1:]:
        values = {
            "gradient_accumulation_steps": step.shape.accumulation * factor,
            "per_device_batch_size": step.config.per_device_batch_size / factor,
        }
        saves = step.temporary_bytes * (factor - 1) // factor
        yield Change(values, saves, f"temporaries of 1/{factor} of the rows at a time; the same global batch")


def _recompute(step: Step) -> Iterator[Change]:
    if step.config.remat_policy == "full":
        return
    layers = step.config.model.num_layers
    streams = _tokens(step) * step.config.model.mhc_expansion_rate * step.config.model.emb_dim * _item(step)
    saves = step.temporary_bytes * (layers - 1) // layers - layers * streams
    why = f"one of {layers} layers' temporaries at a time, and each layer's input; at most that"
    yield Change({"remat_policy": "full"}, saves, why)


def _attention_in_chunks(step: Step) -> Iterator[Change]:
    if step.config.attention != "dot_product":
        return
    model, length = step.config.model, step.shape.length
    keys = length + max((length // ratio for ratio in model.compress_ratios if ratio), default=0)
    heads = model.num_query_heads // step.degrees.tensor
    scores = step.shape.rows_per_shard * heads * length * keys * ITEM_SIZE["float32"]
    why = "one layer's scores of every query and key: logits, weights and a gradient, in float32"
    yield Change({"attention": "chunked"}, min(3 * scores, step.temporary_bytes), why)


def _receive_buffer(step: Step) -> Iterator[Change]:
    values = {"moe_capacity_factor": ROUNDS_FACTOR, "moe_overflow": "rounds"}
    saves = _expert_bytes(step, step.config) - _expert_bytes(step, replace(step.config, **values))
    why = f"rows received for experts: {ROUNDS_FACTOR} x the mean load, the rest in further rounds; none is dropped"
    yield Change(values, min(saves, step.temporary_bytes), why)


def _spread_experts(step: Step) -> Iterator[Change]:
    values = {"moe_expert_axes": ["expert", "tensor"]}
    saves = _expert_bytes(step, step.config) - _expert_bytes(step, replace(step.config, **values))
    yield Change(values, min(saves, step.temporary_bytes), "tokens and experts split over tensor as well")


def _expert_bytes(step: Step, config: Config) -> int:
    """Rows that an exchange receives, as they go through experts: inputs, outputs and hidden, and their gradients."""
    model, spread = config.model, "tensor" in config.moe_expert_axes
    tokens = _tokens(step) * (1 if spread else step.degrees.tensor)
    devices = step.degrees.expert * (step.degrees.tensor if spread else 1)
    if devices == 1:
        return 0
    rows = devices * tokens * min(model.num_experts_per_tok, model.num_experts // devices)
    if config.moe_capacity_factor != -1:
        rows = min(rows, round(config.moe_capacity_factor * tokens * model.num_experts_per_tok))
    width = model.moe_mlp_dim // (1 if spread else step.degrees.tensor)
    return 2 * rows * (2 * model.emb_dim + 3 * width) * _item(step)


def _split_weights(step: Step) -> Iterator[Change]:
    """Degrees moved from expert to fsdp: the same batch shards, and weights that are not experts in more parts."""
    for factor in divisors(step.degrees.expert)[1:]:
        values = {
            "ici_fsdp_parallelism": step.degrees.fsdp * factor,
            "ici_expert_parallelism": step.degrees.expert // factor,
        }
        yield from _fewer_arguments(step, values, "weights and optimizer state in more parts, gathered layer by layer")


def _smaller_weights(step: Step) -> Iterator[Change]:
    if step.config.weight_dtype == "float32":
        yield from _fewer_arguments(step, {"weight_dtype": "bfloat16"}, "weights in half the bytes")


def _adapters(step: Step) -> Iterator[Change]:
    if not step.config.lora_rank:
        why = "no optimizer state and no gradients but the adapters'; trains less than the whole model"
        yield from _fewer_arguments(step, {"lora_rank": 16, "load_balance_loss_weight": 0.0}, why)


def _larger_slice(step: Step) -> Iterator[Change]:
    now = find_slice(step.config.compile_topology)
    for larger in SLICES.values():
        if larger.chip is not now.chip or larger.num_chips != 2 * now.num_chips:
            continue
        for key in ("ici_fsdp_parallelism", "ici_tensor_parallelism"):
            values = {
                "compile_topology": larger.name,
                key: 2 * step.degrees.fsdp if key == "ici_fsdp_parallelism" else 2 * step.degrees.tensor,
                "per_device_batch_size": step.config.per_device_batch_size / 2,
            }
            yield from _fewer_arguments(step, values, "twice the chips, the same global batch", fewer_tokens=True)


def _fewer_arguments(step: Step, values: dict[str, Any], why: str, fewer_tokens: bool = False) -> Iterator[Change]:
    change = Change(values, 0, why)
    if _possible(step, change):
        saves = step.arguments.total - step.arguments_of(replace(step.config, **values)).total
        yield replace(change, saves_bytes=saves + (step.temporary_bytes // 2 if fewer_tokens else 0))


def _tokens(step: Step) -> int:
    """Tokens on a device."""
    return step.shape.rows_per_shard * step.shape.length // step.degrees.tensor


def _item(step: Step) -> int:
    return ITEM_SIZE[step.config.dtype]
