"""Checkpoints: complete or not there, onto any mesh, and a message where one is of no use."""

import json
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from runs import tiny_config
from trainer.checkpoint import Checkpoints
from trainer.errors import ConfigError, RunError
from trainer.mesh import make_mesh
from trainer.parallel import Degrees
from trainer.step import TrainState

RUN = {"global_batch": 4, "config_fingerprint": "abc"}


@pytest.fixture
def opened(tmp_path):
    """Opens the checkpoints of one run again and again, as starts of the run would."""
    managers = []

    def open_one(run=RUN, **values):
        managers.append(Checkpoints(tmp_path / "checkpoints", tiny_config(tmp_path, **values), run))
        return managers[-1]

    yield open_one
    for manager in managers:
        manager.close()


def save(checkpoints, state, step=1):
    checkpoints.save(state, step)
    checkpoints.finish()


def mesh_of(fsdp, expert, tensor):
    degrees = Degrees(1, fsdp, expert, tensor)
    return make_mesh(degrees, jax.devices()[: degrees.product])


ONE, ALL = (1, 1, 1), (2, 2, 2)
MESHES = (ONE, (8, 1, 1), (1, 4, 1), ALL)


def state_of(mesh, step=1, dtype=np.float32, shape=(16, 8)):
    """Numbers that follow from the step, spread over the mesh."""
    rng = np.random.default_rng(step)
    params = {"w": rng.random(shape).astype(dtype), "norm": rng.random(8).astype(np.float32), "absent": None}
    host = TrainState(np.int32(step), params, {"mu": {"w": rng.random(shape).astype(np.float32)}})
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(x.shape))), host)


def spec_of(shape):
    return {0: P(), 1: P("tensor"), 2: P(("fsdp", "expert"), "tensor")}[len(shape)]


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(state, other):
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("saved_on", MESHES)
@pytest.mark.parametrize("restored_on", MESHES)
def test_any_mesh_reads_what_any_mesh_wrote(opened, saved_on, restored_on):
    state = state_of(mesh_of(*saved_on))
    first = opened()
    save(first, state)
    wanted = abstract(state_of(mesh_of(*restored_on)))
    restored = opened().restore(1, wanted)
    assert_equal(restored, state)
    for leaf, asked in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == asked.sharding


def test_bfloat16_comes_back_to_the_bit(opened):
    state = state_of(mesh_of(*ALL), dtype=jnp.bfloat16)
    checkpoints = opened()
    save(checkpoints, state)
    assert_equal(checkpoints.restore(1, abstract(state)), state)


def test_a_state_is_copied_before_save_returns(opened):
    """The next step overwrites the state's memory while the save goes on."""
    size = (1024, 1024)
    state = state_of(mesh_of(*ONE), shape=size)
    expected = jax.tree.map(lambda x: np.array(x), state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    wanted = abstract(state)
    overwrite.lower(state).compile()
    checkpoints = opened()
    checkpoints.save(state, 1)
    jax.block_until_ready(overwrite(state))
    checkpoints.finish()
    assert_equal(checkpoints.restore(1, wanted), expected)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_only_the_newest_are_kept(opened, tmp_path, asynchronous):
    checkpoints = opened(max_num_checkpoints_to_keep=2, async_checkpointing=asynchronous)
    for step in (1, 2, 3, 4):
        checkpoints.save(state_of(mesh_of(*ONE), step), step)
        checkpoints.check()
    checkpoints.finish()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"3", "4"}
    assert checkpoints.latest() == 4


def test_a_step_that_is_there_is_not_saved_again(opened, tmp_path):
    state = state_of(mesh_of(*ONE))
    save(opened(), state)
    written = (tmp_path / "checkpoints" / "1").stat().st_mtime_ns
    save(opened(), state)
    assert (tmp_path / "checkpoints" / "1").stat().st_mtime_ns == written


def test_leftovers_of_a_killed_save_are_named_removed_and_no_obstacle(opened, tmp_path):
    """A folder as orbax leaves it when it is killed between writing and renaming."""
    first = opened()
    state = state_of(mesh_of(*ONE))
    save(first, state)
    folder = tmp_path / "checkpoints"
    leftover = folder / "7.orbax-checkpoint-tmp"
    shutil.copytree(folder / "1", leftover)
    (leftover / "commit_success.txt").unlink(missing_ok=True)
    again = opened()
    assert again.skipped == [leftover.name]
    assert again.latest() == 1
    save(again, state_of(mesh_of(*ONE), 2), 2)
    assert {path.name for path in folder.iterdir()} == {"1", "2"}
    assert opened().skipped == []


