"""The whole sub-layer against plain float64, under routings that leave devices empty or full, on every kind of mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from reference import FLOAT32, expert, route, routed, worst
from sharded import mesh_of, on_mesh
from trainer.config import load
from trainer.models import moe as moe_module
from trainer.models.moe import MoE, MoEOptions, Routing, moe, root_softplus
from trainer.ops.permute import PERMUTE
from trainer.params import gather, initialize, pspecs
from trainer.sharding import BATCH_AXES, TENSOR, Layout

B, S = 8, 8
OVERRIDES = ["model.emb_dim=16", "model.moe_mlp_dim=8", "model.num_experts=16", "model.num_experts_per_tok=3"]
C = load("configs/models/deepseek_v4_tiny.yml", [*OVERRIDES, "model.mlp_activations_limit=0.05"]).config.model
E, K, D = C.num_experts, C.num_experts_per_tok, C.emb_dim

MESHES = {
    "1": {},
    "expert 8": {"expert": 8},
    "expert 4 x tensor 2": {"expert": 4, "tensor": 2},
    "tensor 4": {"tensor": 4},
    "fsdp 2 x expert 2 x tensor 2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
ROUTINGS = ("uniform", "all to one device", "one expert empty", "first device empty", "last device full")


def options(axes=("expert", "tensor"), capacity=-1.0, rounds=True, permute="gather", balance=False):
    return MoEOptions(PERMUTE[permute], axes, False, capacity, rounds, frozen=False, balance_loss=balance)


def spec(hashed=False):
    return MoE.spec(C, hashed)


def weights(hashed=False, seed=3):
    whole = initialize(spec(hashed), Layout(), mesh_of(), jnp.float32, seed)
    return jax.tree.map(lambda x: np.asarray(x) * (10 if x.dtype == jnp.float32 else 1), whole)


def forced(kind):
    """Experts and weights of every token [B S, K]."""
    rng = np.random.default_rng(5)
    scores = rng.random((B * S, E))
    push = {"all to one device": slice(0, 2), "last device full": slice(E - 2, E)}
    if kind in push:
        scores[:, push[kind]] += 10
    if kind == "one expert empty":
        scores[:, 7] = -1
    if kind == "first device empty":
        scores[:, :2] = -1
    experts = np.argsort(-scores, axis=1)[:, :K].astype(np.int32)
    return experts, rng.random((B * S, K)).astype(np.float32)


def inputs():
    rng = np.random.default_rng(6)
    return rng.standard_normal((B, S, D)).astype(np.float32), rng.integers(0, C.vocab_size, (B, S)).astype(np.int32)


BATCH = P(BATCH_AXES, TENSOR)


def on_given_routes(mesh, o):
    """The layer with routes as arguments: (x, experts, combine) -> value, gradients of (x, combine, gate, up, down),
    dropped, rounds. Compiled once for all routes."""
    layout = Layout.of(o.expert_axes)

    def local(p, x, experts, combine):
        batch, length, _ = x.shape
        p = gather(spec(), p, jnp.float32, layout)
        routing = Routing(experts.reshape(-1, K), combine.reshape(-1, K), jnp.ones((batch * length, E)))
        original = moe_module.RoutedMoE.route
        moe_module.RoutedMoE.route = lambda *_: routing
        try:
            y, stats = moe(p, x, jnp.zeros((batch, length), jnp.int32), jnp.ones((batch, length), bool), C, o)
        finally:
            moe_module.RoutedMoE.route = original
        return y, lax.psum(stats.dropped, mesh.axis_names), lax.pmax(stats.rounds, mesh.axis_names)

    specs = (pspecs(spec(), layout), BATCH, BATCH, BATCH)
    whole = on_mesh(mesh, local, specs, (BATCH, P(), P()))

    def loss(p, x, combine, experts):
        y, *counts = whole(p, x, experts.reshape(B, S, K), combine.reshape(B, S, K))
        return jnp.sum(jnp.sin(y * jnp.arange(1, D + 1))), (y, *counts)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    def run(x, experts, combine):
        with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
            grads, (y, dropped, rounds) = compiled(weights(), x, combine, experts)
        of = grads[0].routed
        return y, (grads[1], grads[2], of.gate, of.up, of.down), int(dropped), int(rounds)

    return run


def shared(x):
    p = weights().shared
    gate, up, down = (np.asarray(w, np.float64) for w in (p.gate, p.up, p.down))
    return np.stack([expert(t, gate, up, down, C.mlp_activations_limit) for t in x.reshape(-1, D)])


@pytest.fixture(scope="module")
def dense():
    """Value and gradients on one device, for every routing; the values are held against loops."""
    results = {}
    run = on_given_routes(mesh_of(), options(permute="repeat"))
    for kind in ROUTINGS:
        x, _ = inputs()
        experts, combine = forced(kind)
        y, grads, *_ = run(x, experts, combine)
        p = weights().routed
        loops = routed(x.reshape(-1, D), experts, combine, p, C.mlp_activations_limit) + shared(x)
        assert worst(np.asarray(y).reshape(-1, D), loops) < FLOAT32
        results[kind] = (y, grads)
    return results


@pytest.mark.parametrize("axes", [("expert", "tensor"), ("expert",)], ids=["spread", "by width"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("capacity", [-1.0, 0.4], ids=["worst case", "rounds"])
def test_every_routing_equals_the_dense_layer(dense, mesh, axes, capacity):
    run = on_given_routes(mesh_of(**MESHES[mesh]), options(axes, capacity))
    for kind in ROUTINGS:
        x, _ = inputs()
        y, grads, dropped, rounds = run(x, *forced(kind))
        assert dropped == 0
        assert worst(y, dense[kind][0]) < FLOAT32, kind
        for ours, theirs in zip(grads, dense[kind][1], strict=True):
            assert worst(ours, theirs) < FLOAT32, kind
        if capacity > 0 and mesh == "expert 8" and kind == "all to one device":
            assert rounds > 2


def test_what_is_dropped_is_counted():
    x, _ = inputs()
    experts, combine = forced("all to one device")
    mesh = mesh_of(expert=8)
    y, grads, dropped, _ = on_given_routes(mesh, options(("expert",), 1.0, rounds=False))(x, experts, combine)
    capacity = B * S // 8 * K
    load = np.bincount(experts.reshape(-1) // 2, minlength=8)
    assert dropped == np.maximum(load - capacity, 0).sum() > 0
    assert all(np.isfinite(g).all() for g in (y, *grads))


def test_more_room_than_rows():
    x, _ = inputs()
    experts, combine = forced("uniform")
    y, _, dropped, rounds = on_given_routes(mesh_of(expert=8), options(("expert",), 4.0))(x, experts, combine)
    assert (dropped, rounds) == (0, 1) and np.isfinite(y).all()


def test_rows_nobody_wrote_are_never_read(monkeypatch):
    """On a TPU an empty buffer is not zero: poison what the exchange leaves unwritten."""
    from trainer.ops import exchange

    move = exchange._move

    def poisoned(rows, num_rows, r, e):
        out = move(rows, num_rows, r, e)
        if num_rows == e.capacity:
            used = jnp.arange(num_rows) < jnp.sum(r.incoming)
            out = jnp.where(used[:, None], out, jnp.nan)
        return out

    monkeypatch.setattr(exchange, "_move", poisoned)
    x, _ = inputs()
    y, grads, *_ = on_given_routes(mesh_of(expert=8), options(("expert",), 2.0))(x, *forced("uniform"))
    assert all(np.isfinite(g).all() for g in (y, *grads))


# Routing.


def route_with(x, router, bias, k=K):
    p = weights().routed.replace(router=router, bias=bias)
    return p.route(jnp.asarray(x), jnp.zeros(len(x), jnp.int32), C)


def test_routes_are_those_of_plain_float64():
    x = inputs()[0].reshape(-1, D)
    p = weights().routed
    bias = np.random.default_rng(7).standard_normal(E).astype(np.float32) * 0.01
    ours = route_with(x, p.router, bias)
    experts, combine = route(x, p.router, bias, K, C.routed_scaling_factor)
    np.testing.assert_array_equal(ours.experts, experts)
    assert worst(ours.weights, combine) < FLOAT32


def test_ties_go_to_the_lower_expert():
    ours = route_with(np.zeros((2, D), np.float32), np.zeros((D, E), np.float32), np.zeros(E, np.float32))
    np.testing.assert_array_equal(ours.experts, [[0, 1, 2]] * 2)
    below = -float(root_softplus(jnp.float32(0)))  # the sum is 0.0 or -0.0: they tie
    signs = np.full(E, below, np.float32)
    ours = route_with(np.zeros((2, D), np.float32), np.zeros((D, E), np.float32), signs)
    np.testing.assert_array_equal(ours.experts, [[0, 1, 2]] * 2)


def test_scores_keep_a_finite_gradient_where_softplus_underflows():
    x = jnp.array([-200.0, -104.0, -50.0, 0.0, 30.0])
    grads = jax.vmap(jax.grad(root_softplus))(x)
    assert np.isfinite(grads).all() and grads[0] == 0 and grads[3] > 0


def whole_layer(mesh, o, hashed=False, x=None, valid=None):
    layout = Layout.of(o.expert_axes)
    ones = np.ones((B, S), bool) if valid is None else valid

    def local(p, x, tokens, valid):
        y, stats = moe(gather(spec(hashed), p, jnp.float32, layout), x, tokens, valid, C, o)
        sums = lax.psum((stats.load, stats.balance, (~stats.finite).astype(jnp.int32)), mesh.axis_names)
        return y, sums

    whole = on_mesh(mesh, local, (pspecs(spec(hashed), layout), BATCH, BATCH, BATCH), (BATCH, P()))

    def balance_loss(p):
        return whole(p, data, tokens, ones)[1][1]

    data, tokens = (inputs()[0] if x is None else x), inputs()[1]
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        y, (load, balance, bad) = jax.jit(whole)(weights(hashed), data, tokens, ones)
        grad = jax.jit(jax.grad(balance_loss))(weights()).routed.router if o.balance_loss else None
    return np.asarray(y), np.asarray(load), float(balance), int(bad), grad


@pytest.mark.parametrize("hashed", [False, True], ids=["top-k", "hash"])
def test_the_layer_and_its_load_are_those_of_plain_float64(hashed):
    x, tokens = inputs()
    p = weights(hashed).routed
    experts, combine = route(x.reshape(-1, D), p.router, np.zeros(E), K, C.routed_scaling_factor)
    if hashed:
        experts = p.tid2eid[:, tokens.reshape(-1)].T
        scores = np.sqrt(np.logaddexp(0, x.reshape(-1, D).astype(np.float64) @ p.router))
        chosen = np.take_along_axis(scores, experts, 1)
        combine = C.routed_scaling_factor * chosen / chosen.sum(1, keepdims=True)
    expected = routed(x.reshape(-1, D), experts, combine, p, C.mlp_activations_limit)
    p_shared = weights(hashed).shared
    expected += np.stack(
        [
            expert(t, p_shared.gate, p_shared.up, p_shared.down, C.mlp_activations_limit)
            for t in x.reshape(-1, D).astype(np.float64)
        ]
    )
    for mesh in ({}, {"expert": 4, "tensor": 2}):
        y, load, *_ = whole_layer(mesh_of(**mesh), options(), hashed)
        assert worst(y.reshape(-1, D), expected) < FLOAT32
        np.testing.assert_array_equal(load, np.bincount(experts.reshape(-1), minlength=E))


def test_padding_visits_no_expert():
    valid = np.arange(S) < np.arange(B)[:, None]
    x = inputs()[0]
    other = np.where(valid[..., None], x, 7.0).astype(np.float32)
    (y, load, *_), (y2, load2, *_) = (
        whole_layer(mesh_of(expert=4, tensor=2), options(), x=data, valid=valid) for data in (x, other)
    )
    assert load.sum() == valid.sum() * K
    np.testing.assert_array_equal(load, load2)
    np.testing.assert_array_equal(y[valid], y2[valid])


def test_the_balance_loss_and_its_gradient_are_the_same_on_every_mesh():
    results = [whole_layer(mesh_of(**mesh), options(balance=True)) for mesh in MESHES.values()]
    x = inputs()[0].astype(np.float64)
    p = weights().routed
    scores = np.sqrt(np.logaddexp(0, x @ p.router))
    experts, _ = route(x.reshape(-1, D), p.router, np.zeros(E), K, 1.0)
    expected = 0.0
    for b in range(B):
        f = np.bincount(experts.reshape(B, -1)[b], minlength=E) * E / (K * S)
        expected += (f * (scores[b] / scores[b].sum(-1, keepdims=True)).mean(0)).sum()
    for *_, balance, _, grad in results:
        assert abs(balance - expected) < FLOAT32 * expected
        assert worst(grad, results[0][-1]) < FLOAT32


def test_scores_that_are_no_numbers_are_reported():
    x = inputs()[0].copy()
    x[3, 2, 1] = np.nan
    *_, bad, _ = whole_layer(mesh_of(expert=4, tensor=2), options(), x=x)
    assert bad == 1
