"""What a run prints: plain lines, and a clock beside phases that take long."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

GIB = 2**30


class Output:
    """Prints on one process of a run, and keeps silent on the others. Knows how long each phase took."""

    def __init__(self, enabled: bool = True):
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.enabled = enabled
        self.seconds: dict[str, float] = {}

    def line(self, text: str) -> None:
        if self.enabled:
            self.every(text)

    def every(self, text: str) -> None:
        """On every process."""
        self._console.print(text, markup=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the start: a running clock on a terminal, and a line when it is done."""
        with self.timed(name):
            if self._console.is_terminal and self.enabled:
                columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
                with Progress(*columns, console=self._console, transient=True) as progress:
                    progress.add_task(name)
                    yield
            else:
                self.line(f"{name} ...")
                yield
        self.line(f"{name}: {self.seconds[name]:.1f} s")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time inside to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            before = self.seconds[name] if name in self.seconds else 0.0
            self.seconds[name] = before + time.perf_counter() - start


def gib(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "n/a"
    value = num_bytes / GIB
    return f"{value:.2f} GiB" if value >= 0.1 else f"{value:.2g} GiB"
