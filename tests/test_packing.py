"""Rows against a packer of plain loops, and the accounting of every token."""

from collections import Counter

import numpy as np
import pytest

from trainer.data import packing
from trainer.data.documents import Documents
from trainer.data.packing import NO_LOSS, Order, PackedRows, Source, first_fit

EOS = 999_999


def numbered(lengths):
    """Documents whose tokens are all different: document d has d * 1000, d * 1000 + 1, ..., then the end."""
    return [np.append(np.arange(length) + d * 1000, EOS).astype(np.int32) for d, length in enumerate(lengths)]


def pack(lengths, row_length, *, seed=0, shuffle=True, targets=()):
    documents = Documents.join(numbered(lengths), targets)
    return PackedRows(documents, Order([Source(np.arange(len(lengths)))], seed, shuffle), row_length)


def packed_by_loops(documents, row_length, window_rows):
    """One pass in the order given, written as packing is explained."""
    pieces, window, tokens = [], [], 0
    for document in documents:
        inputs, targets = document[:-1].tolist(), document[1:].tolist()
        for at in range(0, len(inputs), row_length):
            number = tokens // (window_rows * row_length)
            pieces.append((number, inputs[at : at + row_length], targets[at : at + row_length]))
            tokens += len(pieces[-1][1])
    rows = []
    for number in sorted({number for number, _, _ in pieces}):
        window = []
        for _, inputs, targets in (piece for piece in pieces if piece[0] == number):
            row = next((row for row in window if len(row) + len(inputs) <= row_length), None)
            if row is None:
                row = []
                window.append(row)
            segment = row[-1][2] + 1 if row else 1
            row += [(i, t, segment, p) for p, (i, t) in enumerate(zip(inputs, targets, strict=True))]
        rows += window
    return [row + [(0, NO_LOSS, 0, 0)] * (row_length - len(row)) for row in rows]


def as_tuples(row):
    return list(zip(*(row[name].tolist() for name in ("tokens", "targets", "segment_ids", "positions")), strict=True))


LENGTHS = {
    "around S": [1, 15, 16, 17, 160],
    "exactly one row": [16],
    "less than one row": [3, 1],
    "ends on rows": [8, 8, 16, 32],
    "many": [(7 * n) % 41 + 1 for n in range(60)],
}


@pytest.mark.parametrize("window_rows", [1, 4, 256])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_rows_are_what_plain_loops_make(monkeypatch, lengths, window_rows):
    monkeypatch.setattr(packing, "WINDOW_ROWS", window_rows)
    stream = pack(lengths, 16, shuffle=False)
    expected = packed_by_loops(numbered(lengths), 16, window_rows)
    assert stream.rows_per_epoch == len(expected)
    for number in range(3 * len(expected)):
        row = stream.row(number)
        assert all(array.dtype == np.int32 for array in row.values())
        assert as_tuples(row) == expected[number % len(expected)]


def test_first_fit_goes_back_to_rows_with_room():
    row, used = first_fit(np.array([10, 10, 4, 16, 6, 2, 6]), 16)
    assert (row.tolist(), used) == ([0, 1, 0, 2, 1, 0, 3], 4)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_every_token_is_used_once_per_pass(lengths, shuffle):
    stream = pack(lengths, 16, seed=5, shuffle=shuffle)
    expected = Counter((int(t), int(u)) for d in numbered(lengths) for t, u in zip(d[:-1], d[1:], strict=True))
    first = 0
    for number in range(3):
        rows = rows_of_pass(stream, number)
        places = [place for row in rows for place in as_tuples(row)]
        used = [place for place in places if place[2]]
        assert Counter((token, target) for token, target, _, _ in used) == expected
        assert stream.tokens_of(number) == len(used) == sum(lengths)
        assert {place for place in places if not place[2]} <= {(0, NO_LOSS, 0, 0)}
        first += len(rows)
    assert stream.utilization() == sum(lengths) / (stream.rows_per_epoch * 16)


def rows_of_pass(stream, number):
    """All rows of a pass; each pass may need another number of them."""
    stream.row(stream.rows_per_epoch * (number + 2) * 2)
    ends = [0, *stream._ends]
    return [stream.row(r) for r in range(ends[number], ends[number + 1])]


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
        assert set(np.flatnonzero(np.diff(documents)) + 1) <= set(starts)


def test_what_is_no_target_has_no_loss():
    """Document 0 trains on its second half alone, document 1 on all."""
    targets = [np.array([False, False, True, True, True]), None]
    row = pack([4, 3], 8, shuffle=False, targets=targets).row(0)
    assert row["targets"].tolist() == [NO_LOSS, 2, 3, EOS, 1001, 1002, EOS, NO_LOSS]
    assert row["tokens"].tolist() == [0, 1, 2, 3, 1000, 1001, 1002, 0]


def test_any_row_is_found_alone_and_in_any_order():
    numbers = [0, 2000, 17, 3, 2001, 0, 400]
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


def order(sources, seed=0, shuffle=True, passes=(0,)):
    made = Order(sources, seed, shuffle)
    return [made.of_pass(number).tolist() for number in passes]


def test_order_follows_seed_and_pass():
    sources = [Source(np.arange(50))]
    orders = [o for seed in (0, 1, -1) for o in order(sources, seed, passes=(0, 1))]
    assert all(sorted(some) == list(range(50)) for some in orders)
    assert len({tuple(some) for some in orders}) == 6
    assert order(sources, shuffle=False, passes=(1,)) == [list(range(50))]


def test_order_keeps_its_values():
    """A resumed run must find the same data under another NumPy."""
    assert order([Source(np.arange(8))], seed=1, passes=(2,)) == [[4, 2, 0, 6, 1, 5, 7, 3]]


def test_a_mixture_keeps_its_shares_and_uses_all_of_a_source_before_any_again():
    """70 : 30 of 100 and 100 documents: a pass takes all of the first and 43 of the second."""
    first, second = np.arange(100), np.arange(100, 200)
    passes = order([Source(first, 0.7), Source(second, 0.3)], passes=range(7))
    assert all(sorted(n for n in some if n < 100) == first.tolist() for some in passes)
    of_second = [n for some in passes for n in some if n >= 100]
    assert [len(some) for some in passes] == [143] * 7
    assert sorted(of_second[:100]) == sorted(of_second[100:200]) == second.tolist() and len(of_second) == 301
    for some in passes:  # spread evenly: every ten places have seven of the first, give or take one
        of_first = np.cumsum(np.array(some) < 100)
        assert np.abs(of_first - 100 / 143 * np.arange(1, 144)).max() <= 1.5
