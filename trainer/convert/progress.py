"""How far a conversion is, and how fast."""

import time
from collections.abc import Callable

EVERY_S = 10.0


class Rate:
    """Counts bytes and writes a line now and then."""

    def __init__(self, total: int, write: Callable[[str], None]):
        self._total = total
        self._write = write
        self._done = 0
        self._start = self._shown = time.perf_counter()

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.perf_counter()
        if now - self._shown >= EVERY_S:
            self._shown = now
            self._write(f"{self.summary()} of {self._total / 1e9:.2f} GB")

    def summary(self) -> str:
        seconds = time.perf_counter() - self._start
        return f"{self._done / 1e9:.2f} GB in {seconds:.0f} s, {self._done / 1e6 / max(seconds, 1e-9):.0f} MB/s"
