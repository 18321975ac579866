"""The words of a config before and after they have a type: `Given`, arguments, and text read by a schema type."""

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeAlias, get_args, get_origin

import yaml

from trainer.errors import ConfigError

COMMAND_LINE = "command line"

# Files by path or glob. Each has a weight, or none has: then every file counts as what it holds.
Paths: TypeAlias = dict[str, float | None]
PATHS_KEYS = ("dataset_path", "eval_dataset_path")  # where a block of YAML is one value, and not keys below

# Plain decimal numbers. A leading zero (octal in YAML), 0x, base 60 (1:30), nan and inf are left out on purpose.
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*(?:_[0-9]+)*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_LIST_ITEM = r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s,"'\[\]](?:[^,"'\[\]]*[^\s,"'\[\]])?))\s*"""
_LIST = re.compile(rf"\[(?:\s*|{_LIST_ITEM}(?:,{_LIST_ITEM})*)\]")
_MAX_INT_DIGITS = 18  # what fits int64


@dataclass(frozen=True)
class Given:
    """One key's value as somebody wrote it, before the schema's type decides how to read it."""

    key: str  # dotted: model.num_experts
    value: str | list[str | None] | dict[str, str | None] | None  # text, as written; None is YAML's null
    where: str  # how a message names the place: run.yml:3, or argument 'steps=3'
    origin: str  # how `config` names the place: run.yml:3, or command line
    folder: str = ""  # where relative input paths start; "" is the current folder


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `words` that is spelled most like `word`, or None when none is near."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def parse_overrides(arguments: Iterable[str]) -> dict[str, Given]:
    """`key=value` arguments by key. The value is everything after the first `=`, untouched."""
    given: dict[str, Given] = {}
    for argument in arguments:
        where = f"argument {argument!r}"
        key, equals, value = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError(f"{where}: overrides are written key=value, without leading dashes")
        if key != key.strip():
            raise ConfigError(f"{where}: no space may stand before the '='; write {key.strip()}={value.strip()}")
        if not equals or not key:
            raise ConfigError(f"{where}: overrides are written key=value")
        if key == "base":
            raise ConfigError(f"{where}: 'base' names the files a file builds on; it belongs in a file")
        if key in given:
            raise ConfigError(f"{where}: {key} is given already, by {given[key].where}")
        given[key] = Given(key, value, where, COMMAND_LINE)
    return given


def flatten(values: Mapping[str, Any], source: str, prefix: str = "") -> dict[str, Given]:
    """Nested Python values by dotted key. Scalars turn into text, so that one set of rules reads them."""
    given: dict[str, Given] = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, Mapping) and key in PATHS_KEYS:
            weights: dict[str, str | None] = {path: None if w is None else str(w) for path, w in value.items()}
            equal = all(w is None for w in weights.values())
            given[key] = Given(key, list(weights) if equal else weights, source, source)
        elif isinstance(value, Mapping):
            given |= flatten(value, source, key + ".")
        elif isinstance(value, list | tuple):
            given[key] = Given(key, [None if item is None else str(item) for item in value], source, source)
        else:
            given[key] = Given(key, None if value is None else str(value), source, source)
    return given


def read(given: Given, kind: Any) -> Any:
    """The value as `kind`: str, int, float, bool, a Literal of texts, a list of one of them, or `Paths`."""
    try:
        if kind == Paths:
            return _paths(given)
        if get_origin(kind) is list:
            return [_scalar(item, get_args(kind)[0]) for item in _items(given, get_args(kind)[0])]
        if isinstance(given.value, list | dict):
            kind_given = "list" if isinstance(given.value, list) else "block"
            raise ValueError(f"needs one value, not the {kind_given} {given.value}")
        return _scalar(given.value, kind)
    except ValueError as error:
        raise ConfigError(f"{given.where}: {given.key} {error}") from None


def _paths(given: Given) -> Paths:
    """A list of paths, or paths with weights as in {a.jsonl: 0.7, b/*.parquet: 0.3}."""
    weights = given.value
    if given.origin == COMMAND_LINE and isinstance(weights, str) and weights.startswith("{"):
        try:
            weights = yaml.load(weights, Loader=yaml.BaseLoader)  # every scalar stays text
        except yaml.YAMLError:
            weights = None
        if not isinstance(weights, dict) or not all(isinstance(w, str) for pair in weights.items() for w in pair):
            raise ValueError(f"is no mixture such as {{a.jsonl: 0.7, b.jsonl: 0.3}}: {given.value}")
    if not isinstance(weights, dict):
        return dict.fromkeys(_scalar(item, str) for item in _items(given, str))
    if not weights or "" in weights:
        raise ValueError("needs paths with their weights, as in {a.jsonl: 0.7, b.jsonl: 0.3}")
    return {_scalar(path, str): _weight(path, text) for path, text in weights.items()}


def _weight(path: str, text: str | None) -> float:
    try:
        weight = _scalar(text, float)
    except ValueError as error:
        raise ValueError(f"{path}: the weight {error}") from None
    if weight <= 0:
        raise ValueError(f"{path}: the weight must be above 0, not {text}; leave out what is not to be read")
    return weight


def _items(given: Given, kind: Any) -> Sequence[str | None]:
    """The texts of a list. One bare text stands for a list of itself, except where numbers are wanted."""
    text = given.value
    if isinstance(text, dict):
        raise ValueError(f"needs a list, not the block {text}")
    if isinstance(text, list):
        items = text
    elif given.origin == COMMAND_LINE and text is not None and text.startswith("["):
        if not _LIST.fullmatch(text):
            raise ValueError(f"is not a list such as [a,b]: {text} (quote an item that holds brackets or commas)")
        items = ["".join(groups) for groups in re.findall(_LIST_ITEM, text[1:-1])]
    elif not text or kind in (int, float):
        raise ValueError(f"needs a list such as {'[0,4,16]' if kind in (int, float) else '[a,b]'}, not {text!r}")
    else:
        items = [text]
    if "" in items:
        raise ValueError("holds an empty text")
    return items


def _scalar(text: str | None, kind: Any) -> Any:
    """One text as `kind`. Raises ValueError with what is wrong, to follow the key's name in a sentence."""
    if text is None:
        raise ValueError("has no value" + (' (write "" for an empty text)' if kind is str else ""))
    if "${" in text:
        raise ValueError(f"holds an interpolation, {text!r}; they are not supported, write the value itself")
    if text == "???":
        raise ValueError("is '???', the mark of a value still to be given")
    if get_origin(kind) is Literal:
        return _choice(text, get_args(kind))
    return _READERS[kind](text)


def _choice(text: str, allowed: tuple[str, ...]) -> str:
    if text in allowed:
        return text
    near = nearest(text, allowed)
    raise ValueError(f"must be one of {', '.join(allowed)}, not {text!r}" + (f"; did you mean {near}?" if near else ""))


def _int(text: str) -> int:
    """A whole number, in any decimal spelling of it: 10000, 10_000, 1e4."""
    number = Decimal(text.replace("_", "")) if _NUMBER.fullmatch(text) else None
    if number is not None and number.adjusted() >= _MAX_INT_DIGITS:
        raise ValueError(f"is out of range: {text}")
    if number is None or number != number.to_integral_value():
        raise ValueError(f"needs a whole number such as 8 or 1e4, not {text!r}{_leading_zero(text)}")
    return int(number)


def _float(text: str) -> float:
    """A finite number: 2, .5, 1e-4, 1_000."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"needs a finite number such as 0.5 or 1e-4, not {text!r}{_leading_zero(text)}")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"is out of range: {text}")
    return number


def _leading_zero(text: str) -> str:
    stripped = text.lstrip("0")
    ambiguous = stripped != text and stripped[:1].isdigit() and _NUMBER.fullmatch(stripped)
    return f" (a leading zero means octal to some readers; write {stripped})" if ambiguous else ""


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"needs true or false, not {text!r}")
    return text.lower() == "true"


_READERS = {str: str, int: _int, float: _float, bool: _bool}


def absolute(text: str, folder: str) -> str:
    """An input path or glob made absolute; a URL such as gs://bucket/file stays as it is."""
    return text if "://" in text else os.path.abspath(os.path.join(folder, os.path.expanduser(text)))
