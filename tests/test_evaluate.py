"""Held-out loss: the same on every mesh, without dropout, and of the checkpoint that is asked for."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from runs import ToyRun, rows_of, tiny_config
from steps import MESHES, config_of, start
from trainer.data.loader import Loader
from trainer.data.stream import open_stream
from trainer.errors import ConfigError
from trainer.evaluate import Evaluation, evaluate_run, held_out
from trainer.loop import train, train_steps
from trainer.mesh import make_mesh
from trainer.models.deepseek_v4 import Batch
from trainer.parallel import resolve_degrees
from trainer.run_folder import existing_run, open_run
from trainer.signals import StopSignal
from trainer.state import batch_sharding
from trainer.step import forward_sums


def evaluated(*overrides):
    config = config_of("eval_steps=2", *overrides)
    degrees = resolve_degrees(config)
    started = start(config)
    with jax.set_mesh(started.program.mesh), jax.default_matmul_precision("highest"):
        evaluation = Evaluation(config, degrees, make_mesh(degrees, jax.devices()[: degrees.product]))
        found = evaluation(started.state.params, started.frozen)
        evaluation.close()
    return found, started


def test_the_loss_is_the_mean_over_the_held_out_batches(on_one_device):
    found, started = on_one_device
    loader = Loader(open_stream(held_out(started.config)), started.shape, batch_sharding(started.program))
    total, targets = 0.0, 0
    with jax.set_mesh(started.program.mesh), jax.default_matmul_precision("highest"):
        for number in range(2):
            batch = jax.tree.map(lambda x: x[0], Batch(**loader.batch(number)))
            total += float(forward_sums(started.program)(started.state.params, batch).loss)
            targets += int(np.sum(np.asarray(batch.targets) >= 0))
    loader.close()
    assert found["eval_targets"] == targets
    assert found["eval_loss"] == pytest.approx(total / targets, rel=1e-6)
    assert found["eval_perplexity"] == pytest.approx(np.exp(total / targets), rel=1e-5)


@pytest.fixture(scope="module")
def on_one_device():
    return evaluated()


@pytest.mark.parametrize("mesh", ["all"])
def test_every_mesh_says_the_same(mesh, on_one_device):
    one, other = on_one_device[0], evaluated(*MESHES[mesh])[0]
    assert other["eval_targets"] == one["eval_targets"]
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


def test_nothing_is_dropped_out():
    lora = ["lora_rank=2", "lora_targets=[*]"]
    losses = []
    for dropout in (0.0, 0.5):
        config = replace(config_of("eval_steps=1", *lora), lora_dropout=dropout)
        of = start(config)
        params = jax.tree.map(lambda x: x + 0.1, of.state.params)  # B is no longer zero
        with jax.set_mesh(of.program.mesh):
            evaluation = Evaluation(config, resolve_degrees(config), of.program.mesh)
            losses.append(evaluation(params, of.frozen)["eval_loss"])
            evaluation.close()
    assert losses[0] == losses[1]


def test_held_out_data_is_other_data():
    config = config_of("seed=4")
    assert held_out(config).seed == 5
    text = replace(config, dataset_type="text", dataset_path={"a": None}, eval_dataset_path={"b": None})
    assert (held_out(text).dataset_path, held_out(text).enable_data_shuffling) == ({"b": None}, False)
    with pytest.raises(ConfigError, match="eval_dataset_path is empty"):
        held_out(replace(text, eval_dataset_path={}))


def test_evaluations_are_written_beside_their_steps(tmp_path, capsys):
    toy = ToyRun(tmp_path, steps=5, eval_interval=2, checkpoint_period=4)
    seen = []

    def evaluation(params, frozen):
        seen.append(float(jax.device_get(params["w"])[0]))
        return {"eval_loss": 1.5, "eval_perplexity": 4.5, "eval_targets": 7}

    run = replace(toy.run(), evaluation=evaluation)
    reporter = toy.reporter().open(toy.folder, 0)
    train_steps(run, toy.compiled, (toy.state, None), 0, reporter)
    reporter.close()
    assert [row["step"] for row in rows_of(toy.folder.path) if "eval_loss" in row] == [2, 4, 5]
    moved = np.diff(seen)
    assert moved == pytest.approx([2 + 3, 4])  # the states after steps 2, 4 and 5; step k adds k - 1
    assert "step 4: held-out loss 1.5000, perplexity 4.5" in capsys.readouterr().out


def test_the_command_reads_the_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.loop.find_devices", lambda *_, **__: jax.devices()[:1])
    monkeypatch.setattr("trainer.evaluate.find_devices", lambda *_, **__: jax.devices()[:1])
    config = tiny_config(tmp_path, eval_interval=2, eval_steps=2, steps=2)
    lines = []

    def said():
        assert evaluate_run(config, existing_run(config), lines.append) == 0
        return json.loads(lines[-1])

    before = said()
    assert before["source"] == "the first weights" and not (tmp_path / "tiny").exists()
    assert train(config, open_run(config), StopSignal()) == 0
    after = said()
    assert after["source"].endswith("tiny/checkpoints/2") and after["eval_loss"] != before["eval_loss"]
    assert after["eval_loss"] == pytest.approx(rows_of(tmp_path / "tiny")[-1]["eval_loss"], rel=1e-6)
    existing_run(replace(config, train_on="assistant", max_target_length=2 * config.max_target_length))
    with pytest.raises(ConfigError, match="lora_rank was 0 and is 2"):
        existing_run(replace(config, lora_rank=2))
