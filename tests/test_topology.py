"""The table of TPU slices, and what `compile_topology` makes of a config before JAX is there."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import load
from trainer.errors import ConfigError
from trainer.parallel import Degrees, resolve_degrees
from trainer.topology import CHIPS, SLICES, chip_of, find_slice
from trainer.validate import validate

CONFIGS = Path(__file__).parent.parent / "configs"
FLASH = CONFIGS / "models" / "deepseek_v4_flash.yml"
POD = {
    "max_target_length": "16384",
    "per_device_batch_size": "0.125",
    "ici_expert_parallelism": "16",
    "ici_tensor_parallelism": "8",
    "compile_topology": "v6e-128",
}


def pod(**values: object):
    return load(FLASH, [f"{key}={value}" for key, value in (POD | values).items()]).config


def message(call, *arguments) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "topology", "devices", "hosts", "wraps"),
    [
        ("v6e-1", "v6e:1x1", 1, 1, (False, False)),
        ("v6e-4", "v6e:2x2", 4, 1, (False, False)),
        ("v6e-8", "v6e:2x4", 8, 2, (False, False)),
        ("v6e-64", "v6e:8x8", 64, 16, (False, False)),
        ("v6e-128", "v6e:8x16", 128, 32, (False, True)),
        ("v6e-256", "v6e:16x16", 256, 64, (True, True)),
        ("v5e-128", "v5e:8x16", 128, 32, (False, True)),
        ("v5litepod-128", "v5e:8x16", 128, 32, (False, True)),
        ("v5p-8", "v5p:2x2x1", 4, 1, (False, False, False)),
        ("v5p-64", "v5p:2x4x4", 32, 8, (False, False, False)),
        ("v5p-128", "v5p:4x4x4", 64, 16, (True, True, True)),
        ("v5p-12288", "v5p:16x16x24", 6144, 1536, (True, True, True)),
        ("tpu7x-8", "tpu7x:2x2x1", 8, 1, (False, False, False)),
        ("tpu7x-128", "tpu7x:4x4x4", 128, 16, (True, True, True)),
    ],
)
def test_slices(name, topology, devices, hosts, wraps):
    one = find_slice(name)
    assert (one.topology, one.num_devices, one.num_hosts, one.wraps) == (topology, devices, hosts, wraps)


def test_names_are_numbered_by_chips_or_by_cores():
    for name, one in SLICES.items():
        cores = 2 if one.chip.name in ("v5p", "tpu7x") else 1
        assert int(name.rpartition("-")[2]) == one.num_chips * cores


def test_chips_by_the_kinds_that_jax_names():
    assert [chip_of(kind).name for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")] == [c.name for c in CHIPS]
    assert chip_of("cpu") is None


def test_a_link_is_one_direction_of_one_port():
    assert chip_of("TPU v6 lite").link_bytes_per_s == 100e9


@pytest.mark.parametrize(
    ("name", "meant"),
    [("v6e-126", "v6e-128"), ("v6e:8x16", "v6e-128"), ("v6e128", "v6e-128"), ("v5e-100", "v5litepod-128"),
     ("v5p-4", "v5p-8"), ("CPU", "cpu"), ("tpu7x-7", "tpu7x-8")],
)  # fmt: skip
def test_an_unknown_slice_is_refused_with_the_names_and_the_nearest(name, meant):
    text = message(find_slice, name)
    assert f"compile_topology={name} is no slice that is sold; did you mean {meant}? there are v6e-1, 4, 8, 16," in text
    assert text.endswith("; and cpu")


def test_a_shape_that_libtpu_takes_and_nobody_sells_is_refused():
    assert "is no slice that is sold" in message(find_slice, "v6e:16x8")


# The config.


def test_the_mesh_has_to_be_the_slices_size():
    validate(pod())
    assert message(validate, pod(compile_topology="v6e-64")) == (
        "the mesh and the devices differ in number: dcn_data_parallelism=1 x ici_fsdp_parallelism=1 x "
        "ici_expert_parallelism=16 x ici_tensor_parallelism=8; product 128; devices: 64 (compile_topology=v6e-64); "
        "valid: ici_tensor_parallelism=4"
    )


@pytest.mark.parametrize("key", ["ici_fsdp_parallelism", "ici_expert_parallelism", "ici_tensor_parallelism"])
def test_the_rest_is_filled_from_the_slice(key):
    config = pod(**{key: -1})
    validate(config)
    assert resolve_degrees(config) == resolve_degrees(pod())


def test_slices_are_copies_of_the_model():
    assert resolve_degrees(pod(dcn_data_parallelism=2)) == Degrees(data=2, fsdp=1, expert=16, tensor=8)


def test_other_devices_than_the_slices_are_refused():
    validate(pod(), 128)
    validate(pod(dcn_data_parallelism=2), 256)
    assert message(validate, pod(), 64) == (
        "compile_topology=v6e-128 x dcn_data_parallelism=1 is 128 devices, and this run has 64; name what it runs on, "
        "or leave compile_topology empty"
    )


def test_on_the_cpu_only_the_name_counts():
    cpu = {"hardware": "cpu", "ici_expert_parallelism": 1, "ici_tensor_parallelism": 1, "per_device_batch_size": 1}
    validate(pod(**cpu))
    assert "did you mean v6e-128" in message(validate, pod(**cpu, compile_topology="v6e-127"))
    validate(pod(**cpu, compile_topology="cpu"))


@pytest.mark.parametrize(("expert", "tensor"), [(16, 8), (8, 16), (128, 1)])
def test_meshes_of_whole_physical_axes(expert, tensor):
    validate(degrees(expert, tensor))


@pytest.mark.parametrize(("expert", "tensor"), [(32, 4), (4, 32)])
def test_meshes_that_split_physical_axes_need_the_switch(expert, tensor):
    text = message(validate, degrees(expert, tensor))
    assert text.startswith(
        f"ici_expert_parallelism={expert} x ici_tensor_parallelism={tensor} does not lie on whole axes of the slice's "
        "torus, 8x16: degrees that do are 1, 8, 16, 128"
    )
    assert "set allow_split_physical_axes=true" in text
    validate(replace(degrees(expert, tensor), allow_split_physical_axes=True))


def degrees(expert: int, tensor: int):
    return pod(ici_expert_parallelism=expert, ici_tensor_parallelism=tensor, per_device_batch_size=1)


# libtpu.

KNOWN = """
import json, sys
from jax.experimental import topologies
for name, topology, chips in json.loads(sys.argv[1]):
    options = {"chips_per_host_bounds": (1, 1, 1)} if chips == 1 else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    sizes = [max(d.coords[i] for d in devices) + 1 for i in range(3)]
    hosts = len({d.process_index for d in devices})
    cores = 1 + max(d.core_on_chip for d in devices)
    print(json.dumps([name, len(devices), hosts, devices[0].device_kind, sizes, cores]))
"""


@pytest.mark.slow
def test_libtpu_knows_every_slice_as_the_table_has_it():
    asked = [[one.name, one.topology, one.num_chips] for one in SLICES.values()]
    environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
                   "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", KNOWN, json.dumps(asked)],
        env=environment, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == len(SLICES)
    for name, devices, hosts, kind, sizes, cores in answers:
        one = SLICES[name]
        assert (devices, hosts, cores) == (one.num_devices, one.num_hosts, one.chip.devices), name
        assert kind in one.chip.kinds, name
        assert sizes == [*one.dims, 1][:3], name
