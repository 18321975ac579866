"""Files to tokens and targets, and the count of everything that is left out."""

import json

import numpy as np
import pytest

from trainer.data import records
from trainer.data.documents import Documents, Form, concatenate, read_documents
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import ConfigError

EOS = 256


def form(*columns, everything=False):
    return Form(list(columns) or ["text"], ByteTokenizer(), everything)


def write(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def spelled(documents):
    """Each document as text, | for an end, and as the tokens that are targets."""
    every = []
    for start, length in zip(documents.starts, documents.lengths, strict=True):
        ids = documents.tokens[start : start + length + 1]
        flags = np.ones(length + 1, bool)
        if documents.targets is not None:
            flags = documents.targets[start : start + length + 1]
        text = "".join("|" if n == EOS else chr(n) for n in ids)
        every.append((text, "".join(c for c, target in zip(text, flags, strict=True) if target)))
    return every


def test_texts_end_and_are_all_target(tmp_path):
    file = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}, {"text": "two"})
    documents, tally = read_documents([file], form(), skip_bad=False)
    assert spelled(documents) == [("one|", "one|"), ("two|", "two|")]
    assert documents.targets is None and documents.num_targets == 6
    assert (tally.empty, tally.without_target, tally.num_bad) == (1, 0, 0)


def test_conversations_train_on_the_answers(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    file = write(tmp_path / "a.jsonl", {"m": [*chat, *chat]}, {"m": chat[:1]}, {"m": []}, {"m": chat})
    documents, tally = read_documents([file], form("m"), skip_bad=False)
    turn = "user: hi\nassistant: yo|"
    assert spelled(documents) == [(turn * 2, "yo|yo|"), (turn, "yo|")]
    assert documents.num_targets == 9
    assert (tally.conversations, tally.empty, tally.without_target) == (4, 1, 1)
    everything, tally = read_documents([file], form("m", everything=True), skip_bad=False)
    assert [text for text, targets in spelled(everything) if text == targets] == [turn * 2, "user: hi\n|", turn]


def test_a_documents_first_token_is_no_target_though_it_is_the_assistants(tmp_path):
    file = write(tmp_path / "a.jsonl", {"q": "", "a": "yes"})
    documents, _ = read_documents([file], form("q", "a"), skip_bad=False)
    assert documents.num_targets == 3 and documents.lengths.tolist() == [3]


BAD = [b'{"text": "\xff"}', b'{"body": "x"}', b"{", b'{"text": 7}']


@pytest.fixture
def malformed(tmp_path):
    """10,000 lines of which 100 are bad, one is of 5 MB, and some are blank."""
    path = tmp_path / "bad.jsonl"
    lines = [json.dumps({"text": f"line {n}"}).encode() for n in range(10_000)]
    for n in range(100):
        lines[37 + 97 * n] = BAD[n % len(BAD)]
    lines[5000] = json.dumps({"text": "x" * 5_000_000}).encode()
    lines[6000] = b""
    path.write_bytes(b"\n".join(lines))
    return path


def test_bad_records_are_counted_when_skipped(malformed):
    documents, tally = read_documents([str(malformed)], form(), skip_bad=True)
    assert (tally.num_bad, len(documents.lengths)) == (100, 10_000 - 101)
    assert [bad.where() for bad in tally.bad] == [f"{malformed}:{line}" for line in (38, 135, 232)]
    assert documents.lengths.max() == 5_000_000
    assert f"100 that cannot be read, the first at {malformed}:38: not UTF-8" in tally.describe()


@pytest.mark.parametrize("chunk_bytes", [50, 1000, 10**7])
def test_the_first_bad_record_ends_a_run_that_does_not_skip(malformed, monkeypatch, chunk_bytes):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk_bytes)
    with pytest.raises(ConfigError, match=rf"dataset_path: {malformed}:38: not UTF-8 .*on_bad_record=skip"):
        read_documents([str(malformed)], form(), skip_bad=False)


def test_chunks_give_the_same_documents_in_the_same_order(tmp_path, monkeypatch):
    file = write(tmp_path / "a.jsonl", *({"q": f"{n}?", "a": f"{n * n}"} for n in range(500)))
    whole, _ = read_documents([file], form("q", "a"), skip_bad=False)
    monkeypatch.setattr(records, "CHUNK_BYTES", 64)
    parts, _ = read_documents([file], form("q", "a"), skip_bad=False)
    assert spelled(parts) == spelled(whole) == [(f"{n}?{n * n}|", f"{n * n}|") for n in range(500)]


def test_concatenate_joins_with_and_without_targets():
    a = Documents.join([np.array([1, 2, 3])])
    b = Documents.join([np.array([4, 5])], [np.array([False, True])])
    both = concatenate([a, Documents.join([]), b])
    assert both.tokens.tolist() == [1, 2, 3, 4, 5] and both.targets.tolist() == [True, True, True, False, True]
    assert both.starts.tolist() == [0, 3] and both.lengths.tolist() == [2, 1]
    assert concatenate([a, a]).targets is None
