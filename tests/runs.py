"""Tiny runs: a config whose step compiles in seconds, and toy steps that take no compile worth the name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.checkpoint import Checkpoints
from trainer.config import Config, from_values
from trainer.console import Output
from trainer.data.stream import FIELDS
from trainer.loop import Run
from trainer.memory import program_memory
from trainer.mesh import make_mesh
from trainer.models.deepseek_v4 import Batch
from trainer.parallel import BatchShape, Degrees
from trainer.report import Reporter
from trainer.run_folder import open_run
from trainer.signals import StopSignal
from trainer.step import TrainState

MODEL = {
    "vocab_size": 64,
    "emb_dim": 16,
    "compress_ratios": [0, 4],
    "sliding_window_size": 8,
    "first_num_hash_layers": 1,
    "num_query_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 8,
    "o_groups": 4,
    "o_lora_rank": 4,
    "indexer_n_heads": 2,
    "indexer_head_dim": 8,
    "indexer_topk": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 16,
    "mhc_expansion_rate": 2,
    "sinkhorn_iterations": 3,
    "yarn_original_max_position": 16,
}


def tiny_config(folder: Path, **values: Any) -> Config:
    """A run that writes below `folder`."""
    base = {
        "model": MODEL,
        "run_name": "tiny",
        "base_output_directory": str(folder),
        "hardware": "cpu",
        "dtype": "float32",
        "remat_policy": "none",
        "per_device_batch_size": 2,
        "max_target_length": 32,
        "learning_rate": 1e-2,
        "steps": 4,
        "checkpoint_period": 2,
        "enable_tensorboard": False,
    }
    return from_values(base | values, (), "test").config


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def toy_state(size: int = 4) -> TrainState:
    """Random, so that it does not compress."""
    mesh = make_mesh(Degrees(1, 1, 1, 1), jax.devices()[:1])
    on_mesh = NamedSharding(mesh, P())
    values = np.random.default_rng(0).random(size, np.float32)
    state = TrainState(np.int32(0), {"w": values}, {"m": np.zeros(size, np.float32)})
    return jax.device_put(state, on_mesh)


def toy_step(state: TrainState, frozen: None, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    """A step of no model: the loss is the mean of the weights, which move by the batch's first token."""
    del frozen
    params = {"w": state.params["w"] + batch.tokens[0, 0, 0]}
    metrics = {
        "loss": jnp.mean(state.params["w"]),
        "grad_norm": jnp.float32(1.0),
        "learning_rate": jnp.float32(0.1),
        "num_targets": jnp.sum(batch.targets),
        "moe_dropped_tokens": jnp.int32(0),
        "moe_load_max_over_mean": jnp.float32(1.5),
        "router_finite_by_layer": jnp.array([True, True]),
    }
    return TrainState(state.step + 1, params, state.opt_state), metrics


class ToyLoader:
    """Batches whose first token is the step's number. `at(step)`, if given, is called before each."""

    def __init__(self) -> None:
        self.at: Any = None
        self._sharding = NamedSharding(make_mesh(Degrees(1, 1, 1, 1), jax.devices()[:1]), P())

    def batch(self, step: int) -> dict[str, jax.Array]:
        if self.at is not None:
            self.at(step)
        return {field: jax.device_put(np.full((1, 1, 4), step, np.int32), self._sharding) for field in FIELDS}


class ToyRun:
    """A run of `step` in `folder`, without a model."""

    def __init__(self, folder: Path, step: Any = toy_step, *, size: int = 4, **values: Any):
        self.config = tiny_config(folder, **values)
        self.folder = open_run(self.config)
        self.state, self.loader, self.stop = toy_state(size), ToyLoader(), StopSignal()
        batch = Batch(**self.loader.batch(0))
        self.compiled = jax.jit(step, donate_argnums=0).lower(self.state, None, batch).compile()
        self.checkpoints = Checkpoints(self.folder.checkpoints, self.config, {"global_batch": 1})
        mesh = make_mesh(Degrees(1, 1, 1, 1), jax.devices()[:1])
        self.program: Any = SimpleNamespace(mesh=mesh, model=self.config.model)
        self.shape = BatchShape(rows=1, accumulation=1, length=4, batch_shards=1)

    def reporter(self) -> Reporter:
        return Reporter(self.config, self.program, self.shape, program_memory(self.compiled), Output())

    def run(self) -> Run:
        checkpoints = self.checkpoints if self.config.enable_checkpointing else None
        loader: Any = self.loader
        return Run(self.config, self.program, self.shape, loader, checkpoints, self.folder, Output(), self.stop)
