import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import FLOAT32, worst
from trainer.ops import permute
from trainer.ops.permute import PERMUTE, sort_by_expert

N, K, D, E = 24, 4, 16, 6  # no two of these, or their products, can be mistaken for each other

ROUTINGS = {
    "uniform": lambda rng: rng.integers(0, E, (N, K)),
    "one hot expert": lambda rng: np.full((N, K), 3),
    "an empty expert": lambda rng: rng.integers(1, E, (N, K)),
    "all ties": lambda rng: np.zeros((N, K)),
}


@pytest.fixture(params=ROUTINGS)
def experts(request):
    return jnp.asarray(ROUTINGS[request.param](np.random.default_rng(0)), jnp.int32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(permute, "CHUNK", 7)  # divides nothing here


def layer(way, x, weights, experts, valid):
    """Into expert order, something to each row that depends on its place, and back."""
    p = sort_by_expert(experts, valid, E)
    rows = way.gather(x, p)
    return way.combine(jnp.tanh(rows) * rows, weights, p)


def data(dtype=jnp.float32):
    rng = np.random.default_rng(1)
    x, weights, ct = (rng.standard_normal(s).astype(np.float32) for s in ((N, D), (N, K), (N, D)))
    return jnp.asarray(x, dtype), jnp.asarray(weights), jnp.asarray(ct, dtype)


def gradients(way, experts, dtype=jnp.float32):
    x, weights, ct = data(dtype)
    run = partial(layer, PERMUTE[way], experts=experts, valid=jnp.ones(N, bool))
    out, pull = jax.vjp(run, x, weights)
    return out, *pull(ct)


def test_the_order_is_token_major_within_an_expert_and_padding_comes_last(experts):
    valid = np.arange(N) % 5 != 0
    p = sort_by_expert(experts, jnp.asarray(valid), E)
    assignments = [(int(experts[t, k]) if valid[t] else E, t, k) for t in range(N) for k in range(K)]
    expected = sorted(assignments, key=lambda a: a[0])  # Python's sort is stable
    np.testing.assert_array_equal(p.token, [t for _, t, _ in expected])
    np.testing.assert_array_equal(p.group_sizes, [sum(e == a[0] for a in assignments) for e in range(E)])
    place = {(t, k): j for j, (_, t, k) in enumerate(expected)}
    np.testing.assert_array_equal(p.inverse, [[place[t, k] for k in range(K)] for t in range(N)])


class TestGatherReplicatedActivations:
    def test_value_and_gradients_are_those_of_the_repeat_form(self, experts):
        for ours, theirs in zip(gradients("gather", experts), gradients("repeat", experts), strict=True):
            assert worst(ours, theirs) < FLOAT32

    def test_rows_are_the_tokens_of_their_experts(self, experts):
        x, *_ = data()
        p = sort_by_expert(experts, jnp.ones(N, bool), E)
        np.testing.assert_array_equal(PERMUTE["gather"].gather(x, p), np.asarray(x)[np.asarray(p.token)])

    def test_combine_undoes_gather(self, experts):
        x, *_ = data()
        p = sort_by_expert(experts, jnp.ones(N, bool), E)
        back = PERMUTE["gather"].combine(PERMUTE["gather"].gather(x, p), jnp.full((N, K), 1 / K), p)
        assert worst(back, x) < FLOAT32

    def test_the_backward_sums_in_float32_and_rounds_once(self):
        rng = np.random.default_rng(2)
        n, k = 512, 6
        experts = jnp.asarray(rng.integers(0, 8, (n, k)), jnp.int32)
        p = sort_by_expert(experts, jnp.ones(n, bool), 8)
        ct = jnp.asarray(rng.standard_normal((n * k, D)), jnp.bfloat16)
        exact = np.asarray(ct, np.float64)[np.asarray(p.inverse)].sum(1)
        (ours,) = jax.vjp(lambda x: PERMUTE["gather"].gather(x, p), jnp.zeros((n, D), jnp.bfloat16))[1](ct)
        (autodiff,) = jax.vjp(lambda x: x[p.token], jnp.zeros((n, D), jnp.bfloat16))[1](ct)
        assert worst(ours, exact) < 4e-3 < worst(autodiff, exact)

    def test_padding_tokens_get_no_gradient_from_rows_of_no_group(self):
        x, weights, ct = data()
        valid = jnp.arange(N) < N - 4
        experts = jnp.zeros((N, K), jnp.int32)

        def run(x):
            p = sort_by_expert(experts, valid, E)
            rows = PERMUTE["gather"].gather(x, p)
            used = jnp.arange(N * K) < jnp.sum(p.group_sizes)
            return PERMUTE["gather"].combine(jnp.where(used[:, None], rows, 0), weights, p)

        out, pull = jax.vjp(run, x)
        assert not np.any(out[N - 4 :]) and not np.any(pull(ct)[0][N - 4 :])

    def test_only_the_sorted_rows_are_k_times_the_activations(self, experts):
        found = arrays_of_k_times(PERMUTE["gather"], experts)
        assert found and set(found) == {(N * K, D)}
        assert set(hlo_arrays_of_k_times(PERMUTE["gather"], experts)) == {(N * K, D)}

    def test_the_repeat_form_has_copies_before_the_gather_and_in_the_combine(self, experts):
        assert len(set(arrays_of_k_times(PERMUTE["repeat"], experts))) > 1

    def test_sorted_rows_are_gathered_once_and_never_moved_again(self, experts):
        made = [name for name, shape in equations(PERMUTE["gather"], experts) if shape == (N * K, D)]
        assert made.count("gather") == 1
        assert not {"concatenate", "scatter", "scatter-add", "sort", "transpose", "reshape"} & set(made)

    def test_one_sort_and_one_scatter_make_the_permutation(self, experts):
        names = [name for name, _ in equations(PERMUTE["gather"], experts)]
        assert names.count("sort") == 1 + 1  # its two outputs
        scatters = [shape for name, shape in equations(PERMUTE["gather"], experts) if name == "scatter"]
        assert scatters.count((N * K,)) == 2  # the inverse, and the weights in sorted order


def traced(way, experts):
    x, weights, ct = data()

    def run(x, weights, ct):
        out, pull = jax.vjp(partial(layer, way, experts=experts, valid=jnp.ones(N, bool)), x, weights)
        return out, pull(ct)

    return run, (x, weights, ct)


def equations(way, experts):
    """(primitive, shape) of everything computed, in loops and calls too."""
    run, args = traced(way, experts)

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [p for p in jax.tree.leaves(list(eqn.params.values())) if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
            for sub in inner:
                yield from walk(getattr(sub, "jaxpr", sub))
            if not inner:
                yield from ((eqn.primitive.name, tuple(v.aval.shape)) for v in eqn.outvars)

    return list(walk(jax.make_jaxpr(run)(*args).jaxpr))


def arrays_of_k_times(way, experts):
    return [shape for _, shape in equations(way, experts) if np.prod(shape) == N * K * D]


def hlo_arrays_of_k_times(way, experts):
    run, args = traced(way, experts)
    text = jax.jit(run).lower(*args).compile().as_text()
    shapes = [map(int, dims.split(",")) for dims in re.findall(r"(?:f32|bf16|f16)\[([\d,]+)\]", text)]
    without_ones = [tuple(size for size in shape if size != 1) for shape in shapes]
    return [shape for shape in without_ones if np.prod(shape) == N * K * D]
