"""The collectives of a compiled program: how many, over which mesh axes, and what each device sends."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trainer.dryrun.hlo import Instruction, Program, leaves

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")  # fmt: skip

_EXPLICIT = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")  # newer XLA: a mesh, and its axes
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True)
class Collectives:
    """All of one kind over the same axes."""

    kind: str
    axes: str  # "tensor", "expert x tensor", or "?" where the groups are along no axes of the mesh
    count: int  # per step, turns of loops included; loops of unknown length turn once
    num_bytes: int  # one device sends, per step


def executions(program: Program) -> Iterator[tuple[Instruction, int]]:
    """(instruction, how often a step runs it) of all that is no part of a fusion. Loops of unknown length turn once."""
    waiting = [(program.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        for line in program.computations[name]:
            yield line, times
            if line.opcode == "fusion":
                continue
            called = [n for names in line.called.values() for n in names if n in program.computations]
            trips = program.trip_count(line) if line.opcode == "while" else 1
            if line.opcode in ("while", "call", "conditional", "call-start", "async-start"):
                waiting += [(n, times * (1 if trips is None else trips)) for n in called]


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collectives]:
    """Most bytes first. `mesh`: axis names and sizes, in the order that numbers the devices of the program."""
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for line, times in executions(program):
        kind = line.opcode.removesuffix("-start")
        if kind == "fusion" and (summed := _summed_and_cut(line, program)):
            line, kind = summed, "reduce-scatter"
        if kind not in KINDS:
            continue
        groups = _groups(line, math.prod(mesh.values()))
        if groups.shape[1] == 1:
            continue  # over an axis of size 1: nothing moves
        total = found[kind, _axes(groups, mesh)]
        total[0] += times
        total[1] += times * _sent(kind, line, groups.shape[1])
    rows = [Collectives(kind, axes, count, num_bytes) for (kind, axes), (count, num_bytes) in found.items()]
    return sorted(rows, key=lambda row: -row.num_bytes)


def _summed_and_cut(fusion: Instruction, program: Program) -> Instruction | None:
    """The all-reduce inside a fusion that is a reduce-scatter: XLA for TPU writes it as an all-reduce and a slice."""
    for name in fusion.called["calls"] if "all-reduce-scatter" in fusion.rest else ():
        for line in program.computations[name]:
            if line.opcode == "all-reduce":
                return line
    return None


def _groups(line: Instruction, num_devices: int) -> np.ndarray:
    """Devices that talk to each other: [groups, members]."""
    iota = _IOTA.search(line.rest)
    if iota:
        shape, whole = ([int(n) for n in text.split(",")] for text in iota.groups()[:2])
        order = [int(n) for n in iota[3].split(",")] if iota[3] else list(range(len(whole)))
        return np.arange(math.prod(whole)).reshape(whole).transpose(order).reshape(shape)
    named = _NAMED.search(line.rest)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
        inside = re.findall(r"'([^']*)'", named[2])
        order = [axis for axis in sizes if axis not in inside] + inside
        whole = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        whole = whole.transpose([list(sizes).index(axis) for axis in order])
        return whole.reshape(-1, math.prod(sizes[axis] for axis in inside))
    explicit = _EXPLICIT.search(line.rest)
    if explicit:
        return np.array([[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d, ]+)\}", explicit[1])])
    return np.arange(num_devices)[None]


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> str:
    """The axes along which the members of a group differ."""
    if groups.max() >= math.prod(mesh.values()):
        return "?"
    places = np.stack(np.unravel_index(groups, list(mesh.values())))
    differ = [axis for axis, place in zip(mesh, places, strict=True) if (place != place[:, :1]).any()]
    return " x ".join(differ) or "none"


def _sent(kind: str, line: Instruction, members: int) -> int:
    """Bytes one device sends, as a ring does it: all but its own part of what is gathered or exchanged; twice that
    for an all-reduce. A ragged exchange is counted as if its buffer were full."""
    arrays = leaves(line.shape)
    if line.opcode.endswith("-start") and len(arrays) > 1:
        arrays = arrays[len(arrays) // 2 :] if kind != "collective-permute" else arrays[1:2]
    whole = sum(array.num_bytes for array in arrays if array.dtype != "token")
    others = (members - 1) / members
    if kind == "all-reduce":
        return round(2 * others * whole)
    if line.opcode == "reduce-scatter":  # its own shape is that of the part
        return round((members - 1) * whole)
    return whole if kind == "collective-permute" else round(others * whole)
