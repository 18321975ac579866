"""Batches on meshes: the same rows on every mesh, each process reading what its devices hold."""

import threading
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.data.documents import Documents
from trainer.data.loader import Loader, blocks_of, rows_needed
from trainer.data.packing import Order, PackedRows, Source
from trainer.data.stream import FIELDS
from trainer.errors import ConfigError
from trainer.parallel import BatchShape

AXES = ("data", "fsdp", "expert", "tensor")
SPEC = P(None, ("data", "fsdp", "expert"), "tensor")
POD = (1, 16, 16384)


def batch_sharding(*degrees):
    return NamedSharding(jax.make_mesh(degrees, AXES, axis_types=(AxisType.Explicit,) * 4), SPEC)


@pytest.fixture
def open_loader():
    opened = []

    def open_one(stream, num_microbatches, rows, sharding):
        shards = sharding.mesh.size // sharding.mesh.shape["tensor"]
        opened.append(Loader(stream, BatchShape(rows, num_microbatches, stream.row_length, shards), sharding))
        return opened[-1]

    yield open_one
    for loader in opened:
        loader.close()


class Rows(PackedRows):
    """Packed rows that describe themselves."""

    def describe(self):
        return ["the rows"]


def packed(documents, row_length, seed=0):
    """Rows of documents that each end with token 999."""
    joined = Documents.join([np.append(document, 999).astype(np.int32) for document in documents])
    return Rows(joined, Order([Source(np.arange(len(documents)))], seed, shuffle=True), row_length)


def numbered_rows(count, row_length=8):
    """Documents of exactly one row each; every token of document d is d."""
    return packed([np.full(row_length, d) for d in range(count)], row_length)


class FakeDevice:
    """As much of a device as a sharding's index map needs."""

    platform, device_kind, client = "cpu", "fake", None

    def __init__(self, number, process_index):
        self.id, self.process_index = number, process_index

    def memory(self, kind):
        return None


def pod_indices():
    """Process -> its devices' parts of the batch: v6e-128, expert 16 x tensor 8, hosts of 2 x 2 chips."""
    devices = np.empty((1, 1, 16, 8), dtype=object)
    for expert in range(16):
        for tensor in range(8):
            host = expert // 2 * 4 + tensor // 2
            devices[0, 0, expert, tensor] = FakeDevice(expert * 8 + tensor, host)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * 4)
    indices = {}
    for device, index in NamedSharding(mesh, SPEC).devices_indices_map(POD).items():
        indices.setdefault(device.process_index, []).append(index)
    return indices


