"""The folder of a run, and whether a config may go on in it. No JAX: what is wrong shows before anything starts."""

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Config, load, schema, to_yaml, value_of
from trainer.console import gib
from trainer.errors import ConfigError

# What a run is: with another value of one of these, its later steps would not follow from its earlier ones. The
# global batch is one more, which the mesh has a part in: see `Checkpoints.refuse_other_run`.
MODEL_KEYS = (  # what its weights are, with all of `model`
    "seed",
    "weight_dtype",
    "load_parameters_path",
    "init_adapter_path",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_weight_dtype",
)
ORDER_KEYS = (  # what it saw, in which order, and what was done with it
    "max_target_length",
    "opt_type",
    "dataset_type",
    "dataset_path",
    "train_data_columns",
    "train_on",
    "on_bad_record",
    "long_documents",
    "tokenizer_path",
    "enable_data_shuffling",
)

PROBE_BYTES = 2**20


def model_keys() -> list[str]:
    return [key for key in schema() if key in MODEL_KEYS or key.startswith("model.")]


def fixed_keys() -> list[str]:
    model = model_keys()
    return [key for key in schema() if key in model or key in ORDER_KEYS]


def fingerprint(config: Config) -> str:
    """Of all that is fixed but the paths, which may move."""
    values = {key: value_of(config, key) for key in fixed_keys() if schema()[key].path_unless is None}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RunFolder:
    """Where a run is written."""

    path: Path
    changes: tuple[str, ...]  # "key: old -> new", against the config that the run was last started with

    @property
    def config_file(self) -> Path:
        return self.path / "config.yml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_config(self, config: Config) -> None:
        partial = self.config_file.with_suffix(".partial")
        partial.write_text(to_yaml(config), encoding="utf-8")
        os.replace(partial, self.config_file)

    def check_space(self, checkpoint_bytes: int) -> None:
        """Raises ConfigError where the disk has no room for one checkpoint."""
        free = shutil.disk_usage(self.path).free
        if free < checkpoint_bytes:
            raise ConfigError(
                f"{self.path}: a checkpoint takes about {gib(checkpoint_bytes)}, and the disk has {gib(free)} left; "
                "free some, or set base_output_directory to another disk"
            )


def open_run(config: Config) -> RunFolder:
    """The config's run folder, made if need be and tried out.

    Raises ConfigError where nothing can be written, or where the folder holds checkpoints of another run.
    """
    base = config.base_output_directory
    if "://" in base:
        raise ConfigError(
            f"base_output_directory={base} is a URL, and runs are written to folders; mount it (a Cloud Storage bucket "
            "with gcsfuse) and name the folder"
        )
    folder = RunFolder(Path(base) / config.run_name, ())
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        _try_to_write(folder.path)
    except OSError as error:
        raise ConfigError(f"base_output_directory={base}: cannot write to {folder.path}: {error.strerror}") from None
    if not any(entry.name.isdigit() for entry in folder.checkpoints.iterdir()):
        return folder
    if not config.enable_checkpointing:
        raise ConfigError(
            f"enable_checkpointing=false would start over, and {folder.path} holds checkpoints; set run_name=NEW, "
            "enable_checkpointing=true, or remove the folder"
        )
    return RunFolder(folder.path, _changes(folder, config, fixed_keys()))


def existing_run(config: Config) -> RunFolder:
    """The run folder, there or not, to read its weights from. Raises ConfigError where its model is another."""
    folder = RunFolder(Path(config.base_output_directory) / config.run_name, ())
    _changes(folder, config, model_keys())
    return folder


def _try_to_write(folder: Path) -> None:
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _changes(folder: RunFolder, config: Config, fixed: list[str]) -> tuple[str, ...]:
    """What differs from the run's own config.yml. Raises ConfigError where one of the `fixed` keys does."""
    saved = folder.config_file
    if not saved.exists():
        return ()
    try:
        old = load(saved).config
    except ConfigError as error:
        raise ConfigError(
            f"{folder.path} holds checkpoints, and the config they were made with cannot be read: {error}; set "
            "run_name=NEW, or remove the folder"
        ) from None
    differ = [key for key in schema() if value_of(old, key) != value_of(config, key)]
    refused = [key for key in fixed if key in differ]
    if refused:
        shown = "; ".join(f"{key} was {value_of(old, key)} and is {value_of(config, key)}" for key in refused)
        moved = any(schema()[key].path_unless is not None for key in refused)
        hint = f", or, for files that only moved, the new path in {saved}" if moved else ""
        raise ConfigError(
            f"{folder.path} holds checkpoints of another run: {shown}. Set what it was, run_name=NEW for a new "
            f"run{hint}, or remove the folder"
        )
    return tuple(f"{key}: {value_of(old, key)} -> {value_of(config, key)}" for key in differ)
