"""Every form of attention against loops, in value and gradient, and what a query may not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from reference import BFLOAT16, FLOAT32, attention, worst
from sharded import mesh_of, on_mesh
from trainer.ops import attend
from trainer.ops.attend import Entries, Keys, attention_forms

B, S, H, C, WINDOW, RATIO = 2, 152, 4, 16, 20, 4
T = S // RATIO
FORMS = ("dot_product", "chunked", "dynamic_splash")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(attend, "CHUNK_QUERIES", 16)  # does not divide S, and is shorter than the window
    monkeypatch.setattr(attend, "SPLASH_QUERIES", 64)
    monkeypatch.setattr(attend, "HALVED_ENTRIES", 30)


def attention_of(name, q, kv, entries, sinks, segments):
    keys = Keys(kv, entries, sinks, segments, WINDOW)
    return attention_forms(interpret=True)[name](lambda q, attend: attend(q), q, keys)


def case():
    """Two documents and padding per row; entries seen at random among those whole in the past."""
    rng = np.random.default_rng(0)
    q, kv, entries, sinks = (rng.standard_normal(s).astype(np.float32) for s in ((B, S, H, C), (B, S, C), (B, T, C), H))
    segments = np.repeat([[1] * 61 + [2] * 70 + [0] * 21, [1] * 152], 1, axis=0).astype(np.int32)
    past = (np.arange(T) + 1) * RATIO <= np.arange(S)[:, None] + 1
    return q, kv, entries, (rng.random((B, S, T)) < 0.5) & past, sinks, segments


def value_and_gradients(name, dtype=jnp.float32, with_entries=True, mesh=None):
    q, kv, entries, seen, sinks, segments = case()
    mesh = mesh_of() if mesh is None else mesh
    weight = np.random.default_rng(1).standard_normal(q.shape) * (segments > 0)[..., None, None]

    def local(q, kv, entries, seen, sinks, segments, weight):
        e = Entries(entries, seen) if with_entries else None
        out = attention_of(name, q, kv, e, sinks, segments)
        return lax.psum(jnp.sum(out.astype(jnp.float32) * weight), ("expert", "tensor")), out

    heads, rows = P("expert", None, "tensor"), P("expert")
    whole = on_mesh(mesh, local, (heads, rows, rows, rows, P("tensor"), rows, heads), (P(), heads))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        run = jax.jit(jax.value_and_grad(whole, argnums=(0, 1, 2, 4), has_aux=True))
        (_, out), grads = run(q.astype(dtype), kv.astype(dtype), entries.astype(dtype), seen, sinks, segments,
                              weight.astype(np.float32))  # fmt: skip
    return np.asarray(out, np.float32)[segments > 0], grads


@pytest.mark.parametrize("with_entries", [True, False], ids=["entries", "window only"])
def test_the_plain_form_is_loops(with_entries):
    q, kv, entries, seen, sinks, segments = case()
    seen = seen & with_entries
    expected = attention(q, kv, entries, seen, sinks, segments, WINDOW)[segments > 0]
    assert worst(value_and_gradients("dot_product", with_entries=with_entries)[0], expected) < FLOAT32


@pytest.mark.parametrize("with_entries", [True, False], ids=["entries", "window only"])
@pytest.mark.parametrize("name", FORMS[1:])
def test_forms_agree(name, with_entries):
    out, grads = value_and_gradients("dot_product", with_entries=with_entries)
    for mesh in (mesh_of(), mesh_of(expert=2, tensor=2)):
        ours, our_grads = value_and_gradients(name, with_entries=with_entries, mesh=mesh)
        assert worst(ours, out) < FLOAT32
        for a, b in zip(our_grads, grads, strict=True):
            assert worst(a, b) < FLOAT32


@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_stays_near_float32(name):
    out, grads = value_and_gradients("dot_product")
    ours, our_grads = value_and_gradients(name, jnp.bfloat16)
    assert worst(ours, out) < BFLOAT16
    for a, b in zip(our_grads, grads, strict=True):
        assert a.dtype == (jnp.float32 if a.ndim == 1 else jnp.bfloat16)
        assert worst(a.astype(jnp.float32), b) < BFLOAT16


@pytest.mark.parametrize("name", FORMS)
def test_the_window_ends_where_it_should_and_documents_are_apart(name):
    q, kv, _, _, sinks, segments = case()
    queries = (30, 61, 100, 130)

    def of_query(kv, s):
        return jnp.sum(attention_of(name, q, kv, None, sinks, segments)[0, s] ** 2)

    def local(kv):
        return jnp.stack([jax.grad(of_query)(kv, s)[0] for s in queries])

    with jax.set_mesh(mesh_of()):
        influence = jax.jit(on_mesh(mesh_of(), local, (P(),), P()))(kv)
    for s, grads in zip(queries, np.abs(influence).max(-1), strict=True):
        start = max(0 if s < 61 else 61, s - WINDOW + 1)
        seen = np.zeros(S, bool)
        seen[start : s + 1] = True
        np.testing.assert_array_equal(grads > 0, seen)
