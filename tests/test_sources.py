"""Files to documents, with the place of every mistake; and synthetic rows."""

import os
from pathlib import Path

import numpy as np
import pytest

from trainer.data.sources import SyntheticRows, find_files, read_documents
from trainer.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "data" / "python_reference.jsonl"


def read(path, content):
    path.write_bytes(content)
    return list(read_documents([path]))


def test_globs_are_sorted_and_name_each_file_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "sub/deep/d.jsonl", "c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    found = find_files(["**/*.jsonl", "*.txt", "./a.txt", "c.TXT", str(tmp_path / "b.txt")])
    assert [str(file) for file in found] == ["sub/deep/d.jsonl", "a.txt", "b.txt", "c.TXT"]


def test_a_name_with_brackets_is_taken_as_it_is(tmp_path):
    (tmp_path / "part[1].txt").write_text("x")
    (tmp_path / "part1.txt").write_text("y")
    assert find_files([str(tmp_path / "part[1].txt")]) == [tmp_path / "part[1].txt"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.json", r"'\*\.json' matches no file"),
        ("gs://bucket/*.jsonl", r"matches no file \(local files only"),
        ("*", r"notes\.md, which is no \.txt or \.jsonl file"),
        (".", r"which is no \.txt or \.jsonl file"),
    ],
)
def test_globs_that_name_no_text_are_refused(tmp_path, monkeypatch, pattern, message):
    (tmp_path / "notes.md").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_files([pattern])


def test_no_glob_is_refused():
    with pytest.raises(ConfigError, match="dataset_path is empty"):
        find_files([])


def test_a_txt_file_is_one_document_to_the_byte(tmp_path):
    assert read(tmp_path / "a.txt", "één\r\n\ntwo\n".encode()) == ["één\r\n\ntwo\n"]
    assert read(tmp_path / "empty.txt", b"") == [""]
    assert read(tmp_path / "marked.txt", b"\xef\xbb\xbfone") == ["one"]


def test_a_jsonl_file_is_one_document_per_line(tmp_path):
    content = b'\xef\xbb\xbf{"text": "one\\ntwo", "id": 7}\r\n\n{"text": ""}\n{"text": "\xe2\x80\xa8\\u00e9"}'
    assert read(tmp_path / "a.jsonl", content) == ["one\ntwo", "", "\u2028é"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"not JSON: Expecting ',' delimiter, column 13"),
        (b"plain", "not JSON"),
        (b'["x"]', "not a JSON object"),
        (b'{"content": "x", "id": 1}', r'no field "text" \(it has content, id\)'),
        (b'{"text": null}', '"text" is a NoneType, not a string'),
        (b'{"text": ["x"]}', '"text" is a list, not a string'),
        (b'{"text": "\\ud83d"}', "not valid Unicode"),
        (b'{"text": "\xff"}', "not UTF-8 text"),
        (b"[" * 200_000, "a.jsonl:3: "),
        (b"1" * 10_000, "JSON out of bounds"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path / "a.jsonl", b'{"text": "x"}\n\n' + line + b'\n{"text": "y"}\n')
    assert f"{tmp_path / 'a.jsonl'}:3: " in str(caught.value)


def test_bad_bytes_of_a_txt_file_are_named_by_line(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.txt:2: not UTF-8 text"):
        read(tmp_path / "a.txt", b"\xef\xbb\xbfone\n\xfftwo\n")


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.txt: No such file"):
        list(read_documents([tmp_path / "gone.txt"]))


def test_the_shipped_text_is_clean_and_small():
    documents = list(read_documents(find_files([str(SHIPPED)])))
    assert len(documents) == len(set(documents)) == 60
    assert os.path.getsize(SHIPPED) < 450_000
    characters = set("".join(documents))
    assert all(c == "\n" or c.isprintable() for c in characters)
    assert len([c for c in characters if ord(c) > 126]) == 9  # quotes, dashes and the like


def test_synthetic_rows_depend_on_seed_and_number_alone():
    rows = SyntheticRows(vocab_size=1000, row_length=64, seed=3)
    again = SyntheticRows(vocab_size=1000, row_length=64, seed=3)
    far = again.row(10**12)
    for name, array in rows.row(10**12).items():
        assert array.dtype == np.int32 and array.shape == (64,)
        np.testing.assert_array_equal(array, far[name])
    others = [SyntheticRows(1000, 64, 4).row(0), rows.row(1)]
    assert all((rows.row(0)["tokens"] != other["tokens"]).sum() > 50 for other in others)


def test_a_synthetic_row_is_one_full_document():
    row = SyntheticRows(vocab_size=7, row_length=4096, seed=0).row(5)
    np.testing.assert_array_equal(row["targets"][:-1], row["tokens"][1:])
    np.testing.assert_array_equal(row["positions"], np.arange(4096))
    assert set(row["segment_ids"]) == {1}
    assert set(row["tokens"]) == set(range(7)) and 0 <= row["targets"][-1] < 7


def test_synthetic_columns_are_a_cut_of_the_row():
    rows = SyntheticRows(vocab_size=1000, row_length=64, seed=3)
    whole, part = rows.row(9), rows.row(9, slice(16, 32))
    for name in whole:
        np.testing.assert_array_equal(part[name], whole[name][16:32])


def test_synthetic_rows_keep_their_values():
    """A resumed run must find the same data under another NumPy."""
    row = SyntheticRows(vocab_size=1000, row_length=6, seed=1).row(2)
    assert row["tokens"].tolist() == [377, 50, 683, 234, 763, 984]