def test_a_pod_process_reads_the_two_rows_its_chips_hold():
    indices = pod_indices()
    assert len(indices) == 32
    rows = {process: rows_needed(parts, POD) for process, parts in indices.items()}
    assert all(rows[process] == [process // 4 * 2, process // 4 * 2 + 1] for process in range(32))
    assert Counter(row for some in rows.values() for row in some) == {row: 4 for row in range(16)}


def test_a_pod_holds_every_place_of_the_batch_once():
    held = np.zeros(POD, np.int64)
    for parts in pod_indices().values():
        for micro, rows, columns in blocks_of(parts, POD):
            assert len(rows) == 1 and len(columns) == 2048
            held[np.ix_(micro, rows, columns)] += 1
    assert (held == 1).all()


def test_replicas_read_the_same_rows():
    sharding = NamedSharding(batch_sharding(2, 1, 2, 2).mesh, P(None, "expert", None))
    parts = list(sharding.devices_indices_map((3, 4, 8)).values())
    assert len(parts) == 8
    assert blocks_of(parts, (3, 4, 8)) == {(range(3), range(0, 2), range(8)), (range(3), range(2, 4), range(8))}
    assert rows_needed(parts[:1], (3, 4, 8)) == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize("degrees", [(1, 1, 1, 1), (8, 1, 1, 1), (1, 1, 4, 2), (1, 2, 2, 2), (2, 2, 1, 2)])
def test_the_batch_is_the_same_on_every_mesh(open_loader, degrees):
    stream = packed([np.arange(n) + 100 * n for n in range(1, 60)], 16, seed=7)
    sharding = batch_sharding(*degrees)
    loader = open_loader(stream, 3, 8, sharding)
    for step in (0, 1, 5):
        batch = loader.batch(step)
        assert tuple(batch) == FIELDS
        for field, array in batch.items():
            assert array.shape == (3, 8, 16) and array.dtype == np.int32
            assert array.sharding == sharding
            expected = [[stream.row(step * 24 + a * 8 + b)[field] for b in range(8)] for a in range(3)]
            np.testing.assert_array_equal(np.asarray(array), expected)


def test_each_document_is_seen_once_per_epoch_with_less_than_a_row_per_device(open_loader):
    """per_device_batch_size = 0.25: 8 devices share 2 rows, and nothing is loaded only to be thrown away."""
    stream = numbered_rows(64)
    loader = open_loader(stream, 1, 2, batch_sharding(1, 1, 2, 4))
    read = []
    row = stream.row
    stream.row = lambda number, columns: read.append((number, columns.start, columns.stop)) or row(number, columns)
    for epoch in range(2):
        steps = range(epoch * 32, epoch * 32 + 32)
        seen = [int(d) for step in steps for d in np.asarray(loader.batch(step)["tokens"])[0, :, 0]]
        assert sorted(seen) == list(range(64))
    loader.close()
    expected = [(number, start, start + 2) for number in range(128) for start in range(0, 8, 2)]
    assert sorted(part for part in read if part[0] < 128) == expected  # each part once, though batches are made ahead


def test_the_next_batch_is_ready_before_it_is_asked_for(open_loader):
    """Walking forward reads every row once, one step ahead, off the caller's thread."""
    stream, ready, reads = numbered_rows(64), threading.Event(), Counter()
    row = stream.row

    def counted(number, columns):
        reads[number, threading.current_thread() is threading.main_thread()] += 1
        if number == 5:
            ready.set()
        return row(number, columns)

    stream.row = counted
    loader = open_loader(stream, 1, 2, batch_sharding(1, 1, 1, 1))
    loader.batch(0)
    loader.batch(1)
    assert ready.wait(30)  # row 5 is the last of step 2, which nobody has asked for
    loader.batch(2)
    loader.close()
    assert all(reads[number, False] == 1 for number in range(6))
    assert not any(main for _, main in reads)


def test_an_error_in_the_thread_reaches_the_caller_of_its_step(open_loader):
    stream = numbered_rows(64)
    row = stream.row

    def failing(number, columns):
        if number == 3:
            raise OSError("row 3 is gone")
        return row(number, columns)

    stream.row = failing
    loader = open_loader(stream, 1, 2, batch_sharding(1, 1, 1, 1))
    loader.batch(0)
    with pytest.raises(OSError, match="row 3 is gone"):
        loader.batch(1)


def test_close_ends_the_threads(open_loader):
    before = set(threading.enumerate())
    loader = open_loader(numbered_rows(16), 1, 1, batch_sharding(1, 1, 1, 1))
    loader.batch(0)
    assert set(threading.enumerate()) - before
    loader.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_loader_starts_and_goes_back_anywhere(open_loader, step):
    """What a resumed run reads, and an evaluation that begins again."""
    loader = open_loader(numbered_rows(64), 1, 2, batch_sharding(1, 1, 1, 1))
    again = open_loader(numbered_rows(64), 1, 2, batch_sharding(1, 2, 1, 1))
    walked = [np.asarray(loader.batch(number)["tokens"]) for number in range(9)]
    for number in (step, step + 1, 0, step):
        np.testing.assert_array_equal(np.asarray(again.batch(number)["tokens"]), walked[number])


def test_batches_pass_the_transfer_guard(open_loader):
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        batch = open_loader(numbered_rows(16), 2, 4, batch_sharding(1, 2, 2, 2)).batch(0)
        jax.block_until_ready(batch)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert set(batch) == set(FIELDS)


def test_an_epoch_of_fewer_rows_than_a_step_is_refused(open_loader):
    open_loader(numbered_rows(8), 2, 4, batch_sharding(1, 1, 1, 1))
    message = r"fills 7 rows of max_target_length=8, and a step takes 8 \(global_batch=8 \(4 rows x 2 accumulation\)"
    with pytest.raises(ConfigError, match=message):
        open_loader(numbered_rows(7), 2, 4, batch_sharding(1, 1, 1, 1))


def test_rows_of_another_length_than_the_batch_are_refused():
    with pytest.raises(ValueError, match="rows of 8 tokens for batches of length 4"):
        Loader(numbered_rows(8), BatchShape(1, 1, 4, 1), batch_sharding(1, 1, 1, 1))


def test_less_text_than_one_row_is_padded_and_comes_again(open_loader):
    stream = packed([np.array([1, 2])], 8)
    loader = open_loader(stream, 1, 1, batch_sharding(1, 1, 1, 1))
    for step in range(3):
        assert np.asarray(loader.batch(step)["targets"])[0, 0].tolist() == [2, 999] + [-100] * 6


def test_describe_says_what_this_process_reads(open_loader):
    loader = open_loader(numbered_rows(64), 2, 4, batch_sharding(1, 1, 4, 2))
    assert loader.describe(3) == [
        "the rows",
        "step 4 loads 8 rows and trains on 8; process 0 of 1 reads 8: rows 24-31, columns 0-7",
    ]


def test_describe_shows_gaps_between_rows(open_loader, monkeypatch):
    """One process of several holds the middle of each microbatch."""
    sharding = batch_sharding(1, 1, 4, 2)
    parts = sharding.devices_indices_map((5, 4, 8))
    mine = {device: index for device, index in parts.items() if index[1].start in (1, 2)}
    monkeypatch.setattr(type(sharding), "addressable_devices_indices_map", lambda self, shape: mine)
    loader = open_loader(numbered_rows(64), 5, 4, sharding)
    assert loader.describe(0)[-1].endswith("reads 10: rows 1-2, 5-6, 9-10, 13-14, ..., columns 0-7")
