"""Numbers of an independent implementation (Hugging Face transformers), for two models, on meshes of every kind."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from trainer import verify as verify_module
from trainer.errors import ConfigError
from trainer.verify import TOLERANCE, closeness, difference, differences, read_golden, verify, verify_config

TINY = Path("tests/data/deepseek_v4_tiny")
ODD = Path("tests/data/deepseek_v4_odd")  # other stream and head counts, no multiple of a ratio long

ON = {
    "1": [],
    "expert 4 x tensor 2": ["num_cpu_devices=8", "ici_expert_parallelism=4", "ici_tensor_parallelism=2"],
    "all, experts by width, rounds, repeat": [
        "num_cpu_devices=8", "ici_fsdp_parallelism=2", "ici_expert_parallelism=2", "ici_tensor_parallelism=2",
        "moe_expert_axes=[expert]", "moe_capacity_factor=0.5", "moe_permute=repeat", "remat_policy=full",
    ],
}  # fmt: skip


def compare(folder, overrides):
    golden = read_golden(folder / "golden.npz")
    config = verify_config(folder, golden["input_ids"], overrides)
    return differences(config, folder, golden)[0]


@pytest.fixture(autouse=True)
def devices_of_the_suite(monkeypatch):
    make = verify_module.make_mesh
    monkeypatch.setattr(verify_module, "make_mesh", lambda d: make(d, jax.devices()[: d.product]))


@pytest.mark.parametrize("mesh", list(ON)[1:])
def test_the_tiny_model_is_golden(mesh):
    found = compare(TINY, ON[mesh])
    assert max(found.values()) < TOLERANCE
    assert {"logits", "loss", "last_hidden", "L5.streams_out"} <= found.keys()
    gradients = {name.split("/", 1)[1] for name in found if name.startswith("grad/")}
    assert len(gradients) > 90 and any("indexer" not in name and "compressor" in name for name in gradients)


@pytest.mark.parametrize("attention", ["chunked", "dynamic_splash"])
def test_every_form_of_attention_is_golden(attention, monkeypatch):
    from trainer.ops import attend

    monkeypatch.setattr(attend, "CHUNK_QUERIES", 48)
    assert (
        max(compare(ODD, [f"attention={attention}", "ici_tensor_parallelism=2", "num_cpu_devices=2"]).values())
        < TOLERANCE
    )


def test_the_command_prints_the_worst_and_one_line_of_json(monkeypatch):
    monkeypatch.setattr(verify_module, "find_devices", lambda *_, **__: None)
    monkeypatch.setattr(verify_module, "differences", lambda *_: ({"logits": 1e-6, "loss": float("inf")}, {}))
    lines: list[str] = []
    assert verify(str(TINY), str(TINY / "golden.npz"), [], lines.append) == 1
    assert json.loads(lines[-1]) == {"ok": False, "max_rel": {"logits": 1e-6, "loss": None}}
    assert "loss" in lines[1]


def test_a_difference_is_relative_to_the_arrays_scale_and_infinite_where_there_is_none():
    golden = np.array([0.0, 100.0])
    assert difference(golden + [1.0, 0.0], golden) == pytest.approx(0.01)
    assert difference(np.array([np.nan, 100.0]), golden) == np.inf
    assert difference(np.zeros(3), golden) == np.inf


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_what_is_no_golden_file_is_refused(tmp_path, content):
    path = tmp_path / "golden.npz"
    if content is None:
        np.savez(path, logits=np.zeros(3))
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"golden\.npz"):
        read_golden(path)


def test_closeness_is_the_divergence_of_next_token_distributions():
    p, q = np.array([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]]), np.array([[[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]]])
    found = closeness(np.log(q) + 5, np.log(p) - 7)  # logits have no scale of their own
    assert found["kl"] == pytest.approx(np.sum(p * np.log(p / q)) / 2)
    assert found["top1"] == 0.5
    assert closeness(np.log(p), np.log(p)) == {"kl": pytest.approx(0, abs=1e-12), "top1": 1.0}
