"""FLOP counted from the config, against the model's own parameters and masks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from trainer.config import load
from trainer.flops import Utilization, forward_flops, indexer_params, matmul_params
from trainer.mesh import make_mesh
from trainer.models.deepseek_v4 import DeepSeekV4, active_params
from trainer.models.rows import row_context, visible
from trainer.parallel import Degrees
from trainer.params import count, named_leaves

MODELS = Path(__file__).parents[1] / "configs" / "models"


def model(name):
    return load(MODELS / f"{name}.yml").config.model


@pytest.fixture(params=["deepseek_v4_tiny", "deepseek_v4_flash"])
def c(request):
    return model(request.param)


def size(c, leaf):
    """Weights of a leaf that one token is multiplied with: of stacked experts, those it visits."""
    path, p = leaf
    experts = "/routed/" in path and path.endswith(("gate", "up", "down"))
    return int(np.prod(p.shape)) * (c.num_experts_per_tok / c.num_experts if experts else 1)


NO_MATMUL = ("embedding", "norm", "bias", "tid2eid", "base", "scale", "sinks")


def test_weights_are_those_of_the_model(c):
    leaves = [leaf for leaf in named_leaves(DeepSeekV4.spec(c)) if not leaf[0].rpartition("/")[2].endswith(NO_MATMUL)]
    indexer = [leaf for leaf in leaves if "/indexer/" in leaf[0]]
    sparse = sum(ratio == c.csa_compress_ratio for ratio in c.compress_ratios)
    assert sum(size(c, leaf) for leaf in indexer) == sparse * indexer_params(c)
    assert sum(size(c, leaf) for leaf in leaves) == matmul_params(c) + sparse * indexer_params(c)


def test_flash_is_13_billion_active():
    c = model("deepseek_v4_flash")
    sparse = sum(ratio == c.csa_compress_ratio for ratio in c.compress_ratios)
    matmul = matmul_params(c) + sparse * indexer_params(c)
    assert matmul == pytest.approx(active_params(c, count(DeepSeekV4.spec(c))), rel=1e-3)
    assert 13.2e9 < matmul < 13.3e9


def test_attention_is_what_the_masks_let_through():
    """Counted from the masks that the model uses, with an index_topk that binds."""
    c = replace(model("deepseek_v4_tiny"), indexer_topk=3, sliding_window_size=5)
    length = 64
    ones, positions = jnp.ones((1, length), jnp.int32), jnp.arange(length)[None]

    def masks(segment_ids, positions):
        rows = row_context(segment_ids, positions, c)
        return {ratio: visible(w, segment_ids, jnp.arange(length)) for ratio, w in rows.windows.items()}

    one_device = make_mesh(Degrees(1, 1, 1, 1), jax.devices()[:1])
    seen = jax.shard_map(masks, mesh=one_device, in_specs=P(), out_specs=P(), check_vma=False)(ones, positions)
    seen = {0: np.zeros((length, 1), bool)} | {ratio: np.asarray(mask)[0] for ratio, mask in seen.items()}
    window = sum(0 <= q - k < c.sliding_window_size for q in range(length) for k in range(length))
    pairs, scored = 0, 0
    for ratio in c.compress_ratios:
        of_query = np.sum(seen[ratio], axis=-1)
        if ratio == c.csa_compress_ratio:
            scored += np.sum(of_query)
            of_query = np.minimum(of_query, c.indexer_topk)
        pairs += window + np.sum(of_query)
    flops = forward_flops(c, length)
    assert flops.attention == 2 * 2 * c.num_query_heads * c.head_dim * pairs
    sparse = sum(ratio == c.csa_compress_ratio for ratio in c.compress_ratios)
    scores = c.indexer_n_heads * c.indexer_head_dim * scored
    assert flops.indexer == 2 * (length * sparse * indexer_params(c) + scores)


def test_training_is_three_forwards_but_for_the_indexer(c):
    flops = forward_flops(c, 256)
    assert flops.matmul == 2 * matmul_params(c) * 256
    assert flops.of_training(False) == pytest.approx(3 * (flops.matmul + flops.attention) + flops.indexer)
    assert flops.of_training(True) == pytest.approx(flops.of_training(False) - flops.matmul)
    assert flops.of_training(False) / 256 > 6 * matmul_params(c)


V6E = SimpleNamespace(device_kind="TPU v6 lite")


@pytest.mark.parametrize(
    "rate, device, mfu, text",
    [
        (459e12, V6E, 0.5, "MFU 50.0%"),
        (918e12, V6E, 1.0, "MFU 100.0%"),
        (920e12, V6E, None, "above the device's peak: not a measurement"),
        (2307e12 / 4, SimpleNamespace(device_kind="TPU7x"), 0.5, "MFU 50.0%"),  # JAX shows a chip as two devices
        (1e12, SimpleNamespace(device_kind="cpu"), None, ""),
    ],
)
def test_utilization_is_flagged_not_printed_above_the_peak(rate, device, mfu, text):
    used = Utilization.of(rate, device)
    assert used.mfu == (mfu if mfu is None else pytest.approx(mfu)) and str(used) == text
