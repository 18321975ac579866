"""The loop: when it reads, saves and stops; and a run of the real model, interrupted, against one that was not."""

import logging
import os
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runs import ToyRun, rows_of, tiny_config, toy_step
from trainer import loop
from trainer.errors import ConfigError, RunError
from trainer.loop import train_steps
from trainer.metrics import WARM_UP_STEPS
from trainer.models.deepseek_v4 import Batch
from trainer.optimizer import as_float32
from trainer.parallel import batch_shape, resolve_degrees
from trainer.params import split_trainable
from trainer.report import Reporter
from trainer.run_folder import open_run
from trainer.signals import STOPPED, StopSignal
from trainer.state import abstract_state, batch_sharding, lower_step, optimizer_of


def go(toy: ToyRun, first: int = 0, compiled=None, reporter: Reporter | None = None) -> int:
    reporter = (reporter or toy.reporter()).open(toy.folder, first)
    try:
        return train_steps(toy.run(), compiled or toy.compiled, (toy.state, None), first, reporter)
    finally:
        reporter.close()
        toy.checkpoints.close()


def latest(toy: ToyRun) -> int:
    return max(int(path.name) for path in toy.folder.checkpoints.iterdir())


def test_next_step_is_dispatched_before_a_step_is_read(tmp_path):
    events = []

    class Recorder(Reporter):
        def step(self, step, metrics, evaluate=None):
            events.append(f"read {step}")
            super().step(step, metrics, evaluate)

    toy = ToyRun(tmp_path, steps=5, checkpoint_period=3)

    def compiled(state, frozen, batch):
        events.append(f"dispatch {int(jax.device_get(state.step)) + 1}")
        return toy.compiled(state, frozen, batch)

    save = toy.checkpoints.save
    toy.checkpoints.save = lambda state, step: (events.append(f"save {step}"), save(state, step))
    assert go(toy, compiled=compiled, reporter=Recorder(toy.config, toy.program, toy.shape, None, toy.run().out)) == 0
    assert events == [
        "dispatch 1", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3", "save 3",
        "dispatch 4", "dispatch 5", "read 4", "read 5", "save 5",
    ]  # fmt: skip


class Device:
    """One that works as accelerators do: a step returns at once, and its results are there when it is their turn.

    (JAX's CPU client would run a step that waits in a callback right where it is dispatched.)
    """

    def __init__(self, seconds):
        self._seconds = iter(seconds)
        self._queue = ThreadPoolExecutor(max_workers=1)

    def __call__(self, state, frozen, batch):
        done = self._queue.submit(time.sleep, next(self._seconds))
        names = ("loss", "grad_norm", "learning_rate", "moe_load_max_over_mean", "moe_dropped_tokens")
        metrics = {name: Pending(done, np.float32(1)) for name in names}
        return state, metrics | {"router_finite_by_layer": Pending(done, np.array([True]))}


class Pending:
    """A result that is waited for when it is read."""

    def __init__(self, done, value):
        self._done, self._value = done, value

    def __array__(self, *_, **__):
        self._done.result()
        return np.asarray(self._value)


def test_step_time_is_the_time_of_the_work(tmp_path):
    """Step 5 takes longer than the others, and the save after step 3 longer still."""
    each, fifth, saving = 0.2, 0.6, 1.0
    toy = ToyRun(tmp_path, steps=7, checkpoint_period=3)
    save = toy.checkpoints.save
    toy.checkpoints.save = lambda state, step: (time.sleep(saving), save(state, step))
    assert go(toy, compiled=Device([each] * 4 + [fifth] + [each] * 2)) == 0
    rows = rows_of(toy.folder.path)
    assert [row["warm_up"] for row in rows] == [step < WARM_UP_STEPS for step in range(7)]
    times = [row["step_time_s"] for row in rows]
    assert each * 0.95 < np.median(times[WARM_UP_STEPS:]) < fifth
    assert np.argmax(times) == 4 and fifth * 0.95 < times[4]
    for row in rows:
        assert row["tokens_per_s_per_device"] == pytest.approx(4 / row["step_time_s"])


