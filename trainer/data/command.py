"""`trainer data`: what a run would be fed, and how fast."""

import json
import time
from collections.abc import Callable, Iterator

import grain
import numpy as np
from rich.console import Console
from rich.text import Text

from trainer.config import Config
from trainer.data.packing import NO_LOSS
from trainer.data.stream import RowStream, TextRows, open_stream, trained_runs

SHOWN_ROWS = 3
SHOWN_TOKENS = 400  # of each row
MEASURED_SECONDS = 2.0
SEGMENT_COLORS = ("cyan", "yellow", "magenta", "blue")


def show(config: Config, write: Callable[[str], None]) -> int:
    """The dataset in numbers, its first rows as text, and the pipeline's speed without a model. One line of JSON last.

    Each document of a row has a color of its own; what is trained on is bold and underlined.
    """
    start = time.perf_counter()
    stream = open_stream(config)
    opened = time.perf_counter() - start
    console = Console(highlight=False, soft_wrap=True)
    for line in stream.describe():
        console.print(line, markup=False)
    if isinstance(stream, TextRows):
        for number in range(min(SHOWN_ROWS, stream.rows_per_epoch)):
            show_row(stream, number, console)
    found = numbers(stream, opened)
    console.print(speed(found))
    write(json.dumps(found))
    return 0


def show_row(stream: TextRows, number: int, console: Console) -> None:
    row = stream.row(number)
    filled, trained = int((row["segment_ids"] > 0).sum()), int((row["targets"] != NO_LOSS).sum())
    console.print(
        f"\nrow {number}: {int(row['segment_ids'].max())} documents, {filled:,} of {stream.row_length:,} places "
        f"filled, {trained:,} targets",
        style="bold",
    )
    text = Text()
    for start, stop, is_trained in trained_runs(row, min(filled, SHOWN_TOKENS)):
        color = SEGMENT_COLORS[int(row["segment_ids"][start]) % len(SEGMENT_COLORS)]
        style = f"bold underline {color}" if is_trained else color
        text.append(stream.tokenizer.decode(row["tokens"][start:stop].tolist()), style)
    if filled > SHOWN_TOKENS:
        text.append(" …")
    console.print(text)


def numbers(stream: RowStream, opened: float) -> dict[str, float | int | None]:
    """Counts of an epoch, and tokens per second: of reading and tokenizing, and of the packed rows."""
    found: dict[str, float | int | None] = {"rows_per_epoch": stream.rows_per_epoch, "open_s": round(opened, 3)}
    if isinstance(stream, TextRows):
        found |= {
            "documents": stream.num_documents,
            "tokens": stream.num_tokens,
            "targets": stream.num_targets,
            "utilization": round(stream.utilization(), 4),
            "read_tokens_per_s": round(stream.num_tokens / opened),
        }
    return found | {"row_tokens_per_s": round(rows_per_second(stream) * stream.row_length)}


def rows_per_second(stream: RowStream) -> float:
    """Of rows made in order by as many threads as a run's loader has."""
    rows: Iterator[dict[str, np.ndarray]] = iter(
        grain.MapDataset.range(2**40)
        .map(stream.row)
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16))
    )
    next(rows)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < MEASURED_SECONDS:
        next(rows)
        count += 1
    return count / (time.perf_counter() - start)


def speed(found: dict[str, float | int | None]) -> str:
    rows = f"{found['row_tokens_per_s']:,} tokens/s of packed rows"
    if "read_tokens_per_s" not in found:
        return f"\nspeed: {rows}"
    return (
        f"\nspeed: read and tokenized at the start, {found['read_tokens_per_s']:,} tokens/s "
        f"({found['open_s']:.1f} s in all); then {rows}"
    )
