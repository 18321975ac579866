"""What a run prints: plain lines, and a clock beside phases that take long."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

GIB = 2**30


class Output:
    """Prints on one process of a run, and keeps silent on the others."""

    def __init__(self, enabled: bool = True):
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=not enabled)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the start: a running clock on a terminal, and a line when it is done."""
        start = time.perf_counter()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                progress.add_task(name)
                yield
        else:
            self.line(f"{name} ...")
            yield
        self.line(f"{name}: {time.perf_counter() - start:.1f} s")


def gib(num_bytes: int | None) -> str:
    return "n/a" if num_bytes is None else f"{num_bytes / GIB:.2f} GiB"