def test_implicit_transfers_are_refused(tmp_path):
    toy = ToyRun(tmp_path)
    batches = toy.loader.batch
    toy.loader.batch = lambda step: jax.tree.map(np.asarray, batches(step))
    with pytest.raises(Exception, match="[Dd]isallowed host-to-device transfer"):
        go(toy)


@pytest.mark.parametrize("name, value", [("loss", jnp.nan), ("grad_norm", jnp.inf)])
@pytest.mark.parametrize("bad_step", [3, 4])  # seen when the next step is under way; and right at a save
def test_a_step_that_is_no_number_ends_the_run_and_is_never_saved(tmp_path, name, value, bad_step):
    def breaking(state, frozen, batch):
        bad = state.step + 1 >= bad_step
        state, metrics = toy_step(state, frozen, batch)
        metrics |= {name: jnp.where(bad, value, metrics[name])}
        return state, metrics | {"router_finite_by_layer": jnp.array([True, ~bad])}

    toy = ToyRun(tmp_path, breaking, steps=10, checkpoint_period=2)
    with pytest.raises(RunError, match=rf"step {bad_step}: {name}=(nan|inf); .* is layer 1\."):
        go(toy)
    assert latest(toy) == 2
    rows = rows_of(toy.folder.path)
    assert [row["step"] for row in rows] == list(range(1, bad_step + 1))
    assert rows[-1][name] is None


def stop_at(toy: ToyRun, step: int, number: int):
    """A signal while the batch of `step` is fetched, once it has got through."""

    def at(now):
        if now == step:
            os.kill(os.getpid(), number)
            while toy.stop.name is None:
                time.sleep(0.001)

    return at


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, number, capfd):
    toy = ToyRun(tmp_path, steps=10, checkpoint_period=100)
    toy.loader.at = stop_at(toy, 3, number)
    before = signal.getsignal(number)
    with toy.stop:
        assert go(toy) == STOPPED
    assert signal.getsignal(number) is before
    assert latest(toy) == 4
    assert f"stopped by {signal.Signals(number).name} after step 4 of 10" in capfd.readouterr().out


def test_a_signal_without_checkpoints_is_a_failure(tmp_path):
    toy = ToyRun(tmp_path, steps=10, enable_checkpointing=False)
    toy.loader.at = stop_at(toy, 3, signal.SIGTERM)
    with toy.stop, pytest.raises(RunError, match="enable_checkpointing=false"):
        go(toy)


def test_a_signal_during_the_last_step_changes_nothing(tmp_path):
    toy = ToyRun(tmp_path, steps=4)
    toy.loader.at = stop_at(toy, 3, signal.SIGTERM)
    with toy.stop:
        assert go(toy) == 0
    assert latest(toy) == 4


def test_a_save_that_fails_behind_ends_the_run_soon_and_leaves_the_one_before(tmp_path):
    """The file system takes no large file any more: step 50 is saved, step 100 is not, and 150 is never reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    toy = ToyRun(tmp_path, size=100_000, steps=1_000, checkpoint_period=50, log_period=1_000)

    def at(step):
        if step == 50:
            toy.checkpoints.finish()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        time.sleep(0.02 if step > 100 else 0)

    toy.loader.at = at
    try:
        with pytest.raises(RunError, match=r"tiny/checkpoints/100: .*\(step 50 is still there\).*too large"):
            go(toy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (toy.folder.checkpoints / "50").exists() and not (toy.folder.checkpoints / "100").exists()
    assert rows_of(toy.folder.path)[-1]["step"] < 150


def test_steps_done_again_stand_once_in_the_metrics(tmp_path):
    def at(step):
        if step == 5:
            raise OSError("pulled the plug")

    toy = ToyRun(tmp_path, steps=8, checkpoint_period=3)
    toy.loader.at = at
    with pytest.raises(OSError, match="pulled the plug"):
        go(toy)
    assert [row["step"] for row in rows_of(toy.folder.path)] == [1, 2, 3, 4]
    with (toy.folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # cut off
    again = ToyRun(tmp_path, steps=8, checkpoint_period=3)
    assert again.checkpoints.latest() == 3
    assert go(again, first=3) == 0
    assert [row["step"] for row in rows_of(toy.folder.path)] == list(range(1, 9))


class StopAfter(StopSignal):
    """As if a signal came during step `step`."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def agreed(self, step):
        self.name = "SIGTERM" if step >= self._step else None
        return self.name is not None


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """Equal programs are compiled once in this module."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def devices():
    """The process has its devices already: a run takes the first of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "find_devices", lambda config, say: jax.devices()[: config.num_cpu_devices])
        yield


