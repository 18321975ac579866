"""The safetensors of a Hugging Face folder, read tensor by tensor or in rows, from a disk or a bucket.

Read here rather than by the safetensors package: it opens no buckets, and reads neither E8M0 nor parts of a packed
matrix. The format (github.com/huggingface/safetensors, "Format"): the header's length in eight bytes, little-endian,
the header in JSON with each tensor's dtype, shape and range of bytes, then the bytes.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from trainer.errors import ConfigError
from trainer.hf.names import release_name
from trainer.hf.quantized import fp4, fp8, scale_shape

INDEX = "model.safetensors.index.json"
PLAIN = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32,
}  # fmt: skip
FP8, FP4, SCALES = {"F8_E4M3"}, {"I8", "U8"}, {"F8_E8M0", "U8", "F32", "BF16"}
_BYTES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I8": np.int8, "U8": np.uint8}
_NUMPY = PLAIN | _BYTES
# A weight's scales lie beside it under one of these names; the second and third in repacked files.
_COMPANIONS = (".scale", ".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it."""

    path: epath.Path
    name: str  # in the file
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # of its bytes in the file

    def read(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows first .. last."""
        row = math.prod(self.shape[1:])
        last = (self.shape[0] if self.shape else 1) if last is None else last
        kind = np.dtype(_NUMPY[self.dtype])
        with self.path.open("rb") as file:
            file.seek(self.start + first * row * kind.itemsize)
            data = file.read((last - first) * row * kind.itemsize)
        return np.frombuffer(data, kind).reshape(self.shape and (last - first, *self.shape[1:]))


class TensorFiles:
    """The tensors of a folder's *.safetensors under their published names, quantised ones as numbers.

    Raises ConfigError for files that are missing, cut short or no safetensors.
    """

    def __init__(self, folder: epath.Path):
        self.folder = folder
        self._stored: dict[str, Stored] = {}
        self.ignored = 0  # tensors of the multi-token-prediction layers, which this model does not have
        for path in _paths(folder):
            for stored in read_header(path):
                name = release_name(stored.name)
                if name.startswith("mtp."):
                    self.ignored += 1
                else:
                    self._stored[name] = stored
        self._scales = {}
        for name in [name for name in self._stored if name.endswith(_COMPANIONS)]:
            stem = next(name.removesuffix(c) for c in _COMPANIONS if name.endswith(c))
            weight = self._stored.get(f"{stem}.weight")
            if weight is not None and weight.dtype not in PLAIN:
                self._scales[f"{stem}.weight"] = self._stored.pop(name)

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def stored_name(self, name: str) -> str:
        return self._stored[name].name

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the numbers: a packed byte counts as two. Raises ConfigError where they can't be read."""
        stored = self._stored[name]
        if stored.dtype in PLAIN:
            return stored.shape
        where = f"{stored.path}: {stored.name} is stored as {stored.dtype}"
        if stored.dtype not in FP8 | FP4 or len(stored.shape) != 2:
            raise ConfigError(f"{where}; matrices in {', '.join([*PLAIN, *sorted(FP8 | FP4)])} are read")
        packed = stored.dtype in FP4
        shape = (stored.shape[0], stored.shape[1] * 2) if packed else stored.shape
        scale = self._scales.get(name)
        if scale is None:
            raise ConfigError(f"{where}, and no scales lie beside it: {name.removesuffix('.weight')}.scale is missing")
        if scale.dtype not in SCALES or scale.shape != scale_shape(shape, packed):
            raise ConfigError(
                f"{where} with scales {scale.name} of {scale.dtype} {list(scale.shape)}; "
                f"{' or '.join(sorted(SCALES))} {list(scale_shape(shape, packed))} are read"
            )
        return shape

    def dtype(self, name: str) -> np.dtype:
        """What is kept of it: its own type, or bfloat16, which holds FP4 and FP8 with E8M0 scales exactly."""
        stored = self._stored[name].dtype
        return np.dtype(PLAIN[stored] if stored in PLAIN else ml_dtypes.bfloat16)

    def read(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows first .. last of a tensor; float32 where it is quantised."""
        stored = self._stored[name]
        rows = stored.read(first, last)
        if stored.dtype in PLAIN:
            return rows
        if stored.dtype in FP4:
            return fp4(rows, self._scales[name].read(first, last))
        return fp8(rows, self._scales[name].read(), first)


def _paths(folder: epath.Path) -> list[epath.Path]:
    """The folder's files, all of those its index names among them."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        try:
            wanted = set(json.loads(index.read_text())["weight_map"].values())
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index}: not an index of safetensors: {error}") from None
        missing = sorted(wanted - {path.name for path in paths})
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ConfigError(f"{folder}: {len(missing)} of the {len(wanted)} files in {INDEX} are missing: {shown}")
    if not paths:
        raise ConfigError(f"{folder}: no *.safetensors file here")
    return paths


def read_header(path: epath.Path) -> Iterator[Stored]:
    """The tensors of one file."""
    try:
        size = path.stat().length
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ConfigError(f"{path}: cannot be read: it is cut short within its header")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if end > size:
        raise ConfigError(f"{path}: cannot be read: it is cut short, {size} bytes of {end}")
    for name, tensor in header.items():
        kind = tensor["dtype"]
        stored = Stored(path, name, kind, tuple(tensor["shape"]), 8 + length + tensor["data_offsets"][0])
        held = tensor["data_offsets"][1] - tensor["data_offsets"][0]
        if kind in _NUMPY and held != math.prod(stored.shape) * np.dtype(_NUMPY[kind]).itemsize:
            raise ConfigError(f"{path}: cannot be read: {name} of {kind} {list(stored.shape)} has {held} bytes")
        yield stored
