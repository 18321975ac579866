import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import FLOAT32, sinkhorn, worst
from trainer.config import load
from trainer.models import hyper_connections as hc

C = load("configs/models/deepseek_v4_tiny.yml", ["model.emb_dim=8", "model.mhc_expansion_rate=3"]).config.model
N, D = C.mhc_expansion_rate, C.emb_dim


def params(cls=hc.HyperConnection):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), cls.spec(C))


def streams():
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, N, D)), jnp.float32)


def plain(p, x, sublayer):
    """SPEC section 3, token by token: stream k becomes post_k y + sum_j mix[j, k] x_j."""
    out = np.zeros(x.shape)
    for b, s in np.ndindex(x.shape[:2]):
        tok = np.asarray(x[b, s], np.float64)
        z = np.einsum("nd,mnd->m", tok / np.sqrt((tok**2).mean() + C.normalization_layer_epsilon), p.fn)
        pre = 1 / (1 + np.exp(-(p.scale[0] * z[:N] + p.base[:N]))) + C.mhc_epsilon
        post = 2 / (1 + np.exp(-(p.scale[1] * z[N : 2 * N] + p.base[N : 2 * N])))
        mix = (p.scale[2] * z[2 * N :] + p.base[2 * N :]).reshape(N, N)
        mix = sinkhorn(mix, C.sinkhorn_iterations, C.mhc_epsilon)
        y = sublayer(pre @ tok)
        for k in range(N):
            out[b, s, k] = post[k] * y + sum(mix[j, k] * tok[j] for j in range(N))
    return out


def test_a_connection_is_the_plain_one_with_an_asymmetric_mix():
    p, x = params(), streams()
    out, other = hc.connect(p, x, lambda y: (jnp.sin(y), "kept"), C)
    assert other == "kept"
    assert worst(out, plain(jax.tree.map(np.asarray, p), np.asarray(x), np.sin)) < FLOAT32


def test_the_streams_collapse_by_sigmoid_weights():
    p, x = params(hc.HyperHead), streams()
    z = np.einsum("bsnd,mnd->bsm", x, p.fn) / np.sqrt((np.asarray(x) ** 2).mean((-1, -2)) + 1e-6)[..., None]
    weights = 1 / (1 + np.exp(-(p.scale[0] * z + p.base))) + C.mhc_epsilon
    assert worst(hc.collapse(p, x, C), np.einsum("bsn,bsnd->bsd", weights, x)) < FLOAT32


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_sinkhorn_has_its_rounds_and_its_epsilon_where_the_model_has_them(rounds):
    logits = np.random.default_rng(2).standard_normal((7, 4, 4)).astype(np.float32) * 3
    expected = np.stack([sinkhorn(m.astype(np.float64), rounds, 0.05) for m in logits])
    assert worst(hc.sinkhorn(jnp.asarray(logits), rounds, 0.05), expected) < FLOAT32


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_gradients_stay_finite_at_any_scale_and_jit_changes_nothing(scale):
    p, x = params(), streams()

    def loss(p, x):
        return scale * jnp.sum(hc.connect(p, x, lambda y: (y, None), C)[0] ** 2)

    plain_grads, jitted = jax.grad(loss, (0, 1))(p, x), jax.jit(jax.grad(loss, (0, 1)))(p, x)
    for a, b in zip(jax.tree.leaves(plain_grads), jax.tree.leaves(jitted), strict=True):
        assert np.isfinite(a).all() and worst(b, a) < FLOAT32 * 10


def test_bfloat16_streams_are_mixed_in_float32_and_rounded_once():
    p, x = params(), streams().astype(jnp.bfloat16)
    out, _ = hc.connect(p, x, lambda y: (y, None), C)
    exact, _ = hc.connect(p, x.astype(jnp.float32), lambda y: (y.astype(jnp.bfloat16).astype(jnp.float32), None), C)
    assert out.dtype == jnp.bfloat16
    assert worst(out.astype(jnp.float32), exact) <= 2**-8
