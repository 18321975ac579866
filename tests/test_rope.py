import math

import jax.numpy as jnp
import numpy as np
import pytest

from reference import FLOAT32, worst
from trainer.config import load
from trainer.models.rope import frequencies, rotate, rotation

FLASH = load("configs/models/deepseek_v4_flash.yml", []).config.model
TINY = load("configs/models/deepseek_v4_tiny.yml", []).config.model


def test_sliding_layers_turn_by_their_own_base_without_yarn():
    expected = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    assert worst(frequencies(FLASH, compressed=False), expected) < FLOAT32


def test_compressed_layers_blend_kept_and_divided_frequencies():
    """The pairs that turn more than 32 times over 65536 positions keep their frequency, those that turn less than
    once have a 16th of it, and a ramp lies between (YaRN, Peng et al. 2023, section 3.2)."""
    plain = 160_000.0 ** (-np.arange(0, 64, 2) / 64)

    def pair(turns):
        return 64 * math.log(65536 / (turns * 2 * math.pi)) / (2 * math.log(160_000.0))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    ours = frequencies(FLASH, compressed=True)
    assert worst(ours[: low + 1], plain[: low + 1]) < FLOAT32
    assert worst(ours[high:], plain[high:] / 16) < FLOAT32
    middle = (low + high) // 2
    ramp = (middle - low) / (high - low)
    assert ours[middle] == pytest.approx(plain[middle] * (1 - ramp) + plain[middle] / 16 * ramp, rel=1e-6)


@pytest.mark.parametrize("ndim", [3, 4])
def test_neighbouring_channels_of_the_last_ones_turn_by_position(ndim):
    rng = np.random.default_rng(0)
    rope, width = TINY.qk_rope_head_dim, TINY.head_dim
    positions = np.array([[0, 1, 129, 4095]], np.int32)
    x = rng.standard_normal((1, 4, 3, width)[: ndim - 1] + (width,)).astype(np.float32)
    by = rotation(TINY, jnp.asarray(positions), compressed=True)
    out = np.asarray(rotate(jnp.asarray(x), by))
    np.testing.assert_array_equal(out[..., : width - rope], x[..., : width - rope])
    for s, i in np.ndindex(4, rope // 2):
        turn = np.exp(1j * float(positions[0, s]) * float(frequencies(TINY, compressed=True)[i]))
        at = width - rope + 2 * i
        expected = (x[0, s, ..., at] + 1j * x[0, s, ..., at + 1]) * turn
        assert worst(out[0, s, ..., at], expected.real) < 1e-3 and worst(out[0, s, ..., at + 1], expected.imag) < 1e-3
    assert worst(rotate(jnp.asarray(out), by, inverse=True), x) < FLOAT32
