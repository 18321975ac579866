"""Weights from Hugging Face folders and back, quantised ones, and adapters, against few independent lines."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from safetensors.numpy import load_file, save, save_file

from sharded import mesh_of
from steps import config_of
from test_hf import TINY, equal, program
from trainer.convert import from_hf as from_hf_module
from trainer.convert.adapter import folded, merge
from trainer.convert.command import convert
from trainer.convert.from_hf import from_hf
from trainer.convert.to_hf import of_model_folder, to_hf
from trainer.errors import ConfigError, RunError
from trainer.hf import arrays as arrays_module
from trainer.hf.files import TensorFiles
from trainer.hf.load import load
from trainer.hf.names import leaves, release_name
from trainer.hf.peft import CONFIG, TENSORS, Adapter, adapted_leaves, of_arrays, read_adapter
from trainer.hf.peft import save as save_adapter
from trainer.hf.quantized import fp4, fp8
from trainer.models.config import ADAPTER_LETTERS
from trainer.models.deepseek_v4 import DeepSeekV4
from trainer.models.lora import is_adapted
from trainer.params import abstract, initialize
from trainer.state import first_adapters
from trainer.step import build_program, lora_of

SILENT = lambda _: None  # noqa: E731


@pytest.fixture
def converted(tmp_path):
    from_hf(str(TINY), str(tmp_path / "arrays"), (), SILENT)
    return tmp_path / "arrays"


def tensors_of(folder):
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def test_there_and_back_is_bit_equal(converted, tmp_path):
    to_hf(str(converted), str(tmp_path / "back"), SILENT)
    first, second = tensors_of(TINY), tensors_of(tmp_path / "back")
    assert first.keys() == second.keys()
    assert all(first[n].dtype == second[n].dtype and np.array_equal(first[n], second[n]) for n in first)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((TINY / "config.json").read_text())


def test_every_mesh_loads_the_arrays(converted):
    assert equal(load(str(TINY), program()), load(str(converted), program(fsdp=2, expert=2, tensor=2)))


def test_orbax_restores_the_arrays(converted):
    p = program()
    wanted = abstract(DeepSeekV4.spec(p.model), p.layout, mesh_of(), p.weight_dtype)
    with ocp.StandardCheckpointer() as checkpointer:
        assert equal(checkpointer.restore((converted / "weights").absolute(), wanted), load(str(TINY), p))


def test_a_stopped_conversion_goes_on(tmp_path, monkeypatch):
    target, copied, copy = tmp_path / "arrays", [], from_hf_module.copy_part

    def full_disk(part, *rest):
        copied.append(part.group)
        if len(copied) == 40:
            raise OSError(28, "No space left on device")
        return copy(part, *rest)

    monkeypatch.setattr(from_hf_module, "copy_part", full_disk)
    with pytest.raises(RunError, match="No space left on device; the same command goes on"):
        from_hf(str(TINY), str(target), (), SILENT)
    assert not (target / "config.json").exists()
    with pytest.raises(ConfigError, match="its conversion is not finished"):
        load(str(target), program())
    first = len(copied)
    from_hf(str(TINY), str(target), (), SILENT)
    assert 0 < len(copied) - first < len(set(copied)) * 8
    assert equal(load(str(TINY), program()), load(str(target), program()))
    with pytest.raises(ConfigError, match="is there already"):
        from_hf(str(TINY), str(target), (), SILENT)


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def quantise(w, packed, float_scales):
    """Some elements and scales of w's shape, and the numbers they stand for, element by element."""
    rng = np.random.default_rng(w.size)
    rows, columns = w.shape
    size = (rows, -(-columns // 32)) if packed else (-(-rows // 128), -(-columns // 128))
    power = rng.integers(120, 130, size).astype(np.uint8)
    scale = np.float32(2.0) ** (power.astype(np.int32) - 127)
    if float_scales:
        scale = rng.random(size).astype(np.float32)
    if packed:
        nibbles = rng.integers(0, 16, w.shape)
        stored = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8).view(np.int8)
        element = lambda i, j: E2M1[nibbles[i, j]] * scale[i, j // 32]  # noqa: E731
    else:
        stored = rng.standard_normal(w.shape).astype(ml_dtypes.float8_e4m3fn)
        element = lambda i, j: np.float32(stored[i, j]) * scale[i // 128, j // 128]  # noqa: E731
    numbers = np.array([[element(i, j) for j in range(columns)] for i in range(rows)], np.float32)
    return stored, scale if float_scales else power.view(ml_dtypes.float8_e8m0fnu), numbers


@pytest.mark.parametrize("float_scales", [False, True])
@pytest.mark.parametrize(("packed", "shape"), [(False, (130, 300)), (True, (3, 96))])
def test_quantised_matrices_are_what_their_formats_define(packed, shape, float_scales):
    stored, scale, numbers = quantise(np.zeros(shape), packed, float_scales)
    assert np.array_equal((fp4 if packed else fp8)(stored, scale), numbers)


def quantised_folder(folder, float_scales, companion):
    """The tiny model with FP4 experts and FP8 attention and shared experts -> (folder, its numbers)."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("golden.npz"))
    numbers, stored = {}, {}
    for name, w in tensors_of(TINY).items():
        packed = ".experts." in name
        attention = release_name(name).rpartition(".attn.")[2] in ("wq_a.weight", "wq_b.weight", "wo_b.weight")
        if not (packed or ".shared_experts." in name or attention):
            numbers[name] = stored[name] = w
            continue
        elements, scale, numbers[name] = quantise(w, packed, float_scales)
        stored[name], stored[name.removesuffix(".weight") + companion] = elements, scale
    write_safetensors(folder / "model.safetensors", stored)
    return folder, numbers


def write_safetensors(path, tensors):
    """By hand: the library's NumPy side does not write every type."""
    kinds = {"float32": "F32", "int64": "I64", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
    header, data = {}, b""
    for name, x in tensors.items():
        raw = x.tobytes()
        header[name] = {"dtype": kinds[x.dtype.name], "shape": x.shape, "data_offsets": [len(data), len(data + raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(("float_scales", "companion"), [(False, ".scale"), (True, ".weight_scale_inv")])
def test_a_quantised_folder_holds_the_numbers_of_its_formats(tmp_path, float_scales, companion):
    folder, numbers = quantised_folder(tmp_path / "quantised", float_scales, companion)
    plain = Path(shutil.copytree(TINY, tmp_path / "plain", ignore=shutil.ignore_patterns("golden.npz")))
    save_file(numbers, plain / "model.safetensors")
    assert equal(load(str(folder), program()), load(str(plain), program()))
    from_hf(str(folder), str(tmp_path / "arrays"), () if not float_scales else ("weight_dtype=float32",), SILENT)
    assert equal(load(str(tmp_path / "arrays"), program()), load(str(plain), program()))


def test_scales_that_are_missing_are_named(tmp_path):
    folder, _ = quantised_folder(tmp_path / "quantised", False, ".other_scale")
    with pytest.raises(ConfigError, match="unexpected: layers.0.attn.wo_b.other_scale"):
        load(str(folder), program())
    with pytest.raises(ConfigError, match=r"no scales lie beside it: layers\.0\.attn\.wo_b\.scale is missing"):
        TensorFiles(epath.Path(folder)).shape("layers.0.attn.wo_b.weight")


def test_a_missing_file_of_the_index_is_named(tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "m"))
    weight_map = {"embed.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="1 of the 1 files .* missing: model-00002-of-00002"):
        load(str(folder), program())


def adapter(rank=2, scale=1.5):
    """Of a grouped, a plain and a shared-expert module of layer 2."""
    rng = np.random.default_rng(1)
    w = {release_name(n): x for n, x in tensors_of(TINY).items()}
    made = {}
    for path, name in (("attention/wo_a", "attn.wo_a"), ("attention/wq_b", "attn.wq_b"),
                       ("moe/shared/gate", "ffn.shared_experts.w1")):  # fmt: skip
        rows, columns = w[f"layers.2.{name}.weight"].shape
        made[2, path] = tuple(rng.standard_normal(size).astype(np.float32) for size in ((rank, columns), (rows, rank)))
    return Adapter(rank, scale, made)


def test_an_adapter_in_peft_form_is_read_as_it_was(tmp_path):
    save_adapter(adapter(), epath.Path(tmp_path), "base", 0.0)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 3.0, False)
    names = set(load_file(tmp_path / TENSORS))
    assert "base_model.model.model.layers.2.self_attn.o_a_proj.lora_A.weight" in names and len(names) == 6
    read = read_adapter(epath.Path(tmp_path))
    assert (read.rank, read.scale) == (2, 1.5)
    pairs = [(x, y) for key, ab in adapter().matrices.items() for x, y in zip(ab, read.matrices[key], strict=True)]
    assert all(np.array_equal(x, y) for x, y in pairs)


def test_merging_adds_scaled_products(tmp_path):
    save_adapter(adapter(), epath.Path(tmp_path / "peft"), "base", 0.0)
    merge(str(TINY), str(tmp_path / "peft"), str(tmp_path / "merged"), SILENT)
    before, after = tensors_of(TINY), tensors_of(tmp_path / "merged")
    changed = {release_name(n) for n in before if not np.array_equal(before[n], after[n])}
    assert changed == {f"layers.2.{n}.weight" for n in ("attn.wo_a", "attn.wq_b", "ffn.shared_experts.w1")}
    a, b = adapter().matrices[2, "attention/wq_b"]
    name = next(n for n in before if release_name(n) == "layers.2.attn.wq_b.weight")
    assert np.allclose(after[name], before[name] + 1.5 * b @ a, atol=1e-6)


def test_another_models_adapter_is_refused(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    (tmp_path / TENSORS).write_bytes(save({"base_model.model.model.layers.0.mlp.up.lora_A.weight": np.zeros((2, 2))}))
    with pytest.raises(ConfigError, match="belongs to no module"):
        merge(str(TINY), str(tmp_path), str(tmp_path / "out"), SILENT)


def test_a_runs_adapter_adds_to_the_published_tensors_what_it_adds_to_the_weights():
    config = replace(config_of("lora_rank=2", "lora_alpha=6"), model=program().model)
    p, c = program(), config.model
    drawn = initialize(DeepSeekV4.spec(c, lora_of(config)), p.layout, mesh_of(), np.float32, 3)
    nodes, _ = jax.tree_util.tree_flatten_with_path(drawn, is_leaf=is_adapted)
    rng, arrays, products = np.random.default_rng(0), {}, {}
    for path, node in nodes:
        if not is_adapted(node):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        a, b = np.asarray(node.a), rng.standard_normal(node.b.shape).astype(np.float32)
        arrays[f"{name}/a"], arrays[f"{name}/b"] = a, b
        within = name.split("/", 3)[-1]
        if within == "attention/wo_a":  # head h is head h % (H / G) of group h // (H / G)
            per_group = c.num_query_heads // c.o_groups
            heads = [
                np.einsum("zcr,zro->zco", a[:, h % per_group], b[:, h // per_group]) for h in range(c.num_query_heads)
            ]
            products[name] = 3 * np.stack(heads, axis=1)
        else:
            weight, of_a, of_b = ADAPTER_LETTERS[within]
            products[name] = 3 * np.einsum(f"z{of_a},z{of_b}->z{weight}", a, b)
    adapted = of_arrays(config, lambda path: arrays[path])
    tensors, _ = of_model_folder(epath.Path(TINY))
    after = {(t.layer, t.path): folded(t, adapted).read() for t in tensors}
    before = {(t.layer, t.path): t.read() for t in tensors}
    checked = 0
    for leaf in leaves(c, DeepSeekV4.spec(c)):
        for at, layer in enumerate(leaf.layers if leaf.path in products else ()):
            key = layer, leaf.path.split("/", 3)[-1]
            to_part = leaf.source.conversion.to_part
            assert np.allclose(to_part(c, after[key]) - to_part(c, before[key]), products[leaf.path][at], atol=1e-5)
            checked += 1
    assert checked == 8 * c.num_layers


@pytest.mark.parametrize(
    ("form", "arguments", "message"),
    [
        ("from-hff", ["a", "b"], "did you mean from-hf"),
        ("merge", ["a", "b"], "convert merge needs DEST"),
        ("to-hf", ["a", "b", "x=1"], "does not take 'x=1'"),
        ("from-hf", [str(TINY), "b", "steps=3"], "steps is not a checkpoint's"),
        ("from-hf", ["/nowhere", "b"], "config.json: no such file"),
        ("to-hf", ["/nowhere", "b"], "neither a run"),
    ],
)
def test_a_command_that_is_wrong_says_how(form, arguments, message):
    with pytest.raises(ConfigError, match=message):
        convert(form, arguments, SILENT)


def lora_config(*more):
    targets = "lora_targets=[attention/wo_a,attention/wq_b,moe/shared/*]"
    config = config_of("lora_rank=2", "lora_alpha=3", targets, *more)
    return replace(config, model=program().model)


def exported(folder):
    """An adapter of all that `lora_config` trains, saved as PEFT has it -> its arrays by path in the tree."""
    config, rng = lora_config(), np.random.default_rng(2)
    spec = DeepSeekV4.spec(config.model, lora_of(config))
    nodes = adapted_leaves(spec, config.model)
    arrays = {
        f"{path}/{side}": rng.standard_normal(getattr(node, side).shape).astype(np.float32)
        for path, _, _, node in nodes
        for side in "ab"
    }
    save_adapter(of_arrays(config, arrays.__getitem__), epath.Path(folder), "base", 0.0)
    return arrays


def test_a_run_starts_from_a_peft_adapter(tmp_path):
    arrays = exported(tmp_path)
    config = lora_config(f"init_adapter_path={tmp_path}", "num_cpu_devices=4", "ici_tensor_parallelism=4")
    with jax.set_mesh(mesh_of(tensor=4)):
        first = first_adapters(build_program(config, mesh_of(tensor=4)), config)
    found = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree.leaves_with_path(first)}
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora_rank=4", "has rank 2 and alpha 3; set lora_rank=2 lora_alpha=3"),
        ("lora_alpha=4", "has rank 2 and alpha 3"),
        ("lora_targets=[attention/wo_a,moe/shared/*]", "also has 6 modules"),
        ("lora_targets=[attention/w*,moe/shared/*]", "lacks 18 modules"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(tmp_path, override, message):
    exported(tmp_path)
    config = lora_config(f"init_adapter_path={tmp_path}", override)
    with pytest.raises(ConfigError, match=message):
        first_adapters(build_program(config, mesh_of()), config)


def test_large_tables_go_by_blocks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays_module, "BLOCK_NUMBERS", 100 * 64)  # 256 rows of 64: two whole blocks and a rest
    from_hf(str(TINY), str(tmp_path / "arrays"), (), SILENT)
    assert json.loads((tmp_path / "arrays/weights/head/.zarray").read_text())["chunks"] == [64, 100]
    assert equal(load(str(TINY), program()), load(str(tmp_path / "arrays"), program()))
