"""Loss on held-out data: every `eval_interval` steps of a run, or by `trainer eval` for its newest checkpoint."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from trainer.checkpoint import FILE_FAULTS
from trainer.config import Config
from trainer.console import Output
from trainer.data.loader import Loader
from trainer.data.stream import open_stream
from trainer.devices import find_devices
from trainer.errors import ConfigError
from trainer.hf.arrays import newest_state
from trainer.mesh import make_mesh
from trainer.models.deepseek_v4 import Batch, DeepSeekV4
from trainer.models.lora import is_adapted
from trainer.ops.cross_entropy import IGNORE
from trainer.parallel import Degrees, batch_shape, resolve_degrees
from trainer.params import merge
from trainer.run_folder import RunFolder
from trainer.state import (
    abstract_batch,
    abstract_frozen,
    abstract_state,
    batch_sharding,
    first_adapters,
    frozen_weights,
    optimizer_of,
    split_state,
    weights,
)
from trainer.step import Program, build_program, forward_sums
from trainer.validate import validate


class Evaluation:
    """The held-out rows of a run, always the same, and the compiled forward pass over them."""

    def __init__(self, config: Config, degrees: Degrees, mesh: Mesh):
        shape = batch_shape(replace(config, gradient_accumulation_steps=1), degrees)
        program = build_program(config, mesh)
        self._loader = Loader(open_stream(held_out(config)), shape, batch_sharding(program))
        rows = self._loader.rows_per_epoch
        self._batches = config.eval_steps if rows is None else min(config.eval_steps, rows // shape.global_batch)
        state = abstract_state(program, optimizer_of(program, config))
        forward = make_evaluate(config, mesh)
        arguments = (state.params, abstract_frozen(program), abstract_batch(program, shape))
        self._compiled = jax.jit(forward).lower(*arguments).compile()

    def __call__(self, params: Any, frozen: Any) -> dict[str, Any]:
        """`eval_loss`, the mean over all targets in nats, `eval_perplexity` and `eval_targets`."""
        loss, targets = 0.0, 0
        for number in range(self._batches):
            sums = jax.device_get(self._compiled(params, frozen, Batch(**self._loader.batch(number))))
            loss, targets = loss + float(sums[0]), targets + int(sums[1])
        mean = loss / max(targets, 1)
        return {"eval_loss": mean, "eval_perplexity": perplexity(mean), "eval_targets": targets}

    def close(self) -> None:
        self._loader.close()


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # nan stays nan


def held_out(config: Config) -> Config:
    """The config whose data is the held-out one, in the order it is written in."""
    if config.dataset_type == "synthetic":
        return replace(config, seed=(config.seed + 1) % 2**32)
    if not config.eval_dataset_path:
        raise ConfigError("eval_dataset_path is empty; it names the held-out files, of the kind of dataset_type")
    return replace(config, dataset_path=config.eval_dataset_path, enable_data_shuffling=False)


def make_evaluate(config: Config, mesh: Mesh) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(what trains, what is frozen, batch [1, B, S]) -> (cross-entropy summed over targets, number of targets)."""
    program = build_program(replace(config, lora_dropout=0.0), mesh)
    forward = forward_sums(program)

    def evaluate(params: Any, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        whole = without_dropout(params if frozen is None else merge(params, frozen))
        micro = jax.tree.map(lambda x: x[0], batch)
        return forward(whole, micro).loss, jnp.sum(micro.targets != IGNORE)

    return evaluate


def without_dropout(params: DeepSeekV4) -> DeepSeekV4:
    return jax.tree.map(lambda x: x.replace(seed=None, dropout=0.0) if is_adapted(x) else x, params, is_leaf=is_adapted)


def evaluate_run(config: Config, folder: RunFolder, write: Callable[[str], None]) -> int:
    """The whole command: the newest checkpoint of the config's run, or its first weights where it has none. Reads the
    run and writes nothing. One line of JSON comes last."""
    held_out(config)
    out = Output()
    devices = find_devices(config, say=out.every)
    validate(config, len(devices))
    degrees = resolve_degrees(config, len(devices))
    mesh = make_mesh(degrees, devices, split_physical_axes=config.allow_split_physical_axes)
    with jax.set_mesh(mesh):
        program = build_program(config, mesh)
        evaluation = Evaluation(config, degrees, mesh)
        try:
            frozen = frozen_weights(program, config)
            params, source = trained_params(program, config, folder)
            found = evaluation(params, frozen)
        finally:
            evaluation.close()
    if jax.process_index() == 0:
        write(
            f"{source}: loss {found['eval_loss']:.4f}, perplexity {found['eval_perplexity']:.4g} over "
            f"{found['eval_targets']:,} targets"
        )
        write(json.dumps({"source": source} | {k: v if math.isfinite(v) else None for k, v in found.items()}))
    return 0


def trained_params(program: Program, config: Config, folder: RunFolder) -> tuple[Any, str]:
    """(what the run trains, where it is from). Raises ConfigError for a checkpoint of another model."""
    run = epath.Path(folder.path)
    if not any(path.name.isdigit() for path in (run / "checkpoints").glob("*")):
        adapters = None if program.options.lora is None else split_state(program, first_adapters(program, config))[0]
        return (weights(program, config) if adapters is None else adapters), "the first weights"
    state = newest_state(run)
    wanted = {"params": abstract_state(program, optimizer_of(program, config)).params}
    arguments = ocp.args.PyTreeRestore(
        item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(state, args=arguments)["params"], str(state.parent)
    except FILE_FAULTS as error:
        raise ConfigError(
            f"{state.parent}: is not a checkpoint of this config's model: {str(error).splitlines()[0]}"
        ) from error
