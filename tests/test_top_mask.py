import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.top_mask import sortable, top_mask


@pytest.mark.parametrize("k", [1, 5, 8, 40, 60])
def test_the_k_best_candidates_the_first_of_equals(k):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((200, 40)).astype(np.float32)
    scores[:100] = np.round(scores[:100])  # ties, across the edge too
    scores[50:60] = 0
    scores[55] *= -1  # -0.0 is 0.0
    scores[0] = -np.inf
    candidates = rng.random(scores.shape) < 0.7
    candidates[3] = False
    chosen = np.asarray(jax.jit(top_mask, static_argnums=2)(scores, candidates, k))
    for row, of_row, mask in zip(scores, candidates, chosen, strict=True):
        best = sorted(np.flatnonzero(of_row), key=lambda j, r=row: (-r[j], j))[:k]
        assert set(np.flatnonzero(mask)) == set(best)


def test_the_order_of_floats_survives():
    x = np.array([-np.inf, -3e38, -1.5, -1e-45, 0.0, 1e-45, 1.0, 3e38, np.inf], np.float32)
    keys = np.asarray(sortable(jnp.asarray(x)))
    assert (np.diff(keys.astype(np.int64)) >= 0).all() and keys[3] <= keys[4] <= keys[5]
    assert sortable(jnp.float32(-0.0)) == sortable(jnp.float32(0.0))
