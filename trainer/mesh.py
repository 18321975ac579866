"""The device mesh: axes (data, fsdp, expert, tensor), always all four, a size of 1 where unused."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from trainer.parallel import Degrees
from trainer.sharding import AXES


def make_mesh(degrees: Degrees, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay the degrees on the devices; JAX places the axes along a TPU slice's rings where it can."""
    shape = (degrees.data, degrees.fsdp, degrees.expert, degrees.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)


def platform(mesh: Mesh) -> str:
    """What the mesh's devices are, which may not be what this machine has (a dry run's are not here)."""
    return mesh.devices.flat[0].platform
