"""The device mesh: axes (data, fsdp, expert, tensor), always all four, a size of 1 where unused.

On a TPU slice the axes are laid on its torus knowingly (see `trainer.torus`), and `placement` says where they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from trainer.errors import ConfigError
from trainer.parallel import Degrees
from trainer.sharding import AXES, DATA
from trainer.topology import chip_of
from trainer.torus import BY_WEIGHT, Assignment, Dim, Torus, assign, torus


@dataclass(frozen=True)
class AxisPlacement:
    """Where one mesh axis lies."""

    axis: str
    degree: int
    slices: int  # that it spans; only `data` spans several
    parts: tuple[tuple[str, int, int, bool], ...]  # (physical axis, devices taken of it, its size, whether it wraps)
    closes_ring: bool  # its devices, in order, are neighbours, the last and the first as well

    def __str__(self) -> str:
        text = f"{self.axis}={self.degree} "
        if self.slices > 1:
            text += f"over {self.slices} slices (data-centre network)" + (" and " if self.parts else "")
        if not self.parts:
            return text.strip()
        whole = all(taken == size for _, taken, size, _ in self.parts)
        dims = [
            str(Dim(name, size, wraps)) if whole else f"{name} ({n} of {size})" for name, n, size, wraps in self.parts
        ]
        obvious = self.degree == 2 or (whole and all(wraps for *_, wraps in self.parts))
        return f"{text}along {' and '.join(dims)}{', closing a ring' if self.closes_ring and not obvious else ''}"


@dataclass(frozen=True)
class Placement:
    """Where the mesh lies. No axes and no torus where devices have no place in one: CPUs, GPUs, single devices."""

    devices: str  # such as "TPU v6 lite"
    torus: Torus | None
    axes: tuple[AxisPlacement, ...]  # those larger than 1

    def __str__(self) -> str:
        if self.torus is None:
            return f"{self.devices}: no torus"
        return f"torus {self.torus}: " + " · ".join(map(str, self.axes))


def make_mesh(degrees: Degrees, devices: Sequence[Any] | None = None, *, split_physical_axes: bool = False) -> Mesh:
    """The mesh on real or a topology's devices. Raises ConfigError where the degrees don't fit the slice's torus."""
    array = lay_out(degrees, jax.devices() if devices is None else devices, split_physical_axes=split_physical_axes)
    return Mesh(array, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def lay_out(degrees: Degrees, devices: Sequence[Any], *, split_physical_axes: bool = False) -> np.ndarray:
    """Devices as an array over AXES. Several slices lie along `data`; where there is no torus, order is kept."""
    sizes = {axis: getattr(degrees, axis) for axis in AXES}
    shape = tuple(sizes.values())
    slices = _by_slice(devices)
    on = torus_of(slices[0])
    if on is None:
        return _array(devices[: degrees.product]).reshape(shape)
    if degrees.product != len(devices) or degrees.data % len(slices):
        raise ConfigError(
            f"{len(devices)} devices in {len(slices)} slices don't make a mesh of {degrees.product} with "
            f"dcn_data_parallelism={degrees.data}; it has to be a multiple of the number of slices"
        )
    sizes[DATA] = degrees.data // len(slices)
    assignment = assign(sizes, on, split_physical_axes)
    return np.concatenate([_place(assignment, _grid(part, on), tuple(sizes.values())) for part in slices])


def placement(mesh: Mesh) -> Placement:
    return placement_of(mesh.devices)


def placement_of(array: np.ndarray) -> Placement:
    """Where each axis of an array of devices over AXES lies, read off the devices' own coordinates."""
    slices = _by_slice(array.flat)
    kind, on = array.flat[0].device_kind, torus_of(slices[0])
    if on is None:
        return Placement(kind, None, ())
    coordinates = np.array([_coordinates(device, on) for device in array.flat]).reshape(*array.shape, -1)
    per_slice = coordinates[: array.shape[0] // len(slices)]  # data is the outermost axis, and slices lie along it
    axes = []
    for i, axis in enumerate(AXES):
        if array.shape[i] == 1:
            continue
        line = np.moveaxis(per_slice, i, 0).reshape(per_slice.shape[i], -1, len(on.dims))
        taken = [len(np.unique(line[:, 0, dim])) for dim in range(len(on.dims))]
        parts = tuple((dim.name, n, dim.size, dim.wraps) for dim, n in zip(on.dims, taken, strict=True) if n > 1)
        num = len(slices) if axis == DATA else 1
        axes.append(AxisPlacement(axis, array.shape[i], num, parts, bool(parts) and _is_ring(line, on, taken)))
    return Placement(kind, on, tuple(axes))


def _is_ring(line: np.ndarray, on: Torus, taken: Sequence[int]) -> bool:
    """Whether lines of coordinates [n, lines, dims] go from neighbour to neighbour and back to their start."""
    used = [dim for dim, n in zip(on.dims, taken, strict=True) if n > 1]
    if all(dim.wraps for dim in used) and math.prod(dim.size for dim in used) == len(line):
        return True  # whole dims, each a ring of its own
    sizes = np.array([dim.size for dim in on.dims])
    step = np.abs(np.roll(line, -1, axis=0) - line)
    step = np.where([dim.wraps for dim in on.dims], np.minimum(step, sizes - step), step)
    return bool((step.sum(axis=-1) == 1).all())


def torus_of(devices: Sequence[Any]) -> Torus | None:
    """The torus that one slice's devices fill; None for a single device, or where they have no coordinates."""
    chip = chip_of(devices[0].device_kind)
    if chip is None or len(devices) == 1 or getattr(devices[0], "coords", None) is None:
        return None
    coords = np.array([device.coords for device in devices])
    sizes = tuple(int(n) for n in coords.max(axis=0) - coords.min(axis=0) + 1)
    cores = len({device.core_on_chip for device in devices})
    if math.prod(sizes) * cores != len(devices):
        return None  # not a box: some of its devices are left out
    dims = sizes if sizes[2] > 1 or chip.links == 6 else sizes[:2]
    return torus(sizes, chip.wraps(dims), cores)


def platform(mesh: Mesh) -> str:
    """What the mesh's devices are, which may not be what this machine has (a dry run's are not here)."""
    return mesh.devices.flat[0].platform


def _by_slice(devices: Any) -> list[list[Any]]:
    by_slice: dict[int, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return [by_slice[index] for index in sorted(by_slice)]


def _coordinates(device: Any, on: Torus) -> list[int]:
    place = dict(zip("xyz", device.coords, strict=True)) | {"core": device.core_on_chip}
    return [place[dim.name] for dim in on.dims]


def _array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), object)
    array[:] = devices
    return array


def _grid(devices: Sequence[Any], on: Torus) -> np.ndarray:
    """One slice's devices by their coordinates."""
    grid = np.empty([dim.size for dim in on.dims], object)
    coordinates = np.array([_coordinates(device, on) for device in devices])
    grid[tuple((coordinates - coordinates.min(axis=0)).T)] = _array(devices)
    return grid


def _place(assignment: Assignment, grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A slice's devices over AXES. Each dim is cut into one part per mesh axis, the heaviest axis innermost."""
    outer_first = BY_WEIGHT[::-1]
    cut = [assignment.parts[axis][dim] for dim in range(grid.ndim) for axis in outer_first]
    order = [dim * len(AXES) + outer_first.index(axis) for axis in AXES for dim in range(grid.ndim)]
    parts = grid.reshape(cut).transpose(order)  # for each mesh axis, its part of each dim
    array = parts.reshape(shape)
    for i, axis in enumerate(AXES):
        if assignment.walks(axis):
            rows, columns = (assignment.parts[axis][dim] for dim in assignment.block(axis))
            array = array.take(_round(rows, columns), axis=i)
    return array


def _round(rows: int, columns: int) -> np.ndarray:
    """Cells of a grid, numbered by rows, in the order of a closed walk from neighbour to neighbour.

    Down the first column at the end; before that, from the top, forth and back over the others. One side is even.
    """
    cells = np.arange(rows * columns).reshape(rows, columns)
    if rows % 2:
        cells = cells.T
    there = [row[1:] if i % 2 == 0 else row[:0:-1] for i, row in enumerate(cells)]
    return np.concatenate([*there, cells[::-1, 0]])
