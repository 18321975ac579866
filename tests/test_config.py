"""Files, overrides, types and origins of the config. Messages are part of the interface, so their text is tested."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import (
    DEFAULT,
    Config,
    Resolved,
    describe,
    documentation,
    from_values,
    load,
    schema,
    to_yaml,
    value_of,
)
from trainer.config_values import PATHS_KEYS, Paths
from trainer.errors import ConfigError
from trainer.models.config import ModelConfig

REPOSITORY = Path(__file__).parent.parent
CONFIGS = REPOSITORY / "configs"
TINY = CONFIGS / "models" / "deepseek_v4_tiny.yml"
FLASH = CONFIGS / "models" / "deepseek_v4_flash.yml"
SMOKE = CONFIGS / "cpu_smoke.yml"

# A new key is a decision: it is added here, documented in the schema, and read somewhere.
KEYS = """
run_name base_output_directory hardware num_cpu_devices seed steps log_period enable_tensorboard
dcn_data_parallelism ici_fsdp_parallelism ici_expert_parallelism ici_tensor_parallelism
allow_split_physical_axes per_device_batch_size max_target_length gradient_accumulation_steps
dtype weight_dtype remat_policy attention moe_permute moe_capacity_factor moe_overflow moe_expert_axes
weight_axes loss_chunk_tokens lora_rank lora_alpha lora_dropout lora_targets lora_weight_dtype init_adapter_path
load_balance_loss_weight routed_bias_update_rate
opt_type learning_rate warmup_steps_fraction cosine_learning_rate_final_fraction
adam_b1 adam_b2 adam_eps adam_weight_decay gradient_clipping_threshold
dataset_type dataset_path train_data_columns train_on on_bad_record long_documents tokenizer_path enable_data_shuffling
eval_interval eval_steps eval_dataset_path
enable_checkpointing checkpoint_period max_num_checkpoints_to_keep async_checkpointing load_parameters_path
compile_topology libtpu_init_args
model.vocab_size model.emb_dim model.compress_ratios model.num_query_heads model.head_dim model.qk_rope_head_dim
model.q_lora_rank model.o_groups model.o_lora_rank model.num_experts model.num_experts_per_tok model.moe_mlp_dim
model.indexer_n_heads model.indexer_head_dim model.indexer_topk model.csa_compress_ratio model.sliding_window_size
model.first_num_hash_layers model.shared_experts model.routed_scaling_factor model.mlp_activations_limit
model.mhc_expansion_rate model.sinkhorn_iterations model.mhc_epsilon model.normalization_layer_epsilon
model.rope_max_timescale model.compressed_rope_max_timescale model.yarn_factor model.yarn_beta_fast
model.yarn_beta_slow model.yarn_original_max_position
""".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder, so that paths in messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
    return path


def message(path: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def tiny(*overrides: str) -> Config:
    return load(TINY, overrides).config


def file_with(line: str) -> str:
    """A file on the tiny model whose line 2 is `line`."""
    return write("run.yml", f"base: {TINY}\n{line}\n")


# The schema.


def test_keys_are_frozen_and_documented():
    assert list(schema()) == KEYS
    assert [row[0] for row in documentation()] == KEYS
    for key, _, _, _, doc in documentation():
        assert doc.endswith((".", ").")) and len(doc) > 10, key


def test_documentation_has_type_default_and_choices():
    rows = {row[0]: row[1:4] for row in documentation()}
    assert rows["hardware"] == ("str", "tpu", "tpu, gpu, cpu")
    assert rows["moe_expert_axes"] == ("list of str", "[expert, tensor]", "expert, tensor")
    assert rows["learning_rate"] == ("float", "3.0e-05", "")
    assert rows["model.emb_dim"] == ("int", "", "")
    assert rows["model.compress_ratios"] == ("list of int", "", "")


def test_config_is_frozen():
    config = tiny()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(config.model, ModelConfig)


def test_neither_loading_nor_validating_imports_jax():
    script = (
        "import sys; from trainer.config import load; from trainer.validate import validate;"
        f"validate(load({str(SMOKE)!r}, []).config);"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'tensorstore', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# Text by type, from a file and from the command line.

FLOATS = {
    "1e-4": 1e-4,
    "1E-4": 1e-4,
    "2e-5": 2e-5,
    "5e-5": 5e-5,
    "1e4": 1e4,
    "1e+4": 1e4,
    ".5": 0.5,
    "5.": 5.0,
    "1_000": 1000.0,
    "3": 3.0,
    "-0.0": 0.0,
}
INTS = {"7": 7, "1e4": 10_000, "1e+4": 10_000, "1_000": 1000, "2.0": 2, "1.5e1": 15, "0": 0, "-3": -3}
NOT_FLOATS = ["nan", ".nan", "inf", "-inf", ".inf", "0x10", "010", "1:30", "1e999", "ten", "1,5", "1__0", "true", "''"]
NOT_INTS = ["1e-4", "1.5", "010", "0x10", "0o17", "1:30", "ten", "nan", "1e400", "true", "1_", "''"]


@pytest.mark.parametrize(("text", "value"), FLOATS.items())
def test_floats(folder, text, value):
    in_file, argued = load(file_with(f"learning_rate: {text}")).config, tiny(f"learning_rate={text}")
    assert in_file.learning_rate == argued.learning_rate == value
    assert type(in_file.learning_rate) is type(argued.learning_rate) is float


@pytest.mark.parametrize(("text", "value"), INTS.items())
def test_ints(folder, text, value):
    in_file, argued = load(file_with(f"steps: {text}")).config, tiny(f"steps={text}")
    assert in_file.steps == argued.steps == value
    assert type(in_file.steps) is type(argued.steps) is int


@pytest.mark.parametrize(("key", "text"), [("learning_rate", t) for t in NOT_FLOATS] + [("steps", t) for t in NOT_INTS])
def test_numbers_refused(folder, key, text):
    assert message(file_with(f"{key}: {text}")).startswith(f"run.yml:2: {key} ")
    assert message(TINY, f"{key}={text}").startswith(f"argument {f'{key}={text}'!r}: {key} ")


def test_numbers_refused_say_what_is_wanted():
    assert message(TINY, "steps=ten") == (
        "argument 'steps=ten': steps needs a whole number such as 8 or 1e4, not 'ten'"
    )
    assert message(TINY, "steps=010").endswith("not '010' (a leading zero means octal to some readers; write 10)")
    assert message(TINY, "learning_rate=nan") == (
        "argument 'learning_rate=nan': learning_rate needs a finite number such as 0.5 or 1e-4, not 'nan'"
    )


@pytest.mark.parametrize("text", ["1e-4", "010", "on", "1:30", "7e10", "true", "0x10", "2026-01-01", "1_000", "a b"])
def test_texts_stay_as_written(folder, text):
    assert load(file_with(f"run_name: {text}")).config.run_name == text
    assert tiny(f"run_name={text}").run_name == text


@pytest.mark.parametrize("text", ["null", "~", "", "@a", "%b", "*c", "!d", "?e", "`f", "[a", "k=v", " g ", "#h"])
def test_command_line_texts_need_no_yaml_quotes(text):
    assert tiny(f"run_name={text}").run_name == text


def test_bools(folder):
    for text, value in {"true": True, "False": False, "TRUE": True}.items():
        assert tiny(f"enable_checkpointing={text}").enable_checkpointing is value
        assert load(file_with(f"enable_checkpointing: {text}")).config.enable_checkpointing is value
    for text in ["2", "1", "on", "yes", ""]:
        assert f"enable_checkpointing needs true or false, not {text!r}" in message(
            TINY, f"enable_checkpointing={text}"
        )


def test_choices(folder):
    assert tiny("dtype=float32").dtype == "float32"
    assert message(TINY, "dtype=bf16") == (
        "argument 'dtype=bf16': dtype must be one of bfloat16, float32, not 'bf16'; did you mean bfloat16?"
    )
    assert message(file_with("hardware: TPU")) == (
        "run.yml:2: hardware must be one of tpu, gpu, cpu, not 'TPU'; did you mean tpu?"
    )


def test_lists(folder):
    assert tiny("model.compress_ratios=[0,4,16]").model.compress_ratios == [0, 4, 16]
    assert tiny("model.compress_ratios=[]").model.compress_ratios == []
    assert tiny("moe_expert_axes=expert").moe_expert_axes == ["expert"]
    assert tiny("moe_expert_axes=[ expert , tensor ]").moe_expert_axes == ["expert", "tensor"]
    assert load(file_with("moe_expert_axes: expert")).config.moe_expert_axes == ["expert"]
    paths = tiny("""dataset_path=["/[ab]*.txt", '/c,d', /*.txt, gs://bucket/x y]""").dataset_path
    assert list(paths) == ["/[ab]*.txt", "/c,d", "/*.txt", "gs://bucket/x y"]
    assert "needs a list such as [0,4,16], not '4'" in message(TINY, "model.compress_ratios=4")
    assert "needs a whole number such as 8 or 1e4, not '1.5'" in message(TINY, "model.compress_ratios=[0,1.5]")
    for broken in ["[0,4", "[0,,4]", "[0,4,]", "[[0],4]", "[0]4]"]:
        assert f"is not a list such as [a,b]: {broken}" in message(TINY, f"model.compress_ratios={broken}")
    assert "dataset_path needs a list" in message(TINY, "dataset_path=")
    assert "dataset_path holds an empty text" in message(TINY, "dataset_path=[a,'']")
    assert "learning_rate needs one value, not the list ['1', '2']" in message(file_with("learning_rate: [1, 2]"))


def test_paths_may_have_weights(folder):
    weights = {f"{folder}/a.jsonl": 0.7, f"{folder}/b/*.parquet": 0.3}
    written = file_with("dataset_path: {a.jsonl: 0.7, 'b/*.parquet': .3}")
    argued = tiny("dataset_path={a.jsonl: 0.7, b/*.parquet: 0.3}")
    assert load(written).config.dataset_path == argued.dataset_path == weights
    assert tiny("dataset_path=[c]").dataset_path == {f"{folder}/c": None}
    Path("again.yml").write_text(to_yaml(argued))
    assert load("again.yml").config == argued
    assert from_values(dataclasses.asdict(argued), (), "test").config.dataset_path == weights
    assert load(written, ["dataset_path=d"]).config.dataset_path == {f"{folder}/d": None}
    for text, fault in {
        "{a: x}": "a: the weight needs a finite number",
        "{a: 0}": "a: the weight must be above 0, not 0",
        "{a: }": "a: the weight needs a finite number",
        "{a: [1]}": "is no mixture such as",
        "{a": "is no mixture such as",
        "{}": "needs paths with their weights",
    }.items():
        assert fault in message(TINY, f"dataset_path={text}")
    assert "run.yml:2: dataset_path a: the weight has no value" in message(file_with("dataset_path: {a: }"))
    assert "holds one weight for each" in message(file_with("dataset_path: {a: [1]}"))
    assert "'a' is given twice" in message(file_with("dataset_path: {a: 1, a: 2}"))
    assert PATHS_KEYS == tuple(name for name, key in schema().items() if key.kind == Paths)


@pytest.mark.parametrize("key", ["run_name", "steps", "dataset_path", "hardware", "enable_checkpointing"])
def test_interpolations_and_missing_marks_are_refused(folder, key):
    for text in ["${oc.env:HOME}", "a${typo}"]:
        assert f"{key} holds an interpolation, {text!r}" in message(TINY, f"{key}={text}")
        assert f"run.yml:2: {key} holds an interpolation" in message(file_with(f"{key}: {text}"))
    assert f"{key} is '???'" in message(TINY, f"{key}=???")


def test_null_is_no_value(folder):
    assert message(file_with("run_name:")) == 'run.yml:2: run_name has no value (write "" for an empty text)'
    assert message(file_with("steps: null")) == "run.yml:2: steps has no value"
    assert load(file_with('run_name: ""')).config.run_name == ""


# Overrides.


def test_override_forms():
    expected = {
        "steps": "argument 'steps': overrides are written key=value",
        "=1": "argument '=1': overrides are written key=value",
        "--steps=1": "argument '--steps=1': overrides are written key=value, without leading dashes",
        "steps = 1": "argument 'steps = 1': no space may stand before the '='; write steps=1",
        "learning_rate.b=2": (
            "argument 'learning_rate.b=2': unknown key 'learning_rate.b': learning_rate holds one value; "
            "write learning_rate=..."
        ),
        "model.compress_ratios.1=9": (
            "argument 'model.compress_ratios.1=9': unknown key 'model.compress_ratios.1': model.compress_ratios holds "
            "a list; give the whole list, model.compress_ratios=[...]"
        ),
        "model=3": "argument 'model=3': model is a block of keys such as model.vocab_size, not a value",
        "base=x.yml": "argument 'base=x.yml': 'base' names the files a file builds on; it belongs in a file",
    }
    for argument, text in expected.items():
        assert message(TINY, argument) == text


def test_the_same_key_twice():
    assert message(TINY, "steps=1", "seed=2", "steps=1") == (
        "argument 'steps=1': steps is given already, by argument 'steps=1'"
    )


def test_override_equal_to_the_models_value_is_accepted():
    assert tiny("model.num_experts=8").model == tiny().model


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("ici_expert_paralelism", "ici_expert_parallelism"),
        ("Steps", "steps"),
        ("num_experts", "model.num_experts"),
        ("model.num_expert", "model.num_experts"),
        ("models.emb_dim", "model.emb_dim"),
        ("base_emb_dim", "model.emb_dim"),
    ],
)
def test_unknown_key_names_the_nearest(folder, wrong, right):
    expected = f"unknown key {wrong!r}; did you mean {right!r}?"
    assert message(TINY, f"{wrong}=8") == f"argument '{wrong}=8': {expected}"
    block, _, leaf = wrong.rpartition(".")
    if block:
        assert message(file_with(f"{block}:\n  {leaf}: 8")) == f"run.yml:3: {expected}"
    else:
        assert message(file_with(f"{leaf}: 8")) == f"run.yml:2: {expected}"


def test_unknown_key_with_nothing_near():
    assert message(TINY, "xyzzy=8") == "argument 'xyzzy=8': unknown key 'xyzzy'; no key has a similar name"


# Files.


def test_later_bases_and_own_values_win_and_origins_say_so(folder):
    write("parts/a.yml", "steps: 1\nseed: 1\nlog_period: 1\nmodel:\n  indexer_topk: 1\n  emb_dim: 128\n")
    write("parts/b.yml", "\nseed: 2\nlog_period: 2\nmodel: {indexer_topk: 2}\n")
    write("run.yml", f"base: [{TINY}, parts/a.yml, parts/b.yml]\nlog_period: 3\n")
    resolved = load("run.yml", ["checkpoint_period=9"])
    config, origins = resolved.config, resolved.origins
    assert (config.steps, config.seed, config.log_period, config.checkpoint_period) == (1, 2, 3, 9)
    assert (config.model.indexer_topk, config.model.emb_dim, config.model.num_experts) == (2, 128, 8)
    assert list(origins) == KEYS
    assert origins["steps"] == "parts/a.yml:1"
    assert origins["seed"] == "parts/b.yml:2"
    assert origins["log_period"] == "run.yml:2"
    assert origins["checkpoint_period"] == "command line"
    assert origins["model.indexer_topk"] == "parts/b.yml:4"
    assert origins["model.emb_dim"] == "parts/a.yml:6"
    assert origins["adam_b1"] == DEFAULT


def test_a_file_reached_twice_stands_for_the_same_values_each_time(folder):
    write("c.yml", f"base: {TINY}\nsteps: 1\nseed: 1\n")
    write("a.yml", "base: c.yml\nsteps: 2\n")
    write("b.yml", "base: ./c.yml\nseed: 3\n")
    write("run.yml", "base: [a.yml, b.yml]\n")
    config = load("run.yml").config
    assert (config.steps, config.seed) == (1, 3)  # b.yml, the later base, says steps: 1 through c.yml


def test_bases_are_as_deep_as_one_likes(folder):
    write("0.yml", f"base: {TINY}\nsteps: 7\n")
    for i in range(1, 1200):
        write(f"{i}.yml", f"base: {i - 1}.yml\n")
    assert load("1199.yml").config.steps == 7


def test_cycles(folder):
    write("sub/a.yml", "steps: 1\nbase: b.yml\n")
    write("sub/b.yml", "base:\n- ../c.yml\n")
    write("c.yml", "base: sub/../sub/a.yml\n")
    assert message("sub/a.yml") == "c.yml:1: base files form a cycle: sub/a.yml -> sub/b.yml -> c.yml -> sub/a.yml"
    write("self.yml", "base: self.yml\n")
    assert message("self.yml") == "self.yml:1: base files form a cycle: self.yml -> self.yml"


def test_files_that_cannot_be_read(folder):
    write("run.yml", "base: models/tiny.yml\n")
    write("models/tinny.yml", "steps: 1\n")
    assert message("rum.yml") == "no config file rum.yml; did you mean run.yml?"
    assert message("run.yml") == "run.yml:1: no config file models/tiny.yml; did you mean models/tinny.yml?"
    assert message("elsewhere/x.yml") == "no config file elsewhere/x.yml"
    assert message("models") == "cannot read config file models: Is a directory"
    Path("latin.yml").write_bytes(b"run_name: caf\xe9\n")
    assert message("latin.yml") == "latin.yml: not UTF-8 text (byte 13)"


BROKEN = {
    "": "run.yml: the file is empty; it needs at least one `key: value`",
    "# only a comment\n": "run.yml: the file is empty; it needs at least one `key: value`",
    "- a\n": "run.yml:1: a config is a mapping of `key: value` lines at its top level",
    "hello\n": "run.yml:1: a config is a mapping of `key: value` lines at its top level",
    "steps: 3\nseed: 1\nsteps: 4\n": "run.yml:3: 'steps' is given twice, on lines 1 and 3",
    "model:\n  emb_dim: 3\n  emb_dim: 4\n": "run.yml:3: 'model.emb_dim' is given twice, on lines 2 and 3",
    "steps: [1\nseed: 2\n": "run.yml:2:5: broken YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
    "steps: 1\n\tseed: 2\n": "run.yml:2:1: broken YAML: while scanning for the next token, "
    "found character '\\t' that cannot start any token",
    "run_name: a\x07\n": "run.yml:1:12: broken YAML: special characters are not allowed",
    "steps: 1\n---\nsteps: 2\n": "run.yml:2:1: broken YAML: expected a single document in the stream, "
    "but found another document",
    "steps: *x\n": "run.yml:1:8: broken YAML: found undefined alias 'x'",
    "on: 1\n": "run.yml:1: unknown key 'on'; no key has a similar name",
    "model.emb_dim: 4\n": "run.yml:1: 'model.emb_dim': dots are for the command line; in a file write `model:` and, "
    "indented below it, `emb_dim:`",
    "model: 3\n": "run.yml:1: model is a block of keys such as model.vocab_size, not a value",
    "steps: {a: 1}\n": "run.yml:1: unknown key 'steps.a': steps holds one value; write steps=...",
    "steps: !!python/name:os.system ''\n": "run.yml:1: 'steps': YAML tags (tag:yaml.org,2002:python/name:os.system) "
    "are not supported",
    "model: &m\n  x: *m\n": "run.yml:2: 'model.x' contains itself",
    "<<: {steps: 2}\n": "run.yml:1: YAML merge keys (<<) are not supported; `base:` builds on other files",
    "? [a]\n: b\n": "run.yml:1: a key must be a plain name",
    "dataset_path: [[a], b]\n": "run.yml:1: 'dataset_path': a list holds plain values, not lists or blocks",
    "base: []\n": "run.yml:1: 'base' needs a file or a list of files, relative to run.yml",
    "base:\n": "run.yml:1: 'base' needs a file or a list of files, relative to run.yml",
    "base: {a: b}\n": "run.yml:1: 'base' needs a file or a list of files, not a block",
}


@pytest.mark.parametrize(("text", "expected"), BROKEN.items())
def test_broken_files(folder, text, expected):
    assert message(write("run.yml", text)) == expected


def test_missing_model_sizes_point_at_the_model_files(folder):
    text = message(write("run.yml", "steps: 3\n"), "model.emb_dim=64")
    assert text.startswith("run.yml: nothing gives model.vocab_size, model.compress_ratios, model.num_query_heads, ")
    assert "model.emb_dim" not in text
    assert text.endswith("build on a model file, with a line such as `base: models/deepseek_v4_tiny.yml` "
                         "(see configs/models/*.yml)")  # fmt: skip


def test_input_paths_start_at_the_file_that_names_them(folder):
    write("sub/data.yml", "dataset_path: [../text/*.txt, /abs/*.txt, gs://bucket/*.txt]\ntokenizer_path: t.json\n")
    write("run.yml", f"base: [{TINY}, sub/data.yml]\nload_parameters_path: weights\n")
    config = load("run.yml").config
    assert list(config.dataset_path) == [f"{folder}/text/*.txt", "/abs/*.txt", "gs://bucket/*.txt"]
    assert config.tokenizer_path == f"{folder}/sub/t.json"
    assert config.load_parameters_path == f"{folder}/weights"
    assert config.base_output_directory == "runs"
    argued = load("sub/../run.yml", ["dataset_path=[q/*.txt,~/z]", "tokenizer_path=byte"]).config
    assert list(argued.dataset_path) == [f"{folder}/q/*.txt", os.path.expanduser("~/z")]
    assert (argued.tokenizer_path, tiny().load_parameters_path) == ("byte", "")


# From values, and back to text.


def test_from_values():
    model = dataclasses.asdict(tiny().model) | {"rope_max_timescale": 500}
    resolved = from_values({"hardware": "cpu", "model": model}, ["steps=2", "model.emb_dim=128"], "hf/config.json")
    assert (resolved.config.hardware, resolved.config.steps) == ("cpu", 2)
    assert (resolved.config.model.rope_max_timescale, resolved.config.model.emb_dim) == (500.0, 128)
    assert resolved.origins["hardware"] == "hf/config.json"
    assert resolved.origins["steps"] == resolved.origins["model.emb_dim"] == "command line"
    for values, text in [
        ({"model": {"embdim": 1}}, "hf/config.json: unknown key 'model.embdim'; did you mean 'model.emb_dim'?"),
        ({"steps": True}, "hf/config.json: steps needs a whole number such as 8 or 1e4, not 'True'"),
        (
            {"learning_rate": math.nan},
            "hf/config.json: learning_rate needs a finite number such as 0.5 or 1e-4, not 'nan'",
        ),
        ({"steps": None}, "hf/config.json: steps has no value"),
    ]:
        with pytest.raises(ConfigError) as error:
            from_values(values, [], "hf/config.json")
        assert str(error.value) == text


TEXTS = ["", "a\nb", "\n", "\t", " a ", "a: b", "a #b", "# a", "- a", "'a'", '"a"', "{a", "null", "~", "1e-4", "010",
         "on", "1:30", "é😀", "\x85", "\u2028", "\x7f", "@a", "`a", "%a", "*a", "&a", "!a", "C:\\a",
         "a" * 300]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_resolved_yaml_loads_to_an_equal_config(folder, text):
    overrides = [f"run_name={text}", f"base_output_directory={text}", "learning_rate=1e-22", "adam_eps=1e-7"]
    resolved = load(SMOKE, [*overrides, "per_device_batch_size=0.1", f"""dataset_path=["{text.replace('"', "")}x"]"""])
    for words in (to_yaml(resolved.config), describe(resolved)):
        again = load(write("elsewhere/config.yml", words))
        assert again.config == resolved.config
        assert all(origin.startswith("elsewhere/config.yml:") for origin in again.origins.values())
    assert "base:" not in to_yaml(resolved.config)


def test_resolved_yaml_is_one_line_per_key(folder):
    assert len(to_yaml(load(FLASH).config).splitlines()) == len(KEYS) + 1  # and one that opens `model:`


def test_describe_has_each_value_beside_its_origin(folder):
    resolved = load(file_with("steps: 12\nrun_name: x"), ["model.emb_dim=128"])
    lines = describe(resolved).splitlines()
    cells = {line.split(":")[0].strip(): [part.strip() for part in line.split("  # ")] for line in lines}
    assert cells["steps"] == ["steps: 12", "run.yml:2"]
    assert cells["emb_dim"] == ["emb_dim: 128", "command line"]
    assert cells["seed"] == ["seed: 0", "default"]
    assert cells["head_dim"] == ["head_dim: 32", f"{TINY}:{line_of(TINY, 'head_dim')}"]
    assert len({line.index("  # ") for line in lines if "  # " in line}) == 1  # aligned


def line_of(path: Path, key: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(f"{key}:"))


# The configs we ship.


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yml")), ids=lambda path: path.stem)
def test_shipped_configs_load(path):
    resolved = load(path)
    assert isinstance(resolved, Resolved)
    assert value_of(resolved.config, "model.num_layers") == len(resolved.config.model.compress_ratios)


def test_flash_has_the_published_sizes():
    """SPEC section 1, and section 9's count, which no wrong size would survive."""
    m = load(FLASH).config.model
    assert m.compress_ratios == [0, 0] + [4, 128] * 20 + [4]
    assert (m.num_layers, m.compress_ratios.count(4), m.compress_ratios.count(128)) == (43, 21, 20)
    assert (m.indexer_topk, m.sliding_window_size, m.num_experts_per_tok, m.qk_rope_head_dim) == (512, 128, 6, 64)
    assert (m.first_num_hash_layers, m.routed_scaling_factor, m.mlp_activations_limit) == (3, 1.5, 10.0)
    assert (m.rope_max_timescale, m.compressed_rope_max_timescale) == (10_000.0, 160_000.0)
    assert (m.yarn_factor, m.yarn_beta_fast, m.yarn_beta_slow, m.yarn_original_max_position) == (16, 32, 1, 65_536)
    assert (m.sinkhorn_iterations, m.mhc_epsilon, m.normalization_layer_epsilon) == (20, 1e-6, 1e-6)
    d, c, heads, streams = m.emb_dim, m.head_dim, m.num_query_heads, m.mhc_expansion_rate
    query = d * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * heads * c
    output = heads * c * m.o_lora_rank + m.o_groups * m.o_lora_rank * d
    attention = query + d * c + c + heads + output
    compress_4, compress_128 = (2 * d * w * k + r * w * k + k for w, r, k in ((2, 4, c), (1, 128, c)))
    indexer = m.q_lora_rank * m.indexer_n_heads * m.indexer_head_dim + d * m.indexer_n_heads
    indexer += 2 * d * 2 * m.indexer_head_dim + 4 * 2 * m.indexer_head_dim + m.indexer_head_dim
    mixes = (2 + streams) * streams
    hyper = 2 * (mixes * streams * d + mixes + 3)
    expert = 3 * d * m.moe_mlp_dim
    top = streams * streams * d + streams + 1 + d + m.num_layers * 2 * d
    router = m.num_layers * m.num_experts * d + (m.num_layers - m.first_num_hash_layers) * m.num_experts
    total = 2 * m.vocab_size * d + m.num_layers * (attention + hyper + (m.num_experts + m.shared_experts) * expert)
    total += 21 * (compress_4 + indexer) + 20 * compress_128 + top + router
    assert total == 284_332_240_471


def test_smoke_config():
    config = load(SMOKE).config
    assert (config.hardware, config.run_name, config.dtype, config.dataset_type) == (
        "cpu",
        "cpu_smoke",
        "float32",
        "text",
    )
    assert [Path(path).relative_to(REPOSITORY) for path in config.dataset_path] == [Path("data/python_reference.jsonl")]
