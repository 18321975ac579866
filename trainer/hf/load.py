"""A model folder's weights, checked as a whole and read shard by shard.

A model folder holds a config.json and its weights in one of two forms: *.safetensors as published, quantised or not, or
the arrays that `trainer convert from-hf` makes of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from trainer.errors import ConfigError
from trainer.hf.arrays import converted, open_arrays
from trainer.hf.files import TensorFiles
from trainer.hf.names import Leaf, leaves
from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import DeepSeekV4
from trainer.params import dtype_of, is_param
from trainer.step import Program

SHOWN = 20  # faults

# (leaf, index: a slice per dim) -> the values there
Read = Callable[[Leaf, Any], np.ndarray]


def check_tensors(files: TensorFiles, wanted: list[Leaf], c: ModelConfig) -> None:
    """Every tensor is there, none is left over, and each has its shape; all faults in one message."""
    needed = {name for leaf in wanted for name in leaf.all_tensors(c)}
    faults = [f"missing: {name}" for name in sorted(needed - files.names)]
    faults += [f"unexpected: {name}" for name in sorted(files.names - needed)]
    for leaf in wanted:
        for name in sorted(files.names.intersection(leaf.all_tensors(c))):
            try:
                shape = files.shape(name)
            except ConfigError as error:
                faults.append(str(error))
                continue
            try:
                made = leaf.source.conversion.to_part(c, np.broadcast_to(np.int8(0), shape)).shape
            except ValueError:
                made = None
            if made != leaf.part_shape:
                faults.append(f"wrong shape: {name} {shape}")
    if faults:
        shown = "\n  ".join(faults[:SHOWN]) + (f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else "")
        raise ConfigError(f"{files.folder} does not hold this model ({len(faults)} faults):\n  {shown}")


def read_files(files: TensorFiles, c: ModelConfig) -> Read:
    """From safetensors, reading only the layers and experts of the index."""

    def read(leaf: Leaf, index: Any) -> np.ndarray:
        ranges = [range(*s.indices(n)) for s, n in zip(index, leaf.param.shape, strict=True)]
        shape, lead = [len(r) for r in ranges], list(ranges)
        layers = [leaf.layers[i] for i in lead.pop(0)] if leaf.layers else [None]
        experts = lead.pop(0) if leaf.source.per_expert else [None]
        inner = tuple(slice(r.start, r.stop) for r in lead)
        tensors = [leaf.tensor(layer, e) for layer in layers for e in experts]
        parts = [leaf.source.conversion.to_part(c, files.read(name))[inner] for name in tensors]
        return np.stack(parts).reshape(shape)

    return read


def reader(folder: epath.Path, c: ModelConfig, wanted: list[Leaf]) -> Read:
    """Of a model folder, checked to hold all of `wanted`. Raises ConfigError."""
    if converted(folder):
        return open_arrays(folder, wanted)
    files = TensorFiles(folder)
    check_tensors(files, wanted, c)
    return read_files(files, c)


def load(folder: str, program: Program) -> DeepSeekV4:
    """A folder's weights, without adapters, straight into their shards: each process reads its own.

    Raises ConfigError before reading if anything does not fit."""
    spec = DeepSeekV4.spec(program.model)
    wanted = leaves(program.model, spec)
    read = reader(epath.Path(folder), program.model, wanted)

    def build(leaf: Leaf) -> jax.Array:
        dtype = dtype_of(leaf.param, program.weight_dtype)
        sharding = NamedSharding(program.mesh, program.layout.pspec(*leaf.param.dims))
        return jax.make_array_from_callback(
            leaf.param.shape, sharding, lambda index: read(leaf, index).astype(dtype, copy=False)
        )

    return jax.tree.structure(spec, is_leaf=is_param).unflatten([build(leaf) for leaf in wanted])
