"""YAML config files and the files they build on, down to one `Given` per key with its file and line.

YAML only gives the structure here: scalars stay text, because YAML 1.1 would read `2e-5` as text, `010` as 8,
`1:30` as 90 and `on` as true. The schema's types read them (`trainer.config_values.read`).
"""

import os
from dataclasses import dataclass, field

import yaml

from trainer.config_values import PATHS_KEYS, Given, nearest
from trainer.errors import ConfigError

BASE = "base"

_YAML_TAG = "tag:yaml.org,2002:"
_NULL = _YAML_TAG + "null"
_MERGE = _YAML_TAG + "merge"
# What unmarked YAML resolves to; any other tag was written out (!foo, !!python/name:...) and asks for code.
_PLAIN_TAGS = {_YAML_TAG + name for name in "str int float bool null seq map timestamp merge value".split()}


@dataclass
class _File:
    """One file while its bases are read."""

    path: str  # as messages name it
    identity: str  # the same for every spelling of the path
    own: dict[str, Given]
    todo: list[Given]  # bases still to read, in order: value is the path
    layers: list[dict[str, Given]] = field(default_factory=list)  # what the bases read so far give


def read_file(path: str) -> dict[str, Given]:
    """Every key that a file and its bases give, by dotted key.

    A later base wins over an earlier one and a file over its bases. A base reached on two ways is read once.
    """
    done: dict[str, dict[str, Given]] = {}
    chain = [_open(path, "")]
    while True:
        file = chain[-1]
        if file.todo:
            base = file.todo.pop(0)
            _refuse_cycle(base, chain)
            identity = os.path.realpath(str(base.value))
            if identity in done:
                file.layers.append(done[identity])
            else:
                chain.append(_open(str(base.value), f"{base.where}: "))
            continue
        merged: dict[str, Given] = {}
        for layer in (*file.layers, file.own):
            merged |= layer
        done[file.identity] = merged
        chain.pop()
        if not chain:
            return merged
        chain[-1].layers.append(merged)


def _refuse_cycle(base: Given, chain: list[_File]) -> None:
    identities = [file.identity for file in chain]
    identity = os.path.realpath(str(base.value))
    if identity in identities:
        paths = [file.path for file in chain[identities.index(identity) :]]
        raise ConfigError(f"{base.where}: base files form a cycle: {' -> '.join([*paths, paths[0]])}")


def _open(path: str, referrer: str) -> _File:
    """Read one file without its bases. `referrer` starts messages about the path itself."""
    node = _compose(path, _text(path, referrer))
    if node is None or (node.tag == _NULL and node.value == ""):
        raise ConfigError(f"{path}: the file is empty; it needs at least one `key: value`")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{_line(node)}: a config is a mapping of `key: value` lines at its top level")
    own: dict[str, Given] = {}
    _flatten(node, path, "", (), own)
    if block := next((given for key, given in own.items() if key.startswith(BASE + ".")), None):
        raise ConfigError(f"{block.where}: 'base' needs a file or a list of files, not a block")
    return _File(path, os.path.realpath(path), own, _bases(path, own.pop(BASE, None)))


def _text(path: str, referrer: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8-sig")
    except FileNotFoundError:
        folder, name = os.path.split(path)
        siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        near = nearest(name, siblings, cutoff=0.75)
        hint = f"; did you mean {os.path.join(folder, near)}?" if near else ""
        raise ConfigError(f"{referrer}no config file {path}{hint}") from None
    except OSError as error:
        raise ConfigError(f"{referrer}cannot read config file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _compose(path: str, text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{place}: broken YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise ConfigError(f"{path}:{line}:{column}: broken YAML: {error.reason}") from None


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _flatten(node: yaml.MappingNode, path: str, prefix: str, around: tuple[yaml.Node, ...], out: dict[str, Given]):
    """Put the mapping's leaves into `out` by dotted key. `around`: the mappings this one lies in."""
    lines: dict[str, int] = {}
    for name_node, value in node.value:
        where = f"{path}:{_line(name_node)}"
        if not isinstance(name_node, yaml.ScalarNode) or not name_node.value:
            raise ConfigError(f"{where}: a key must be a plain name")
        if name_node.tag == _MERGE:
            raise ConfigError(f"{where}: YAML merge keys (<<) are not supported; `base:` builds on other files")
        name = name_node.value
        key = prefix + name
        if "." in name:
            block, leaf = name.split(".", 1)
            raise ConfigError(f"{where}: {key!r}: dots are for the command line; in a file write `{block}:` and, "
                              f"indented below it, `{leaf}:`")  # fmt: skip
        if name in lines:
            raise ConfigError(f"{where}: {key!r} is given twice, on lines {lines[name]} and {_line(name_node)}")
        lines[name] = _line(name_node)
        if isinstance(value, yaml.MappingNode) and key in PATHS_KEYS:
            out[key] = Given(key, _table(value, key, where), where, where, os.path.dirname(path))
        elif isinstance(value, yaml.MappingNode):
            if value in (*around, node):
                raise ConfigError(f"{where}: {key!r} contains itself")
            _flatten(value, path, key + ".", (*around, node), out)
        else:
            out[key] = Given(key, _leaf(value, key, where), where, where, os.path.dirname(path))


def _table(node: yaml.MappingNode, key: str, where: str) -> dict[str, str | None]:
    """A block that is one value: plain names, each with a plain value."""
    table: dict[str, str | None] = {}
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{where}: {key!r}: a block of paths holds one weight for each of them")
        if name.value in table:
            raise ConfigError(f"{where}: {key!r}: {name.value!r} is given twice")
        table[name.value] = str(_leaf(value, key, where)) if value.tag != _NULL else None
    return table


def _leaf(node: yaml.Node, key: str, where: str) -> str | list[str | None] | None:
    if node.tag not in _PLAIN_TAGS:
        raise ConfigError(f"{where}: {key!r}: YAML tags ({node.tag}) are not supported")
    if not isinstance(node, yaml.SequenceNode):
        return None if node.tag == _NULL else node.value
    items = [_leaf(item, key, where) if isinstance(item, yaml.ScalarNode) else [] for item in node.value]
    texts = [item for item in items if not isinstance(item, list)]
    if len(texts) < len(items):
        raise ConfigError(f"{where}: {key!r}: a list holds plain values, not lists or blocks")
    return texts


def _bases(path: str, base: Given | None) -> list[Given]:
    """The files that `base:` names, as paths from where we stand."""
    if base is None:
        return []
    names = base.value if isinstance(base.value, list) else [base.value]
    if not names or not all(names):  # a null or an empty text too
        raise ConfigError(f"{base.where}: 'base' needs a file or a list of files, relative to {path}")
    return [
        Given(BASE, os.path.normpath(os.path.join(base.folder, str(name))), base.where, base.origin) for name in names
    ]
