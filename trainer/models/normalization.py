"""RMSNorm, in float32 throughout with one cast back at the end (SPEC sections 2 and 12)."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, gain: jax.Array | None, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dim; `gain` None means no gain. Returns x's dtype."""
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return (y if gain is None else y * gain).astype(x.dtype)
