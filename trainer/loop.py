"""A training run, from a config to its last checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.checkpoint import Checkpoints
from trainer.config import Config
from trainer.console import Output, gib
from trainer.data.loader import Loader, open_stream
from trainer.devices import find_devices
from trainer.errors import ConfigError, RunError
from trainer.flops import PEAK_FLOPS, forward_flops
from trainer.mesh import make_mesh
from trainer.metrics import Memory, MetricsLog, StepClock, device_memory, process_bytes, program_bytes
from trainer.models.deepseek_v4 import Batch, DeepSeekV4
from trainer.parallel import BatchShape, batch_shape, resolve_degrees
from trainer.params import count, is_param
from trainer.run_folder import CHECKPOINTS, prepare
from trainer.signals import STOPPED, StopSignal
from trainer.state import abstract_state, batch_sharding, first_state, frozen_weights, lower_step, optimizer_of
from trainer.step import Program, TrainState, build_program
from trainer.validate import validate


def train(config: Config) -> int:
    """Run the config, or go on with it from its last checkpoint. Returns the exit code: 0, or 75 after a signal."""
    stop = StopSignal()
    stop.install()
    devices = find_devices(config)
    validate(config, len(devices))
    out = Output(jax.process_index() == 0)
    folder = prepare(config, writes=jax.process_index() == 0)
    degrees = resolve_degrees(config, len(devices))
    shape, mesh = batch_shape(config, degrees), make_mesh(degrees, devices)
    announce(out, folder, mesh, shape)
    with jax.set_mesh(mesh):
        program = build_program(config, mesh)
        loader = Loader(open_stream(config), shape, batch_sharding(program))
        checkpoints = Checkpoints(folder / CHECKPOINTS, config) if config.enable_checkpointing else None
        try:
            return start(Run(config, program, shape, loader, checkpoints, folder, out, stop))
        finally:
            loader.close()
            if checkpoints is not None:
                checkpoints.close()


@dataclass(frozen=True)
class Run:
    """What a run is made of, once all of it is known to fit together."""

    config: Config
    program: Program
    shape: BatchShape
    loader: Loader
    checkpoints: Checkpoints | None
    folder: Path
    out: Output
    stop: StopSignal

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of the run beside its state."""
        return {"global_batch": self.shape.global_batch}


def start(run: Run) -> int:
    """Compile the step, find the state to begin from, and train."""
    out, config, program = run.out, run.config, run.program
    first = last_checkpoint(run)
    if first >= config.steps:
        out.line(f"nothing to do: step {first} of {config.steps} is done")
        return 0
    for line in run.loader.describe(first):
        out.line(line)
    out.line(f"{count(DeepSeekV4.spec(program.model)):,} parameters, {trained(program):,} of them train")
    with out.phase("compiling the step"):
        compiled = lower_step(program, config, run.shape).compile()
    out.line(f"compiled step: {gib(program_bytes(compiled))} per device")
    if config.load_parameters_path and (first == 0 or program.options.lora is not None):
        out.line(f"weights from {config.load_parameters_path}")
    with out.phase("loading weights" if first == 0 else f"restoring step {first}"):
        frozen = frozen_weights(program, config)
        state = restored(run, first) if first else first_state(program, optimizer_of(program, config), config)
        jax.block_until_ready((frozen, state))
    return train_steps(run, compiled, frozen, state, first)


def last_checkpoint(run: Run) -> int:
    """Steps done by the last complete checkpoint; 0 where there is none."""
    if run.checkpoints is None:
        return 0
    for name in run.checkpoints.skipped:
        run.out.line(f"skipping {run.folder / CHECKPOINTS / name}: its save never finished")
    step = run.checkpoints.latest()
    if step is None:
        return 0
    saved, now = run.checkpoints.run_at(step), run.facts
    if saved != now:
        raise ConfigError(
            f"step {step} was saved with global_batch={saved['global_batch']}, and the config makes it "
            f"{now['global_batch']}: the data would not go on where it stopped; set per_device_batch_size to match"
        )
    return step


def restored(run: Run, step: int) -> TrainState:
    if run.checkpoints is None:
        raise ValueError("no checkpoints to restore from")
    abstract = abstract_state(run.program, optimizer_of(run.program, run.config))
    return run.checkpoints.restore(step, abstract)


def train_steps(run: Run, compiled: Any, frozen: Any, state: TrainState, first: int) -> int:
    """The loop. Step k + 1 is dispatched before step k's results are read, so the devices never wait for the host."""
    config, stop = run.config, run.stop
    log = Reporter(run, compiled, first)
    pending: list[tuple[int, dict[str, jax.Array]]] = []  # the step whose results are still to be read
    try:
        for step in range(first, config.steps):
            batch = Batch(**run.loader.batch(step))
            with jax.transfer_guard("disallow"):
                state, metrics = compiled(state, frozen, batch)
            for earlier in pending:
                log.report(*earlier)
            done = step + 1
            pending = [(done, metrics)]
            last = done == config.steps or stop.name is not None
            if last or (run.checkpoints is not None and done % config.checkpoint_period == 0):
                log.report(done, metrics)  # a state is only saved once its step is known to be good
                pending = []
                save(run, state, done)
                log.clock.restart()
            if stop.name is not None and done < config.steps:
                run.out.line(f"stopped by {stop.name} after step {done} of {config.steps}")
                return STOPPED
    finally:
        log.close()
        if run.checkpoints is not None:
            run.checkpoints.finish()
    run.out.line(log.summary())
    return 0


