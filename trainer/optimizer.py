"""The optimizer: clipping, AdamW or SGD, decoupled weight decay, warm-up and cosine decay, from optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.config import Config
from trainer.params import map_spec


def as_float32(tree: Any) -> Any:
    """Gradients and weights as the optimizer sees them, so that its moments are float32 whatever `weight_dtype` is:
    bfloat16 moments round small updates to nothing."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Linear warm-up from 0, then a cosine to `cosine_learning_rate_final_fraction` of the peak at `steps`."""
    warmup = round(config.warmup_steps_fraction * config.steps)
    cosine = optax.cosine_decay_schedule(
        config.learning_rate, max(config.steps - warmup, 1), alpha=config.cosine_learning_rate_final_fraction
    )
    rise = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
    # Step 0 already learns: the warm-up's first rate is one step up, not zero.
    return optax.join_schedules([lambda count: rise(count + 1), cosine], [warmup])


def make_optimizer(config: Config, trainable: Any) -> optax.GradientTransformation:
    """`trainable`: the tree of `Param`s that train; their `decay` says where weight decay applies."""
    scale = {
        "adamw": lambda: optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps),
        "sgd": optax.identity,
    }[config.opt_type]()
    clip = config.gradient_clipping_threshold
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(),
        scale,
        optax.add_decayed_weights(config.adam_weight_decay, mask=map_spec(lambda p: p.decay, trainable)),
        optax.scale_by_learning_rate(learning_rate_schedule(config)),
    )
