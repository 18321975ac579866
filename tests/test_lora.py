"""LoRA: the base model at first, then only adapters move, on every mesh alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import FLOAT32, worst
from steps import MESHES, config_of, run_steps, start
from trainer.config import load
from trainer.errors import ConfigError
from trainer.models.config import ADAPTER_LETTERS
from trainer.models.lora import Adapted, is_adapted, project
from trainer.params import named_leaves, trained
from trainer.validate import validate

LORA = ["lora_rank=4", "lora_alpha=12"]
EVERYTHING = [*LORA, "lora_targets=[*]"]


def adapted(spec):
    """Paths within a layer that have an adapter."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=lambda x: is_adapted(x))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, node in nodes if is_adapted(node)]
    return {path.split("/", 3)[-1] for path in paths}


@pytest.fixture(scope="module")
def alone():
    started = start(config_of(*EVERYTHING))
    before = jax.tree.map(np.asarray, (started.state.params, started.frozen))
    return started, before, *run_steps(started, 3)


def test_the_first_loss_is_the_base_models_to_the_bit(alone):
    base = run_steps(start(config_of()), 1)[0]
    assert float(base[0]["loss"]) == float(alone[2][0]["loss"])
    assert float(alone[2][1]["loss"]) != float(base[0]["loss"])


def test_every_adapter_moves_and_the_base_does_not(alone):
    started, (params, frozen), _, state = alone
    for (name, old), (_, new) in zip(named_leaves(params), named_leaves(state.params), strict=True):
        assert np.all(np.any(old != np.asarray(new), axis=tuple(range(1, old.ndim)))), name
    for (name, old), (_, new) in zip(named_leaves(frozen), named_leaves(started.frozen), strict=True):
        assert np.array_equal(old, new), name
    biases = [name for name, _ in named_leaves(frozen) if name.endswith("/bias")]
    assert biases and not [name for name, _ in named_leaves(params) if not name.endswith(("/a", "/b"))]


def test_only_adapters_are_optimized_and_kept_in_float32(alone):
    started, *_ = alone
    assert trained(started.program.spec) == sum(a.size for a in jax.tree.leaves(alone[1][0]))
    moments = [leaf for name, leaf in named_leaves(started.state.opt_state) if "/mu/" in name]
    assert sum(m.size for m in moments) == trained(started.program.spec)
    bf16 = start(config_of(*LORA, "weight_dtype=bfloat16", "dtype=bfloat16"))
    assert {a.dtype for a in jax.tree.leaves(bf16.state.params)} == {jnp.dtype("float32")}
    assert bf16.frozen.embedding.dtype == jnp.bfloat16


@pytest.mark.parametrize("mesh", ["tensor 4", "all"])
def test_every_mesh_trains_alike(alone, mesh):
    more = ["moe_expert_axes=[expert]", "moe_capacity_factor=0.5", "weight_axes=[fsdp,expert]"] if mesh == "all" else []
    metrics = run_steps(start(config_of(*EVERYTHING, *MESHES[mesh], *more)), 3)[0]
    for name in ("loss", "grad_norm"):
        assert [float(m[name]) for m in metrics] == pytest.approx([float(m[name]) for m in alone[2]], rel=3e-4)


def test_output_groups_may_straddle_devices():
    ways = ([], MESHES["tensor 4"])
    first, second = (run_steps(start(config_of(*LORA, "model.o_groups=2", *way)), 2)[0] for way in ways)
    assert [float(m["loss"]) for m in second] == pytest.approx([float(m["loss"]) for m in first], rel=1e-4)


def test_default_targets_are_attention_and_the_shared_expert():
    assert adapted(start(config_of(*LORA)).program.spec) == {
        "attention/wq_a", "attention/wq_b", "attention/wkv", "attention/wo_a", "attention/wo_b",
        "moe/shared/gate", "moe/shared/up", "moe/shared/down",
    }  # fmt: skip


def test_no_pattern_reaches_routers_norms_or_the_indexer(alone):
    assert adapted(alone[0].program.spec) == set(ADAPTER_LETTERS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora_targets=[attention/wq]"], "matches none of attention/wq_a, .*did you mean attention/wq_"),
        (["lora_targets=[moe/routed/router]"], "matches none of"),
        (["lora_targets=[]"], "lora_targets is empty"),
        (["load_balance_loss_weight=1e-4"], "the routers are frozen"),
        (["lora_dropout=1"], "lora_dropout=1"),
    ],
)
def test_what_cannot_be_adapted_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(load("configs/models/deepseek_v4_tiny.yml", [*LORA, *overrides]).config)


def test_dropout_is_drawn_anew_each_step_and_never_for_the_base(alone):
    started = start(config_of(*EVERYTHING, "lora_dropout=0.5"))
    states = [jax.tree.map(jnp.copy, started.state) for _ in range(2)]
    states.append(states[0].replace(step=states[0].step + 1, params=jax.tree.map(jnp.copy, states[0].params)))
    states[2] = states[2].replace(opt_state=jax.tree.map(jnp.copy, states[0].opt_state))
    runs = [run_steps(started._replace(state=state), 1)[0][0] for state in states]
    norms = [float(m["grad_norm"]) for m in runs]
    assert norms[0] == norms[1] != norms[2]
    assert float(runs[0]["loss"]) == float(alone[2][0]["loss"])  # B is zero: there is nothing to drop from


@pytest.mark.parametrize(
    ("subscripts", "shape", "letters"),
    [("bsd,dq->bsq", (6, 5), ("dr", "rq")), ("bsq,qhc->bshc", (6, 2, 3), ("qr", "rhc"))],
)  # fmt: skip
def test_an_adapter_adds_its_product_to_the_weight(subscripts, shape, letters):
    rng = np.random.default_rng(0)
    sizes = dict(zip(subscripts.split(",")[1].split("->")[0], shape, strict=True)) | {"r": 3}
    a, b = (rng.standard_normal([sizes[i] for i in of]).astype(np.float32) for of in letters)
    base, x = rng.standard_normal(shape).astype(np.float32), rng.standard_normal((2, 4, 6)).astype(np.float32)
    w = Adapted(base, jnp.asarray(a), jnp.asarray(b), None, letters, 0.7, 0.0)
    weight = subscripts.split(",")[1].split("->")[0]
    merged = base + 0.7 * np.einsum(f"{letters[0]},{letters[1]}->{weight}", a, b)
    assert worst(project(subscripts, jnp.asarray(x), w), np.einsum(subscripts, x, merged)) < FLOAT32


def test_no_gradient_matmul_is_spent_on_a_frozen_weight():
    """The compiled step has the FLOPs of forward, recompute and the gradient towards the inputs: a full fine-tune
    with the same shapes has a matmul more for every weight."""
    ways = ([], ["lora_rank=1", "lora_targets=[attention/wkv]"])
    flops = [start(config_of(*way, "remat_policy=none")).compiled.cost_analysis()["flops"] for way in ways]
    assert flops[1] < 0.75 * flops[0]


def test_nothing_of_the_activations_size_is_promoted():
    """bfloat16 activations stay so beside float32 adapters."""
    w = Adapted(jnp.ones((8, 6), jnp.bfloat16), jnp.ones((8, 2)), jnp.ones((2, 6)), None, ("dr", "rq"), 1.0, 0.0)
    jaxpr = jax.make_jaxpr(lambda x: project("bsd,dq->bsq", x, w))(jnp.ones((3, 64, 8), jnp.bfloat16))
    big = [v.aval for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.size >= 3 * 64 * 6]
    assert big and all(aval.dtype == jnp.bfloat16 for aval in big)
