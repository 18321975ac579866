"""Where rows come from: documents in local files, and synthetic rows."""

import codecs
import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from trainer.errors import ConfigError


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files the globs name: patterns in the order given, sorted within each, every file once.

    `**` reaches into folders. Raises ConfigError for a glob that matches nothing, or something that
    is no .txt or .jsonl file.
    """
    if not patterns:
        raise ConfigError("dataset_path is empty, and dataset_type=text needs the .txt or .jsonl files it names")
    files: dict[str, Path] = {}
    for pattern in patterns:
        # A file whose own name holds [ ] or * is meant as it is.
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise ConfigError(f"dataset_path: {pattern!r} matches no file (local files only)")
        for match in matches:
            file = Path(match)
            if not file.is_file() or file.suffix.lower() not in _READERS:
                raise ConfigError(
                    f"dataset_path: {pattern!r} matches {match}, which is no .txt or .jsonl file: "
                    "narrow the glob, as in data/**/*.jsonl"
                )
            files.setdefault(os.path.abspath(match), file)
    return list(files.values())


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """The text of each document: a .txt file is one; a .jsonl file has one per line, in its field "text".

    Raises ConfigError, naming file and line, for a file that can't be read, bytes that are no UTF-8, a line
    that is no JSON object, and a "text" that is missing or no string. Blank lines of a .jsonl file are no documents.
    """
    for file in files:
        yield from _READERS[file.suffix.lower()](file)


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

    def describe(self) -> str:
        return f"synthetic: endless rows of {self.row_length:,} random tokens below {self._vocab_size:,}"


def _read_txt(file: Path) -> Iterator[str]:
    yield _decode(file)


def _read_jsonl(file: Path) -> Iterator[str]:
    # Only \n ends a line: splitlines() would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(_decode(file).split("\n"), start=1):
        if line.strip():
            yield _text_field(line, f"{file}:{number}")


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl}


def _decode(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"dataset_path: cannot read {file}: {error.strerror}") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"dataset_path: {file}:{line}: not UTF-8 text ({error.reason})") from error


def _text_field(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"dataset_path: {where}: not JSON: {error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise ConfigError(f"dataset_path: {where}: JSON out of bounds: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f'dataset_path: {where}: not a JSON object; write {{"text": "..."}}')
    if "text" not in record:
        raise ConfigError(f'dataset_path: {where}: no field "text" (it has {", ".join(list(record)[:5]) or "none"})')
    text = record["text"]
    if not isinstance(text, str):
        raise ConfigError(f'dataset_path: {where}: "text" is a {type(text).__name__}, not a string')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can spell it, UTF-8 can't
        raise ConfigError(f'dataset_path: {where}: "text" is not valid Unicode ({error.reason})') from error
    return text
