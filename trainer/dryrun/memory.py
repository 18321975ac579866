"""What a step's arguments take on each device, from their shapes and shardings alone."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from trainer.config import Config
from trainer.parallel import BatchShape
from trainer.state import abstract_batch, abstract_frozen, abstract_state, optimizer_of
from trainer.step import Program


@dataclass(frozen=True)
class ArgumentBytes:
    """Per device. The compiler counts a little more: on a TPU the last two dims are padded to whole tiles."""

    weights: int
    adapters: int
    optimizer: int
    inputs: int

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.optimizer + self.inputs


def argument_bytes(program: Program, config: Config, shape: BatchShape) -> ArgumentBytes:
    with jax.set_mesh(program.mesh):
        state = abstract_state(program, optimizer_of(program, config))
    trained = shard_bytes(state.params)
    lora = program.options.lora is not None
    return ArgumentBytes(
        weights=shard_bytes(abstract_frozen(program)) if lora else trained,
        adapters=trained if lora else 0,
        optimizer=shard_bytes((state.opt_state, state.step)),
        inputs=shard_bytes(abstract_batch(program, shape)),
    )


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's shards of a tree of `jax.ShapeDtypeStruct`s with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
