"""The folder of a run: what may change when it goes on, and what is found wrong before anything starts."""

import os
from pathlib import Path

import pytest

from runs import MODEL, tiny_config
from trainer.config import load, schema
from trainer.errors import ConfigError
from trainer.run_folder import MODEL_KEYS, ORDER_KEYS, fingerprint, fixed_keys, open_run


@pytest.fixture
def begun(tmp_path):
    """The folder of a run with a checkpoint."""
    config = tiny_config(tmp_path)
    folder = open_run(config)
    folder.write_config(config)
    (folder.checkpoints / "2").mkdir()
    return tmp_path


def test_the_config_can_be_run_as_it_is(begun):
    assert load(begun / "tiny" / "config.yml").config == tiny_config(begun)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"model": MODEL | {"num_experts": 8}}, "model.num_experts was 4 and is 8"),
        ({"max_target_length": 64}, "max_target_length was 32 and is 64"),
        ({"opt_type": "sgd"}, "opt_type was adamw and is sgd"),
        ({"weight_dtype": "bfloat16"}, "weight_dtype was float32 and is bfloat16"),
        ({"dataset_type": "text"}, "dataset_type was synthetic and is text"),
        ({"seed": 1, "opt_type": "sgd"}, "seed was 0 and is 1; opt_type was adamw and is sgd"),
    ],
)
def test_another_run_is_refused_with_the_ways_out(begun, change, text):
    with pytest.raises(ConfigError) as raised:
        open_run(tiny_config(begun, **change))
    message = str(raised.value)
    assert message.startswith(f"{begun / 'tiny'} holds checkpoints of another run: {text}. ")
    assert "run_name=NEW" in message and "remove the folder" in message


def test_moved_files_have_a_way_out(begun):
    with pytest.raises(ConfigError, match=r"for files that only moved, the new path in .*config\.yml"):
        open_run(tiny_config(begun, dataset_path=["/elsewhere/text.jsonl"]))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"steps": 100}, "steps: 4 -> 100"),
        ({"learning_rate": 0.5}, "learning_rate: 0.01 -> 0.5"),
        ({"num_cpu_devices": 8}, "num_cpu_devices: 1 -> 8"),
        ({"ici_expert_parallelism": 4}, "ici_expert_parallelism: 1 -> 4"),
        ({"per_device_batch_size": 0.25}, "per_device_batch_size: 2.0 -> 0.25"),
        ({"log_period": 7, "checkpoint_period": 9}, "log_period: 1 -> 7, checkpoint_period: 2 -> 9"),
    ],
)
def test_what_may_change_is_told(begun, change, text):
    assert ", ".join(open_run(tiny_config(begun, **change)).changes) == text


def test_an_unchanged_run_goes_on(begun):
    assert open_run(tiny_config(begun)).changes == ()


def test_before_the_first_checkpoint_everything_may_change(tmp_path):
    config = tiny_config(tmp_path)
    open_run(config).write_config(config)
    assert open_run(tiny_config(tmp_path, seed=1)).changes == ()


def test_a_leftover_of_a_killed_save_is_no_checkpoint(tmp_path):
    config = tiny_config(tmp_path)
    folder = open_run(config)
    folder.write_config(config)
    (folder.checkpoints / "2.orbax-checkpoint-tmp").mkdir()
    assert open_run(tiny_config(tmp_path, seed=1)).changes == ()


def test_starting_over_beside_checkpoints_is_refused(begun):
    with pytest.raises(ConfigError, match="enable_checkpointing=false would start over"):
        open_run(tiny_config(begun, enable_checkpointing=False))


def test_a_broken_config_of_the_run_is_named(begun):
    (begun / "tiny" / "config.yml").write_text("steps: [")
    with pytest.raises(ConfigError, match=r"cannot be read: .*config\.yml:1:9: broken YAML"):
        open_run(tiny_config(begun))


def test_the_fingerprint_is_of_what_is_fixed_but_paths(tmp_path):
    same = fingerprint(tiny_config(tmp_path))
    assert fingerprint(tiny_config(tmp_path, steps=9, dataset_path=["/elsewhere/x.txt"])) == same
    for change in ({"seed": 1}, {"model": MODEL | {"indexer_topk": 1}}, {"weight_dtype": "bfloat16"}):
        assert fingerprint(tiny_config(tmp_path, **change)) != same


def test_fixed_keys_are_keys():
    assert {*MODEL_KEYS, *ORDER_KEYS} < set(schema())
    assert set(fixed_keys()) == {*MODEL_KEYS, *ORDER_KEYS, *(key for key in schema() if key.startswith("model."))}


def test_nothing_is_left_of_the_try_to_write(tmp_path):
    folder = open_run(tiny_config(tmp_path))
    assert list(folder.path.iterdir()) == [folder.checkpoints]


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"base_output_directory=.*/file: cannot write to .*/file/tiny: Not a dir"):
        open_run(tiny_config(tmp_path / "file"))


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="cannot write to .*/tiny: No space left on device"):
        open_run(tiny_config(tmp_path))
    assert not [path for path in Path(tmp_path / "tiny").iterdir() if path.name.startswith(".probe")]


def test_a_url_is_refused_rather_than_made_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="base_output_directory=gs://bucket is a URL"):
        open_run(tiny_config("gs://bucket"))
    assert not list(tmp_path.iterdir())


def test_no_room_for_a_checkpoint_is_refused(tmp_path):
    folder = open_run(tiny_config(tmp_path))
    folder.check_space(1000)
    with pytest.raises(ConfigError, match=r"a checkpoint takes about 1073741824\.00 GiB, and the disk has"):
        folder.check_space(2**60)
