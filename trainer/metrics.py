"""What a run measures and where it writes it: step times, memory, `metrics.jsonl`, TensorBoard."""

import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tensorboardX import SummaryWriter

from trainer.errors import RunError

WARM_UP_STEPS = 2  # first steps after a start: one-time work of the runtime, kept out of the summary


@dataclass
class StepClock:
    """Time between completions of consecutive steps: what a step costs, whatever overlaps inside it."""

    seconds: list[float] = field(default_factory=list)  # of the steps that count
    _last: float = field(default_factory=time.perf_counter)
    _steps: int = 0

    def completed(self) -> tuple[float, bool]:
        """Call when a step's results are there. (seconds since the step before, whether it counts)"""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._steps += 1
        counts = self._steps > WARM_UP_STEPS
        if counts:
            self.seconds.append(seconds)
        return seconds, counts

    def restart(self) -> None:
        """Leave out what happened since the last completion, such as the copy of a checkpoint to the host."""
        self._last = time.perf_counter()

    def summary(self) -> str:
        if not self.seconds:
            return f"no step time: the first {WARM_UP_STEPS} steps after a start are warm-up"
        deciles = statistics.quantiles(self.seconds, n=10) if len(self.seconds) > 1 else self.seconds * 9
        return (
            f"step time: median {statistics.median(self.seconds):.3f} s, 90th percentile {deciles[8]:.3f} s "
            f"({len(self.seconds)} steps; warm-up left out)"
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, and what was counted. None where nothing is known."""

    num_bytes: int | None
    source: str


def program_bytes(compiled: Any) -> int | None:
    """Arguments, outputs and temporaries of a compiled step on one device; donated arguments count once."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def device_memory(device: Any, compiled: Any) -> Memory:
    """The device's own peak plus the program's temporaries, which allocators leave out; on the CPU, which counts
    nothing, what the compiled step needs."""
    stats = device.memory_stats()
    analysis = compiled.memory_analysis()
    if stats and "peak_bytes_in_use" in stats and analysis is not None:
        return Memory(stats["peak_bytes_in_use"] + analysis.temp_size_in_bytes, "device peak + compiled temporaries")
    return Memory(program_bytes(compiled), "compiled step")


def process_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss


class MetricsLog:
    """`metrics.jsonl`, one object per step, and TensorBoard beside it. Steps after `start_step` are forgotten: a
    resumed run does them again."""

    def __init__(self, folder: Path, start_step: int, tensorboard: bool):
        self._path = folder / "metrics.jsonl"
        kept = [line for line in _lines(self._path) if line["step"] <= start_step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, self._path)
        self._file = self._path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1) if tensorboard else None

    def write(self, record: dict[str, Any], to_board: bool) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self._path}: cannot write metrics: {error.strerror}") from error
        if self._board is not None and to_board:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an earlier metrics file; a line cut off by a crash is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