def fail_on_large_files(checkpoints, step):
    """Saves while no file may be larger than 1000 bytes: the write behind fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save(checkpoints, state_of(mesh_of(*ONE)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunError) as raised:
            save(checkpoints, state_of(mesh_of(*ONE), step, shape=(256, 256)), step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(raised.value)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_is_an_error_and_the_one_before_stays(opened, tmp_path, asynchronous):
    checkpoints = opened(async_checkpointing=asynchronous, max_num_checkpoints_to_keep=1)
    text = fail_on_large_files(checkpoints, 2)
    assert text.startswith(f"{tmp_path / 'checkpoints' / '2'}: ")
    assert "step 1 is still there" in text and "File too large" in text and "\n" not in text
    again = opened()
    assert again.latest() == 1
    assert_equal(again.restore(1, abstract(state_of(mesh_of(*ONE)))), state_of(mesh_of(*ONE)))


@pytest.mark.parametrize(
    "run, text",
    [
        ({**RUN, "global_batch": 8}, "global_batch was 4 and is 8"),
        ({**RUN, "config_fingerprint": "xyz"}, "config_fingerprint was abc and is xyz"),
    ],
)
def test_another_run_is_refused(opened, run, text):
    save(opened(), state_of(mesh_of(*ONE)))
    with pytest.raises(ConfigError, match=text):
        opened(run).refuse_other_run(1)
    opened().refuse_other_run(1)


def test_what_is_saved_beside_the_state(opened, tmp_path):
    save(opened(), state_of(mesh_of(*ONE)))
    (file,) = (path for path in (tmp_path / "checkpoints" / "1" / "run").iterdir() if "commit" not in path.name)
    assert json.loads(file.read_text()) == {**RUN, "step": 1}


def other(state, **params):
    return state.replace(params={**state.params, **params})


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda s, x: other(s, w=x((16, 9))), "params/w: saved as float32[16, 8], wanted as float32[16, 9]"),
        (lambda s, x: other(s, w=x((16, 8), jnp.bfloat16)), "saved as float32[16, 8], wanted as bfloat16[16, 8]"),
        (lambda s, x: other(s, more=x((3,))), "params/more: wanted but not saved"),
        (lambda s, x: other(s, norm=None), "params/norm: saved but not wanted"),
        (lambda s, x: s.replace(opt_state={}), "opt_state/mu/w: saved but not wanted"),
    ],
)
def test_other_arrays_are_refused(opened, change, text):
    state = state_of(mesh_of(*ONE))
    checkpoints = opened()
    save(checkpoints, state)

    def leaf(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=state.step.sharding)

    with pytest.raises(ConfigError) as raised:
        checkpoints.restore(1, change(abstract(state), leaf))
    assert "was saved by another model or optimizer" in str(raised.value) and text in str(raised.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: cut(folder / "state" / "_METADATA"),
        lambda folder: cut(folder / "state" / "manifest.ocdbt"),
        lambda folder: shutil.rmtree(folder / "state"),
        lambda folder: [cut(path) for path in (folder / "state").rglob("d/*")],
    ],
)
def test_a_broken_checkpoint_has_a_clear_message(opened, tmp_path, break_it):
    state = state_of(mesh_of(*ONE))
    save(opened(), state)
    folder = tmp_path / "checkpoints" / "1"
    break_it(folder)
    with pytest.raises(ConfigError) as raised:
        opened().restore(1, abstract(state))
    text = str(raised.value)
    assert text.startswith(f"{folder}: the checkpoint cannot be read; remove that folder") and "\n" not in text


def test_a_broken_run_file_has_a_clear_message(opened, tmp_path):
    save(opened(), state_of(mesh_of(*ONE)))
    for path in (tmp_path / "checkpoints" / "1" / "run").iterdir():
        cut(path)
    with pytest.raises(ConfigError, match="cannot be read; remove that folder"):
        opened().refuse_other_run(1)
