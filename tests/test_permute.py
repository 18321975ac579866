import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import FLOAT32, worst
from trainer.models.moe import MoEOptions, RoutedMoE
from trainer.ops import permute
from trainer.ops.permute import PERMUTE, Permute, sort_by_expert

N, K, D, E = 24, 4, 16, 6  # no two of these, or their products, can be mistaken for each other

ROUTINGS = {
    "uniform": lambda rng: rng.integers(0, E, (N, K)),
    "one hot expert": lambda rng: np.full((N, K), 3),
    "an empty expert": lambda rng: rng.integers(1, E, (N, K)),
    "all ties": lambda rng: np.zeros((N, K)),
}


def through_the_layer(way):
    """The same way, taken by the methods of the layer."""
    layer = RoutedMoE(router=None, bias=None, tid2eid=None, gate=None, up=None, down=None)
    o = MoEOptions(PERMUTE[way], ("expert",), False, -1.0, True, frozen=False, balance_loss=False)
    return Permute(lambda x, p: layer.permute(x, p, o), lambda rows, w, p: layer.unpermute(rows, w, p, o))


WAYS = {**PERMUTE, "layer": through_the_layer("gather"), "layer, repeat": through_the_layer("repeat")}
DIRECT = ("gather", "layer")
COPYING = ("repeat", "layer, repeat")


