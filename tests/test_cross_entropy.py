import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from reference import FLOAT32, worst
from sharded import mesh_of, on_mesh
from trainer.ops.cross_entropy import IGNORE, cross_entropy

N, D, V = 24, 16, 40


def data():
    rng = np.random.default_rng(0)
    h, head = rng.standard_normal((N, D)), rng.standard_normal((D, V))
    targets = rng.integers(0, V, N)
    targets[[2, 7, 23]] = IGNORE
    return h.astype(np.float32), head.astype(np.float32), targets.astype(np.int32)


def plain(h, head, targets):
    """Summed loss and its gradients in float64."""
    logits = h.astype(np.float64) @ head
    top = logits.max(1, keepdims=True)
    logsum = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
    real = targets != IGNORE
    d = np.exp(logits - logsum[:, None])
    d[np.arange(N), np.where(real, targets, 0)] -= 1
    d[~real] = 0
    loss = (logsum - logits[np.arange(N), np.where(real, targets, 0)])[real].sum()
    return loss, d @ head.T, h.T @ d


def whole(mesh, chunk):
    def local(h, head, targets):
        return lax.psum(cross_entropy(h, head, targets, chunk), ("expert", "tensor"))

    return on_mesh(mesh, local, (P(("expert", "tensor")), P(None, "tensor"), P(("expert", "tensor"))), P())


@pytest.mark.parametrize("chunk", [1, 4, 5, 1000])
@pytest.mark.parametrize("mesh", [{}, {"tensor": 4}, {"expert": 2, "tensor": 2}], ids=str)
def test_value_and_gradients_are_those_of_float64(mesh, chunk):
    mesh = mesh_of(**mesh)
    h, head, targets = data()
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        loss, grads = jax.jit(jax.value_and_grad(whole(mesh, chunk), argnums=(0, 1)))(h, head, targets)
    expected, d_h, d_head = plain(h, head, targets)
    assert abs(loss - expected) < FLOAT32 * expected
    assert worst(grads[0], d_h) < FLOAT32 and worst(grads[1], d_head) < FLOAT32


def test_the_logits_of_all_tokens_never_exist_at_once():
    """Not stacked by chunk for the backward either: nothing float has as many elements as [n, V]."""
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        sizes = list(sizes_of(jax.make_jaxpr(jax.value_and_grad(whole(mesh, 6), argnums=(0, 1)))(*data()).jaxpr))
    assert 6 * V in sizes and max(sizes) < N * V


def sizes_of(jaxpr):
    """Elements of every float array made, in loops and calls too."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.size for v in eqn.outvars if np.issubdtype(v.aval.dtype, np.floating))
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from sizes_of(getattr(inner, "jaxpr", inner))


def test_logits_far_from_zero_do_not_overflow():
    h, head, targets = data()
    mesh = mesh_of(tensor=2)
    with jax.set_mesh(mesh):
        loss, grads = jax.value_and_grad(whole(mesh, 8))(h * 100, head, targets)
    assert np.isfinite(loss) and np.isfinite(grads).all()
