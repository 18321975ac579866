"""Rows against a packer of plain loops, and the accounting of every token."""

from collections import Counter

import numpy as np
import pytest

from trainer.data.packing import NO_LOSS, Documents, PackedRows
from trainer.errors import ConfigError

EOS = 999_999


def numbered(lengths):
    """Documents whose tokens are all different: document d has d * 1000, d * 1000 + 1, ..."""
    return [np.arange(length) + d * 1000 for d, length in enumerate(lengths)]


def pack(lengths, row_length, *, seed=0, shuffle=True):
    return PackedRows(Documents.join(numbered(lengths), EOS), row_length, seed, shuffle)


def packed_by_loops(documents, row_length):
    """One epoch in the order given, written as packing is explained: row by row, token by token."""
    rows, row, segment = [], [], 0
    for document in documents:
        targets = [*document[1:].tolist(), EOS]
        segment, position = segment + 1, 0
        for token, target in zip(document.tolist(), targets, strict=True):
            if len(row) == row_length:
                rows.append(row)
                row, segment, position = [], 1, 0
            row.append((token, target, segment, position))
            position += 1
        if len(row) == row_length:
            rows.append(row)
            row, segment = [], 0
    if row:
        rows.append(row + [(0, -100, 0, 0)] * (row_length - len(row)))
    return rows


def as_tuples(row):
    return list(zip(*(row[name].tolist() for name in ("tokens", "targets", "segment_ids", "positions")), strict=True))


LENGTHS = {
    "around S": [1, 15, 16, 17, 160],
    "exactly one row": [16],
    "less than one row": [3, 1],
    "ends on rows": [8, 8, 16, 32],
    "many": [(7 * n) % 41 + 1 for n in range(60)],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_rows_are_what_plain_loops_make(lengths):
    stream = pack(lengths, 16, shuffle=False)
    expected = packed_by_loops(numbered(lengths), 16)
    assert stream.rows_per_epoch == len(expected)
    for number in range(3 * len(expected)):
        row = stream.row(number)
        assert all(array.dtype == np.int32 for array in row.values())
        assert as_tuples(row) == expected[number % len(expected)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_every_token_is_used_once_per_epoch(lengths, shuffle):
    stream = pack(lengths, 16, seed=5, shuffle=shuffle)
    expected = Counter((t, u) for d in numbered(lengths) for t, u in zip(d, [*d[1:], EOS], strict=True))
    for epoch in range(3):
        first = epoch * stream.rows_per_epoch
        places = [place for r in range(stream.rows_per_epoch) for place in as_tuples(stream.row(first + r))]
        used = [place for place in places if place[2]]
        padding = [place for place in places if not place[2]]
        assert Counter((token, target) for token, target, _, _ in used) == expected
        assert len(used) == stream.tokens_per_epoch == sum(lengths)
        assert len(used) + len(padding) == stream.rows_per_epoch * 16 and len(padding) < 16
        assert set(padding) <= {(0, NO_LOSS, 0, 0)}


def test_segments_and_positions_of_a_row():
    stream = pack(LENGTHS["many"], 16, seed=1)
    for number in range(2 * stream.rows_per_epoch):
        row = stream.row(number)
        used = row["segment_ids"] > 0
        segments, positions, documents = row["segment_ids"][used], row["positions"][used], row["tokens"][used] // 1000
        assert segments[0] == 1 and positions[0] == 0
        starts = np.flatnonzero(np.diff(segments)) + 1
        assert (np.diff(segments)[starts - 1] == 1).all()
        assert (positions[starts] == 0).all() and (np.diff(positions)[np.diff(segments) == 0] == 1).all()
        np.testing.assert_array_equal(np.flatnonzero(np.diff(documents)) + 1, starts)


def test_targets_stay_in_their_document():
    stream = pack(LENGTHS["many"], 16, seed=2)
    rows = [stream.row(number) for number in range(stream.rows_per_epoch)]
    tokens, targets = (np.concatenate([row[name] for row in rows]) for name in ("tokens", "targets"))
    used = targets != NO_LOSS
    tokens, targets = tokens[used], targets[used]
    assert ((targets == tokens + 1) | (targets == EOS)).all()
    assert (targets == EOS).sum() == len(LENGTHS["many"])


def test_any_row_is_found_alone_and_in_any_order():
    numbers = [0, 10**9, 17, 3, 10**9 + 1, 0, 400]
    walked = pack(LENGTHS["many"], 16, seed=3)
    rows = [walked.row(number) for number in numbers]
    for number, row in zip(numbers, rows, strict=True):
        alone = pack(LENGTHS["many"], 16, seed=3).row(number)
        assert as_tuples(row) == as_tuples(alone)


def test_columns_are_a_cut_of_the_row():
    stream = pack(LENGTHS["around S"], 16, seed=4)
    for number in range(stream.rows_per_epoch):
        whole = stream.row(number)
        for columns in (slice(0, 4), slice(4, 12), slice(12, 16), slice(None)):
            for name, array in stream.row(number, columns).items():
                np.testing.assert_array_equal(array, whole[name][columns])


def order_of(stream, epoch):
    first = epoch * stream.rows_per_epoch
    tokens = np.concatenate([stream.row(first + r)["tokens"] for r in range(stream.rows_per_epoch)])
    return list(dict.fromkeys((tokens // 1000).tolist()))


def test_order_follows_seed_and_epoch():
    lengths = [16] * 50
    orders = [order_of(pack(lengths, 16, seed=seed), epoch) for seed in (0, 1, -1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    assert order_of(pack(lengths, 16, shuffle=False), 1) == list(range(50))


def test_order_keeps_its_values():
    """A resumed run must find the same data under another NumPy."""
    assert order_of(pack([4] * 8, 4, seed=1), 2) == [4, 2, 0, 6, 1, 5, 7, 3]


def test_empty_documents_are_left_out_and_counted():
    documents = [np.array([], np.int32), np.array([1, 2]), np.array([], np.int32), np.array([3])]
    stream = PackedRows(Documents.join(documents, EOS), 4, 0, shuffle=False)
    assert as_tuples(stream.row(0)) == [(1, 2, 1, 0), (2, EOS, 1, 1), (3, EOS, 2, 0), (0, -100, 0, 0)]
    assert stream.describe() == (
        "text: 2 documents (2 empty ones skipped), 3 tokens an epoch, 0 dropped, in 1 rows of 4 "
        "with 1 places of padding (25.00%)"
    )


@pytest.mark.parametrize("documents", [[], [np.array([], np.int32)] * 3])
def test_no_token_at_all_is_refused(documents):
    with pytest.raises(ConfigError, match=f"no text to train on: {len(documents)} documents"):
        Documents.join(documents, EOS)
