"""Rotary position embedding: two frequency tables, interleaved pairs, last channels only (SPEC section 4)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from trainer.models.config import ModelConfig


class Rotation(struct.PyTreeNode):
    """Cosines and sines of one frequency table at some positions."""

    cos: jax.Array  # [B, S, R / 2] float32
    sin: jax.Array  # [B, S, R / 2] float32

    def take(self, index: jax.Array) -> "Rotation":
        """The rotation at row positions `index` [B, T]."""
        return Rotation(*(jnp.take_along_axis(t, index[..., None], axis=1) for t in (self.cos, self.sin)))


def frequencies(c: ModelConfig, compressed: bool) -> np.ndarray:
    """Angle per position of each channel pair, [R / 2] float32.

    Sliding-only layers turn by theta^(-2i/R). Compressed layers use their own theta and YaRN's blend of kept and
    divided frequencies, at every length and without an amplitude factor.
    """
    dims = c.qk_rope_head_dim
    theta = c.compressed_rope_max_timescale if compressed else c.rope_max_timescale
    plain = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if not compressed or c.yarn_factor == 1.0:
        return plain.astype(np.float32)

    def pair_turning(rotations: float) -> float:
        """The pair that makes this many rotations over the original length."""
        return dims * math.log(c.yarn_original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(c.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_turning(c.yarn_beta_slow)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return (plain * (1 - ramp) + plain / c.yarn_factor * ramp).astype(np.float32)


def rotation(c: ModelConfig, positions: jax.Array, compressed: bool) -> Rotation:
    """Positions [B, S] int32 -> their rotation, in float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(c, compressed)
    return Rotation(cos=jnp.cos(angles), sin=jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation, *, inverse: bool = False) -> jax.Array:
    """Turn the last R channels of x, [B, S, C] or [B, S, H, C], pair (2i, 2i+1) by angle i. Returns x's dtype."""
    cos, sin = by.cos, -by.sin if inverse else by.sin
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    kept, turned = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    pairs = turned.astype(jnp.float32).reshape(*turned.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([kept, pairs.reshape(turned.shape).astype(x.dtype)], axis=-1)
