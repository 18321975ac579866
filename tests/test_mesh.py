"""Where the mesh lies on a slice: real arrays of devices with coordinates, no libtpu."""

import itertools
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from trainer.errors import ConfigError
from trainer.mesh import lay_out, make_mesh, placement, placement_of
from trainer.parallel import Degrees
from trainer.topology import find_slice


@dataclass(frozen=True)
class Device:
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    device_kind: str


def devices(name: str, num_slices: int = 1, at: tuple[int, int, int] = (0, 0, 0)) -> list[Device]:
    """In no helpful order; the slice's first chip is `at`."""
    one = find_slice(name)
    sizes = [*one.dims, 1][:3]
    found = [
        Device(tuple(c + start for c, start in zip(place, at, strict=True)), core, number, one.chip.kinds[0])
        for number in range(num_slices)
        for place in itertools.product(*map(range, sizes))
        for core in range(one.chip.devices)
    ]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def laid(name: str, *degrees: int, split: bool = False, num_slices: int = 1) -> np.ndarray:
    given = devices(name, num_slices)
    array = lay_out(Degrees(*degrees), given, split_physical_axes=split)
    assert array.shape == degrees
    assert set(array.flat) == set(given)
    return array


def text(*arguments, **options) -> str:
    return str(placement_of(laid(*arguments, **options)))


def test_the_pods_tensor_axis_is_x_and_does_not_wrap():
    array = laid("v6e-128", 1, 1, 16, 8)
    for expert, tensor in itertools.product(range(16), range(8)):
        assert array[0, 0, expert, tensor].coords == (tensor, expert, 0)
    found = {axis.axis: axis for axis in placement_of(array).axes}
    assert found["tensor"].parts == (("x", 8, 8, False),) and not found["tensor"].closes_ring
    assert found["expert"].parts == (("y", 16, 16, True),) and found["expert"].closes_ring
    assert str(placement_of(array)) == "torus 8x16: expert=16 along y (16, wraps) · tensor=8 along x (8, no wrap)"


@pytest.mark.parametrize(
    ("name", "degrees", "expected"),
    [
        ("v6e-128", (1, 1, 8, 16), "torus 8x16: expert=8 along x (8, no wrap) · tensor=16 along y (16, wraps)"),
        ("v6e-128", (1, 1, 128, 1), "torus 8x16: expert=128 along x (8, no wrap) and y (16, wraps)"),
        ("v6e-128", (1, 16, 1, 8), "torus 8x16: fsdp=16 along y (16, wraps) · tensor=8 along x (8, no wrap)"),
        ("v6e-256", (1, 1, 16, 16), "torus 16x16: expert=16 along y (16, wraps) · tensor=16 along x (16, wraps)"),
        ("v6e-256", (1, 1, 256, 1), "torus 16x16: expert=256 along x (16, wraps) and y (16, wraps)"),
        ("v6e-64", (1, 1, 8, 8), "torus 8x8: expert=8 along y (8, no wrap) · tensor=8 along x (8, no wrap)"),
        ("v6e-4", (1, 1, 2, 2), "torus 2x2: expert=2 along y (2) · tensor=2 along x (2)"),
        ("v5p-256", (1, 1, 16, 8), "torus 4x4x8: expert=16 along x (4, wraps) and y (4, wraps) · "
         "tensor=8 along z (8, wraps)"),
        ("tpu7x-8", (1, 1, 4, 2), "torus 2x2 of 2 cores: expert=4 along x (2) and y (2), closing a ring · "
         "tensor=2 along core (2)"),
    ],
)  # fmt: skip
def test_whole_physical_axes(name, degrees, expected):
    assert text(name, *degrees) == expected


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ((1, 1, 16, 8), "expert=16 along x (2 of 8) and y (8 of 16) · tensor=8 along x (4 of 8) and y (2 of 16), "
         "closing a ring"),
        ((1, 1, 32, 4), "expert=32 along x (4 of 8) and y (8 of 16) · tensor=4 along x (2 of 8) and y (2 of 16), "
         "closing a ring"),
        ((1, 1, 4, 32), "expert=4 along y (4 of 16) · tensor=32 along x (8 of 8) and y (4 of 16), closing a ring"),
        ((1, 1, 8, 16), "expert=8 along x (8, no wrap) · tensor=16 along y (16, wraps)"),
    ],
)  # fmt: skip
def test_split_physical_axes(degrees, expected):
    """Also where whole axes would do, if the heaviest axis closes a ring only so."""
    assert text("v6e-128", *degrees, split=True) == f"torus 8x16: {expected}"


