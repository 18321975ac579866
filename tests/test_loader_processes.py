"""What several processes read for the same steps, put together."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.data.stream import FIELDS
from trainer.devices import COORDINATOR, NUM_PROCESSES, PROCESS_ID

ROOT = Path(__file__).parents[1]
STEPS = (0, 1, 7)
SHAPE = (2, 4, 32)  # A, B, S

# Saves each part of a batch that this process' devices hold, and where in the batch it stands.
READ = """
import json, os, sys
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from runs import MODEL, tiny_config
from trainer.data.loader import Loader
from trainer.data.stream import open_stream
from trainer.devices import find_devices
from trainer.mesh import make_mesh
from trainer.parallel import batch_shape, resolve_degrees

folder, out, steps = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
config = tiny_config(
    folder, num_cpu_devices=8, per_device_batch_size=0.5, gradient_accumulation_steps=2,
    ici_fsdp_parallelism=2, ici_expert_parallelism=2, ici_tensor_parallelism=2, seed=5,
    dataset_type="text", dataset_path={folder + "/a.jsonl": 0.5, folder + "/b.jsonl": 0.5},
    model=MODEL | {"vocab_size": 264},
)
degrees = resolve_degrees(config)
mesh = make_mesh(degrees, find_devices(config, print))
sharding = NamedSharding(mesh, P(None, ("data", "fsdp", "expert"), "tensor"))
loader = Loader(open_stream(config), batch_shape(config, degrees), sharding)
parts = {}
for step in steps:
    for field, array in loader.batch(step).items():
        for shard in array.addressable_shards:
            place = [list(part.indices(size)[:2]) for part, size in zip(shard.index, array.shape)]
            parts[json.dumps([step, field, place])] = np.asarray(shard.data)
loader.close()
np.savez(out, **parts)
"""


def write_documents(path, first, count):
    rng = np.random.default_rng(first)
    texts = ("".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(3, 50, count))
    path.write_text("".join(json.dumps({"text": f"{first + i} {text}"}) + "\n" for i, text in enumerate(texts)))


def batches(folder, count):
    """{(step, field): int32 [A, B, S]} as `count` processes hold it together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    outs = [folder / f"{count}-{index}.npz" for index in range(count)]
    processes = []
    for index, out in enumerate(outs):
        environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
        environ.pop("XLA_FLAGS", None)
        environ |= {COORDINATOR: address, NUM_PROCESSES: str(count), PROCESS_ID: str(index)}
        command = [sys.executable, "-c", READ, str(folder), str(out), json.dumps(STEPS)]
        processes.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
    finally:
        for process in processes:
            process.kill()
    whole = {(step, field): np.full(SHAPE, -1, np.int32) for step in STEPS for field in FIELDS}
    filled = {key: np.zeros(SHAPE, np.int64) for key in whole}
    for out in outs:
        with np.load(out) as parts:
            for name, part in parts.items():
                step, field, place = json.loads(name)
                index = tuple(slice(*bounds) for bounds in place)
                whole[step, field][index] = part
                filled[step, field][index] += 1
    assert all((count == 1).all() for count in filled.values())
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder / "a.jsonl", 0, 300)
    write_documents(folder / "b.jsonl", 1000, 200)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return batches(folder, 1)


@pytest.mark.parametrize("count", [2, 4])
def test_the_batch_of_a_step_is_the_same_for_any_number_of_processes(folder, alone, count):
    assert (alone[0, "segment_ids"] > 1).any() and (alone[0, "tokens"] != alone[7, "tokens"]).any()
    together = batches(folder, count)
    for key, batch in alone.items():
        np.testing.assert_array_equal(together[key], batch, err_msg=str(key))
