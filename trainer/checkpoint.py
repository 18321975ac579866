"""Checkpoints: the train state and the little a resumed run has to know, saved by orbax in the background.

A checkpoint is complete or it is not there: orbax writes into a temporary folder and renames it at the end.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainer.config import Config
from trainer.errors import ConfigError, RunError
from trainer.step import TrainState

STATE, RUN = "state", "run"

# What orbax and tensorstore raise for files they cannot write or read. Anything else is a fault in code, and shows.
FILE_FAULTS = (OSError, ValueError, KeyError)


class Checkpoints:
    """The checkpoints of one run, by the number of steps done."""

    def __init__(self, folder: Path, config: Config, run: dict[str, Any]):
        """`run`: what is saved beside each state, and has to be the same when the run goes on; plain JSON values.

        Leftovers of saves that never finished are removed; `skipped` names them.
        """
        self._folder = folder
        self._run = run
        self.skipped = sorted(p.name for p in folder.glob("*") if not p.name.isdigit())
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(config.max_num_checkpoints_to_keep),
            enable_async_checkpointing=config.async_checkpointing,
            cleanup_tmp_directories=True,
        )
        handlers = {STATE: ocp.StandardCheckpointHandler(), RUN: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None  # done when the save under way is
        self._last, self._before = self.latest(), None  # steps of the last save, and of the one before it

    def latest(self) -> int | None:
        """Of the complete ones, and of one that is being written."""
        return self._manager.latest_step()

    def save(self, state: TrainState, step: int) -> None:
        """Copies the state to the host; writing goes on behind. An earlier save that failed is raised here."""
        self.finish()
        if self._last == step:
            return
        self._last, self._before = step, self._last
        items = {STATE: ocp.args.StandardSave(state), RUN: ocp.args.JsonSave(self._run | {"step": step})}
        try:
            with jax.transfer_guard("allow"):
                self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except FILE_FAULTS as error:
            raise self._failed(error) from error
        self._written = self._waiter.submit(self._manager.wait_until_finished)

    def check(self) -> None:
        """Raises RunError when the save in the background has failed. Does not wait."""
        if self._written is not None and self._written.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, and raise RunError if it failed."""
        self._written = None
        try:
            self._manager.wait_until_finished()
        except FILE_FAULTS as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> RunError:
        kept = "there is none before it" if self._before is None else f"step {self._before} is still there"
        path = self._folder / str(self._last)
        return RunError(f"{path}: the checkpoint could not be saved ({kept}): {_first_line(error)}")

    def refuse_other_run(self, step: int) -> None:
        """Raises ConfigError where the checkpoint was saved by a run that this one cannot go on with."""
        try:
            saved = self._manager.restore(step, args=ocp.args.Composite(**{RUN: ocp.args.JsonRestore()}))[RUN]
        except FILE_FAULTS as error:
            raise self._unreadable(step, error) from error
        differ = [f"{key} was {saved.get(key)} and is {now}" for key, now in self._run.items() if saved.get(key) != now]
        if differ:
            raise ConfigError(
                f"{self._folder / str(step)} belongs to another run: {'; '.join(differ)}. The mesh and "
                "per_device_batch_size can change where the global batch stays the same, so that the data goes on "
                "where it stopped; model, seed and type of the optimizer (the fingerprint's) can't. Set run_name=NEW "
                "for a new run"
            )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a step, straight into the shards that `abstract` asks for, whatever mesh wrote it.

        Raises ConfigError where the arrays saved are others, or cannot be read.
        """
        try:
            stored = _arrays(self._manager.item_metadata(step)[STATE].tree)
        except FILE_FAULTS as error:
            raise self._unreadable(step, error) from error
        self._refuse_other_arrays(step, stored, _arrays(abstract))
        try:
            args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(abstract)})
            return self._manager.restore(step, args=args)[STATE]
        except FILE_FAULTS as error:
            raise self._unreadable(step, error) from error

    def _refuse_other_arrays(self, step: int, stored: dict[str, str], wanted: dict[str, str]) -> None:
        faults = [f"{name}: saved but not wanted" for name in sorted(stored.keys() - wanted.keys())]
        faults += [f"{name}: wanted but not saved" for name in sorted(wanted.keys() - stored.keys())]
        both = sorted(stored.keys() & wanted.keys())
        faults += [f"{n}: saved as {stored[n]}, wanted as {wanted[n]}" for n in both if stored[n] != wanted[n]]
        if faults:
            shown = "\n  ".join(faults[:8]) + (f"\n  and {len(faults) - 8} more" if len(faults) > 8 else "")
            raise ConfigError(f"{self._folder / str(step)} was saved by another model or optimizer:\n  {shown}")

    def _unreadable(self, step: int, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._folder / str(step)}: the checkpoint cannot be read; remove that folder to go on from the one "
            f"before it ({_first_line(error)})"
        )

    def close(self) -> None:
        """Waits for the save under way, and raises RunError if it failed."""
        try:
            self.finish()
        finally:
            self._manager.close()
            self._waiter.shutdown()


def _arrays(tree: Any) -> dict[str, str]:
    """Path of each array -> its dtype and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