def train(config, stop=None):
    return loop.train(config, open_run(config), stop or StopSignal())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, compile_cache):
    """(config, metrics) of a whole run; and what JAX logged of it."""
    config = tiny_config(tmp_path_factory.mktemp("whole"), enable_tensorboard=True)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("jax").addHandler(handler)
    with jax.log_compiles():
        assert train(config) == 0
    logging.getLogger("jax").removeHandler(handler)
    return config, rows_of(open_run(config).path), records


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, uninterrupted):
    """The folder of the same run, stopped after step 2."""
    folder = tmp_path_factory.mktemp("stopped")
    assert train(tiny_config(folder), StopAfter(2)) == STOPPED
    return folder


def resumed(interrupted, tmp_path, **changes):
    """Goes on with a copy of the stopped run. -> its metrics"""
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    config = tiny_config(tmp_path, **changes)
    assert train(config) == 0
    return rows_of(open_run(config).path)


def test_a_run_writes_what_it_should(uninterrupted):
    config, rows, _ = uninterrupted
    folder = open_run(config).path
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yml", "metrics.jsonl", "tensorboard", "checkpoints"}
    assert list((folder / "tensorboard").iterdir())
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"2", "4"}
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    asked = {
        "step", "loss", "grad_norm", "learning_rate", "step_time_s", "tokens_per_s_per_device",
        "tflops_per_s_per_device", "memory_bytes", "memory_source", "process_rss_bytes", "moe_dropped_tokens",
        "moe_load_max_over_mean", "num_targets",
    }  # fmt: skip
    for row in rows:
        assert asked <= set(row)
        assert row["memory_source"] == "compiled memory analysis" and row["memory_bytes"] > 0
        assert row["num_targets"] == 2 * 32
    assert len({row["loss"] for row in rows}) == 4


def test_the_step_is_compiled_once(uninterrupted):
    _, _, records = uninterrupted
    assert sum(record.startswith("Finished XLA compilation of jit(step)") for record in records) == 1


def test_a_run_that_is_done_says_so(uninterrupted, capsys):
    config, rows, _ = uninterrupted
    assert train(config) == 0
    assert "nothing to do: the run is at step 4, and steps=4" in capsys.readouterr().out
    assert rows_of(open_run(config).path) == rows


def test_resumed_equals_uninterrupted_to_the_bit(uninterrupted, interrupted, tmp_path):
    _, whole, _ = uninterrupted
    rows = resumed(interrupted, tmp_path)
    exact = ("step", "loss", "grad_norm", "learning_rate", "moe_load_max_over_mean_by_layer")
    assert [[row[name] for name in exact] for row in rows] == [[row[name] for name in exact] for row in whole]


def test_resumed_without_the_optimizer_would_differ(uninterrupted, interrupted):
    """The comparison above sees the optimizer's state, not the weights alone."""
    _, whole, _ = uninterrupted
    config = tiny_config(interrupted)
    program, loader, compiled, state = parts(config)
    optimizer = optimizer_of(program, config)
    trainable, _ = split_trainable(program.spec, state.params)
    forgetful = state.replace(opt_state=jax.device_put(optimizer.init(as_float32(trainable)), state.step.sharding))
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(program, optimizer).opt_state)
    forgetful = forgetful.replace(opt_state=jax.device_put(forgetful.opt_state, places))
    losses = []
    with jax.set_mesh(program.mesh):
        for step in (2, 3):
            forgetful, metrics = compiled(forgetful, None, Batch(**loader.batch(step)))
            losses.append(float(metrics["loss"]))
    loader.close()
    assert losses[0] == whole[2]["loss"] and losses[1] != whole[3]["loss"]


