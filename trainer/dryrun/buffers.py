"""What lies in a device's memory at the worst moment of a compiled program, buffer by buffer.

The compiler gives the order of instructions. From it the buffers alive at every one of them follow, loops' bodies
included; the largest total is the peak. What the compiler sets aside is more by what packing buffers of different
lifetimes into one space costs, a tenth or so.
"""

from collections import Counter
from dataclasses import dataclass, field

from trainer.dryrun.hlo import HBM, Instruction, Program, leaves

# The result is the operand's buffer, seen otherwise.
VIEWS = {"bitcast", "optimization-barrier", "add-dependency", "copy-done", "slice-done", "call-done", "while",
         "all-gather-done", "all-reduce-done", "collective-permute-done", "async-done"}  # fmt: skip
IN_PLACE = {"dynamic-update-slice": 0, "scatter": 0, "ragged-all-to-all": 1}  # -> the operand that is written to


@dataclass(eq=False)
class Buffer:
    """One allocation: made by an instruction, or handed in from outside (an argument, a loop's state)."""

    shape: str
    num_bytes: int  # 0 for what is counted elsewhere
    source: str


@dataclass(frozen=True)
class LargeBuffer:
    """Buffers of one shape and source that are alive together."""

    shape: str
    num_bytes: int  # of all of them
    source: str
    count: int


@dataclass
class Peak:
    """The worst moment of one computation."""

    num_bytes: int = 0
    alive: list[Buffer] = field(default_factory=list)


def peak_of(program: Program) -> Peak:
    """Temporaries alive at the peak; arguments, and outputs that take no argument's place, are left out."""
    return _Walk(program).peak(program.entry)


def largest(peak: Peak) -> list[LargeBuffer]:
    """Largest first, equal ones together."""
    groups = Counter((b.shape, b.num_bytes, b.source) for b in peak.alive if b.num_bytes)
    found = [LargeBuffer(shape, size * n, source, n) for (shape, size, source), n in groups.items()]
    return sorted(found, key=lambda b: -b.num_bytes)


class _Walk:
    def __init__(self, program: Program):
        self._program = program
        self._done: dict[str, Peak] = {}

    def peak(self, name: str) -> Peak:
        if name not in self._done:
            self._done[name] = Peak()  # a computation cannot call itself
            self._done[name] = self._peak(self._program.computations[name])
        return self._done[name]

    def _peak(self, lines: list[Instruction]) -> Peak:
        values = self._values(lines)
        last = {id(b): i for i, line in enumerate(lines) for b in self._used(line, values)}
        worst, alive, total = Peak(), {}, 0
        for i, line in enumerate(lines):
            for buffer in values[line.name]:
                if buffer.num_bytes and id(buffer) not in alive:
                    alive[id(buffer)] = buffer
                    total += buffer.num_bytes
            inner = self._inner(line)
            if total + inner.num_bytes > worst.num_bytes:
                worst = Peak(total + inner.num_bytes, [*alive.values(), *inner.alive])
            for buffer in [*self._used(line, values), *values[line.name]]:
                if id(buffer) in alive and last.get(id(buffer), i) <= i:
                    total -= alive.pop(id(buffer)).num_bytes
        return worst

    def _used(self, line: Instruction, values: dict[str, list[Buffer]]) -> list[Buffer]:
        return [buffer for name in line.operands if name in values for buffer in values[name]]

    def _inner(self, line: Instruction) -> Peak:
        if line.opcode == "fusion":
            return Peak()  # works in registers and scratch memory
        called = [name for names in line.called.values() for name in names if name in self._program.computations]
        return max((self.peak(name) for name in called), key=lambda p: p.num_bytes, default=Peak())

    def _values(self, lines: list[Instruction]) -> dict[str, list[Buffer]]:
        """The buffers of each instruction's result, one per array of it. What flows into the result of the whole
        computation lies where the caller has put it."""
        values: dict[str, list[Buffer]] = {}
        for line in lines:
            values[line.name] = self._result(line, values)
        for line in lines:
            if line.is_root:
                for buffer in values[line.name]:
                    buffer.num_bytes = 0
        return values

    def _result(self, line: Instruction, values: dict[str, list[Buffer]]) -> list[Buffer]:
        known = [values[name] for name in line.operands if name in values]
        arrays = leaves(line.shape)
        if line.opcode in ("parameter", "constant"):
            return [Buffer(str(a), 0, line.opcode) for a in arrays]
        if line.opcode == "tuple":
            return [buffer for value in known for buffer in value]
        if line.opcode == "get-tuple-element" and known:
            return self._element(line, known[0], len(arrays))
        if line.opcode in VIEWS and known and len(known[0]) >= len(arrays):
            return known[0][: len(arrays)]
        if line.opcode in ("copy-start", "slice-start") and known:
            return [self._new(line, 0), *known[0][:1], *(self._new(line, i) for i in range(2, len(arrays)))]
        at = self._written(line)
        if at is not None and at < len(known) and len(known[at]) == len(arrays) == 1:
            return known[at]
        return [self._new(line, i) for i in range(len(arrays))]

    def _element(self, line: Instruction, whole: list[Buffer], num: int) -> list[Buffer]:
        """Nested tuples are rare enough (asynchronous starts) to be read as flat."""
        first = min(int(line.rest.split("index=")[1].split(",")[0]), len(whole) - num)
        return whole[first : first + num]

    def _written(self, line: Instruction) -> int | None:
        if line.opcode in IN_PLACE:
            return IN_PLACE[line.opcode]
        if line.opcode != "fusion":
            return None
        inside = {x.name: x for name in line.called.get("calls", []) for x in self._program.computations.get(name, [])}
        root = _through_bitcasts(next((x for x in inside.values() if x.is_root), None), inside)
        if root is None or root.opcode != "dynamic-update-slice":
            return None
        target = _through_bitcasts(inside.get(root.operands[0]), inside)
        return int(target.operands[0]) if target is not None and target.opcode == "parameter" else None

    def _new(self, line: Instruction, index: int) -> Buffer:
        array = leaves(line.shape)[index]
        return Buffer(str(array), array.num_bytes if array.space == HBM else 0, self._program.source(line))


def _through_bitcasts(line: Instruction | None, inside: dict[str, Instruction]) -> Instruction | None:
    """The instruction that a chain of bitcasts starts from; None where the text does not say."""
    while line is not None and line.opcode == "bitcast":
        line = inside.get(line.operands[0])
    return line
