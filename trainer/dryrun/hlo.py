"""A compiled program's text as data: computations in the order they run, shapes with their padded sizes, sources."""

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache

DTYPE_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8, "token": 0,
}  # fmt: skip
HBM = 0

_LEAF = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T((?:\([\d,*]+\))+)")
_SPACE = re.compile(r"S\((\d+)\)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) ")
_HEAD = re.compile(r"^\s*(ROOT )?%?([\w.\-<>]+) = ")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation)="
                     r"(\{[^}]*\}|%?[\w.\-]+)")  # fmt: skip
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')


@dataclass(frozen=True)
class Leaf:
    """One array of a shape."""

    dtype: str
    dims: tuple[int, ...]
    space: int  # memory space: 0 is the device's main memory
    num_bytes: int  # with the layout's padding

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@cache
def leaves(shape: str) -> tuple[Leaf, ...]:
    """The arrays of a shape, tuples flattened in order."""
    return tuple(_leaf(*match.groups()) for match in _LEAF.finditer(shape))


def _leaf(dtype: str, dims: str, layout: str | None) -> Leaf:
    sizes = tuple(int(n) for n in dims.split(",")) if dims else ()
    space = _SPACE.search(layout) if layout else None
    bits = DTYPE_BITS[dtype] if dtype in DTYPE_BITS else 32
    return Leaf(dtype, sizes, int(space[1]) if space else HBM, math.prod(_padded(sizes, layout)) * bits // 8)


def _padded(sizes: tuple[int, ...], layout: str | None) -> list[int]:
    """Sizes from the major-most to the minor-most dim, rounded up to whole tiles."""
    tile = _TILE.search(layout) if layout else None
    order = re.match(r"[\d,]+", layout) if layout else None
    if tile is None or order is None:
        return list(sizes)
    physical = [sizes[int(dim)] for dim in reversed(order[0].split(","))]
    first = [int(n) for n in re.findall(r"\(([\d,*]+)\)", tile[1])[0].replace("*", "1").split(",")]
    if len(first) > len(physical):
        physical = [1] * (len(first) - len(physical)) + physical
    for i, size in enumerate(first):
        at = len(physical) - len(first) + i
        physical[at] = -(-physical[at] // size) * size
    return physical


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes, metadata and backend config
    is_root: bool

    @property
    def called(self) -> dict[str, list[str]]:
        """Computations by the role they have in it."""
        found: dict[str, list[str]] = {}
        for role, names in _CALLED.findall(self.rest):
            found[role] = re.findall(r"[\w.\-]+", names)
        return found

    @property
    def scope(self) -> str:
        name = _OP_NAME.search(self.rest)
        return name[1] if name else ""


@dataclass
class Program:
    """A compiled module."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""
    donated: dict[int, int] = field(default_factory=dict)  # output leaf -> parameter number
    _files: dict[int, str] = field(default_factory=dict)
    _locations: dict[int, tuple[int, int]] = field(default_factory=dict)  # -> (file, line)
    _frames: dict[int, tuple[int, int]] = field(default_factory=dict)  # -> (location, parent frame)

    def source(self, instruction: Instruction) -> str:
        """`trainer/models/moe.py:120 (scope)`: the innermost line of this package it comes from, and its scope."""
        place = self._place(instruction)
        scope = scope_of(instruction.scope)
        return f"{place} ({scope})" if place and scope else place or scope or instruction.opcode

    def _place(self, instruction: Instruction) -> str:
        plain = _SOURCE.search(instruction.rest)
        if plain:
            return f"{_short(plain[1])}:{plain[2]}"
        frame = _FRAME.search(instruction.rest)
        number = int(frame[1]) if frame else 0
        innermost = ""
        while number in self._frames:
            location, parent = self._frames[number]
            file, line = self._locations[location]
            text = f"{_short(self._files[file])}:{line}"
            if "/trainer/" in self._files[file]:
                return text
            innermost = innermost or text
            if parent == number:
                break
            number = parent
        return innermost

    def trip_count(self, loop: Instruction) -> int | None:
        """Times a `while` turns; None where it depends on data."""
        known = _TRIPS.search(loop.rest)
        if known:
            return int(known[1])
        condition = self.computations[loop.called["condition"][0]]
        return _bound(condition, self.computations)


def _bound(condition: list[Instruction], computations: dict[str, list[Instruction]]) -> int | None:
    """The constant that a loop's counter, which starts at 0, is compared with."""
    lines = list(condition)
    for instruction in condition:
        for names in instruction.called.values():
            lines += [line for name in names for line in computations[name]]
    compares = [line for line in lines if line.opcode == "compare" and "direction=LT" in line.rest]
    constants = [int(line.operands[0]) for line in lines if line.opcode == "constant" and line.operands[0].isdecimal()]
    return constants[0] if compares and len(constants) == 1 else None


def _short(path: str) -> str:
    return "trainer/" + path.split("/trainer/")[-1] if "/trainer/" in path else path.rsplit("/", 1)[-1]


def scope_of(op_name: str) -> str:
    """The named scopes of an op_name, and whether it is backward or recompute."""
    words = op_name.split("/")
    plain = [w for w in words if re.fullmatch(r"[a-z_]+", w) and w not in ("shard_map", "while", "body", "closed_call")]
    kinds = [text for mark, text in (("transpose(", "backward"), ("rematted", "recompute")) if mark in op_name]
    return " ".join([*dict.fromkeys(w for w in plain if w not in ("checkpoint", "rematted_computation")), *kinds])


def parse(text: str) -> Program:
    """One pass over the text of a compiled module."""
    program, current, section = Program(), None, ""
    for line in text.splitlines():
        if current is not None:
            if line == "}" or line.startswith("}, execution_thread="):
                current = None
            elif (instruction := _instruction(line)) is not None:
                current.append(instruction)
            elif current:  # attributes of a kernel may go on over several lines
                current[-1] = replace(current[-1], rest=current[-1].rest + line)
        elif line.endswith("{") and "->" in line and (head := _COMPUTATION.match(line)):
            entry, name = head.groups()
            current = program.computations[name] = []
            program.entry = name if entry else program.entry
        elif line.startswith("HloModule"):
            pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", line)
            program.donated = {int(output or 0): int(parameter) for output, parameter in pairs}
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section:
            _table_line(program, section, line)
    return program


def _table_line(program: Program, section: str, line: str) -> None:
    number, _, rest = line.partition(" ")
    if not number.isdecimal():
        return
    values = [int(n) for n in re.findall(r"=(\d+)", rest)]
    if section == "FileNames":
        program._files[int(number)] = rest.strip('"')
    elif section == "FileLocations":
        program._locations[int(number)] = (values[0], values[2])
    elif section == "StackFrames":
        program._frames[int(number)] = (values[0], values[1])


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    shape, at = _balanced(line, head.end()) if line[head.end()] == "(" else _until_space(line, head.end())
    opening = line.find("(", at)
    opcode = line[at:opening].strip()
    operands, end = _balanced(line, opening)
    names = re.findall(r"%([\w.\-<>]+)", operands) or [operands[1:-1].strip()]
    if opcode in ("constant", "parameter"):
        names = [operands[1:-1].strip()]
    return Instruction(head[2], shape, opcode, tuple(n for n in names if n), line[end:], head[1] is not None)


def _until_space(line: str, start: int) -> tuple[str, int]:
    end = line.find(" ", start)
    return line[start:end], end


def _balanced(line: str, start: int) -> tuple[str, int]:
    """The text from an opening parenthesis to the one that closes it, and where it ends."""
    depth = 0
    for i in range(start, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return line[start : i + 1], i + 1
    return line[start:], len(line)