def parts(config):
    """What a run of the config is made of, with the state of its last checkpoint."""
    folder = open_run(config)
    degrees = resolve_degrees(config)
    shape, mesh = batch_shape(config, degrees), loop.make_mesh(degrees, jax.devices()[: degrees.product])
    program = loop.build_program(config, mesh)
    with jax.set_mesh(mesh):
        checkpoints = loop.open_checkpoints(config, folder, program, shape, loop.Output())
        state = checkpoints.restore(checkpoints.latest(), abstract_state(program, optimizer_of(program, config)))
        checkpoints.close()
        compiled = lower_step(program, config, shape).compile()
        loader = loop.Loader(loop.open_stream(config), shape, batch_sharding(program))
    return program, loader, compiled, state


def test_resumed_on_another_mesh_goes_on_with_the_same_data(uninterrupted, interrupted, tmp_path, capsys):
    _, whole, _ = uninterrupted
    changes = {"num_cpu_devices": 2, "ici_expert_parallelism": 2, "per_device_batch_size": 1}
    rows = resumed(interrupted, tmp_path, **changes)
    assert rows[:2] == rows_of(open_run(tiny_config(interrupted)).path)
    for row, expected in zip(rows[2:], whole[2:], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    out = capsys.readouterr().out
    assert "changed since the last start: ici_expert_parallelism: 1 -> 2" in out
    assert "mesh: data 1 x fsdp 1 x expert 2 x tensor 1 on 2 cpu (cpu) devices" in out
    assert "placement: cpu: no torus" in out


def test_the_mesh_is_laid_as_the_config_asks(tmp_path, monkeypatch):
    asked = []

    def make_mesh(*_, split_physical_axes):
        asked.append(split_physical_axes)
        raise ConfigError("no further")

    monkeypatch.setattr(loop, "make_mesh", make_mesh)
    for split in (False, True):
        with pytest.raises(ConfigError, match="no further"):
            train(tiny_config(tmp_path, allow_split_physical_axes=split))
    assert asked == [False, True]


def test_another_global_batch_is_refused(interrupted):
    with pytest.raises(ConfigError, match="global_batch was 2 and is 4"):
        train(tiny_config(interrupted, per_device_batch_size=4))


def test_accumulation_keeps_the_global_batch(interrupted):
    """2 microbatches of 1 row are the rows of 1 microbatch of 2: it gets as far as the data."""
    config = tiny_config(interrupted, per_device_batch_size=1, gradient_accumulation_steps=2, steps=2)
    assert train(config) == 0


def test_a_signal_during_the_start_ends_the_run_before_its_first_step(tmp_path, monkeypatch, capsys):
    stop = StopSignal()
    stop.name = "SIGTERM"
    monkeypatch.setattr(loop, "lower_step", None)
    assert train(tiny_config(tmp_path), stop) == STOPPED
    assert "stopped by SIGTERM before step 1: nothing new to save" in capsys.readouterr().out


def test_bad_data_and_a_full_disk_are_found_before_compiling(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "lower_step", None)
    text = tmp_path / "text.jsonl"
    text.write_text("not JSON\n")
    model = tiny_config(tmp_path).model
    assert model.vocab_size < 257
    changes = {"dataset_type": "text", "dataset_path": [str(text)], "tokenizer_path": "byte"}
    config = tiny_config(tmp_path, **changes, model=vars(model) | {"vocab_size": 260})
    with pytest.raises(ConfigError, match="text.jsonl:1: not JSON"):
        train(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(ConfigError, match="a checkpoint takes about .* GiB, and the disk has .* GiB left"):
        train(tiny_config(tmp_path))
