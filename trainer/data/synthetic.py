"""Made-up rows."""

import numpy as np


class SyntheticRows:
    """Endless rows of uniform random tokens, each row one full document. Row g depends on seed and g alone."""

    rows_per_epoch = None

    def __init__(self, vocab_size: int, row_length: int, seed: int):
        self.row_length = row_length
        self._vocab_size, self._seed = vocab_size, seed % 2**64

    def row(self, number: int, columns: slice = slice(None)) -> dict[str, np.ndarray]:
        """Row `number`'s arrays, int32, for these columns; see `packing.PackedRows.row`."""
        key = np.array([self._seed, number], np.uint64)
        # The raw bits of Philox are the same in every NumPy; its distributions may change.
        line = (np.random.Philox(key=key).random_raw(self.row_length + 1) % self._vocab_size).astype(np.int32)
        positions = np.arange(self.row_length, dtype=np.int32)[columns]
        return {
            "tokens": line[:-1][columns],
            "targets": line[1:][columns],
            "segment_ids": np.ones_like(positions),
            "positions": positions,
        }

    def describe(self) -> list[str]:
        return [f"synthetic: endless rows of {self.row_length:,} random tokens below {self._vocab_size:,}"]
