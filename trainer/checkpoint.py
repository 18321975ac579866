"""Checkpoints: the train state and the little a resumed run has to know, saved by orbax in the background.

A checkpoint is complete or it is not there: orbax writes into a temporary folder and renames it at the end.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from trainer.config import Config
from trainer.errors import ConfigError, RunError
from trainer.step import TrainState

STATE, RUN = "state", "run"


class Checkpoints:
    """The checkpoints of one run, by the number of steps done."""

    def __init__(self, folder: Path, config: Config):
        """Leftovers of saves that never finished are removed; `skipped` names them."""
        self._folder = folder
        self.skipped = sorted(path.name for path in folder.glob("*") if not _complete(path)) if folder.exists() else []
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.max_num_checkpoints_to_keep,
            enable_async_checkpointing=config.async_checkpointing,
            cleanup_tmp_directories=True,
            create=True,
        )
        try:
            handlers = {STATE: ocp.StandardCheckpointHandler(), RUN: ocp.JsonCheckpointHandler()}
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)
        except OSError as error:
            raise RunError(f"{folder}: cannot open the checkpoints: {error}") from error

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState, step: int, run: dict[str, Any]) -> None:
        """Copies the state to the host before it returns; writing goes on behind. An earlier save that failed is
        raised here."""
        if self._manager.latest_step() == step:
            return
        args = ocp.args.Composite(**{STATE: ocp.args.StandardSave(state), RUN: ocp.args.JsonSave(run)})
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Wait for the save under way."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    def run_at(self, step: int) -> dict[str, Any]:
        """What was saved beside the state."""
        return self._manager.restore(step, args=ocp.args.Composite(**{RUN: ocp.args.JsonRestore()}))[RUN]

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a step, straight into the shards that `abstract` asks for, whatever mesh wrote it."""
        self._refuse_other_model(step, abstract)
        args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(abstract)})
        try:
            return self._manager.restore(step, args=args)[STATE]
        except Exception as error:
            raise RunError(
                f"{self._folder / str(step)}: the checkpoint cannot be read: {_first_line(error)}; "
                "remove that folder to go on from the one before"
            ) from error

    def _refuse_other_model(self, step: int, abstract: TrainState) -> None:
        stored = _shapes(self._manager.item_metadata(step)[STATE].tree)
        wanted = _shapes(abstract)
        faults = [
            f"{name}: {stored.get(name, 'not')} saved, {wanted.get(name, 'not')} wanted"
            for name in sorted(stored.keys() | wanted.keys())
            if stored.get(name) != wanted.get(name)
        ]
        if faults:
            shown = "\n  ".join(faults[:8]) + (f"\n  and {len(faults) - 8} more" if len(faults) > 8 else "")
            raise ConfigError(f"{self._folder / str(step)} was saved by another model or optimizer:\n  {shown}")

    def _failed(self, error: Exception) -> RunError:
        return RunError(
            f"{self._folder}: a checkpoint could not be saved: {_first_line(error)}; the last complete one is "
            f"{self._manager.latest_step()}"
        )

    def close(self) -> None:
        self._manager.close()


def _shapes(tree: Any) -> dict[str, str]:
    """Path of each array -> its shape and dtype."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in leaves}


def _complete(path: Path) -> bool:
    return path.name.isdigit() and (path / "_CHECKPOINT_METADATA").exists()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
