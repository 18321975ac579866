"""The safetensors of a Hugging Face DeepSeek-V4 folder, checked as a whole and read shard by shard."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open

from trainer.errors import ConfigError
from trainer.hf.names import Leaf, leaves, release_name
from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import DeepSeekV4
from trainer.params import dtype_of, is_param
from trainer.step import Program


class TensorFiles:
    """The tensors of a folder's *.safetensors under their published names; opened lazily, read one at a time."""

    DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": "bfloat16", "I64": np.int64, "I32": np.int32}

    def __init__(self, folder: Path, stack: ExitStack):
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{folder}: no *.safetensors file here")
        self._slices: dict[str, Any] = {}
        for path in paths:
            try:
                handle = stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from None
            for name in handle.keys():
                if not release_name(name).startswith("mtp."):
                    self._slices[release_name(name)] = (path, handle, name)

    def shape(self, name: str) -> tuple[int, ...]:
        path, handle, stored = self._slices[name]
        view = handle.get_slice(stored)
        if view.get_dtype() not in self.DTYPES:
            raise ConfigError(
                f"{path}: {stored} is stored as {view.get_dtype()}; only {', '.join(self.DTYPES)} are read"
            )
        return tuple(view.get_shape())

    def read(self, name: str) -> np.ndarray:
        _, handle, stored = self._slices[name]
        return handle.get_tensor(stored)

    @property
    def names(self) -> set[str]:
        return set(self._slices)


def check_tensors(files: TensorFiles, wanted: list[Leaf], c: ModelConfig, folder: Path) -> None:
    """Every tensor is there, none is left over, and each has its shape; all faults in one message."""
    needed = {name for leaf in wanted for name in leaf.all_tensors(c)}
    faults = [f"missing: {name}" for name in sorted(needed - files.names)]
    faults += [f"unexpected: {name}" for name in sorted(files.names - needed)]
    for leaf in wanted:
        for name in files.names.intersection(leaf.all_tensors(c)):
            shape = files.shape(name)
            try:
                made = leaf.source.convert(c, np.broadcast_to(np.int8(0), shape)).shape
            except ValueError:
                made = None
            if made != leaf.tensor_shape:
                faults.append(f"wrong shape: {name} {shape}")
    if faults:
        shown = "\n  ".join(faults[:20]) + (f"\n  and {len(faults) - 20} more" if len(faults) > 20 else "")
        raise ConfigError(f"{folder} does not hold this model ({len(faults)} faults):\n  {shown}")


def read_shard(files: TensorFiles, leaf: Leaf, index: Any, c: ModelConfig, dtype: Any) -> np.ndarray:
    """The values of one device's shard, reading only the layers and experts it holds."""
    lead = [range(*s.indices(n)) for s, n in zip(index, leaf.param.shape, strict=True)]
    layers = [leaf.layers[i] for i in lead.pop(0)] if leaf.layers else [None]
    experts = lead.pop(0) if leaf.source.per_expert else [None]
    inner = tuple(slice(r.start, r.stop) for r in lead)
    parts = [
        leaf.source.convert(c, files.read(leaf.tensor(layer, e)))[inner].astype(dtype)
        for layer in layers
        for e in experts
    ]
    return np.stack(parts).reshape([r.stop - r.start for r in _ranges(index, leaf.param.shape)])


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[range]:
    return [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]


def load(folder: Path, program: Program) -> DeepSeekV4:
    """A folder's weights, without adapters, straight into their shards.

    Raises ConfigError before reading if anything does not fit."""
    c = program.model
    with ExitStack() as stack:
        files = TensorFiles(folder, stack)
        spec = DeepSeekV4.spec(c)
        wanted = leaves(c, spec)
        check_tensors(files, wanted, c, folder)

        def build(leaf: Leaf) -> jax.Array:
            dtype = dtype_of(leaf.param, program.weight_dtype)
            sharding = NamedSharding(program.mesh, program.layout.pspec(*leaf.param.dims))
            return jax.make_array_from_callback(
                leaf.param.shape, sharding, lambda index: read_shard(files, leaf, index, c, dtype)
            )

        values = [build(leaf) for leaf in wanted]
    return jax.tree.structure(spec, is_leaf=is_param).unflatten(values)