def save(run: Run, state: TrainState, step: int) -> None:
    if run.checkpoints is not None:
        run.checkpoints.save(state, step, run.facts)


class Reporter:
    """Turns a step's results into a line on the console, a line of metrics, and an end where they are no numbers."""

    def __init__(self, run: Run, compiled: Any, first: int):
        self._run, self._compiled = run, compiled
        self._writes = jax.process_index() == 0
        self._file = MetricsLog(run.folder, first, run.config.enable_tensorboard) if self._writes else None
        self._device = run.program.mesh.local_mesh.devices.flat[0]
        self._peak = PEAK_FLOPS.get(self._device.device_kind)
        per_row = forward_flops(run.program.model, run.shape.length).of_training(run.program.options.lora is not None)
        self._flops = per_row * run.shape.global_batch / run.program.mesh.size
        self._loss = float("nan")
        self.clock = StepClock()

    def report(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """`step`: updates done, this one included. Waits for the step."""
        values = {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
        seconds, counts = self.clock.completed()
        refuse_non_finite(step, values)
        self._loss = float(values["loss"])
        shown = step % self._run.config.log_period == 0 or step == self._run.config.steps
        if self._file is None:
            return
        memory = device_memory(self._device, self._compiled)
        record = self.record(step, seconds, counts, values, memory)
        self._file.write(record, to_board=shown)
        if shown:
            self._run.out.line(self.line(record))

    def record(
        self, step: int, seconds: float, counts: bool, values: dict[str, np.ndarray], memory: Memory
    ) -> dict[str, Any]:
        return {
            "step": step,
            "loss": float(values.pop("loss")),
            "grad_norm": float(values.pop("grad_norm")),
            "step_time_s": seconds,
            "warm_up": not counts,
            "tokens_per_s_per_device": self._run.shape.tokens_per_step / seconds / self._run.program.mesh.size,
            "tflops_per_s_per_device": self._flops / seconds / 1e12,
            "memory_bytes": memory.num_bytes,
            "memory_source": memory.source,
            "process_rss_bytes": process_bytes(),
            **{name: value.tolist() for name, value in values.items()},
        }

    def line(self, r: dict[str, Any]) -> str:
        tflops = r["tflops_per_s_per_device"]
        rate = f"{tflops:.3g} TFLOP/s"
        if self._peak and tflops * 1e12 > self._peak:
            rate = f"{rate} (over the device's peak: not a measurement)"
        return (
            f"step {r['step']}{' (warm-up)' if r['warm_up'] else ''}  loss {r['loss']:.4f}  "
            f"grad norm {r['grad_norm']:.3g}  {r['step_time_s']:.3f} s  "
            f"{r['tokens_per_s_per_device']:,.0f} tokens/s/device  {rate}/device  memory {gib(r['memory_bytes'])}  "
            f"expert load {r['moe_load_max_over_mean']:.2f}x  dropped {r['moe_dropped_tokens']}"
        )

    def summary(self) -> str:
        return f"done: loss {self._loss:.4f}; {self.clock.summary()}; results in {self._run.folder}"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def refuse_non_finite(step: int, values: dict[str, np.ndarray]) -> None:
    """Stop at a loss or gradient that is no number; say in which layer the router first saw one."""
    bad = [name for name in ("loss", "grad_norm") if not np.isfinite(values[name])]
    if not bad:
        return
    layers = np.flatnonzero(~values["router_finite_by_layer"])
    where = f"; the first layer with scores that are no numbers is {layers[0]}" if layers.size else ""
    text = ", ".join(f"{name} {values[name]}" for name in bad)
    raise RunError(f"step {step}: {text}{where}. Nothing of this step is saved; lower learning_rate, or check the data")


def announce(out: Output, folder: Path, mesh: Mesh, shape: BatchShape) -> None:
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    out.line(f"run folder {folder}")
    out.line(f"process {jax.process_index()} of {jax.process_count()}; jax {jax.__version__}")
    out.line(f"mesh {axes} on {mesh.size} {device.platform} devices ({device.device_kind})")
    out.line(str(shape))


def trained(program: Program) -> int:
    """Parameters that a gradient reaches."""
    leaves: list[Any] = jax.tree.leaves(program.spec, is_leaf=is_param)
    return sum(int(np.prod(p.shape)) for p in leaves if p.trainable)
