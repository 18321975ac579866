"""Files to records, in chunks, with the place of every mistake."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from trainer.data import records
from trainer.data.records import BadRecord, chunks_of, read_chunk
from trainer.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "data" / "python_reference.jsonl"
TEXTS = [f"text {n} " + "é" * (n % 7) for n in range(2500)]


def read(path, content=None, columns=("text",)):
    """Every (place, record) of a file."""
    if content is not None:
        path.write_bytes(content)
    return [pair for chunk in chunks_of(str(path), list(columns)) for pair in read_chunk(chunk, list(columns))]


def texts(path, content=None):
    return [record["text"] for _, record in read(path, content)]


def test_a_txt_file_is_one_record_to_the_byte(tmp_path):
    assert texts(tmp_path / "a.txt", "één\r\n\ntwo\n".encode()) == ["één\r\n\ntwo\n"]
    assert texts(tmp_path / "empty.txt", b"") == [""]
    assert texts(tmp_path / "marked.txt", b"\xef\xbb\xbfone") == ["one"]


def test_a_jsonl_file_is_one_record_per_line(tmp_path):
    content = b'\xef\xbb\xbf{"text": "one\\ntwo", "id": 7}\r\n\n{"text": ""}\n{"text": "\xe2\x80\xa8\\u00e9"}'
    assert texts(tmp_path / "a.jsonl", content) == ["one\ntwo", "", "\u2028é"]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 64, 1000, 10**6])
def test_chunks_hold_every_line_once_wherever_they_end(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk_bytes)
    some = TEXTS[:40]
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in some).encode()
    assert texts(tmp_path / "a.jsonl", content) == some
    assert texts(tmp_path / "a.jsonl", content + b"\n\n") == some


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "not JSON: Expecting ',' delimiter, column 13"),
        (b"plain", "not JSON"),
        (b'["x"]', "not a JSON object"),
        (b'{"text": "\xff"}', "not UTF-8 text"),
        (b"[" * 200_000, ""),
        (b"1" * 10_000, "JSON out of bounds"),
    ],
)
def test_a_bad_line_has_its_reason_and_place(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    found = read(path, b'{"text": "x"}\n\n' + line + b'\n{"text": "y"}\n')
    assert [record for _, record in found if not isinstance(record, str)] == [{"text": "x"}, {"text": "y"}]
    (at, reason) = found[1]
    assert message in reason
    assert BadRecord(str(path), at, reason).where() == f"{path}:3"


def test_bad_bytes_of_a_txt_file_are_named_by_line(tmp_path):
    path = tmp_path / "a.txt"
    ((at, reason),) = read(path, b"\xef\xbb\xbfone\n\xfftwo\n")
    assert reason.startswith("not UTF-8 text") and BadRecord(str(path), at, reason).where() == f"{path}:2"


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.txt: No such file"):
        read(tmp_path / "gone.txt")
    with pytest.raises(ConfigError, match=r"cannot read .*broken\.parquet: "):
        read(tmp_path / "broken.parquet", b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"cannot read .*broken\.arrow: "):
        read(tmp_path / "broken.arrow", b"nothing of the kind")


def table():
    return pa.table({"id": list(range(len(TEXTS))), "text": TEXTS})


def test_parquet_rows_are_numbered_through_the_file(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(table(), path, row_group_size=700)
    assert len(chunks_of(str(path), ["text"])) == 4
    found = read(path)
    assert [at for at, _ in found] == list(range(len(TEXTS)))
    assert [record for _, record in found] == [{"text": text} for text in TEXTS]
    assert BadRecord(str(path), 6, "").where() == f"{path}, record 7"


def test_arrow_files_as_datasets_saves_them(tmp_path):
    path = tmp_path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table().schema) as stream:
        stream.write_table(table(), max_chunksize=300)
    assert len(chunks_of(str(path), ["text"])) == 3
    assert read(path) == [(n, {"text": text}) for n, text in enumerate(TEXTS)]


def test_array_records_are_json(tmp_path):
    path = tmp_path / "a.arrayrecord"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS[:20]:
        writer.write(json.dumps({"text": text}).encode())
    writer.write(b"\x0a\x03abc")
    writer.close()
    found = read(path)
    assert [record["text"] for _, record in found[:20]] == TEXTS[:20]
    assert found[20][1].startswith("not JSON")


def test_tables_without_the_columns_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(table(), path)
    with pytest.raises(ConfigError, match=r"a\.parquet has no prompt and no answer; it has id, text"):
        read(path, columns=("prompt", "answer"))


def test_the_shipped_text_is_clean_and_small():
    documents = texts(SHIPPED)
    assert len(documents) == len(set(documents)) == 60
    assert os.path.getsize(SHIPPED) < 450_000
    characters = set("".join(documents))
    assert all(c == "\n" or c.isprintable() for c in characters)
    assert len([c for c in characters if ord(c) > 126]) == 9  # quotes, dashes and the like