@pytest.mark.parametrize(
    ("name", "degrees", "split"),
    [
        ("v6e-128", (1, 1, 16, 8), True),
        ("v6e-128", (1, 1, 4, 32), True),
        ("v6e-256", (1, 2, 16, 8), True),
        ("v6e-4", (1, 1, 1, 4), False),
        ("v6e-8", (1, 1, 1, 8), False),
        ("v6e-16", (1, 1, 1, 16), False),
    ],
)
def test_a_ring_goes_from_neighbour_to_neighbour_and_back(name, degrees, split):
    array = laid(name, *degrees, split=split)
    assert placement_of(array).axes[-1].closes_ring
    for line in array.reshape(-1, degrees[-1]):
        for one, following in zip(line, np.roll(line, -1), strict=True):
            assert sum(abs(a - b) for a, b in zip(one.coords, following.coords, strict=True)) == 1


@pytest.mark.parametrize("degrees", [(1, 1, 32, 4), (1, 1, 4, 32), (1, 2, 8, 8)])
def test_sharing_a_physical_axis_has_to_be_allowed(degrees):
    with pytest.raises(ConfigError, match=r"torus, 8x16.* allow_split_physical_axes=true"):
        laid("v6e-128", *degrees)
    laid("v6e-128", *degrees, split=True)


def test_slices_lie_along_data():
    array = laid("v6e-128", 2, 1, 16, 8, num_slices=2)
    assert [{device.slice_index for device in part.flat} for part in array] == [{0}, {1}]
    assert [device.coords for device in array[0].flat] == [device.coords for device in array[1].flat]
    assert "data=2 over 2 slices (data-centre network) · expert=16 along y" in str(placement_of(array))
    array = laid("v6e-128", 4, 1, 4, 16, num_slices=2, split=True)
    assert [{device.slice_index for device in part.flat} for part in array] == [{0}, {0}, {1}, {1}]
    with pytest.raises(
        ConfigError, match="256 devices in 2 slices don't make a mesh of 256 with dcn_data_parallelism=1"
    ):
        laid("v6e-128", 1, 2, 16, 8, num_slices=2)


def test_a_slice_may_start_anywhere_in_its_pod():
    moved = lay_out(Degrees(1, 1, 4, 8), devices("v6e-32", at=(8, 4, 0)))
    assert str(placement_of(moved)) == text("v6e-32", 1, 1, 4, 8)


def test_a_ring_that_is_broken_is_not_called_one():
    array = laid("v6e-128", 1, 1, 16, 8)
    assert not placement_of(array[:, :, ::-1, [1, 0, *range(2, 8)]]).axes[1].closes_ring
    swapped = array[:, :, [1, 0, *range(2, 16)]]  # a whole axis that wraps is a ring in any order of its devices
    assert placement_of(swapped).axes[0].closes_ring


def test_devices_without_a_torus_keep_their_order():
    mesh = make_mesh(Degrees(1, 2, 2, 2))
    assert list(mesh.devices.flat) == jax.devices()
    assert (str(placement(mesh)), placement(mesh).axes) == ("cpu: no torus", ())
    assert make_mesh(Degrees(1, 1, 2, 1)).size == 2
    [single] = devices("v6e-1")
    assert placement_of(lay_out(Degrees(1, 1, 1, 1), [single])).torus is None


def test_a_slice_with_devices_missing_is_no_torus():
    assert placement_of(lay_out(Degrees(1, 1, 3, 1), devices("v6e-4")[:3])).torus is None
