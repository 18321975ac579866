"""Windows of documents: what is pooled, who sees it, and that packing and meshes change neither."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from reference import FLOAT32, chosen, entries, pooled, worst
from sharded import mesh_of, on_mesh
from trainer.config import load
from trainer.models.compression import Compressor, Indexer, compress, pool, select
from trainer.models.rope import frequencies
from trainer.models.rows import row_context, visible, windows
from trainer.params import initialize
from trainer.sharding import BATCH_AXES, TENSOR, Layout

C = load("configs/models/deepseek_v4_tiny.yml", ["model.indexer_topk=3"]).config.model  # fewer than a document has
LENGTHS = (1, 3, 4, 5, 15, 16, 17, 33)  # of documents, in one row of 96 with two places of padding
S = 96


def packed():
    segments, positions = np.zeros(S, np.int32), np.zeros(S, np.int32)
    start = 0
    for i, length in enumerate(LENGTHS):
        segments[start : start + length] = i + 1
        positions[start : start + length] = np.arange(length)
        start += length
    return segments[None], positions[None]


def documents():
    ends = np.cumsum(LENGTHS)
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False), (3, False)])
def test_packed_documents_pool_as_they_do_alone(ratio, overlap):
    rng = np.random.default_rng(0)
    width = 10
    values, gates = rng.standard_normal((2, S, width)).astype(np.float32)
    bias = rng.standard_normal((ratio, width)).astype(np.float32)
    segments, positions = packed()
    w = windows(jnp.asarray(segments), jnp.asarray(positions), ratio)
    entries = np.asarray(pool(values[None], gates[None], bias, w, overlap))[0]
    alone = np.concatenate([pooled(values[d], gates[d], bias, ratio, overlap) for d in documents()])
    assert worst(entries[: len(alone)], alone) < FLOAT32
    owners = np.repeat(np.arange(len(LENGTHS)) + 1, [n // ratio for n in LENGTHS])
    np.testing.assert_array_equal(np.asarray(w.segment)[0], np.pad(owners, (0, S // ratio - len(owners))))


@pytest.mark.parametrize("ratio", [4, 16])
def test_a_query_sees_whole_windows_of_its_past(ratio):
    segments, positions = packed()
    w = windows(jnp.asarray(segments), jnp.asarray(positions), ratio)
    seen = np.asarray(visible(w, jnp.asarray(segments), jnp.arange(S)))[0]
    numbers = np.concatenate([np.arange(n // ratio) for n in LENGTHS])
    for token in range(sum(LENGTHS)):
        for entry in range(S // ratio):
            own = entry < len(numbers) and w.segment[0, entry] == segments[0, token]
            assert seen[token, entry] == (own and (numbers[entry] + 1) * ratio <= positions[0, token] + 1)
    assert not seen[sum(LENGTHS) :].any()


def weights(spec):
    return jax.tree.map(lambda x: np.asarray(x) * 20, initialize(spec, Layout(), mesh_of(), jnp.float32, 0))


def on(mesh, local, params, *data):
    rows = P(BATCH_AXES, TENSOR)
    whole = on_mesh(mesh, local, (jax.tree.map(lambda _: P(), params), *[rows] * len(data)), rows)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(whole)(params, *data))


def batch():
    rng = np.random.default_rng(2)
    segments, positions = packed()
    x = rng.standard_normal((1, S, C.emb_dim)).astype(np.float32)
    q_low = rng.standard_normal((1, S, C.q_lora_rank)).astype(np.float32)
    return x, q_low, segments, positions


@pytest.mark.parametrize("ratio", [4, 16])
def test_entries_of_a_whole_or_split_row_are_those_of_each_document_alone(ratio):
    x, _, segments, positions = batch()

    def local(p, x, segments, positions):
        rows = row_context(segments, positions, C)
        every = compress(p, x, rows.windows[ratio], rows.compressed, C)
        share = every.shape[1] // jax.lax.axis_size(TENSOR)
        return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(TENSOR) * share, share, axis=1)

    p = weights(Compressor.spec(C, ratio, C.head_dim))
    turn = frequencies(C, compressed=True)
    alone = np.concatenate([entries(p, x[0, d], ratio, ratio == 4, turn) for d in documents()])
    for tensor in (1, 2):
        ours = on(mesh_of(tensor=tensor), local, p, x, segments, positions)
        assert worst(ours[0, : len(alone)], alone) < FLOAT32


def selected(p, tensor=1):
    x, q_low, segments, positions = batch()

    def local(p, x, q_low, segments, positions):
        return select(p, x, q_low, row_context(segments, positions, C), C)

    return on(mesh_of(tensor=tensor), local, p, x, q_low, segments, positions)[0]


def each_alone(p):
    """[S, T]: every document's own choice, at its own places of the row."""
    x, q_low, *_ = batch()
    kept, first = np.zeros((S, S // 4), bool), 0
    for d in documents():
        own = chosen(p, x[0, d], q_low[0, d], 4, C.indexer_topk, frequencies(C, compressed=True))
        kept[d, first : first + own.shape[1]] = own
        first += own.shape[1]
    return kept


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_indexer_chooses_on_a_whole_or_split_row_as_for_each_document_alone(tensor):
    p = weights(Indexer.spec(C))
    expected = each_alone(p)
    np.testing.assert_array_equal(selected(p, tensor), expected)
    assert expected.sum(-1).max() == C.indexer_topk < LENGTHS[-1] // 4


@pytest.mark.parametrize("tensor", [1, 2])
def test_of_equal_scores_the_first_entries_are_kept(tensor):
    p = weights(Indexer.spec(C))
    p = p.replace(weights_proj=np.zeros_like(p.weights_proj))
    kept = selected(p, tensor)
    np.testing.assert_array_equal(kept, each_alone(p))
    last = sum(n // 4 for n in LENGTHS[:-1])
    np.testing.assert_array_equal(np.flatnonzero(kept[sum(LENGTHS) - 1]), last + np.arange(C.indexer_topk))
