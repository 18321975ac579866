"""What a dry run shows while it compiles: the stage, the time and the compiler's memory."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from trainer.console import gib

LINE_EVERY_S = 30.0


class Progress:
    """A running line on a terminal; elsewhere a line for each new stage and every 30 seconds. Writes to stderr."""

    def __init__(self, title: str):
        self._title = title
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._spinner = Spinner("dots")
        self._live = Live(self._spinner, console=self._console, transient=True)
        self._start = time.monotonic()
        self._shown = ("", float("-inf"))  # stage and time of the last line

    def show(self, stage: str, rss_bytes: int) -> None:
        now = time.monotonic()
        minutes, seconds = divmod(int(now - self._start), 60)
        text = f"{self._title}: {stage or 'starting'} · {minutes}:{seconds:02} · {gib(rss_bytes)} resident"
        if self._console.is_terminal:
            self._spinner.update(text=text)
        elif stage != self._shown[0] or now - self._shown[1] >= LINE_EVERY_S:
            self._console.print(text, markup=False)
            self._shown = (stage, now)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
