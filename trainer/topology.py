"""The TPU slices that are sold, and their chips, for planning a run without one. Free of JAX.

Numbers of chips: the pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x" of the Cloud TPU documentation (2026). That
libtpu 0.0.42.1 and 0.0.50.1 know every slice below, with these hosts and device kinds, was tried.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from trainer.config_values import nearest
from trainer.errors import ConfigError

CPU = "cpu"  # the dry run's other target: the devices that hardware=cpu pretends to have

_GIB = 2**30
_CHIPS_PER_HOST = 4  # of libtpu's slices; v5e-8 and v6e-8 are also sold as one host of 8


@dataclass(frozen=True)
class Chip:
    """One generation. Rates and sizes are of a whole chip; JAX sees it as `devices` devices."""

    name: str  # as libtpu calls it
    kinds: tuple[str, ...]  # `device_kind` of its devices in JAX
    devices: int
    hbm_bytes: int  # nominal; the compiler leaves 0.25 to 0.75 GiB of it to the runtime
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    ici_bytes_per_s: float  # over all links, both directions together
    links: int  # inter-chip links: two for each dim of the torus
    wraps: Callable[[tuple[int, ...]], tuple[bool, ...]]  # which dims of a slice close into rings

    @property
    def link_bytes_per_s(self) -> float:
        """One link, one direction."""
        return self.ici_bytes_per_s / (2 * self.links)


def _wraps_at_16(dims: tuple[int, ...]) -> tuple[bool, ...]:
    # A v5e or v6e pod is 16x16. Only a dim that spans it ends where the pod's closing links are.
    return tuple(dim == 16 for dim in dims)


def _wraps_in_cubes(dims: tuple[int, ...]) -> tuple[bool, ...]:
    # "All 4x4x4 and larger slices have full 3D torus connectivity", smaller ones no wrap-around links ("TPU v5p"). For
    # tpu7x the page says no more than that it is built alike: unverified.
    return (len(dims) == 3 and all(dim % 4 == 0 for dim in dims),) * len(dims)


V5E = Chip("v5e", ("TPU v5 lite", "TPU v5e"), 1, 16 * _GIB, 819e9, 197e12, 400e9, 4, _wraps_at_16)
V5P = Chip("v5p", ("TPU v5", "TPU v5p"), 1, 96 * _GIB, 2765e9, 459e12, 1200e9, 6, _wraps_in_cubes)
V6E = Chip("v6e", ("TPU v6 lite", "TPU v6e"), 1, 32 * _GIB, 1638e9, 918e12, 800e9, 4, _wraps_at_16)
TPU7X = Chip("tpu7x", ("TPU7x",), 2, 192 * _GIB, 7380e9, 2307e12, 1200e9, 6, _wraps_in_cubes)
CHIPS = (V5E, V5P, V6E, TPU7X)


@dataclass(frozen=True)
class Slice:
    """Chips that are rented together."""

    name: str
    chip: Chip
    dims: tuple[int, ...]  # chips along x, y (and z)

    @property
    def num_chips(self) -> int:
        return math.prod(self.dims)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices

    @property
    def num_hosts(self) -> int:
        return max(1, self.num_chips // _CHIPS_PER_HOST)

    @property
    def wraps(self) -> tuple[bool, ...]:
        return self.chip.wraps(self.dims)

    @property
    def topology(self) -> str:
        """libtpu's name. It accepts shapes that nobody sells, so it is only ever taken from this table."""
        return f"{self.chip.name}:{'x'.join(map(str, self.dims))}"


_2D = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
_3D = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16),
    (16, 16, 16), (16, 16, 24),
)  # fmt: skip


def _sold() -> list[Slice]:
    slices = [Slice(f"v6e-{chips}", V6E, dims) for chips, dims in _2D.items()]
    slices += [Slice(f"v5litepod-{chips}", V5E, dims) for chips, dims in _2D.items()]
    # These two are numbered by TensorCores, of which their chips have two.
    slices += [Slice(f"v5p-{2 * math.prod(dims)}", V5P, dims) for dims in _3D]
    return slices + [Slice(f"tpu7x-{2 * math.prod(dims)}", TPU7X, dims) for dims in _3D]


SLICES = {one.name: one for one in _sold()}


def find_slice(name: str) -> Slice:
    """The slice of that name; v5e-16 is v5litepod-16. Raises ConfigError with the names there are."""
    known = name.replace("v5e-", "v5litepod-")
    if known in SLICES:
        return SLICES[known]
    near = _nearest_slice(known)
    hint = f"did you mean {near}? " if near else ""
    families = dict.fromkeys(_family(one) for one in SLICES)
    sizes = "; ".join(
        f"{family}-{', '.join(one.rpartition('-')[2] for one in SLICES if _family(one) == family)}"
        for family in families
    )
    raise ConfigError(f"compile_topology={name} is no slice that is sold; {hint}there are {sizes}; and {CPU}")


def _family(name: str) -> str:
    return name.rpartition("-")[0]


def _nearest_slice(name: str) -> str | None:
    """By libtpu's name, by the number of chips within a family, or by spelling."""
    for one in SLICES.values():
        if one.topology == name:
            return one.name
    family, _, size = name.rpartition("-")
    of_family = [one for one in SLICES if _family(one) == family]
    if of_family and size.isdecimal():
        return min(of_family, key=lambda one: abs(int(one.rpartition("-")[2]) - int(size)))
    return nearest(name, [*SLICES, CPU])


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a JAX device; None where the table does not have it."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)
