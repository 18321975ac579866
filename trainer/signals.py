"""SIGTERM and SIGINT end a run in order: the step finishes, a checkpoint is saved, the process exits with 75."""

import os
import signal
from types import FrameType

STOPPED = 75  # the exit code of a run that was stopped and can go on: EX_TEMPFAIL


class StopSignal:
    """Set by the first signal; a second one ends the process at once."""

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.name is not None:
            os._exit(128 + number)
        self.name = signal.Signals(number).name
        os.write(2, f"{self.name}: stopping after this step, with a checkpoint; once more stops at once\n".encode())
