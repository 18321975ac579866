"""A training run, from a config to its last checkpoint."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from trainer.checkpoint import Checkpoints
from trainer.config import Config
from trainer.console import Output
from trainer.data.loader import Loader
from trainer.data.stream import open_stream
from trainer.devices import describe, find_devices
from trainer.errors import RunError
from trainer.evaluate import Evaluation
from trainer.libtpu import VARIABLE
from trainer.memory import program_memory
from trainer.mesh import make_mesh, placement
from trainer.models.deepseek_v4 import Batch
from trainer.parallel import BatchShape, batch_shape, resolve_degrees
from trainer.params import count, trained
from trainer.report import WAITING, Reporter
from trainer.run_folder import RunFolder, fingerprint
from trainer.signals import STOPPED, StopSignal
from trainer.state import abstract_state, batch_sharding, first_state, frozen_weights, lower_step, optimizer_of
from trainer.step import Program, TrainState, build_program
from trainer.validate import validate


@dataclass(frozen=True)
class Run:
    """What a run is made of, once all of it is known to fit together."""

    config: Config
    program: Program
    shape: BatchShape
    loader: Loader
    checkpoints: Checkpoints | None  # None: nothing is saved, and nothing is resumed
    folder: RunFolder
    out: Output
    stop: StopSignal
    evaluation: Evaluation | None = None  # None: nothing is held out


def train(config: Config, folder: RunFolder, stop: StopSignal) -> int:
    """Run the config, or go on with it from its last checkpoint. Returns the exit code: 0, or 75 after a signal."""
    out = Output()
    devices = find_devices(config, say=out.every)
    validate(config, len(devices))
    out.enabled = jax.process_index() == 0
    degrees = resolve_degrees(config, len(devices))
    shape = batch_shape(config, degrees)
    mesh = make_mesh(degrees, devices, split_physical_axes=config.allow_split_physical_axes)
    out.line(f"run folder: {folder.path.absolute()}")
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    out.line(f"mesh: {axes} on {describe(devices)} devices of {jax.process_count()} processes, jax {jax.__version__}")
    out.line(f"placement: {placement(mesh)}")
    if config.hardware == "tpu":
        out.line(f"{VARIABLE}: {os.environ[VARIABLE] if VARIABLE in os.environ else 'none'}")
    elif config.attention == "dynamic_splash":
        out.line("attention=dynamic_splash is a TPU kernel: here Pallas interprets it, slowly")
    out.line(f"batch: {shape}")
    with jax.set_mesh(mesh):
        program = build_program(config, mesh)
        checkpoints = open_checkpoints(config, folder, program, shape, out)
        try:
            first = last_step(checkpoints, folder, out)
            if first >= config.steps:
                out.line(f"nothing to do: the run is at step {first}, and steps={config.steps}")
                return 0
            loader = Loader(open_stream(config), shape, batch_sharding(program))
            if out.enabled:
                folder.write_config(config)
            evaluation = None
            try:
                if config.eval_interval:
                    with out.phase("compile evaluation"):
                        evaluation = Evaluation(config, degrees, mesh)
                run = Run(config, program, shape, loader, checkpoints, folder, out, stop, evaluation)
                return start(run, first)
            finally:
                loader.close()
                if evaluation is not None:
                    evaluation.close()
        finally:
            if checkpoints is not None:
                checkpoints.close()


def open_checkpoints(
    config: Config, folder: RunFolder, program: Program, shape: BatchShape, out: Output
) -> Checkpoints | None:
    """The run's checkpoints, if it has any, and room on the disk for one more."""
    if not config.enable_checkpointing:
        out.line("enable_checkpointing=false: this run is not saved, and cannot be resumed")
        return None
    leaves = jax.tree.leaves(abstract_state(program, optimizer_of(program, config)))
    folder.check_space(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
    run = {"global_batch": shape.global_batch, "config_fingerprint": fingerprint(config)}
    return Checkpoints(folder.checkpoints, config, run)


def last_step(checkpoints: Checkpoints | None, folder: RunFolder, out: Output) -> int:
    """Steps done by the last complete checkpoint, which this run can go on with; 0 where there is none."""
    if checkpoints is None:
        return 0
    for name in checkpoints.skipped:
        out.line(f"skipped {folder.checkpoints / name}: its save never finished; removed")
    step = checkpoints.latest()
    if step is None:
        return 0
    checkpoints.refuse_other_run(step)
    for change in folder.changes:
        out.line(f"changed since the last start: {change}")
    return step


def start(run: Run, first: int) -> int:
    """Fill the state, compile the step, and train. `first`: steps done already."""
    out, config, program = run.out, run.config, run.program
    for line in run.loader.describe(first):
        out.every(line)
    out.line(f"parameters: {count(program.spec):,}, of which {trained(program.spec):,} train")
    with out.phase(start_of(config, first)):
        state = restored(run, first) if first else first_state(program, optimizer_of(program, config), config)
        frozen = frozen_weights(program, config)
        jax.block_until_ready((state, frozen))
    if stopped_early(run, first):
        return STOPPED
    with out.phase("compile"):
        compiled = lower_step(program, config, run.shape).compile()
    needs = program_memory(compiled)
    out.line(f"compiled step: memory {'n/a' if needs is None else needs}")
    if stopped_early(run, first):
        return STOPPED
    reporter = Reporter(config, program, run.shape, needs, out).open(run.folder, first)
    try:
        return train_steps(run, compiled, (state, frozen), first, reporter)
    finally:
        reporter.close()


def start_of(config: Config, first: int) -> str:
    if first:
        return f"restore step {first}"
    return f"load {config.load_parameters_path}" if config.load_parameters_path else "initialize"


def restored(run: Run, step: int) -> TrainState:
    if run.checkpoints is None:
        raise ValueError("no checkpoints to restore from")
    return run.checkpoints.restore(step, abstract_state(run.program, optimizer_of(run.program, run.config)))


def stopped_early(run: Run, step: int) -> bool:
    """Whether a signal came before the first step of this start: what is on the disk is all there is to keep."""
    if jax.process_count() > 1 or run.stop.name is None:
        return False
    run.out.line(f"stopped by {run.stop.name} before step {step + 1}: nothing new to save")
    return True


def train_steps(run: Run, compiled: Any, weights: tuple[TrainState, Any], first: int, reporter: Reporter) -> int:
    """The loop. Step k + 1 is dispatched before step k's metrics are read, so that devices never wait for the host."""
    config, checkpoints, (state, frozen) = run.config, run.checkpoints, weights
    pending: list[tuple[int, dict[str, jax.Array]]] = []  # the step whose metrics are still to be read
    with jax.transfer_guard("disallow"):
        for step in range(first + 1, config.steps + 1):
            with run.out.timed(WAITING):
                batch = Batch(**run.loader.batch(step - 1))
            state, metrics = compiled(state, frozen, batch)
            for earlier in pending:
                reporter.step(*earlier)
            pending = [(step, metrics)]
            stopping = run.stop.agreed(step) and step < config.steps
            evaluate = evaluation_due(run, step, state, frozen)
            saving = stopping or step == config.steps or step % config.checkpoint_period == 0
            if saving or evaluate is not None:
                reporter.step(step, metrics, evaluate)  # a state is saved only once its step is known to be good
                pending = []
            if saving:
                with run.out.timed("checkpoints"):
                    save(run, state, step, last=stopping or step == config.steps)
                reporter.clock.restart()
            if checkpoints is not None:
                checkpoints.check()
            if stopping:
                return stopped(run, step)
    for line in reporter.summary(run.folder):
        run.out.line(line)
    return 0


def evaluation_due(run: Run, step: int, state: TrainState, frozen: Any) -> Callable[[], dict[str, Any]] | None:
    """What evaluates the state after `step`, if that is to be done."""
    evaluation, interval = run.evaluation, run.config.eval_interval
    if evaluation is None or not interval or (step % interval and step != run.config.steps):
        return None

    def evaluate() -> dict[str, Any]:
        with run.out.timed("evaluation"):
            return evaluation(state.params, frozen)

    return evaluate


def save(run: Run, state: TrainState, step: int, *, last: bool) -> None:
    """The last save is waited for."""
    if run.checkpoints is not None:
        run.checkpoints.save(state, step)
        if last:
            run.checkpoints.finish()


def stopped(run: Run, step: int) -> int:
    text = f"stopped by {run.stop.name} after step {step} of {run.config.steps}"
    if run.checkpoints is None:
        raise RunError(f"{text}; enable_checkpointing=false, so nothing of it is kept")
    run.out.line(f"{text}: saved; the same command goes on from here")
    return STOPPED
