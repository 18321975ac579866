"""Documents packed into rows of one length. Pure NumPy.

A document of n + 1 tokens is n inputs and n targets, the tokens after each; so neither targets nor positions ever reach
into another document. The documents of a pass come in an order of its own. First-fit puts each into the first row with
room for it, among the rows of its window: the next documents of the order, WINDOW_ROWS rows' worth. One longer than a
row is cut, with its targets still right at the cut, or dropped.
"""

import functools
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.data.documents import Documents

NO_LOSS = -100  # target where there is nothing to predict
WINDOW_ROWS = 256


@dataclass(frozen=True)
class Source:
    """Part of a mixture: its documents by number, int64, and its weight."""

    documents: np.ndarray
    weight: float = 1.0


class Order:
    """Which documents each pass has, and in which order: a function of (sources, seed, shuffle, pass) alone.

    A pass takes documents from the sources by their weights: all of the source that is first used up, and of the others
    as many as keep the shares; these go on in the next pass where they stopped. So no document comes twice in a pass,
    and all of a source's documents come before one of them comes again.
    """

    def __init__(self, sources: Sequence[Source], seed: int, shuffle: bool):
        self._sources, self._seed, self._shuffle = sources, seed % 2**64, shuffle
        scale = min(len(source.documents) / source.weight for source in sources)
        self.taken = [max(1, round(scale * source.weight)) for source in sources]
        self._epoch = functools.lru_cache(maxsize=2 * len(sources))(self._epoch_of)

    def of_pass(self, number: int) -> np.ndarray:
        """The pass's documents, int64; those of each source lie evenly over it."""
        taken = np.concatenate([self._next(s, number * n, n) for s, n in enumerate(self.taken)])
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in self.taken])
        return taken[np.argsort(places, kind="stable")]

    def _next(self, source: int, start: int, n: int) -> np.ndarray:
        """n documents of the source from `start` of its endless line, epoch after epoch."""
        size = len(self._sources[source].documents)
        first, last = start // size, (start + n - 1) // size
        line = np.concatenate([self._epoch(source, epoch) for epoch in range(first, last + 1)])
        return line[start - first * size :][:n]

    def _epoch_of(self, source: int, epoch: int) -> np.ndarray:
        documents = self._sources[source].documents
        if not self._shuffle:
            return documents
        # Sorted raw bits of Philox: unlike Generator.permutation, the same in every NumPy.
        key = np.array([self._seed, source * 2**32 + epoch], np.uint64)
        return documents[np.argsort(np.random.Philox(key=key).random_raw(len(documents)), kind="stable")]


class Plan(NamedTuple):
    """A pass's pieces of documents, row by row, in the order of the documents in each. Row r has pieces
    `first[r]` to `first[r + 1]`."""

    document: np.ndarray  # [pieces] int64
    offset: np.ndarray  # [pieces] int64: where in its document the piece begins
    length: np.ndarray  # [pieces] int64
    first: np.ndarray  # [rows + 1] int64


def plan(order: np.ndarray, lengths: np.ndarray, row_length: int) -> Plan:
    """First-fit, window by window. `lengths`: of the documents in `order`."""
    counts = -(-lengths // row_length)  # pieces of each document
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    document, offset = np.repeat(order, counts), nth * row_length
    length = np.minimum(np.repeat(lengths, counts) - offset, row_length)
    window = (np.cumsum(length) - length) // (WINDOW_ROWS * row_length)
    edges = np.flatnonzero(np.diff(window, prepend=-1, append=-1))
    row = np.zeros(len(length), np.int64)
    rows = 0
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        row[start:stop], used = first_fit(length[start:stop], row_length)
        row[start:stop] += rows
        rows += used
    by_row = np.argsort(row, kind="stable")
    return Plan(document[by_row], offset[by_row], length[by_row], np.searchsorted(row[by_row], np.arange(rows + 1)))


def first_fit(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, int]:
    """The row of each piece, the first that has room for it, and how many rows that takes."""
    room = np.full(len(lengths), row_length)
    row = np.empty(len(lengths), np.int64)
    used = 0
    for piece, length in enumerate(lengths):
        fits = room[: used + 1] >= length
        row[piece] = chosen = int(fits.argmax())  # the row after the last used one always fits
        room[chosen] -= length
        used = max(used, chosen + 1)
    return row, used


class PackedRows:
    """The endless stream of packed rows, pass after pass.

    Row g is a function of (documents, sources, row_length, seed, shuffle, g) alone: the position in the data is a
    number, the same for every process and every number of processes.
    """

    def __init__(self, documents: Documents, order: Order, row_length: int):
        self.row_length = row_length
        self._documents, self._order = documents, order
        self._plan = functools.lru_cache(maxsize=2)(self._plan_of)
        self._lock = threading.Lock()  # rows are asked for by several threads
        self._ends: list[int] = []  # rows up to the end of each pass known
        self._grow()
        self.rows_per_epoch = self._ends[0]

    def row(self, number: int, columns: slice = slice(None)) -> dict[str, np.ndarray]:
        """Row `number`'s arrays, int32, for these columns.

        tokens, targets (-100 where nothing is to be predicted), segment_ids (1, 2, ... along the row; 0 in padding) and
        positions (from 0 in each segment). Tokens and positions are 0 in padding.
        """
        with self._lock:
            while self._ends[-1] <= number:
                self._grow()
            which = bisect_right(self._ends, number)
            pieces = self._plan(which)
        row = number - (self._ends[which - 1] if which else 0)
        first, last = pieces.first[row], pieces.first[row + 1]
        length = pieces.length[first:last]
        segment = np.repeat(np.arange(1, len(length) + 1), length)
        position = np.arange(len(segment)) - np.repeat(np.cumsum(length) - length, length)
        start = self._documents.starts[pieces.document[first:last]] + pieces.offset[first:last]
        token = np.repeat(start, length) + position
        targets = self._documents.tokens[token + 1]
        if self._documents.targets is not None:
            targets = np.where(self._documents.targets[token + 1], targets, NO_LOSS)
        filled = {
            "tokens": (self._documents.tokens[token], 0),
            "targets": (targets, NO_LOSS),
            "segment_ids": (segment, 0),
            "positions": (position, 0),
        }
        return {name: self._padded(array, padding)[columns] for name, (array, padding) in filled.items()}

    def tokens_of(self, number: int) -> int:
        """Inputs in pass `number`."""
        with self._lock:
            return int(self._plan(number).length.sum())

    def utilization(self) -> float:
        """The part of the first pass's places that holds tokens."""
        return self.tokens_of(0) / (self.rows_per_epoch * self.row_length)

    def _padded(self, array: np.ndarray, padding: int) -> np.ndarray:
        row = np.full(self.row_length, padding, np.int32)
        row[: len(array)] = array
        return row

    def _grow(self) -> None:
        rows = len(self._plan(len(self._ends)).first) - 1
        self._ends.append((self._ends[-1] if self._ends else 0) + rows)

    def _plan_of(self, number: int) -> Plan:
        order = self._order.of_pass(number)
        return plan(order, self._documents.lengths[order], self.row_length)
