"""Arithmetic of the mesh and of the batch: degrees, rows and tokens. Free of JAX; `trainer.mesh` builds the mesh."""

import math
from dataclasses import dataclass
from fractions import Fraction

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.topology import CPU, Slice, find_slice

AXIS_KEYS = {
    "data": "dcn_data_parallelism",
    "fsdp": "ici_fsdp_parallelism",
    "expert": "ici_expert_parallelism",
    "tensor": "ici_tensor_parallelism",
}
THE_REST = -1

_WHOLE = Fraction(1, 10**9)  # 1/96 per device, written with 16 digits, is a whole row on 96 devices


@dataclass(frozen=True)
class Degrees:
    """Size of each mesh axis, 1 where it is unused."""

    data: int
    fsdp: int
    expert: int
    tensor: int

    @property
    def product(self) -> int:
        """Devices in the mesh."""
        return self.data * self.fsdp * self.expert * self.tensor

    @property
    def batch_shards(self) -> int:
        """Parts the rows of a batch are split into; the tensor axis splits the length instead."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True)
class BatchShape:
    """What one optimizer step consumes, over all devices."""

    rows: int  # B: sequences of one microbatch
    accumulation: int  # A: microbatches
    length: int  # S: tokens per sequence
    batch_shards: int

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.rows * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.length

    @property
    def rows_per_shard(self) -> int:
        return self.rows // self.batch_shards

    def __str__(self) -> str:
        return (
            f"global_batch={self.global_batch} ({self.rows} rows x {self.accumulation} accumulation) "
            f"tokens/step={self.tokens_per_step} rows/batch-shard={self.rows_per_shard}"
        )


def device_count(config: Config, num_devices: int | None) -> int | None:
    """Devices of the run: `num_cpu_devices` on the CPU; elsewhere `num_devices`, or those of `compile_topology`.

    None where nobody knows yet.
    """
    if config.hardware == "cpu":
        return config.num_cpu_devices
    planned = planned_slice(config)
    if planned is None or config.dcn_data_parallelism < 1:
        return num_devices
    expected = planned.num_devices * config.dcn_data_parallelism
    if num_devices not in (None, expected):
        raise ConfigError(
            f"compile_topology={config.compile_topology} x dcn_data_parallelism={config.dcn_data_parallelism} is "
            f"{expected} devices, and this run has {num_devices}; name what it runs on, or leave compile_topology empty"
        )
    return expected


def planned_slice(config: Config) -> Slice | None:
    """The TPU slice that `compile_topology` names for a run on TPUs. Raises ConfigError for a name of none."""
    if config.hardware != "tpu" or config.compile_topology in ("", CPU):
        return None
    return find_slice(config.compile_topology)


def given_degrees(config: Config) -> dict[str, int]:
    """The degrees as the config has them, by key; -1 is the rest."""
    return {key: getattr(config, key) for key in AXIS_KEYS.values()}


def resolve_degrees(config: Config, num_devices: int | None = None) -> Degrees:
    """The degrees with -1 worked out. Where the number of devices is unknown, it is the product of the degrees."""
    given = given_degrees(config)
    devices = device_count(config, num_devices)
    open_keys = [key for key, degree in given.items() if degree == THE_REST]
    fixed = math.prod(degree for degree in given.values() if degree != THE_REST)
    if any(degree < 1 and degree != THE_REST for degree in given.values()):
        raise ConfigError(_mesh_message("a degree is at least 1, or -1 for the rest", config, given, devices))
    if len(open_keys) > 1:
        raise ConfigError(_mesh_message("only one degree may be -1, the rest", config, given, devices))
    if devices is None:
        if open_keys:
            raise ConfigError(f"{open_keys[0]}=-1 is the rest of the devices, and their number is not known here")
        devices = fixed
    if open_keys and devices % fixed:
        raise ConfigError(_mesh_message("the fixed degrees don't divide the devices", config, given, devices))
    if not open_keys and devices != fixed:
        raise ConfigError(_mesh_message("the mesh and the devices differ in number", config, given, devices))
    degrees = {axis: devices // fixed if given[key] == THE_REST else given[key] for axis, key in AXIS_KEYS.items()}
    return Degrees(**degrees)


def _mesh_message(problem: str, config: Config, given: dict[str, int], devices: int | None) -> str:
    product = math.prod(degree for degree in given.values() if degree != THE_REST)
    text = f"{problem}: {' x '.join(f'{key}={degree}' for key, degree in given.items())}; product "
    text += f"without the -1: {product}" if THE_REST in given.values() else f"{product}"
    if devices is None:
        devices = math.prod(degree for degree in given.values() if degree > 0)
    else:
        text += f"; devices: {devices}{_whose(config)}"
    changes = [f"{key}={degree}" for key, degree in _completion(given, devices).items() if degree != given[key]]
    text += f"; valid: {' '.join(changes)}"
    if config.hardware == "cpu" and THE_REST not in given.values() and product > 0:
        text += f", or num_cpu_devices={product}"
    return text


def _whose(config: Config) -> str:
    if config.hardware == "cpu":
        return " (num_cpu_devices)"
    return f" (compile_topology={config.compile_topology})" if planned_slice(config) else ""


def _completion(given: dict[str, int], devices: int) -> dict[str, int]:
    """Degrees that fill `devices`: the given ones, lowered until they divide; the open axis (or fsdp) gets the rest."""
    rest = devices
    complete = {}
    for key, degree in given.items():
        complete[key] = largest_divisor(rest, degree) if degree > 0 else 1
        rest //= complete[key]
    open_keys = [key for key, degree in given.items() if degree < 1]
    complete[open_keys[0] if open_keys else "ici_fsdp_parallelism"] *= rest
    return complete


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending: all of them up to 10**12, beyond it those that are quickly found."""
    small = [d for d in range(1, math.isqrt(min(number, 10**12)) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`."""
    return max(d for d in divisors(number) if d <= limit)


def batch_shape(config: Config, degrees: Degrees) -> BatchShape:
    """The batch on a mesh. Refuses a batch of no whole number of rows, or one that the batch axes don't divide.

    Rows are counted exactly from the decimal digits of `per_device_batch_size`: 0.1 x 30 is 3.
    """
    devices = degrees.product
    exact = Fraction(repr(config.per_device_batch_size)) * devices
    rows = round(exact)
    product = f"per_device_batch_size={config.per_device_batch_size:g} x {devices} = {float(exact):.10g}"
    if abs(exact - rows) > _WHOLE * max(rows, 1):
        raise ConfigError(
            f"{product} is not a whole number (of rows, over all devices); {_nearest_batches(exact, degrees)}"
        )
    if rows < 1 or rows % degrees.batch_shards:
        shards = " x ".join(f"{key} {getattr(degrees, axis)}" for axis, key in AXIS_KEYS.items() if axis != "tensor")
        raise ConfigError(
            f"{product}: {_rows(rows)} don't divide into {degrees.batch_shards} batch shards ({shards}); "
            + _nearest_batches(exact, degrees)
        )
    return BatchShape(rows, config.gradient_accumulation_steps, config.max_target_length, degrees.batch_shards)


def _nearest_batches(exact: Fraction, degrees: Degrees) -> str:
    below = max(math.floor(exact / degrees.batch_shards), 1)
    sizes = [shards * degrees.batch_shards for shards in (below, below + 1)]
    works = " or ".join(f"{rows / degrees.product!r} ({_rows(rows)})" for rows in sizes)
    return f"nearest per_device_batch_size that work: {works}"


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"
