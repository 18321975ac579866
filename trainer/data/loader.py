"""Batches of rows on a mesh, prepared ahead by Grain.

What a process reads follows from the batch's sharding alone. The rows of a step are the same set on every
mesh, so the position in the data is the step's number, which every checkpoint has.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from trainer.data.stream import FIELDS, RowStream
from trainer.errors import ConfigError
from trainer.parallel import BatchShape

Batch: TypeAlias = dict[str, jax.Array]
Shape: TypeAlias = tuple[int, int, int]  # A, B, S: microbatches, rows of one, length
Index: TypeAlias = tuple[slice, ...] | None  # one device's part of a batch as jax.sharding gives it; None: no part
Block: TypeAlias = tuple[range, range, range]  # the same, spelled out

END_OF_STEPS = 2**40
AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)


def blocks_of(indices: Iterable[Index], shape: Shape) -> set[Block]:
    """The distinct parts of a batch [A, B, S] that devices with these indices hold; replicas share one."""
    micro, rows, length = map(range, shape)
    return {(micro[index[0]], rows[index[1]], length[index[2]]) for index in indices if index is not None}


def rows_needed(indices: Iterable[Index], shape: Shape) -> list[int]:
    """Which of a step's A * B rows devices with these indices touch, in whole or in part, sorted."""
    _, rows, _ = shape
    return sorted({a * rows + b for micro, some, _ in blocks_of(indices, shape) for a in micro for b in some})


class Loader:
    """Batches [A, B, S] of a row stream, as global arrays with one sharding.

    Row b of microbatch a at step s is the stream's row s * A * B + a * B + b. The next steps' batches are built
    and sent to the devices by threads while the caller computes. `close()` ends them.
    Raises ConfigError when an epoch has fewer rows than a step takes.
    """

    def __init__(self, stream: RowStream, shape: BatchShape, sharding: NamedSharding):
        if stream.row_length != shape.length:
            raise ValueError(f"rows of {stream.row_length} tokens for batches of length {shape.length}")
        if stream.rows_per_epoch is not None and stream.rows_per_epoch < shape.global_batch:
            raise ConfigError(
                f"dataset_path: the text fills {stream.rows_per_epoch} rows of max_target_length={shape.length}, and a "
                f"step takes {shape.global_batch} ({shape}), so it would hold documents twice: give more text, or "
                "lower max_target_length, per_device_batch_size or gradient_accumulation_steps"
            )
        self.rows_per_epoch = stream.rows_per_epoch
        self.shape: Shape = (shape.accumulation, shape.rows, shape.length)
        self._rows_per_step = shape.global_batch
        self._stream, self._sharding = stream, sharding
        self._indices = list(sharding.addressable_devices_indices_map(self.shape).values())
        self._blocks = blocks_of(self._indices, self.shape)
        self._steps = grain.MapDataset.range(END_OF_STEPS).map(self._load)
        self._ahead: grain.DatasetIterator[Batch] | None = None  # at step self._next
        self._next = 0

    def batch(self, step: int) -> Batch:
        """The FIELDS of step `step` (from 0), int32 [A, B, S]. Steps may come in any order; the next ones are prepared.

        An error met while preparing is raised here, when its step is asked for.
        """
        if self._ahead is None or step != self._next:
            self.close()
            self._ahead = iter(self._steps.to_iter_dataset(AHEAD))
            self._ahead.set_state({"next_index": step})
        self._next = step + 1
        return next(self._ahead)

    def close(self) -> None:
        """Ends the threads that prepare batches."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def describe(self, step: int) -> list[str]:
        """Lines for the log, which counts steps from 1: the data, and the rows this process reads for `step`."""
        mine = [step * self._rows_per_step + row for row in rows_needed(self._indices, self.shape)]
        columns = sorted({column for _, _, some in self._blocks for column in some})
        return [
            *self._stream.describe(),
            f"step {step + 1} loads {self._rows_per_step} rows and trains on {self._rows_per_step}; process "
            f"{jax.process_index()} of {jax.process_count()} reads {len(mine)}: rows {_spans(mine)}, "
            f"columns {_spans(columns)}",
        ]

    def _load(self, step: int) -> Batch:
        loaded = {block: self._read(step, block) for block in self._blocks}

        def part(field: str, index: Index) -> np.ndarray:
            (block,) = blocks_of([index], self.shape)
            return loaded[block][field]

        # JAX's guard counts make_array_from_callback as implicit; this is the one transfer of data that is meant.
        with jax.transfer_guard_host_to_device("allow"):
            return {
                field: jax.make_array_from_callback(self.shape, self._sharding, functools.partial(part, field))
                for field in FIELDS
            }

    def _read(self, step: int, block: Block) -> Mapping[str, np.ndarray]:
        """FIELDS of one block of a step's batch, int32 [A, B, S] of the block's size."""
        micro, rows, columns = block
        some = slice(columns.start, columns.stop)
        first = step * self._rows_per_step
        read = [self._stream.row(first + a * self.shape[1] + b, some) for a in micro for b in rows]
        size = (len(micro), len(rows), len(columns))
        return {field: np.stack([row[field] for row in read]).reshape(size) for field in FIELDS}


def _spans(numbers: list[int], most: int = 4) -> str:
    """Sorted numbers as spans, as in "0-3, 8-11"; only the first few of many."""
    # Within a run of neighbours, number minus place is constant.
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(spans[:most]) + (", ..." if len(spans) > most else "")