@pytest.fixture(params=ROUTINGS)
def experts(request):
    return jnp.asarray(ROUTINGS[request.param](np.random.default_rng(0)), jnp.int32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(permute, "CHUNK", 7)  # divides nothing here


def layer(way, x, weights, experts, valid):
    """Into expert order, each expert's own factor, and back; rows of no group are hidden, as the layer does."""
    p = sort_by_expert(experts, valid, E)
    factors = jnp.repeat(jnp.arange(1.0, E + 1), p.group_sizes, total_repeat_length=N * K)
    used = jnp.arange(N * K) < jnp.sum(p.group_sizes)
    rows = way.gather(x, p)
    return way.combine(jnp.where(used[:, None], factors[:, None] * jnp.tanh(rows), 0).astype(x.dtype), weights, p)


def data(dtype=jnp.float32):
    rng = np.random.default_rng(1)
    x, weights, ct = (rng.standard_normal(s).astype(np.float32) for s in ((N, D), (N, K), (N, D)))
    return jnp.asarray(x, dtype), jnp.asarray(weights), jnp.asarray(ct, dtype)


def gradients(way, experts, valid):
    x, weights, ct = data()
    out, pull = jax.vjp(partial(layer, WAYS[way], experts=experts, valid=jnp.asarray(valid)), x, weights)
    return out, *pull(ct)


def plain(experts, valid):
    """The same layer and its gradients, assignment by assignment in float64."""
    x, weights, ct = (np.asarray(a, np.float64) for a in data())
    out, d_x, d_weights = np.zeros((N, D)), np.zeros((N, D)), np.zeros((N, K))
    for t, k in np.ndindex(N, K):
        if valid[t]:
            y = (int(experts[t, k]) + 1) * np.tanh(x[t])
            out[t] += weights[t, k] * y
            d_weights[t, k] = ct[t] @ y
            d_x[t] += weights[t, k] * (int(experts[t, k]) + 1) * (1 - np.tanh(x[t]) ** 2) * ct[t]
    return out, d_x, d_weights


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
    @pytest.mark.parametrize("way", WAYS)
    def test_value_and_gradients_are_those_of_float64(self, way, experts):
        for valid in (np.ones(N, bool), np.arange(N) % 5 != 0):
            for ours, exact in zip(gradients(way, experts, valid), plain(experts, valid), strict=True):
                assert worst(ours, exact) < FLOAT32

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

    @pytest.mark.parametrize("way", DIRECT)
    def test_only_the_sorted_rows_are_k_times_the_activations(self, way):
        assert {shape for _, shape in equations(way) if np.prod(shape) == N * K * D} == {(N * K, D)}
        assert {shape for _, shape, _ in compiled_arrays(way) if np.prod(shape) == N * K * D} == {(N * K, D)}

    @pytest.mark.parametrize("way", COPYING)
    def test_the_repeat_form_has_others(self, way):
        assert len({shape for _, shape in equations(way) if np.prod(shape) == N * K * D}) > 1
        assert len({shape for _, shape, _ in compiled_arrays(way) if np.prod(shape) == N * K * D}) > 1

    @pytest.mark.parametrize("way", DIRECT)
    def test_the_program_holds_the_sorted_rows_and_their_cotangent_and_no_copy(self, way):
        assert held(way) == 2

    @pytest.mark.parametrize("way", COPYING)
    def test_the_program_of_the_repeat_form_holds_more(self, way):
        assert held(way) > 2

    @pytest.mark.parametrize("way", DIRECT)
    def test_sorted_rows_are_gathered_once_and_never_moved_again(self, way):
        made = [name for name, shape in equations(way) if shape == (N * K, D)]
        assert made.count("gather") == 1
        assert not {"concatenate", "scatter", "scatter-add", "sort", "transpose", "reshape"} & set(made)

    @pytest.mark.parametrize("way", DIRECT)
    def test_one_sort_and_one_scatter_make_the_permutation(self, way):
        names = [name for name, _ in equations(way)]
        assert names.count("sort") == 1 + 1  # its two outputs
        scatters = [shape for name, shape in equations(way) if name == "scatter"]
        assert scatters.count((N * K,)) == 2  # the inverse, and the weights in sorted order
        assert [opcode for opcode, _, _ in compiled_arrays(way)].count("sort") == 1


def traced(way):
    """Forward and backward of the way there and back, nothing between, and arguments for it. The experts are one of
    them: as constants, the compiler would sort them itself."""
    x, weights, ct = data()

    def run(x, weights, ct, experts):
        def there_and_back(x, weights):
            p = sort_by_expert(experts, jnp.ones(N, bool), E)
            return WAYS[way].combine(WAYS[way].gather(x, p), weights, p)

        out, pull = jax.vjp(there_and_back, x, weights)
        return out, pull(ct)

    return run, (x, weights, ct, jnp.asarray(ROUTINGS["uniform"](np.random.default_rng(0)), jnp.int32))


def equations(way):
    """(primitive, shape) of everything computed, in loops and calls too."""
    run, args = traced(way)

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [p for p in jax.tree.leaves(list(eqn.params.values())) if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
            for sub in inner:
                yield from walk(getattr(sub, "jaxpr", sub))
            if not inner:
                yield from ((eqn.primitive.name, tuple(v.aval.shape)) for v in eqn.outvars)

    return list(walk(jax.make_jaxpr(run)(*args).jaxpr))


@cache
def compiled_arrays(way):
    """(opcode, shape without ones, whether it is inside a fusion and so never in memory) of every instruction that
    the compiler has left, whatever its dtype; a sort's first output stands for all."""
    run, args = traced(way)
    text = jax.jit(run).lower(*args).compile().as_text()
    fusions = set(re.findall(r" fusion\(.*calls=%([\w.-]+)", text))
    found, computation = [], ""
    for line in text.splitlines():
        opened = re.match(r"(?:ENTRY )?%([\w.-]+) .*{$", line)
        computation = opened[1] if opened else computation
        made = re.match(r"\s+(?:ROOT )?%(\S+) = \(?\w+\[([\d,]*)\].*? ([\w-]+)\(", line)
        if made:
            opcode = "dynamic-update-slice" if "dynamic-update-slice" in made[1] else made[3]
            shape = tuple(int(n) for n in made[2].split(",") if n not in ("", "1"))
            found.append((opcode, shape, computation in fusions))
    return found


def held(way):
    """How many arrays of K times the activations the compiled program makes; those filled in place count once."""
    unmade = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "dynamic-update-slice"}
    return sum(
        np.prod(shape) == N * K * D and not fused and opcode not in unmade
        for opcode, shape, fused in compiled_arrays(way)
    )
