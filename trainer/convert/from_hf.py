"""A Hugging Face folder -> a model folder whose weights orbax restores shard by shard; see `trainer.hf.arrays`.

Streams part by part (a layer of a parameter, or one expert of it; large tables by rows), and can be stopped at any
point: the parts done are listed, and the same command goes on after them.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from trainer.config import DEFAULT, from_values
from trainer.convert.progress import Rate
from trainer.errors import ConfigError, RunError
from trainer.hf.arrays import ARRAYS, CONFIG, NAMES, PROGRESS, block_rows, copy_beside, create, write_metadata
from trainer.hf.config import model_values
from trainer.hf.files import TensorFiles
from trainer.hf.load import check_tensors
from trainer.hf.names import Leaf, leaves
from trainer.models.config import ModelConfig
from trainer.models.deepseek_v4 import DeepSeekV4
from trainer.step import DTYPES

WORKERS = 4  # parts in the making at one time; each holds some 50 MB a few times over


@dataclass(frozen=True)
class Part:
    """What is read, converted and written at one time."""

    leaf: Leaf
    at: int | None  # of the leaf's layers; None for globals
    expert: int | None
    rows: tuple[int, int] | None  # of the tensor; None: all of it

    @property
    def group(self) -> str:
        """Parts are recorded as done by these."""
        return self.leaf.path if self.at is None else f"{self.leaf.path}[{self.at}]"


def parts(c: ModelConfig, wanted: list[Leaf]) -> Iterator[Part]:
    for leaf in wanted:
        for at in range(len(leaf.layers)) if leaf.layers else [None]:
            for expert in range(c.num_experts) if leaf.source.per_expert else [None]:
                for rows in _blocks(leaf):
                    yield Part(leaf, at, expert, rows)


def _blocks(leaf: Leaf) -> list[tuple[int, int] | None]:
    step = block_rows(leaf)
    if step is None:
        return [None]
    num = leaf.part_shape[leaf.source.conversion.rows_along or 0]
    return [(first, min(first + step, num)) for first in range(0, num, step)]


def copy_part(part: Part, files: TensorFiles, c: ModelConfig, array: Any) -> int:
    """Read, convert, write. Returns the bytes written."""
    leaf = part.leaf
    layer = None if part.at is None else leaf.layers[part.at]
    first, last = part.rows or (0, None)
    made = leaf.source.conversion.to_part(c, files.read(leaf.tensor(layer, part.expert), first, last))
    made = np.ascontiguousarray(made.astype(array.dtype.numpy_dtype, copy=False))
    index: list[Any] = [i for i in (part.at, part.expert) if i is not None]
    if part.rows is not None:
        place: list[Any] = [slice(None)] * made.ndim
        place[leaf.source.conversion.rows_along or 0] = slice(*part.rows)
        index += place
    array[tuple(index) if index else ...].write(made).result()
    return made.nbytes


def kept_dtype(files: TensorFiles, leaf: Leaf, c: ModelConfig, weight_dtype: Any | None) -> np.dtype:
    """What a parameter is stored as: the type asked for, or the widest of its tensors' own."""
    if leaf.param.dtype is not None:
        return np.dtype(leaf.param.dtype)
    if weight_dtype is not None:
        return np.dtype(weight_dtype)
    return max((files.dtype(name) for name in leaf.all_tensors(c)), key=lambda dtype: dtype.itemsize)


@dataclass(frozen=True)
class Job:
    """One conversion, all of it known to fit."""

    files: TensorFiles
    model: ModelConfig
    wanted: list[Leaf]
    dtypes: dict[str, np.dtype]  # by the parameters' paths
    target: epath.Path

    @property
    def identity(self) -> dict[str, Any]:
        """What has to be the same when it goes on."""
        return {"source": str(self.files.folder), "dtypes": {path: dtype.name for path, dtype in self.dtypes.items()}}

    @property
    def num_bytes(self) -> int:
        return sum(int(np.prod(leaf.param.shape)) * self.dtypes[leaf.path].itemsize for leaf in self.wanted)


