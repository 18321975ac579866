"""Weights back into a Hugging Face folder: of a model folder, or of a full fine-tune's newest checkpoint.

Files are written one after another, each under another name until it is whole, and config.json last: the same command
goes on after the files that are there.
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from trainer.config import Config, from_values
from trainer.config import load as load_config
from trainer.convert.progress import Rate
from trainer.errors import ConfigError, RunError
from trainer.hf.arrays import ARRAYS, CONFIG, NAMES, converted, copy_beside, newest_state, open_array
from trainer.hf.config import model_values
from trainer.hf.files import INDEX, TensorFiles
from trainer.hf.load import check_tensors
from trainer.hf.names import Leaf, leaves
from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import DeepSeekV4

FILE_BYTES = 5 * 10**9
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}


# (leaf, which of its stacked layers, which expert) -> the type to write it in, and its values as a published tensor
Values = Callable[[Leaf, int | None, int | None], tuple[np.dtype, Callable[[], np.ndarray]]]


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. `read` gives its values."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    layer: int | None
    path: str  # of its parameter, within the layer
    expert: int | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def to_hf(source: str, dest: str, write: Callable[[str], None]) -> int:
    """The whole command. Raises ConfigError where source or dest are not fit, RunError where writing fails."""
    folder = epath.Path(source)
    tensors, config_from = of_model_folder(folder) if (folder / CONFIG).exists() else of_run(folder)
    write_folder(tensors, config_from, epath.Path(dest), write)
    return 0


def of_model_folder(folder: epath.Path) -> tuple[list[Tensor], epath.Path]:
    """A model folder's tensors, under the names and in the types they came in; bfloat16 for what is quantised."""
    c = from_values({"model": model_values(folder)}, (), str(folder)).config.model
    wanted = leaves(c, DeepSeekV4.spec(c))
    if converted(folder):
        names = json.loads((folder / NAMES).read_text())
        values = of_arrays(c, lambda leaf: open_array(folder / ARRAYS, leaf.path), narrow=False)
        return model_tensors(c, values, names), folder
    files = TensorFiles(folder)
    check_tensors(files, wanted, c)

    def of_files(leaf: Leaf, at: int | None, expert: int | None) -> tuple[np.dtype, Callable[[], np.ndarray]]:
        name = leaf.tensor(None if at is None else leaf.layers[at], expert)
        return files.dtype(name), lambda: files.read(name)

    return model_tensors(c, of_files, {name: files.stored_name(name) for name in files.names}), folder


def of_run(folder: epath.Path) -> tuple[list[Tensor], epath.Path]:
    """A full fine-tune's tensors under their published names, weights in bfloat16."""
    config = run_config(folder)
    if config.lora_rank:
        raise ConfigError(
            f"{folder} trained adapters (lora_rank={config.lora_rank}); use `convert lora-to-peft`, or `convert merge`"
        )
    if not config.load_parameters_path:
        raise ConfigError(
            f"{folder} started from random weights: there is no {CONFIG} to write beside its own, which "
            "load_parameters_path would name"
        )
    state = newest_state(folder)
    values = of_arrays(config.model, lambda leaf: open_array(state, f"params/{leaf.path}"), narrow=True)
    return model_tensors(config.model, values, {}), epath.Path(config.load_parameters_path)


def run_config(folder: epath.Path) -> Config:
    path = folder / "config.yml"
    if not path.exists():
        raise ConfigError(f"{folder}: neither a run (config.yml) nor a model folder ({CONFIG})")
    return load_config(str(path)).config


def of_arrays(c: ModelConfig, array_of: Callable[[Leaf], Any], *, narrow: bool) -> Values:
    """From arrays of parameters; with `narrow` weights that the run keeps in its `weight_dtype` become bfloat16."""
    opened: dict[str, Any] = {}

    def values(leaf: Leaf, at: int | None, expert: int | None) -> tuple[np.dtype, Callable[[], np.ndarray]]:
        if leaf.path not in opened:
            opened[leaf.path] = array_of(leaf)
        array = opened[leaf.path]
        dtype = np.dtype(array.dtype.numpy_dtype)
        if dtype == np.int32:
            dtype = np.dtype(np.int64)  # as the published tables of token ids are
        elif narrow and leaf.param.dtype is None:
            dtype = np.dtype(ml_dtypes.bfloat16)
        index: Any = tuple(i for i in (at, expert) if i is not None) or ...
        return dtype, lambda: leaf.source.conversion.to_tensor(c, array[index].read().result())

    return values


def model_tensors(c: ModelConfig, values: Values, names: dict[str, str]) -> list[Tensor]:
    """Every published tensor of the model; `names` renames."""
    tensors = []
    for leaf in leaves(c, DeepSeekV4.spec(c)):
        shape = leaf.source.conversion.to_tensor(c, np.broadcast_to(np.int8(0), leaf.part_shape)).shape
        path = leaf.path.split("/", 3)[-1] if leaf.layers else leaf.path
        for at in range(len(leaf.layers)) if leaf.layers else [None]:
            layer = None if at is None else leaf.layers[at]
            for expert in range(c.num_experts) if leaf.source.per_expert else [None]:
                name = leaf.tensor(layer, expert)
                dtype, read = values(leaf, at, expert)
                tensors.append(Tensor(names.get(name, name), dtype, shape, read, layer, path, expert))
    return tensors


def cut(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Into files of some FILE_BYTES."""
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(t.num_bytes for t in files[-1]) + tensor.num_bytes > FILE_BYTES:
            files.append([])
        files[-1].append(tensor)
    return files


def write_folder(
    tensors: Sequence[Tensor], config_from: epath.Path, target: epath.Path, write: Callable[[str], None]
) -> None:
    """Raises ConfigError where the target is there already, RunError where writing fails."""
    if (target / CONFIG).exists():
        raise ConfigError(f"{target}: is there already; remove it, or name another folder")
    config = json.loads((config_from / CONFIG).read_text())
    for key in ("quantization_config", "expert_dtype"):  # nothing is quantised any more
        config.pop(key, None)
    files = cut(tensors)
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    rate = Rate(sum(tensor.num_bytes for tensor in tensors), write)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, held in zip(names, files, strict=True):
            if not (target / name).exists():
                write_file(held, target / name, rate)
        where = {tensor.name: name for name, held in zip(names, files, strict=True) for tensor in held}
        total = sum(tensor.num_bytes for tensor in tensors)
        (target / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
        copy_beside(config_from, target)
        (target / CONFIG).write_text(json.dumps(config, indent=2))
    except OSError as error:
        raise RunError(f"{target}: writing failed: {error}; the same command goes on from here") from error
    write(f"{target}: {rate.summary()}")


def write_file(tensors: Sequence[Tensor], path: epath.Path, rate: Rate) -> None:
    """One safetensors file; see `trainer.hf.files` for the format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        kind = _SAFETENSORS[tensor.dtype.name]
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.parent / f"{path.name}.partial"
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.read().astype(tensor.dtype, copy=False))
            file.write(data.tobytes())
            rate.add(data.nbytes)
    partial.rename(path)
