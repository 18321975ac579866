"""What a run says of its steps: a line on the console, a line of metrics, and an end where they are no numbers."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import psutil

from trainer.config import Config
from trainer.console import Output, gib
from trainer.errors import RunError
from trainer.flops import Utilization, forward_flops
from trainer.memory import ProgramMemory, device_memory, process_bytes
from trainer.metrics import MetricsLog, StepClock
from trainer.parallel import BatchShape
from trainer.run_folder import RunFolder
from trainer.step import Program

BY_LAYER = "_by_layer"


class Reporter:
    """Reads each step's metrics off the devices, which waits for the step. Writes on process 0 alone."""

    def __init__(
        self, config: Config, program: Program, shape: BatchShape, needs: ProgramMemory | None, out: Output
    ):  # fmt: skip
        self._config, self._shape, self._needs, self._out = config, shape, needs, out
        self._devices = list(program.mesh.local_devices)
        self._num_devices = program.mesh.size
        flops = forward_flops(program.model, shape.length).of_training(config.lora_rank > 0) * shape.global_batch
        self._flops_per_device = flops / self._num_devices
        self._log: MetricsLog | None = None
        self._loss: float | None = None
        self.clock = StepClock()

    def open(self, folder: RunFolder, start_step: int) -> "Reporter":
        """To be called right before the first step: the clock starts."""
        if self._out.enabled:
            self._log = MetricsLog(folder.path, start_step, self._config.enable_tensorboard)
        self.clock = StepClock()
        return self

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def step(
        self, step: int, metrics: dict[str, jax.Array], evaluate: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """`step`: updates done, this one included. Raises RunError for a loss or gradient that is no number.

        `evaluate` is called once the step's time is known, and adds to what is said of the step.
        """
        values = {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
        seconds, warm_up = self.clock.completed()
        self._loss = float(values["loss"])
        evaluated = {} if evaluate is None else evaluate()
        if evaluated:
            loss, perplexity = evaluated["eval_loss"], evaluated["eval_perplexity"]
            self._out.line(f"step {step}: held-out loss {loss:.4f}, perplexity {perplexity:.4g}")
            self.clock.restart()
        if self._log is not None:
            shown = bool(evaluated) or step % self._config.log_period == 0 or step == self._config.steps
            record = self._record(step, seconds, warm_up, values) | evaluated
            self._log.write(record, to_board=shown)
            if shown:
                self._out.line(self._line(record))
        refuse_non_finite(step, values)

    def _record(self, step: int, seconds: float, warm_up: bool, values: dict[str, np.ndarray]) -> dict[str, Any]:
        memory = device_memory(self._devices, self._needs)
        rate = self._flops_per_device / seconds
        first = ("loss", "grad_norm", "learning_rate")
        return {
            "step": step,
            **{name: values[name].tolist() for name in first},
            "step_time_s": seconds,
            "warm_up": warm_up,
            "tokens_per_s_per_device": self._shape.tokens_per_step / seconds / self._num_devices,
            "tflops_per_s_per_device": rate / 1e12,
            "mfu": Utilization.of(rate, self._devices[0]).mfu,
            "memory_bytes": memory.num_bytes,
            "memory_source": memory.source,
            "process_rss_bytes": process_bytes(),
            **{name: value.tolist() for name, value in values.items() if name not in first},
        }

    def _line(self, r: dict[str, Any]) -> str:
        used = str(Utilization.of(r["tflops_per_s_per_device"] * 1e12, self._devices[0]))
        return (
            f"step {r['step']}/{self._config.steps}{' (warm-up)' if r['warm_up'] else ''}  loss {r['loss']:.4f}  "
            f"grad norm {r['grad_norm']:.3g}  {r['step_time_s']:.3f} s  "
            f"{r['tokens_per_s_per_device']:,.0f} tokens/s/device  {r['tflops_per_s_per_device']:.3g} TFLOP/s/device"
            f"{used and f' ({used})'}  memory {gib(r['memory_bytes'])}  "
            f"experts max/mean {r['moe_load_max_over_mean']:.2f}  dropped {r['moe_dropped_tokens']}"
        )

    def summary(self, folder: RunFolder) -> list[str]:
        """What the run came to: steps, their time, where the rest of the time went, and where the files are."""
        clock, shape = self.clock, self._shape
        lines = [f"{clock.steps} steps, final loss {'n/a' if self._loss is None else f'{self._loss:.4f}'}"]
        if clock.median is None or clock.p90 is None:
            lines.append("step time n/a: the first steps after a start are warm-up")
        else:
            lines.append(
                f"step time: median {clock.median:.3f} s, 90th percentile {clock.p90:.3f} s, "
                f"{shape.tokens_per_step / clock.median:,.0f} tokens/s ({len(clock.counted)} steps; warm-up left out)"
            )
        wall = time.time() - psutil.Process().create_time()
        parts = self._out.seconds | {"steps": clock.total}
        waiting = parts.pop(WAITING, 0.0)
        parts["other"] = wall - sum(parts.values())
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        lines.append(f"{wall:.1f} s in all: {shown} (of the steps, {waiting:.1f} waiting for data)")
        return [*lines, f"results in {folder.path}"]


WAITING = "waiting for data"


def refuse_non_finite(step: int, values: dict[str, np.ndarray]) -> None:
    """Stop at a loss or gradient that is no number; say in which layer the router first saw one."""
    bad = [name for name in ("loss", "grad_norm") if not np.isfinite(values[name])]
    if not bad:
        return
    layers = np.flatnonzero(~values["router_finite_by_layer"])
    where = f"; the first layer whose router scores are no numbers is layer {layers[0]}" if layers.size else ""
    text = ", ".join(f"{name}={values[name]}" for name in bad)
    raise RunError(
        f"step {step}: {text}{where}. Nothing of this step is saved, and the last checkpoint is from before it; "
        "lower learning_rate, or check the data"
    )
