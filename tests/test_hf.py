"""Hugging Face folders: every spelling of the names is read, and all that does not fit is listed before reading."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sharded import mesh_of
from trainer.config import from_values
from trainer.errors import ConfigError
from trainer.hf.config import model_values
from trainer.hf.load import load
from trainer.hf.names import release_name
from trainer.params import named_leaves
from trainer.step import build_program

TINY = Path("tests/data/deepseek_v4_tiny")


def program(folder=TINY, **mesh):
    degrees = {f"ici_{axis}_parallelism": degree for axis, degree in mesh.items()}
    devices = int(np.prod(list(mesh.values()) or [1]))
    values = {"model": model_values(folder), "hardware": "cpu", "weight_dtype": "float32", "num_cpu_devices": devices}
    return build_program(from_values(values | degrees, (), str(folder)).config, mesh_of(**mesh))


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("golden.npz")))


def change(folder, fn):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    fn(tensors)
    save_file(tensors, path)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_shards_are_those_of_the_whole():
    assert equal(load(str(TINY), program()), load(str(TINY), program(fsdp=2, expert=2, tensor=2)))


def test_the_published_names_are_read_as_well(folder):
    def rename(tensors):
        for name in list(tensors):
            tensors[release_name(name)] = tensors.pop(name)

    change(folder, rename)
    assert equal(load(str(TINY), program()), load(str(folder), program(folder)))


def test_tensors_may_lie_in_several_files(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    assert equal(load(str(TINY), program()), load(str(folder), program(folder)))


def test_tables_stay_integers_whatever_the_weights_are():
    tables = [leaf for name, leaf in named_leaves(load(str(TINY), program())) if name.endswith("tid2eid")]
    assert tables and all(t.dtype == np.int32 for t in tables)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda t: t.pop(next(n for n in t if n.endswith("kv_norm.weight") or "norm" in n)), "missing: "),
        (lambda t: t.update({"model.layers.0.extra.weight": np.zeros(3, np.float32)}), "unexpected: layers.0.extra"),
        (lambda t: t.update({next(n for n in t if release_name(n) == "head.weight"): np.zeros((3, 5), np.float32)}),
         "wrong shape: head.weight"),
    ],
)  # fmt: skip
def test_faults_are_listed(folder, fault, message):
    change(folder, fault)
    with pytest.raises(ConfigError, match=message):
        load(str(folder), program(folder))


def test_a_file_cut_short_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        load(str(folder), program(folder))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("model_type", "deepseek_v3", "not a DeepSeek-V4 config"), ("hidden_size", None, "missing hidden_size"),
     ("num_key_value_heads", 2, "num_key_value_heads=2 is not supported")],
)  # fmt: skip
def test_other_models_are_refused(folder, key, value, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=message):
        model_values(folder)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        model_values(tmp_path)