def prepare(source: str, dest: str, overrides: Sequence[str]) -> Job:
    """Raises ConfigError where the source is not whole, or the arguments are no good."""
    folder = epath.Path(source)
    resolved = from_values({"model": model_values(folder)}, overrides, source)
    changed = [key for key, origin in resolved.origins.items() if origin == "command line" and key != "weight_dtype"]
    if changed:
        raise ConfigError(f"convert from-hf takes weight_dtype=... alone; {changed[0]} is not a checkpoint's")
    asked = resolved.origins["weight_dtype"] != DEFAULT
    weight_dtype = DTYPES[resolved.config.weight_dtype] if asked else None
    c = resolved.config.model
    files = TensorFiles(folder)
    wanted = leaves(c, DeepSeekV4.spec(c))
    check_tensors(files, wanted, c)
    dtypes = {leaf.path: kept_dtype(files, leaf, c, weight_dtype) for leaf in wanted}
    return Job(files, c, wanted, dtypes, epath.Path(dest))


def from_hf(source: str, dest: str, overrides: Sequence[str], write: Callable[[str], None]) -> int:
    """The whole command. Raises ConfigError where source or dest are not fit, RunError where writing fails."""
    job = prepare(source, dest, overrides)
    target, files = job.target, job.files
    if files.ignored:
        write(f"{files.ignored} tensors of mtp.* (multi-token prediction) are left out: this model does not have them")
    done = start(job)
    if done:
        write(f"going on with {target}: {len(done)} parts are there")
    rate = Rate(job.num_bytes, write)
    try:
        convert(job, done, rate)
        write_metadata(target / ARRAYS, DeepSeekV4.spec(job.model))
        finish(job)
    except (OSError, ValueError) as error:  # tensorstore raises ValueError for what it cannot write
        reason = str(error).splitlines()[0]
        raise RunError(f"{target}: writing failed: {reason}; the same command goes on from here") from error
    write(f"{target}: {rate.summary()}")
    return 0


def convert(job: Job, done: list[str], rate: Rate) -> None:
    """Every part that is not done, several at a time."""
    arrays = {leaf.path: create(job.target / ARRAYS, leaf, job.dtypes[leaf.path]) for leaf in job.wanted}
    todo = [part for part in parts(job.model, job.wanted) if part.group not in set(done)]
    left = Counter(part.group for part in todo)
    pending: dict[Future[int], Part] = {}

    def collect() -> None:
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            part = pending.pop(future)
            rate.add(future.result())
            left[part.group] -= 1
            if not left[part.group]:
                done.append(part.group)
                record(job, done)

    with ThreadPoolExecutor(WORKERS) as pool:
        for part in todo:
            pending[pool.submit(copy_part, part, job.files, job.model, arrays[part.leaf.path])] = part
            while len(pending) >= WORKERS:
                collect()
        while pending:
            collect()


def start(job: Job) -> list[str]:
    """Make the folder, or take up what is there. Returns the groups that are done. Raises ConfigError."""
    target, progress = job.target, job.target / PROGRESS
    if progress.exists():
        known = json.loads(progress.read_text())
        if known["identity"] != job.identity:
            raise ConfigError(
                f"{target}: holds part of another conversion, of {known['identity']['source']}; remove it, or name "
                "another folder"
            )
        return known["done"]
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target}: is there already; remove it, or name another folder")
    try:
        (target / ARRAYS).mkdir(parents=True, exist_ok=True)
        _check_space(target, job.num_bytes)
        record(job, [])
    except OSError as error:
        raise ConfigError(f"{target}: cannot write there: {error.strerror or error}") from None
    return []


def record(job: Job, done: list[str]) -> None:
    partial = job.target / f"{PROGRESS}.partial"
    partial.write_text(json.dumps({"identity": job.identity, "done": done}))
    partial.replace(job.target / PROGRESS)


def finish(job: Job) -> None:
    """What else a model folder has, config.json last; then it is whole."""
    source, target = job.files.folder, job.target
    copy_beside(source, target)
    names = {name: job.files.stored_name(name) for name in sorted(job.files.names)}
    (target / NAMES).write_text(json.dumps(names))
    (source / CONFIG).copy(target / CONFIG, overwrite=True)
    (target / PROGRESS).unlink()


def _check_space(target: epath.Path, total: int) -> None:
    """Raises ConfigError where a local disk has no room."""
    if "://" in str(target):
        return
    free = shutil.disk_usage(str(target)).free
    if free < total:
        raise ConfigError(f"{target}: needs {total / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB left")
