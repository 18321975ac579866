"""The folder of a run, and whether a config may go on in it. No JAX: what is wrong shows before anything starts."""

import os
from pathlib import Path

from trainer.config import Config, load, schema, to_yaml, value_of
from trainer.errors import ConfigError

CONFIG_FILE = "config.yml"
CHECKPOINTS = "checkpoints"

# What a run is: with another value of these, its later steps would not follow from its earlier ones.
FIXED_KEYS = (
    "seed",
    "max_target_length",
    "weight_dtype",
    "opt_type",
    "dataset_type",
    "dataset_path",
    "tokenizer_path",
    "enable_data_shuffling",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_weight_dtype",
    "load_parameters_path",
)


def run_folder(config: Config) -> Path:
    return Path(config.base_output_directory) / config.run_name


def prepare(config: Config, *, writes: bool) -> Path:
    """The run's folder, made and tried out by the process that `writes`, its config saved there.

    Raises ConfigError where nothing can be written, or where the folder holds checkpoints of another run.
    """
    folder = run_folder(config)
    if not writes:
        return folder
    try:
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"\0" * 2**20)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"base_output_directory={config.base_output_directory}: cannot write to {folder}: {error.strerror}"
        ) from None
    saved = folder / CONFIG_FILE
    if saved.exists() and any((folder / CHECKPOINTS).iterdir()):
        _refuse_other_run(load(saved).config, config, folder)
    partial = saved.with_suffix(".partial")
    partial.write_text(to_yaml(config))
    os.replace(partial, saved)
    return folder


def _refuse_other_run(old: Config, new: Config, folder: Path) -> None:
    keys = [*FIXED_KEYS, *(key for key in schema() if key.startswith("model."))]
    changed = [key for key in keys if value_of(old, key) != value_of(new, key)]
    if changed:
        shown = "; ".join(f"{key} was {value_of(old, key)} and is {value_of(new, key)}" for key in changed)
        raise ConfigError(
            f"{folder} holds checkpoints of another run: {shown}. Set run_name to start a new run, or remove the folder"
        )
