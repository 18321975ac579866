"""A config's dataset as rows: every key that shapes it, and what is said about it."""

import json

import numpy as np
import pytest

from runs import MODEL, tiny_config
from trainer.data.packing import NO_LOSS
from trainer.data.stream import marked, open_stream
from trainer.data.synthetic import SyntheticRows
from trainer.errors import ConfigError


def write(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


@pytest.fixture
def stream(tmp_path):
    """Opens the rows of a config with a vocabulary for bytes."""

    def open_one(paths, vocab_size=300, **changes):
        values = {"dataset_type": "text", "dataset_path": paths, "max_target_length": 4, "enable_data_shuffling": False}
        return open_stream(tiny_config(tmp_path, model=MODEL | {"vocab_size": vocab_size}, **values | changes))

    return open_one


def spelled(row):
    return "".join("|" if n == 256 else chr(n) if n else "." for n in row["tokens"])


def test_files_are_read_in_the_order_given(tmp_path, stream):
    write(tmp_path / "a.jsonl", *({"text": text} for text in ("ab", "", "cde")))
    (tmp_path / "b.txt").write_text("f")
    rows = stream([str(tmp_path / "*.jsonl"), str(tmp_path / "*.txt")])
    assert rows.rows_per_epoch == 2
    assert [spelled(rows.row(number)) for number in range(2)] == ["abf.", "cde."]
    assert rows.row(0)["targets"].tolist() == [ord("b"), 256, 256, NO_LOSS]
    assert rows.describe()[:2] == [
        "text: 3 documents of 6 tokens, 6 of them targets; an epoch is 2 rows of 4, 75.0% full",
        "left out: 1 empty records, 0 without a target, 0 that cannot be read",
    ]


def test_order_follows_the_seed(tmp_path, stream):
    path = [write(tmp_path / "a.jsonl", *({"text": chr(n) * 4} for n in range(65, 91)))]

    def order(**changes):
        rows = stream(path, **changes)
        return [int(rows.row(number)["tokens"][0]) for number in range(26)]

    assert order() == list(range(65, 91))
    shuffled = order(enable_data_shuffling=True)
    assert sorted(shuffled) == order() != shuffled != order(enable_data_shuffling=True, seed=1)


@pytest.mark.parametrize(
    ("long_documents", "documents"), [("split", ["abcd", "efgh", "ijkl", "m..."]), ("drop", ["abcd", "m..."])]
)
def test_long_documents_are_split_or_dropped(tmp_path, stream, long_documents, documents):
    file = write(tmp_path / "a.jsonl", {"text": "abcd"}, {"text": "efghijkl"}, {"text": "m"})
    rows = stream([file], long_documents=long_documents)
    assert [spelled(rows.row(number)) for number in range(rows.rows_per_epoch)] == documents
    done = "cut into rows" if long_documents == "split" else "left out"
    assert f"1 of 3 documents are longer than a row: {done} (long_documents)" in rows.describe()


def test_weights_mix_files(tmp_path, stream):
    a = write(tmp_path / "a.jsonl", *({"text": "aaaa"} for _ in range(30)))
    b = write(tmp_path / "b.jsonl", *({"text": "bbbb"} for _ in range(30)))
    rows = stream({a: 0.75, b: 0.25})
    assert rows.rows_per_epoch == 40
    assert "".join(spelled(rows.row(number))[0] for number in range(8)) == "aabaaaba"
    assert f"mixture, documents of an epoch: 30 of {a}, 10 of {b}" in rows.describe()


def test_bad_records_end_the_run_or_are_counted(tmp_path, stream):
    file = write(tmp_path / "a.jsonl", {"text": "abcd"}, {"body": "x"}, {"text": "efgh"})
    with pytest.raises(ConfigError, match=rf'dataset_path: {file}:2: no field "text"'):
        stream([file])
    rows = stream([file], on_bad_record="skip")
    assert [spelled(rows.row(number)) for number in range(2)] == ["abcd", "efgh"]
    assert f"1 that cannot be read, the first at {file}:2: " in rows.describe()[1]


def test_conversations_are_shown_with_what_is_trained_on(tmp_path, stream):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write(tmp_path / "a.jsonl", {"messages": chat}, {"messages": chat})
    rows = stream([file], train_data_columns=["messages"], max_target_length=64)
    turn = r"user: hi\nassistant: ⟦yo⟧"
    assert rows.describe()[1:] == [
        "2 conversations, written in plain `role: content` lines: the tokenizer has no chat template; "
        "targets: assistant",
        f"first row: {turn}{turn}",
    ]
    assert marked(rows.row(0), rows.tokenizer, most=9) == r"user: hi\n …"


@pytest.mark.parametrize("value", [[], [{"role": "user", "content": "x"}]])
def test_nothing_to_train_on_is_refused(tmp_path, stream, value):
    file = write(tmp_path / "a.jsonl", {"messages": value})
    with pytest.raises(ConfigError, match="no text to train on in .*a.jsonl; left out: . empty records, . without"):
        stream([file], train_data_columns=["messages"])


def test_a_vocabulary_too_small_is_refused(tmp_path, stream):
    file = write(tmp_path / "a.jsonl", {"text": "abcd"})
    with pytest.raises(ConfigError, match="model.vocab_size=256"):
        stream([file], vocab_size=256)


def test_synthetic(stream):
    row = stream([], dataset_type="synthetic", seed=5).row(11)
    for field, array in SyntheticRows(300, 4, 5).row(11).items():
        np.testing.assert_array_equal(row[field], array)
