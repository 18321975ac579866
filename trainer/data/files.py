"""Which files a dataset is made of: paths and globs, here or behind a URL that fsspec knows."""

import glob
import json
import os
from collections.abc import Iterable
from typing import Any, BinaryIO

import fsspec

from trainer.errors import ConfigError

SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrayrecord", ".arrow")
HINT = "a .txt, .jsonl, .parquet or .arrayrecord file, or a Hugging Face dataset saved to disk"

# What a file system of fsspec raises beside OSError where a package or the right to read is missing.
FAULTS = (OSError, ImportError, ValueError)


def find_files(patterns: Iterable[str], key: str = "dataset_path") -> list[str]:
    """The files the globs name: patterns in the order given, sorted within each, every file once.

    `**` reaches into folders. Raises ConfigError for a glob that matches nothing, or something that is no file of
    text.
    """
    files: dict[str, str] = {}
    for pattern in patterns:
        matches = _matches(pattern, key)
        if not matches:
            raise ConfigError(f"{key}: {pattern!r} matches no file")
        for match in matches:
            for file in _members(match, pattern, key):
                files.setdefault(file if "://" in file else os.path.abspath(file), file)
    return list(files.values())


def is_url(path: str) -> bool:
    return "://" in path


def open_file(path: str) -> BinaryIO:
    """For reading, from anywhere in it. Raises one of FAULTS."""
    if is_url(path):
        system, place = fsspec.core.url_to_fs(path)
        return system.open(place, "rb")
    return open(path, "rb")


def size_of(path: str) -> int:
    """Bytes. Raises one of FAULTS."""
    if is_url(path):
        system, place = fsspec.core.url_to_fs(path)
        return int(system.size(place))
    return os.path.getsize(path)


def unreadable(path: str, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return ConfigError(f"dataset_path: cannot read {path}: {reason}")


def _matches(pattern: str, key: str) -> list[str]:
    if not is_url(pattern):
        # A file whose own name holds [ ] or * is meant as it is.
        return [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    try:
        system, place = fsspec.core.url_to_fs(pattern)
        found = [place] if system.exists(place) else sorted(system.glob(place))
    except FAULTS as error:
        needs = "; install what reads it, such as gcsfs for gs://" if isinstance(error, ImportError) else ""
        raise ConfigError(f"{key}: cannot look up {pattern!r}: {error}{needs}") from error
    return [system.unstrip_protocol(place) for place in found]


def _members(match: str, pattern: str, key: str) -> list[str]:
    """The file itself, or those of a dataset's folder."""
    if not is_url(match) and os.path.isdir(match):
        splits = os.path.join(match, "dataset_dict.json")
        if os.path.exists(splits):
            raise ConfigError(f"{key}: {match} holds several datasets; name one of them: {_names(splits, key)}")
        state = os.path.join(match, "state.json")
        if os.path.exists(state):
            return [os.path.join(match, name) for name in _arrow_files(state, key)]
    elif match.lower().endswith(SUFFIXES):
        return [match]
    raise ConfigError(
        f"{key}: {pattern!r} matches {match}, which is no {HINT.removeprefix('a ')}: "
        "narrow the glob, as in data/**/*.jsonl"
    )


def _names(splits: str, key: str) -> str:
    folder = os.path.dirname(splits)
    return ", ".join(os.path.join(folder, name) for name in _json(splits, key).get("splits", []))


def _arrow_files(state: str, key: str) -> list[str]:
    saved = _json(state, key)
    try:
        names = [entry["filename"] for entry in saved["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {state} does not list the dataset's files: {error!r}") from error
    if saved.get("_indices_data_files"):
        raise ConfigError(
            f"{key}: {os.path.dirname(state)} has an order of its own; flatten_indices() and save it again"
        )
    return names


def _json(path: str, key: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from error
    return content if isinstance(content, dict) else {}
