"""Which dims of a torus the mesh axes get."""

import itertools
import math

import pytest

from trainer.errors import ConfigError
from trainer.topology import SLICES, find_slice
from trainer.torus import BY_WEIGHT, Torus, assign, torus


def on(name: str) -> Torus:
    one = find_slice(name)
    return torus(one.dims, one.wraps, one.chip.devices)


def degrees(data: int = 1, fsdp: int = 1, expert: int = 1, tensor: int = 1) -> dict[str, int]:
    return {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}


@pytest.mark.parametrize("name", [name for name, one in SLICES.items() if one.num_devices <= 256])
def test_every_mesh_has_a_place_where_dims_may_be_shared(name):
    size = on(name).size
    powers = [2**i for i in range(size.bit_length())]
    for expert, tensor in itertools.product(powers, powers):
        if size % (expert * tensor) == 0:
            asked = degrees(fsdp=size // (expert * tensor), expert=expert, tensor=tensor)
            found = assign(asked, on(name), split=True)
            assert {axis: math.prod(found.parts[axis]) for axis in BY_WEIGHT} == asked
            for i, dim in enumerate(on(name).dims):
                assert math.prod(found.parts[axis][i] for axis in BY_WEIGHT) == dim.size


def test_the_heavier_axis_gets_the_ring():
    for heavy, light in itertools.combinations(BY_WEIGHT, 2):
        found = assign(degrees(**{heavy: 8, light: 16}), on("v6e-128"), split=False)
        assert (found.closes_ring(heavy), found.closes_ring(light)) == (False, True)  # nothing else is whole
        found = assign(degrees(**{heavy: 4, light: 4}), torus((4, 4), (False, True), 1), split=False)
        assert (found.closes_ring(heavy), found.closes_ring(light)) == (True, False)


def test_sharing_dims_closes_a_ring_only_where_it_helps():
    assert assign(degrees(expert=16, tensor=8), on("v6e-128"), split=True).parts["tensor"] == (4, 2)
    assert assign(degrees(expert=8, tensor=16), on("v6e-128"), split=True).parts["tensor"] == (1, 16)


def test_an_axis_between_others_devices_is_no_ring():
    found = assign(degrees(expert=2, tensor=64), on("v6e-128"), split=True)
    assert not found.contiguous("expert") and not found.closes_ring("expert")


def test_cores_go_to_the_heaviest_axis():
    found = assign(degrees(expert=4, tensor=2), on("tpu7x-8"), split=False)
    assert [dim.name for dim, part in zip(found.torus.dims, found.parts["tensor"], strict=True) if part > 1] == ["core"]


def test_the_refusal_names_what_works():
    with pytest.raises(ConfigError) as error:
        assign(degrees(fsdp=2, expert=16, tensor=4), on("v6e-128"), split=False)
    assert str(error.value) == (
        "ici_fsdp_parallelism=2 x ici_expert_parallelism=16 x ici_tensor_parallelism=4 does not lie on whole axes of "
        "the slice's torus, 8x16: degrees that do are 1, 8, 16, 128, each axis of the torus used once; or set "
        "allow_split_physical_axes=true, and several mesh axes share one of the torus's"
    )
