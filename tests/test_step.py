"""The whole step: the same numbers on every mesh and however it is cut, and what moves."""

import jax
import numpy as np
import pytest

from reference import worst
from steps import MESHES, config_of, losses, random_batch, run_steps, start
from trainer.params import named_leaves
from trainer.step import forward_sums

SAME = 1e-4


def one_and_three(started):
    """Adam's first moments after one step, which are its gradients scaled; and the metrics of three steps."""
    metrics, state = run_steps(started, 1)
    moments = {name: np.asarray(leaf) for name, leaf in named_leaves(state.opt_state) if "/mu/" in name}
    more, _ = run_steps(started._replace(state=state), 2, first=1)
    return moments, metrics + more


@pytest.fixture(scope="module")
def alone():
    return one_and_three(start(config_of()))


@pytest.mark.parametrize("mesh", list(MESHES)[1:])
def test_every_mesh_trains_alike(alone, mesh):
    moments, metrics = one_and_three(start(config_of(*MESHES[mesh])))
    for ours, theirs in zip(metrics, alone[1], strict=True):
        for name in ("loss", "grad_norm", "num_targets", "moe_load_max_over_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=SAME), name
    # A wrong factor in one gradient hides behind Adam's scale in the losses. Some gradients are the small rest of
    # large sums, so the bound is loose: a device too many is off by 1.
    assert moments.keys() == alone[0].keys() and moments
    for name, leaf in moments.items():
        assert worst(leaf, alone[0][name]) < 1e-2, name


@pytest.mark.parametrize(
    "overrides",
    [
        ["remat_policy=none"],
        ["remat_policy=minimal"],
        ["moe_permute=repeat", "moe_expert_axes=[expert]", *MESHES["all"]],
        ["moe_capacity_factor=0.4", "weight_axes=[fsdp,expert]", *MESHES["expert 4"]],
        ["attention=chunked", "loss_chunk_tokens=48"],
        ["gradient_accumulation_steps=2", "per_device_batch_size=0.5", *MESHES["all"]],
        ["dcn_data_parallelism=2", "ici_tensor_parallelism=2"],
    ],
    ids=lambda o: o[0],
)
def test_what_must_not_change_the_numbers_does_not(alone, overrides):
    assert losses(overrides) == pytest.approx([float(m["loss"]) for m in alone[1]], rel=SAME)


def test_the_balance_loss_does_not_depend_on_accumulation_or_mesh():
    base = ["load_balance_loss_weight=0.1", "model.first_num_hash_layers=0"]
    ways = ([], ["gradient_accumulation_steps=2", "per_device_batch_size=0.5", *MESHES["all"]])
    # The first step only: rounding parts the ways where an update turns a near tie of the router.
    alone, split = (run_steps(start(config_of(*base, *way)), 1)[0][0] for way in ways)
    for name in ("moe_balance_loss", "grad_norm"):
        assert float(split[name]) == pytest.approx(float(alone[name]), rel=1e-5) and alone[name] > 0


@pytest.fixture(scope="module")
def started():
    return start(config_of("routed_bias_update_rate=0.01"))


def test_routing_tables_and_the_indexer_stay_while_the_bias_moves_against_load(started):
    started = started._replace(state=jax.tree.map(jax.numpy.copy, started.state))
    before = {name: np.asarray(leaf) for name, leaf in named_leaves(started.state.params)}
    (metrics, *_), state = run_steps(started, 1)
    after = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params)}
    fixed = {name for name, leaf in named_leaves(started.program.spec) if not leaf.trainable}
    for name in before:
        moved = not np.array_equal(before[name], after[name])
        assert moved == (name not in fixed or name.endswith("/bias")), name
    steps = [np.unique(np.abs(after[n] - before[n]).round(6)) for n in fixed if n.endswith("/bias")]
    assert steps and all(set(s) <= {0.0, np.float32(0.01)} for s in steps)
    assert metrics["moe_load_max_over_mean_by_layer"].shape == (2,)


def test_padding_changes_nothing(started):
    """Other tokens in padding places: losses equal to the bit."""
    batch = random_batch(0, started.program, started.shape)
    padding = batch.segment_ids == 0
    other = batch.replace(tokens=jax.numpy.where(padding, 7, batch.tokens))
    with jax.set_mesh(started.program.mesh):
        run = jax.jit(forward_sums(started.program))
        first, second = (run(started.state.params, jax.tree.map(lambda x: x[0], b)) for b in (batch, other))
    assert float(first.loss) == float(second.loss)
    np.testing.assert_array_equal(first.load, second.load)
