"""SIGTERM and SIGINT end a run in order: the step finishes, a checkpoint is saved, the process exits with 75."""

import os
import signal
import threading
from types import FrameType
from typing import Any

STOPPED = 75  # the exit code of a run that was stopped and can go on: EX_TEMPFAIL

STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Set by the first signal while it is entered; a second one ends the process at once.

    Python runs signal handlers between bytecodes of the main thread, which a compile keeps busy for minutes. So the
    handlers do nothing, and a thread reads the numbers that Python writes to a pipe as signals come in.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._passed_on = False  # to JAX, where there are several processes
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _noted) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)

    def agreed(self, step: int) -> bool:
        """Whether to stop after `step`. With several processes all get the same answer if all ask at every step: a
        SIGTERM to one counts for all. JAX's own handler sees to that, in the place of this class's; it is told of a
        signal that came before it was there, and of SIGINT, by one more SIGTERM."""
        import jax
        from jax.experimental import multihost_utils

        if jax.process_count() == 1:
            return self.name is not None
        if self.name is not None and not self._passed_on:
            os.kill(os.getpid(), signal.SIGTERM)
            self._passed_on = True
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.name = self.name or signal.SIGTERM.name
        return True

    def _watch(self, pipe: int) -> None:
        while received := os.read(pipe, 1):
            number = received[0]
            if number not in STOPPING:
                continue
            if self.name is not None:
                os._exit(128 + number)
            self.name = signal.Signals(number).name
            text = f"{self.name}: stopping once the work at hand (a step, or the start) is done; again: at once\n"
            os.write(2, text.encode())
        os.close(pipe)


def _noted(number: int, frame: FrameType | None) -> None:
    del number, frame
