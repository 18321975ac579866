"""The attention layer of each kind, with weights of no particular size, against the same in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from reference import FLOAT32, attention, chosen, entries, rms, turned, worst
from sharded import mesh_of, on_mesh
from trainer.config import load
from trainer.models.attention import Attention
from trainer.models.attention import attention as layer
from trainer.models.config import ADAPTER_LETTERS
from trainer.models.lora import Adapted
from trainer.models.rope import frequencies
from trainer.models.rows import row_context
from trainer.ops import attend
from trainer.ops.attend import attention_forms, dot_product
from trainer.params import gather, initialize, pspecs
from trainer.sharding import Layout

OVERRIDES = ["model.sliding_window_size=5", "model.indexer_topk=3", "model.o_groups=2", "model.emb_dim=16"]
C = load("configs/models/deepseek_v4_tiny.yml", OVERRIDES).config.model
S = 64


def weights(ratio):
    """Scaled up from their start, gains and sinks moved off theirs."""
    rng = np.random.default_rng(0)
    start = initialize(Attention.spec(C, ratio), Layout(), mesh_of(), jnp.float32, 0)
    return jax.tree.map(lambda x: 10 * np.asarray(x) + rng.random(x.shape, np.float32) * (x.ndim == 1), start)


def plain(p, x, ratio):
    """SPEC sections 4 to 7 on one document [S, D]."""
    x, positions = np.asarray(x, np.float64), np.arange(S)
    turn = frequencies(C, compressed=ratio > 0)
    q_low = rms(x @ p.wq_a) * p.q_norm
    q = turned(rms(np.einsum("sq,qhc->shc", q_low, p.wq_b)), positions, turn)
    kv = turned(rms(x @ p.wkv) * p.kv_norm, positions, turn)
    compressed = entries(p.compressor, x, ratio, ratio == 4, turn) if ratio else np.zeros((0, C.head_dim))
    seen = (np.arange(len(compressed)) + 1) * ratio <= positions[:, None] + 1
    if ratio == 4:
        seen = chosen(p.indexer, x, q_low, ratio, C.indexer_topk, turn)
    o = attention(q[None], kv[None], compressed[None], seen[None], p.sinks, np.ones((1, S)), C.sliding_window_size)
    o = turned(o[0], positions, turn, back=True)
    per_group = C.num_query_heads // C.o_groups
    low = [
        np.einsum("shc,hco->so", o[:, g : g + per_group], p.wo_a[g : g + per_group])
        for g in range(0, C.num_query_heads, per_group)
    ]
    return np.concatenate(low, axis=-1) @ p.wo_b


@pytest.mark.parametrize("tensor", [1, 2, 4], ids=["whole", "groups split", "a group on two devices"])
@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_a_layer_is_the_plain_one(ratio, tensor):
    x = np.random.default_rng(1).standard_normal((1, S, C.emb_dim)).astype(np.float32)
    p, mesh = weights(ratio), mesh_of(tensor=tensor)

    def local(p, x, segments, positions):
        p = gather(Attention.spec(C, ratio), p, jnp.float32, Layout())
        return layer(p, x, row_context(segments, positions, C), dot_product, C, lambda part: part)

    rows = Layout().pspec("batch", "length")
    run = on_mesh(mesh, local, (pspecs(Attention.spec(C, ratio), Layout()), rows, rows, rows), rows)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        ours = jax.jit(run)(p, x, np.ones((1, S), np.int32), np.arange(S, dtype=np.int32)[None])
    assert worst(ours[0], plain(p, x[0], ratio)) < FLOAT32


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_chunks_of_a_row_drop_what_they_like(monkeypatch, dropout):
    """Far from its start, a row of equal tokens has equal outputs: with dropout, chunks must not share one draw."""
    monkeypatch.setattr(attend, "CHUNK_QUERIES", 16)
    rng, rank = np.random.default_rng(2), 3
    per_group = C.num_query_heads // C.o_groups
    p = weights(0)
    p = p.replace(
        wo_a=Adapted(
            base=p.wo_a,
            a=rng.standard_normal((per_group, C.head_dim, rank)).astype(np.float32),
            b=rng.standard_normal((C.o_groups, rank, C.o_lora_rank)).astype(np.float32),
            seed=np.array([7], np.int32) if dropout else None,
            letters=ADAPTER_LETTERS["attention/wo_a"][1:],
            scale=1.0,
            dropout=dropout,
        )
    )

    def local(p, x, segments, positions):
        form = attention_forms(interpret=True)["chunked"]
        return layer(p, x, row_context(segments, positions, C), form, C, lambda part: part)

    x = np.broadcast_to(rng.standard_normal(C.emb_dim).astype(np.float32), (1, S, C.emb_dim))
    rows = Layout().pspec("batch", "length")
    run = on_mesh(mesh_of(), local, (jax.tree.map(lambda _: P(), p), rows, rows, rows), rows)
    with jax.set_mesh(mesh_of()), jax.default_matmul_precision("highest"):
        y = jax.jit(run)(p, x, np.ones((1, S), np.int32), np.arange(S, dtype=np.int32)[None])[0]
    assert (worst(y[20:32], y[36:48]) < 1e-4) == (dropout == 0)
