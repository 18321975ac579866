"""Checks across keys, without devices. Every refusal names its key, its value and what works."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Config, load, schema
from trainer.errors import ConfigError
from trainer.parallel import AXIS_KEYS
from trainer.validate import RANGE_OF, validate, validate_run

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = CONFIGS / "models" / "deepseek_v4_tiny.yml"
FLASH = CONFIGS / "models" / "deepseek_v4_flash.yml"
POD = ["max_target_length=16384", "per_device_batch_size=0.125", "ici_expert_parallelism=16",
       "ici_tensor_parallelism=8"]  # fmt: skip


def check(path: Path, overrides: list[str], num_devices: int | None = None) -> None:
    validate(load(path, overrides).config, num_devices)


def message(path: Path, overrides: list[str], num_devices: int | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        check(path, overrides, num_devices)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path):
    check(path, [])


def test_the_pod_is_valid():
    check(FLASH, POD, 128)
    check(FLASH, POD)
    check(FLASH, [*POD, "moe_expert_axes=[expert]"], 128)
    check(FLASH, [*POD[:3], "ici_tensor_parallelism=-1"], 128)


def test_the_tiny_model_splits_over_any_mesh_of_8():
    for mesh in itertools.product((1, 2, 4, 8), repeat=4):
        if mesh[0] * mesh[1] * mesh[2] * mesh[3] == 8:
            degrees = [f"{key}={degree}" for key, degree in zip(AXIS_KEYS.values(), mesh, strict=True)]
            for axes in ("[expert,tensor]", "[expert]"):
                check(CONFIGS / "cpu_smoke.yml", ["num_cpu_devices=8", *degrees, f"moe_expert_axes={axes}"])


# Ranges.


def test_every_number_has_a_range():
    numbers = {key for key, item in schema().items() if item.kind in (int, float)}
    assert set(RANGE_OF) == numbers - set(AXIS_KEYS.values())


OUT_OF_RANGE = {
    "at least 0": ["-1"],
    "at least 1": ["0", "-1"],
    "above 0": ["0", "-1"],
    "above 1": ["1", "0"],
    "from 0 to 1": ["-1", "2"],
    "at least 0 and below 1": ["-1", "1"],
    "from 0 to 4294967295": ["-1", "4294967296"],
    "above 0, or -1 for the worst case": ["0", "-2"],
}


@pytest.mark.parametrize(("key", "allowed"), RANGE_OF.items())
def test_ranges(key, allowed):
    for text in OUT_OF_RANGE[allowed]:
        refusal = message(TINY, [f"{key}={text}"])
        assert re.fullmatch(rf"{re.escape(key)}={text}(\.0)? is not possible; it must be {allowed}", refusal)


@pytest.mark.parametrize(
    "override",
    ["steps=0", "seed=4294967295", "moe_capacity_factor=1.5", "warmup_steps_fraction=0", "warmup_steps_fraction=1",
     "adam_b1=0", "gradient_clipping_threshold=0", "model.first_num_hash_layers=0", "model.yarn_factor=1"],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_allowed(override):
    check(TINY, [override])


# The model.


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.compress_ratios=[]"], "model.compress_ratios=[] is not possible"),
        (["model.compress_ratios=[0,-4]"], "model.compress_ratios=[0, -4] is not possible"),
        (["model.num_experts_per_tok=9"], "model.num_experts_per_tok=9 is more than model.num_experts=8; "
         "it must be from 1 to 8"),
        (["model.first_num_hash_layers=7"], "model.first_num_hash_layers=7 is more than the 6 layers"),
        (["model.qk_rope_head_dim=15"], "model.qk_rope_head_dim=15 must be even (channels rotate in pairs), and at "
         "most model.head_dim=32 and model.indexer_head_dim=32; nearest that work: 14 or 16"),
        (["model.qk_rope_head_dim=34"], "nearest that work: 32"),
        (["model.indexer_head_dim=8"], "model.indexer_head_dim=8; nearest that work: 8"),
        (["model.head_dim=8"], "model.head_dim=8 and"),
        (["model.yarn_beta_slow=64"], "model.yarn_beta_fast=32 is below model.yarn_beta_slow=64"),
        (["model.o_groups=3"], "model.num_query_heads=8 is not divisible by model.o_groups=3 (an output group is whole "
         "heads); nearest that work: model.num_query_heads=6 or model.num_query_heads=9, or model.o_groups=2 or "
         "model.o_groups=4"),
    ],
)  # fmt: skip
def test_impossible_models(overrides, expected):
    assert expected in message(TINY, overrides)


def test_rope_may_fill_the_head():
    check(TINY, ["model.qk_rope_head_dim=32"])


# Hardware, axes, data.


def test_num_cpu_devices_is_for_the_cpu():
    assert message(TINY, ["num_cpu_devices=8"]) == (
        "num_cpu_devices=8 needs hardware=cpu, and hardware=tpu; set hardware=cpu, or leave num_cpu_devices at 1"
    )
    check(TINY, ["num_cpu_devices=8", "hardware=cpu", "ici_fsdp_parallelism=8"])
    assert "devices: 8 (num_cpu_devices)" in message(TINY, ["num_cpu_devices=8", "hardware=cpu"], 1)


@pytest.mark.parametrize("axes", ["[tensor,expert]", "[tensor]", "[]", "[expert,expert]"])
def test_expert_axes(axes):
    assert message(TINY, [f"moe_expert_axes={axes}"]).endswith("it must be [expert, tensor] or [expert]")


def test_text_needs_files_and_room_for_bytes():
    assert message(TINY, ["dataset_type=text"]).startswith("dataset_type=text needs dataset_path")
    text = ["dataset_type=text", "dataset_path=x.txt"]
    check(TINY, [*text, "model.vocab_size=257"])
    assert message(TINY, [*text, "model.vocab_size=256"]).startswith("model.vocab_size=256 is too small for tokenizer_")
    check(TINY, [*text, "model.vocab_size=256", "tokenizer_path=t.json"])
    check(TINY, ["model.vocab_size=256"])  # synthetic data has no tokenizer


# The mesh against the shapes.


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["max_target_length=250"], "max_target_length=250 is not divisible by the least common multiple of "
         "model.compress_ratios=16 (sequences split over tensor, into whole compress windows); nearest that work: "
         "max_target_length=240 or max_target_length=256"),
        (["max_target_length=8"], "nearest that work: max_target_length=16"),
        (["ici_tensor_parallelism=4", "max_target_length=96"], "max_target_length=96 is not divisible by "
         "ici_tensor_parallelism x the least common multiple of model.compress_ratios = 4 x 16 = 64 (sequences split "
         "over tensor, into whole compress windows); nearest that work: max_target_length=64 or "
         "max_target_length=128, or ici_tensor_parallelism=2"),
        (["ici_tensor_parallelism=3", "max_target_length=96"], "model.num_query_heads=8 is not divisible by "
         "ici_tensor_parallelism=3 (heads split over tensor); nearest that work: model.num_query_heads=6 or "
         "model.num_query_heads=9, or ici_tensor_parallelism=1"),
        (["ici_tensor_parallelism=4", "model.o_groups=1", "model.o_lora_rank=6"], "model.o_lora_rank=6 is not "
         "divisible by ici_tensor_parallelism=4 (the output projection's ranks split over tensor); nearest that work: "
         "model.o_lora_rank=4 or model.o_lora_rank=8, or ici_tensor_parallelism=2"),
        (["ici_tensor_parallelism=4", "model.vocab_size=322"], "model.vocab_size=322 is not divisible by "
         "ici_tensor_parallelism=4 (the vocabulary splits over tensor); nearest that work: model.vocab_size=320 or "
         "model.vocab_size=324, or ici_tensor_parallelism=2"),
        (["ici_fsdp_parallelism=2", "ici_tensor_parallelism=4", "model.emb_dim=60"], "model.emb_dim=60 is not "
         "divisible by ici_fsdp_parallelism x ici_tensor_parallelism = 2 x 4 = 8 (the embedding's width splits over "
         "fsdp and tensor); nearest that work: model.emb_dim=56 or model.emb_dim=64, or ici_fsdp_parallelism=1, or "
         "ici_tensor_parallelism=2"),
        (["ici_tensor_parallelism=4", "model.moe_mlp_dim=6"], "model.moe_mlp_dim=6 is not divisible by "
         "ici_tensor_parallelism=4 (the shared expert's width splits over tensor)"),
        (["ici_fsdp_parallelism=4", "model.q_lora_rank=6"], "model.q_lora_rank=6 is not divisible by "
         "ici_fsdp_parallelism=4 (the query's rank splits over fsdp); nearest that work: model.q_lora_rank=4 or "
         "model.q_lora_rank=8, or ici_fsdp_parallelism=2"),
        (["ici_fsdp_parallelism=4", "model.o_lora_rank=6"], "model.o_lora_rank=6 is not divisible by "
         "ici_fsdp_parallelism=4 (the output projection's rank splits over fsdp)"),
        (["ici_expert_parallelism=4", "model.num_experts=10"], "model.num_experts=10 is not divisible by "
         "ici_expert_parallelism=4 (with moe_expert_axes=[expert, tensor], experts split over both); nearest that "
         "work: model.num_experts=8 or model.num_experts=12, or ici_expert_parallelism=2"),
        (["ici_expert_parallelism=8", "model.num_experts=4"], "model.num_experts=4 is not divisible by "
         "ici_expert_parallelism=8"),
        (["ici_expert_parallelism=4", "ici_tensor_parallelism=4"], "model.num_experts=8 is not divisible by "
         "ici_expert_parallelism x ici_tensor_parallelism = 4 x 4 = 16 (with moe_expert_axes=[expert, tensor], experts "
         "split over both); nearest that work: moe_expert_axes=[expert], or model.num_experts=16, or "
         "ici_expert_parallelism=2, or ici_tensor_parallelism=2"),
        (["ici_tensor_parallelism=4", "moe_expert_axes=[expert]", "model.moe_mlp_dim=6", "model.shared_experts=2"],
         "model.moe_mlp_dim=6 is not divisible by ici_tensor_parallelism=4 (with moe_expert_axes=[expert], each "
         "expert's width splits over tensor)"),
        (["ici_expert_parallelism=3", "moe_expert_axes=[expert]"], "model.num_experts=8 is not divisible by "
         "ici_expert_parallelism=3 (experts split over expert)"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_divide(overrides, expected):
    devices = 1
    for override in overrides:
        if "_parallelism=" in override:
            devices *= int(override.split("=")[1])
    assert expected in message(TINY, overrides, devices)
    assert expected.split(" (")[0] in message(TINY, overrides)
    if devices > 1:
        assert expected.split(" (")[0] in message(TINY, ["hardware=cpu", f"num_cpu_devices={devices}", *overrides])


def test_products_divide_where_one_factor_does_not():
    check(TINY, ["ici_tensor_parallelism=4", "model.o_groups=2", "model.o_lora_rank=6"])
    check(TINY, ["ici_tensor_parallelism=4", "model.moe_mlp_dim=6", "model.shared_experts=2"])


def test_the_indexer_heads_are_not_split():
    check(TINY, ["ici_tensor_parallelism=4", "model.indexer_n_heads=6"])


def test_without_compression_any_length_that_tensor_divides_will_do():
    check(TINY, ["max_target_length=7", "model.compress_ratios=[0,0,0]"])
    check(TINY, ["max_target_length=12", "model.compress_ratios=[0,0,0]", "ici_tensor_parallelism=4"])


def test_experts_over_expert_only_when_they_do_not_fill_both_axes():
    check(TINY, ["ici_expert_parallelism=4", "ici_tensor_parallelism=4", "moe_expert_axes=[expert]"])
    text = message(TINY, ["ici_expert_parallelism=3", "ici_tensor_parallelism=4"])
    assert "moe_expert_axes=[expert]," not in text.split("nearest that work")[1]  # 3 doesn't divide 8 either


def test_the_suggested_lengths_and_degrees_pass():
    overrides = ["ici_tensor_parallelism=3", "max_target_length=2000"]
    works = message(FLASH, overrides).split("nearest that work: ")[1]
    lengths = re.findall(r"max_target_length=(\d+)", works)
    assert lengths == ["1920", "2304"]
    for length in lengths:
        assert "max_target_length" not in message(FLASH, [overrides[0], f"max_target_length={length}"]).split(" is ")[0]


def test_a_degree_of_minus_one_on_an_unknown_number_of_devices():
    check(FLASH, [*POD[:3], "ici_tensor_parallelism=-1"])
    check(TINY, ["ici_fsdp_parallelism=-1", "per_device_batch_size=0.3"])  # whole on some number of devices
    assert "model.num_query_heads=8 is not divisible by ici_tensor_parallelism=3" in message(
        TINY, ["ici_fsdp_parallelism=-1", "ici_tensor_parallelism=3", "max_target_length=96"]
    )
    assert "only one degree may be -1" in message(TINY, ["ici_fsdp_parallelism=-1", "ici_expert_parallelism=-1"])
    assert "a degree is at least 1" in message(TINY, ["ici_fsdp_parallelism=-1", "ici_expert_parallelism=0"])
    assert "a degree is at least 1" in message(TINY, ["ici_fsdp_parallelism=-1", "ici_expert_parallelism=-2"])


def test_the_batch_is_checked():
    assert "0.3 x 1 = 0.3 is not a whole number" in message(TINY, ["per_device_batch_size=0.3"])
    assert "12 rows don't divide into 16 batch shards" in message(
        FLASH, ["per_device_batch_size=0.09375", *POD[2:]], 128
    )


def test_the_wrong_number_of_devices():
    assert "product 128; devices: 64;" in message(FLASH, POD, 64)


# A run.


def run_named(name: str, **changes: Any) -> Config:
    return replace(load(TINY).config, run_name=name, **changes)


def test_a_run_needs_a_name_that_is_one_folder():
    validate_run(run_named("a-b_1.2"))
    for name in ["", "a/b", "..", ".", "a\\b", "a\0"]:
        with pytest.raises(ConfigError, match="run_name"):
            validate_run(run_named(name))
    with pytest.raises(ConfigError, match="base_output_directory is empty"):
        validate_run(run_named("a", base_output_directory=""))
    check(TINY, ["run_name="])  # looking at a config needs no name
