"""Paths and globs to files, here and behind a URL."""

import json

import fsspec
import pytest

from trainer.data.files import find_files, open_file, size_of
from trainer.errors import ConfigError


def test_globs_are_sorted_and_name_each_file_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "sub/deep/d.jsonl", "c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    found = find_files(["**/*.jsonl", "*.txt", "./a.txt", "c.TXT", str(tmp_path / "b.txt")])
    assert found == ["sub/deep/d.jsonl", "a.txt", "b.txt", "c.TXT"]


def test_a_name_with_brackets_is_taken_as_it_is(tmp_path):
    (tmp_path / "part[1].txt").write_text("x")
    (tmp_path / "part1.txt").write_text("y")
    assert find_files([str(tmp_path / "part[1].txt")]) == [str(tmp_path / "part[1].txt")]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.json", r"dataset_path: '\*\.json' matches no file"),
        ("*", r"notes\.md, which is no \.txt, \.jsonl, \.parquet"),
        (".", r"which is no \.txt, \.jsonl"),
        ("nowhere://bucket/*.jsonl", r"cannot look up 'nowhere://bucket/\*\.jsonl'"),
    ],
)
def test_globs_that_name_no_text_are_refused(tmp_path, monkeypatch, pattern, message):
    (tmp_path / "notes.md").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_files([pattern])


def test_files_behind_a_url_are_found_and_read():
    system = fsspec.filesystem("memory")
    for name in ("a.jsonl", "b.jsonl", "c.md"):
        system.pipe(f"/bucket/data/{name}", name.encode())
    found = find_files(["memory://bucket/data/*.jsonl", "memory://bucket/data/a.jsonl"])
    assert found == ["memory:///bucket/data/a.jsonl", "memory:///bucket/data/b.jsonl"]
    with open_file(found[1]) as file:
        assert file.read() == b"b.jsonl"
    assert size_of(found[0]) == 7
    with pytest.raises(ConfigError, match="matches no file"):
        find_files(["memory://bucket/data/*.parquet"])


def saved_dataset(folder, state):
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    return str(folder)


def test_a_saved_dataset_is_its_files_in_order(tmp_path):
    files = [{"filename": "data-00001-of-00002.arrow"}, {"filename": "data-00000-of-00002.arrow"}]
    folder = saved_dataset(tmp_path / "train", {"_data_files": files})
    assert find_files([folder]) == [f"{folder}/data-00001-of-00002.arrow", f"{folder}/data-00000-of-00002.arrow"]


def test_saved_datasets_that_are_not_one_sequence_of_records_are_refused(tmp_path):
    saved_dataset(tmp_path / "all" / "train", {"_data_files": []})
    (tmp_path / "all" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ConfigError, match=r"several datasets; name one of them: .*all/train, .*all/test"):
        find_files([str(tmp_path / "all")])
    shuffled = saved_dataset(
        tmp_path / "shuffled", {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}
    )
    with pytest.raises(ConfigError, match="an order of its own; flatten_indices"):
        find_files([shuffled])
    with pytest.raises(ConfigError, match="does not list the dataset's files"):
        find_files([saved_dataset(tmp_path / "broken", {})])
