"""A run on conversations learns the answers, and nothing of the questions."""

import json
from dataclasses import replace

import jax
import pytest

from runs import MODEL, tiny_config
from trainer.evaluate import evaluate_run
from trainer.loop import train
from trainer.run_folder import existing_run, open_run
from trainer.signals import StopSignal

PAIRS = [("what is up", "NORTH"), ("and down", "SOUTH"), ("the left", "WEST"), ("the right", "EAST")]


@pytest.fixture
def config(tmp_path, monkeypatch):
    for module in ("loop", "evaluate"):
        monkeypatch.setattr(f"trainer.{module}.find_devices", lambda *_, **__: jax.devices()[:1])
    path = tmp_path / "talks.jsonl"
    talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in PAIRS * 8]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    files = {"dataset_path": [str(path)], "eval_dataset_path": [str(path)], "train_data_columns": ["messages"]}
    steps = {"steps": 30, "checkpoint_period": 30, "eval_steps": 4, "learning_rate": 3e-2, "seed": 3}
    return tiny_config(
        tmp_path, model=MODEL | {"vocab_size": 257}, dataset_type="text", train_on="assistant", **files, **steps
    )


def losses(config):
    """Mean loss over the answers, and over all else."""
    found = []
    for train_on in ("assistant", "all"):
        lines = []
        one = replace(config, train_on=train_on)
        assert evaluate_run(one, existing_run(one), lines.append) == 0
        found.append(json.loads(lines[-1]))
    answers, everything = found
    total = everything["eval_loss"] * everything["eval_targets"] - answers["eval_loss"] * answers["eval_targets"]
    return answers["eval_loss"], total / (everything["eval_targets"] - answers["eval_targets"])


def test_the_loss_falls_on_the_answers_and_not_elsewhere(config):
    answers, elsewhere = losses(config)
    assert train(config, open_run(config), StopSignal()) == 0
    answers_after, elsewhere_after = losses(config)
    assert answers_after < 0.5 * answers
    assert elsewhere_after > elsewhere - 0.05
