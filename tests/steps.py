"""Steps of a tiny model on any mesh, without a run folder."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.config import Config, load
from trainer.mesh import make_mesh
from trainer.models.deepseek_v4 import Batch
from trainer.parallel import BatchShape, batch_shape, resolve_degrees
from trainer.state import batch_sharding, first_state, frozen_weights, lower_step, optimizer_of
from trainer.step import Program, TrainState, build_program
from trainer.validate import validate

ROWS, LENGTH = 8, 64
SMALL = [
    "hardware=cpu", "model.compress_ratios=[4,16]", "model.first_num_hash_layers=1", f"max_target_length={LENGTH}",
    "dtype=float32", "learning_rate=1e-2", "warmup_steps_fraction=0", "attention=dot_product",
]  # fmt: skip

MESHES = {
    "1": [],
    "expert 4": ["ici_expert_parallelism=4"],
    "tensor 4": ["ici_tensor_parallelism=4"],
    "fsdp 4": ["ici_fsdp_parallelism=4"],
    "all": ["ici_fsdp_parallelism=2", "ici_expert_parallelism=2", "ici_tensor_parallelism=2"],
}


def config_of(*overrides: str, rows: int = ROWS) -> Config:
    """The tiny model with a microbatch of `rows` on the mesh that the overrides make; later overrides win."""
    given = {item.split("=")[0]: item for item in (*SMALL, *overrides)}
    devices = 1
    for key, item in given.items():
        if key.endswith("_parallelism"):
            devices *= int(item.split("=")[1])
    given["num_cpu_devices"] = f"num_cpu_devices={devices}"
    given.setdefault("per_device_batch_size", f"per_device_batch_size={rows / devices}")
    config = load("configs/models/deepseek_v4_tiny.yml", list(given.values())).config
    validate(config)
    return config


class Started(NamedTuple):
    config: Config
    program: Program
    shape: BatchShape
    compiled: Any
    frozen: Any
    state: TrainState


def start(config: Config) -> Started:
    degrees = resolve_degrees(config)
    mesh, shape = make_mesh(degrees, jax.devices()[: degrees.product]), batch_shape(config, degrees)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        program = build_program(config, mesh)
        compiled = lower_step(program, config, shape).compile()
        state = first_state(program, optimizer_of(program, config), config)
        return Started(config, program, shape, compiled, frozen_weights(program, config), state)


def random_batch(step: int, program: Program, shape: BatchShape) -> Batch:
    """Rows of two documents and some padding, the same for every mesh and way of accumulating."""
    rng = np.random.default_rng(step)
    num = shape.global_batch
    tokens = rng.integers(0, 257, (num, shape.length)).astype(np.int32)
    cut = rng.integers(5, shape.length - 5, (num, 1))
    index = np.arange(shape.length)
    end = shape.length - 3
    segments = np.where(index < end, 1 + (index >= cut), 0).astype(np.int32)
    positions = np.where(index >= cut, index - cut, index) * (segments > 0)
    targets = np.where((segments > 0) & (np.roll(segments, -1, 1) == segments), np.roll(tokens, -1, 1), -100)
    targets[:, -1] = -100
    whole = (shape.accumulation, shape.rows, shape.length)
    host = (np.asarray(x, np.int32).reshape(whole) for x in (tokens, targets, segments, positions))
    return jax.device_put(Batch(*host), batch_sharding(program))


def run_steps(started: Started, num_steps: int, first: int = 0) -> tuple[list[dict[str, Any]], TrainState]:
    """Metrics of each step, and the state after the last. Uses up the first state."""
    state, found = started.state, []
    with jax.set_mesh(started.program.mesh):
        for step in range(first, first + num_steps):
            state, metrics = started.compiled(state, started.frozen, random_batch(step, started.program, started.shape))
            found.append(jax.device_get(metrics))
    return found, state


def losses(overrides: Sequence[str], num_steps: int = 3) -> list[float]:
    return [float(m["loss"]) for m in run_steps(start(config_of(*overrides)), num_steps)[0]]
