"""`trainer data`: the rows as a run would see them, in numbers and in color."""

import json
import re

from runs import MODEL, tiny_config
from trainer.data.command import show

CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def shown(config, monkeypatch, capsys):
    monkeypatch.setattr("trainer.data.command.MEASURED_SECONDS", 0.01)
    monkeypatch.setenv("FORCE_COLOR", "1")
    written = []
    assert show(config, written.append) == 0
    return capsys.readouterr().out, json.loads(written[-1])


def test_text_is_counted_and_shown_by_document(tmp_path, monkeypatch, capsys):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATION}) + "\n" + json.dumps({"messages": CONVERSATION}) + "\n")
    changes = {"train_data_columns": ["messages"], "enable_data_shuffling": False, "max_target_length": 64}
    model = MODEL | {"vocab_size": 300}
    config = tiny_config(tmp_path, model=model, dataset_type="text", dataset_path=[str(path)], **changes)
    out, found = shown(config, monkeypatch, capsys)

    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    tokens = len("user: hi\nassistant: yo") + 1  # with the end of the answer, which is only a target; so less one
    assert (found["documents"], found["rows_per_epoch"], found["targets"]) == (2, 1, 2 * len("yo|"))
    assert found["tokens"] == 2 * (tokens - 1)
    assert found["utilization"] == round(found["tokens"] / 64, 4)
    assert found["row_tokens_per_s"] > 0 and found["read_tokens_per_s"] > 0
    assert f"row 0: 2 documents, {found['tokens']} of 64 places filled, 6 targets" in plain
    colors = re.findall(r"\x1b\[([0-9;]+)myo", out)
    assert len(set(colors)) == 2 and all(style.startswith("1;4;") for style in colors)  # bold, underlined, two colors
    assert not re.search(r"\x1b\[1;4;\d+muser", out)


def test_rows_made_up_are_only_measured(tmp_path, monkeypatch, capsys):
    out, found = shown(tiny_config(tmp_path, dataset_type="synthetic"), monkeypatch, capsys)
    assert found["rows_per_epoch"] is None and "documents" not in found
    assert "tokens/s of packed rows" in re.sub(r"\x1b\[[0-9;]*m", "", out)
