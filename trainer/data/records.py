"""Records of data files, in chunks that are read apart from each other.

A record is a mapping of fields; a .txt file is one record with one field.
"""

import codecs
import json
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from trainer.data.chat import UnusableError
from trainer.data.files import FAULTS, is_url, open_file, size_of, unreadable
from trainer.errors import ConfigError

CHUNK_BYTES = 4 * 2**20
CHUNK_RECORDS = 4096


@dataclass(frozen=True)
class Chunk:
    """Part of a file: bytes of a .txt or .jsonl file; of the others row groups (Parquet), batches or records."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class BadRecord:
    """`at` is a byte of a .jsonl file, and a record's number, from 0, in others."""

    file: str
    at: int
    reason: str

    def where(self) -> str:
        """FILE:LINE, or FILE and the record's number; both count from 1."""
        if not self.file.lower().endswith((".jsonl", ".txt")):
            return f"{self.file}, record {self.at + 1}"
        line, left = 1, self.at
        with open_file(self.file) as file:
            while left > 0 and (content := file.read(min(left, CHUNK_BYTES))):
                line += content.count(b"\n")
                left -= len(content)
        return f"{self.file}:{line}"


# The fields, or why they cannot be read; and the record's place in its file, as in `BadRecord.at`.
Record: TypeAlias = tuple[int, Mapping[str, Any] | str]


def readable(record: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Raises UnusableError for one that cannot be read."""
    if isinstance(record, str):
        raise UnusableError(record)
    return record


def chunks_of(file: str, columns: list[str]) -> list[Chunk]:
    """The file's parts in order. Raises ConfigError for one that can't be opened, or has no such columns."""
    try:
        return _KINDS[_suffix(file)][0](file, columns)
    except FAULTS as error:
        raise unreadable(file, error) from error


def read_chunk(chunk: Chunk, columns: list[str]) -> Iterator[Record]:
    """The records that begin in this part of the file."""
    try:
        yield from _KINDS[_suffix(chunk.file)][1](chunk, columns)
    except FAULTS as error:
        raise unreadable(chunk.file, error) from error


def _suffix(file: str) -> str:
    return file[file.rindex(".") :].lower()


def _whole(file: str, columns: list[str]) -> list[Chunk]:
    return [Chunk(file, 0, size_of(file))]


def _read_txt(chunk: Chunk, columns: list[str]) -> Iterator[Record]:
    with open_file(chunk.file) as file:
        content = file.read()
    text = content.removeprefix(codecs.BOM_UTF8)
    try:
        yield 0, {columns[0]: text.decode("utf-8")}
    except UnicodeDecodeError as error:
        yield len(content) - len(text) + error.start, f"not UTF-8 text ({error.reason})"


def _jsonl_chunks(file: str, columns: list[str]) -> list[Chunk]:
    size = size_of(file)
    return [Chunk(file, at, min(at + CHUNK_BYTES, size)) for at in range(0, size, CHUNK_BYTES)]


def _read_jsonl(chunk: Chunk, columns: list[str]) -> Iterator[Record]:
    with open_file(chunk.file) as file:
        at = chunk.start
        if at:  # a line belongs to the chunk that its first byte lies in
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while at < chunk.stop and (line := file.readline()):
            # Only \n ends a line: splitlines() would also cut at U+2028, which JSON strings may hold.
            content = line.removeprefix(codecs.BOM_UTF8) if at == 0 else line
            if content.strip():
                yield at, _parse(content.rstrip())
            at += len(line)


def _parse(content: bytes) -> Mapping[str, Any] | str:
    try:
        record = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not UTF-8 text ({error.reason})"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg}, column {error.colno}"
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        return f"JSON out of bounds: {error}"
    if not isinstance(record, dict):
        return 'not a JSON object; write {"text": "..."}'
    return record


def _parquet_chunks(file: str, columns: list[str]) -> list[Chunk]:
    import pyarrow.parquet as parquet  # heavy, and many runs have none

    with open_file(file) as handle:
        about = parquet.ParquetFile(handle)
        _refuse_missing(file, about.schema_arrow.names, columns)
        return [Chunk(file, group, group + 1) for group in range(about.num_row_groups)]


def _read_parquet(chunk: Chunk, columns: list[str]) -> Iterator[Record]:
    import pyarrow.parquet as parquet

    with open_file(chunk.file) as handle:
        file = parquet.ParquetFile(handle)
        first = sum(file.metadata.row_group(group).num_rows for group in range(chunk.start))
        batches = file.iter_batches(CHUNK_RECORDS, [chunk.start], columns)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=first)


def _arrow_chunks(file: str, columns: list[str]) -> list[Chunk]:
    with _arrow(file) as stream:
        _refuse_missing(file, stream.schema.names, columns)
        batches = sum(1 for _ in stream)
    return [Chunk(file, at, min(at + 4, batches)) for at in range(0, batches, 4)]  # datasets writes 1000 records each


def _read_arrow(chunk: Chunk, columns: list[str]) -> Iterator[Record]:
    with _arrow(chunk.file) as stream:
        first = 0
        for number, batch in enumerate(stream):
            if chunk.start <= number < chunk.stop:
                yield from enumerate(batch.select(columns).to_pylist(), start=first)
            first += batch.num_rows


def _arrow(file: str) -> Any:
    import pyarrow as arrow

    return arrow.ipc.open_stream(arrow.memory_map(file))


def _refuse_missing(file: str, names: list[str], columns: list[str]) -> None:
    missing = [column for column in columns if column not in names]
    if missing:
        raise ConfigError(
            f"train_data_columns={columns}: {file} has no {' and no '.join(missing)}; it has {', '.join(names)}"
        )


def _arrayrecord_chunks(file: str, columns: list[str]) -> list[Chunk]:
    if is_url(file):
        raise ConfigError(f"dataset_path: {file}: ArrayRecord files are read from folders; mount the bucket (gcsfuse)")
    from grain.sources import ArrayRecordDataSource

    records = len(cast(Sized, ArrayRecordDataSource(file)))
    return [Chunk(file, at, min(at + CHUNK_RECORDS, records)) for at in range(0, records, CHUNK_RECORDS)]


def _read_arrayrecord(chunk: Chunk, columns: list[str]) -> Iterator[Record]:
    from grain.sources import ArrayRecordDataSource

    source = ArrayRecordDataSource(chunk.file)
    for number in range(chunk.start, chunk.stop):
        yield number, _parse(source[number])


_KINDS = {
    ".txt": (_whole, _read_txt),
    ".jsonl": (_jsonl_chunks, _read_jsonl),
    ".parquet": (_parquet_chunks, _read_parquet),
    ".arrow": (_arrow_chunks, _read_arrow),
    ".arrayrecord": (_arrayrecord_chunks, _read_arrayrecord),
}
