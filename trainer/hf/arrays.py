"""Arrays of an orbax checkpoint, read and written in parts by tensorstore, so that no whole model is ever in memory.

`trainer convert from-hf` writes a folder that orbax restores as a tree of `DeepSeekV4` (one zarr array per parameter)
and that is a model folder of this project's too: config.json comes last, and without it the folder is unfinished.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath

from trainer.errors import ConfigError
from trainer.hf.names import Leaf
from trainer.params import is_param

ARRAYS = "weights"  # the orbax checkpoint in a model folder
PROGRESS = "progress.json"  # there while a conversion is not finished
BLOCK_NUMBERS = 2**24  # of a table, converted at one time

CONFIG = "config.json"
NAMES = "names.json"  # published names -> those of the files it was made from


def converted(folder: epath.Path) -> bool:
    """Whether a model folder has its weights as arrays. Raises ConfigError where its conversion never finished."""
    if (folder / PROGRESS).exists():
        raise ConfigError(f"{folder}: its conversion is not finished; run the same `convert from-hf` again to continue")
    return (folder / ARRAYS).exists()


def _url(path: epath.Path) -> str:
    return f"{path}/" if "://" in str(path) else f"file://{Path(str(path)).absolute()}/"


def _spec(root: epath.Path, path: str) -> dict[str, Any]:
    """One array of an orbax checkpoint: a folder of its own, or a part of one store of all (OCDBT)."""
    name = path.replace("/", ".")
    if (root / "manifest.ocdbt").exists():
        return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": _url(root), "path": f"{name}/"}}
    return {"driver": "zarr", "kvstore": _url(root / name)}


def create(root: epath.Path, leaf: Leaf, dtype: np.dtype) -> Any:
    """The array of one parameter, empty or as far as it was written. A chunk is what is written at one time: one
    layer's part, one expert's, or a block of a table's rows."""
    shape, chunk = leaf.param.shape, list(leaf.part_shape)
    rows = block_rows(leaf)
    if rows is not None:
        chunk[leaf.source.conversion.rows_along or 0] = rows
    chunk = [1] * (len(shape) - len(chunk)) + chunk
    spec = _spec(root, leaf.path) | {
        "metadata": {"shape": shape, "chunks": chunk, "dtype": dtype_name(dtype), "compressor": None},
        "dtype": dtype.name,
    }
    return ts.open(spec, create=True, open=True).result()


def dtype_name(dtype: np.dtype) -> str:
    """As zarr writes it."""
    return "bfloat16" if dtype.name == "bfloat16" else dtype.str


def block_rows(leaf: Leaf) -> int | None:
    """Rows of the tensor converted at one time; None: all of them. Only the vocabulary's tables are so large."""
    along = leaf.source.conversion.rows_along
    if leaf.layers or along is None or len(leaf.part_shape) != 2:
        return None
    step = max(1, BLOCK_NUMBERS // leaf.part_shape[1 - along])
    return step if step < leaf.part_shape[along] else None


def open_array(root: epath.Path, path: str) -> Any:
    """One parameter's array. Raises ConfigError where it isn't there or cannot be read."""
    try:
        return ts.open(_spec(root, path), open=True, read=True).result()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{root}: {path} cannot be read: {_first_line(error)}") from None


def open_arrays(folder: epath.Path, wanted: list[Leaf]) -> Any:
    """`load.Read` of a converted folder. Raises ConfigError where its arrays are not those of `wanted`."""
    root = folder / ARRAYS
    arrays = {leaf.path: open_array(root, leaf.path) for leaf in wanted}
    faults = [
        f"{leaf.path} is {list(arrays[leaf.path].shape)} and not {list(leaf.param.shape)}"
        for leaf in wanted
        if tuple(arrays[leaf.path].shape) != leaf.param.shape
    ]
    if faults:
        raise ConfigError(f"{folder} holds another model: {'; '.join(faults[:5])}")

    def read(leaf: Leaf, index: Any) -> np.ndarray:
        return arrays[leaf.path][tuple(index)].read().result()

    return read


def write_metadata(root: epath.Path, spec: Any) -> None:
    """What orbax wants to know of a checkpoint's tree. Its own writer makes it only of arrays that are in memory."""
    tree = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=lambda x: x is None or is_param(x))
    for path, leaf in leaves:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        keys = [{"key": name, "key_type": 1 if name.isdigit() else 2} for name in names]
        value: dict[str, Any] = {"value_type": "None", "skip_deserialize": True}
        if leaf is not None:
            value = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(leaf.shape)}
        tree[str(tuple(names))] = {"key_metadata": keys, "value_metadata": value}
    metadata = {"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False, "custom_metadata": None,
                "store_array_data_equal_to_fill_value": True}  # fmt: skip
    (root / "_METADATA").write_text(json.dumps(metadata))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def newest_state(run: epath.Path) -> epath.Path:
    """The train state of a run folder's newest complete checkpoint. Raises ConfigError where there is none."""
    steps = [path for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    if not steps:
        raise ConfigError(f"{run}: has no checkpoint")
    return max(steps, key=lambda path: int(path.name)) / "state"


def copy_beside(source: epath.Path, target: epath.Path) -> None:
    """What else of a model folder its users need."""
    for pattern in ("tokenizer*.json", "generation_config.json", "special_tokens_map.json", "*.jinja"):
        for path in source.glob(pattern):
            path.copy(target / path.name, overwrite=True)
