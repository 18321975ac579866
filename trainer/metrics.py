"""What a run measures and where it writes it: step times, `metrics.jsonl`, TensorBoard."""

import json
import math
import os
import statistics
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from trainer.errors import RunError

WARM_UP_STEPS = 2  # first steps after a start: one-time work of the runtime, kept out of the summary


@dataclass
class StepClock:
    """Time between completions of consecutive steps: what a step costs, whatever overlaps inside it."""

    counted: list[float] = field(default_factory=list)  # seconds of the steps after the warm-up
    total: float = 0.0  # seconds of all steps
    steps: int = 0
    _last: float = field(default_factory=time.perf_counter)

    def completed(self) -> tuple[float, bool]:
        """Call when a step's results are there. -> (seconds since the step before, whether it is warm-up)"""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.steps += 1
        self.total += seconds
        warm_up = self.steps <= WARM_UP_STEPS
        if not warm_up:
            self.counted.append(seconds)
        return seconds, warm_up

    def restart(self) -> None:
        """Leave out what happened since the last completion, such as the copy of a checkpoint to the host."""
        self._last = time.perf_counter()

    @property
    def median(self) -> float | None:
        return statistics.median(self.counted) if self.counted else None

    @property
    def p90(self) -> float | None:
        """90th percentile, between measured values."""
        if len(self.counted) < 2:
            return self.median
        return statistics.quantiles(self.counted, n=10, method="inclusive")[8]


class MetricsLog:
    """`metrics.jsonl`, one object per step, and TensorBoard beside it.

    `start_step`: steps done when the run starts or goes on; what the files say of later ones is forgotten, since
    they are done again. Raises RunError when a file cannot be written.
    """

    def __init__(self, folder: Path, start_step: int, tensorboard: bool):
        self._path = folder / "metrics.jsonl"
        try:
            self._keep_until(start_step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error
        self._board = None
        if tensorboard:
            # Files are named by second and host: two writers of one second would share one, and lose what is in it.
            suffix = f".{uuid.uuid4().hex[:8]}"
            self._board = SummaryWriter(
                str(folder / "tensorboard"), purge_step=start_step + 1, filename_suffix=suffix, flush_secs=10
            )

    def write(self, record: dict[str, Any], to_board: bool) -> None:
        """One step. Numbers that are none become null, which every JSON reader takes."""
        try:
            self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error
        if self._board is not None and to_board:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _keep_until(self, step: int) -> None:
        """Leave the whole lines up to `step`, in one go; a line cut off by a crash is not whole."""
        if not self._path.exists():
            return
        partial = self._path.with_suffix(".partial")
        with self._path.open(encoding="utf-8", errors="replace") as old, partial.open("w", encoding="utf-8") as new:
            new.writelines(line for line in old if _step_of(line) <= step)
            new.flush()
            os.fsync(new.fileno())
        os.replace(partial, self._path)

    def _failed(self, error: OSError) -> RunError:
        return RunError(f"{self._path}: cannot be written: {error.strerror}")


def _step_of(line: str) -> float:
    """The step a line is about; infinite where it is no whole object."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
