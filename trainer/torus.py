"""Which dims of a slice's torus each mesh axis lies on. Free of JAX.

The program's text is the same however the mesh lies on the chips, and its collectives are not: an axis whose devices
form a ring of neighbours sends both ways round, one that ends without a closing link sends everything back.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.parallel import AXIS_KEYS

# Axes by what their collectives weigh. `tensor` gathers and scatters whole sequences several times in each layer, and
# nothing else can run meanwhile; `expert` sends tokens twice a layer, to all devices at once, which gains less from a
# ring; `fsdp` gathers weights, ahead of their use; `data` sums gradients once a step.
BY_WEIGHT = ("tensor", "expert", "fsdp", "data")

CORE = "core"
SMALL_PLANE = 16  # chips of a whole plane without wrap-around links that an axis still walks as one ring


@dataclass(frozen=True)
class Dim:
    """One physical dim of a slice."""

    name: str  # x, y, z, or CORE: the devices of one chip
    size: int
    wraps: bool

    def __str__(self) -> str:
        wrap = "" if self.size == 2 else ", wraps" if self.wraps else ", no wrap"
        return f"{self.name} ({self.size}{wrap})"


@dataclass(frozen=True)
class Torus:
    """The dims of a slice that are larger than 1."""

    dims: tuple[Dim, ...]

    @property
    def size(self) -> int:
        return math.prod(dim.size for dim in self.dims)

    def __str__(self) -> str:
        chips = "x".join(str(dim.size) for dim in self.dims if dim.name != CORE)
        return chips + "".join(f" of {dim.size} cores" for dim in self.dims if dim.name == CORE)


def torus(sizes: tuple[int, ...], wraps: tuple[bool, ...], cores: int) -> Torus:
    """The torus of a slice of chips, `cores` devices each. Cores come first: the link between them is the fastest."""
    dims = [Dim(name, size, wrap) for name, size, wrap in zip("xyz", sizes, wraps, strict=False)]
    return Torus(tuple(dim for dim in [Dim(CORE, cores, False), *dims] if dim.size > 1))


@dataclass(frozen=True)
class Assignment:
    """For each mesh axis, how many devices it takes of each dim. The heavier of two axes on a dim takes neighbours."""

    torus: Torus
    parts: Mapping[str, tuple[int, ...]]  # by axis, in the order of BY_WEIGHT

    def block(self, axis: str) -> list[int]:
        """The dims that an axis takes some of, by index."""
        return [i for i, part in enumerate(self.parts[axis]) if part > 1]

    def contiguous(self, axis: str) -> bool:
        """Whether the axis is the innermost on each of its dims: its devices are then neighbours there."""
        inner = itertools.takewhile(lambda other: other != axis, self.parts)
        return all(self.parts[other][i] == 1 for other in inner for i in self.block(axis))

    def whole(self, axis: str) -> bool:
        return all(self.parts[axis][i] == self.torus.dims[i].size for i in self.block(axis))

    def walks(self, axis: str) -> bool:
        """Whether the axis goes round a block of two dims from neighbour to neighbour, and so back to its start."""
        block = self.block(axis)
        parts = [self.parts[axis][i] for i in block]
        if len(block) != 2 or not self.contiguous(axis) or all(part % 2 for part in parts):
            return False
        if self.whole(axis):  # the dims' own rings are better, and so is a large plane's shape
            return math.prod(parts) <= SMALL_PLANE and not any(self.torus.dims[i].wraps for i in block)
        return True

    def closes_ring(self, axis: str) -> bool:
        block = self.block(axis)
        if self.whole(axis) and all(self.torus.dims[i].wraps for i in block):
            return True
        pair = len(block) == 1 and self.parts[axis][block[0]] == 2
        return self.walks(axis) or (pair and self.contiguous(axis))

    @property
    def score(self) -> tuple:
        """Larger is better: rings for the heaviest axes, then whole dims, then the heavy axes on the first dims."""
        rings = tuple(self.closes_ring(axis) for axis in self.parts)
        whole = sum(self.whole(axis) for axis in self.parts)
        return rings, whole, tuple(self.parts.values())


def assign(degrees: Mapping[str, int], on: Torus, split: bool) -> Assignment:
    """The best assignment of mesh axes (name -> degree) to the torus's dims.

    With `split` a dim may be shared by several axes, and an axis may take a block of two dims and close a ring in it
    where no dim wraps. Without, each dim belongs to one axis. Raises ConfigError where the degrees don't allow that.
    """
    found = [Assignment(on, parts) for parts in _assignments(degrees, on, split)]
    if not found:
        raise ConfigError(_not_whole(degrees, on))
    return max(found, key=lambda assignment: assignment.score)


def _assignments(degrees: Mapping[str, int], on: Torus, split: bool) -> Iterator[dict[str, tuple[int, ...]]]:
    def place(axes: tuple[str, ...], free: tuple[int, ...]) -> Iterator[dict[str, tuple[int, ...]]]:
        if not axes:
            yield {}
            return
        for part in itertools.product(*(_parts(size, split) for size in free)):
            if math.prod(part) == degrees[axes[0]]:
                rest = tuple(size // taken for size, taken in zip(free, part, strict=True))
                for others in place(axes[1:], rest):
                    yield {axes[0]: part} | others

    return place(BY_WEIGHT, tuple(dim.size for dim in on.dims))


def _parts(size: int, split: bool) -> list[int]:
    return [part for part in range(1, size + 1) if size % part == 0] if split else sorted({1, size})


def _not_whole(degrees: Mapping[str, int], on: Torus) -> str:
    given = " x ".join(f"{key}={degrees[axis]}" for axis, key in AXIS_KEYS.items() if degrees[axis] > 1)
    sizes = sorted({math.prod(part) for part in itertools.product(*(_parts(dim.size, False) for dim in on.dims))})
    return (
        f"{given} does not lie on whole axes of the slice's torus, {on}: degrees that do are "
        f"{', '.join(map(str, sizes))}, each axis of the torus used once; or set allow_split_physical_axes=true, and "
        "several mesh axes share one of the torus's"
    )
