"""Documents packed into one row get the logits that each has alone, through layers of every kind."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from steps import MESHES, config_of, start
from trainer.models.deepseek_v4 import Batch
from trainer.verify import activations

LENGTHS = (3, 21, 1, 37)  # shorter than a window of 4, odd, and never at the end of one
LENGTH = 64


def row(documents):
    """One row of these documents, one segment each."""
    tokens, segments, positions = (np.zeros(LENGTH, np.int32) for _ in range(3))
    at = 0
    for number, document in enumerate(documents, start=1):
        some = slice(at, at + len(document))
        tokens[some], segments[some], positions[some] = document, number, np.arange(len(document))
        at += len(document)
    return tokens, segments, positions


@pytest.mark.parametrize("attention", ["dot_product", "chunked"])
@pytest.mark.parametrize("mesh", ["1", "tensor 4", "all"])
def test_packed_documents_have_the_logits_each_has_alone(mesh, attention):
    overrides = ["model.compress_ratios=[0,4,16]", "model.first_num_hash_layers=1", f"attention={attention}"]
    of = start(config_of(*MESHES[mesh], *overrides))
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 250, n).astype(np.int32) for n in LENGTHS]
    rows = [row(documents), *(row([document]) for document in documents), *[row([])] * 3]
    tokens, segments, positions = (np.stack(some) for some in zip(*rows, strict=True))
    host = Batch(tokens, np.full_like(tokens, -100), segments, positions)
    batch = jax.device_put(host, NamedSharding(of.program.mesh, of.program.batch_spec))
    with jax.set_mesh(of.program.mesh), jax.default_matmul_precision("highest"):
        found = np.asarray(activations(of.program, of.state.params, batch)["logits"])
    at = 0
    for number, length in enumerate(LENGTHS, start=1):
        packed, alone = found[0, at : at + length], found[number, :length]
        np.testing.assert_allclose(packed, alone, atol=1e-4)
        assert np.abs(alone).max() > 0.1
        at += length
