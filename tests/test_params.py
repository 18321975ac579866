from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharded import mesh_of
from trainer.config import load
from trainer.models.deepseek_v4 import DeepSeekV4, active_params
from trainer.params import (
    BLOCK_ROWS,
    abstract,
    count,
    distinct_ids,
    initialize,
    merge,
    named_leaves,
    param,
    split_trainable,
    stack,
)
from trainer.sharding import Layout

TINY = load("configs/models/deepseek_v4_tiny.yml", []).config.model
FLASH = load("configs/models/deepseek_v4_flash.yml", []).config.model
SPEC = DeepSeekV4.spec(TINY)


def values(spec, layout=None, seed=0, **mesh):
    return jax.tree.map(np.asarray, initialize(spec, layout or Layout(), mesh_of(**mesh), jnp.float32, seed))


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_flash_has_the_published_number_of_parameters():
    total = count(DeepSeekV4.spec(FLASH))
    assert total == 284_332_240_471
    assert round(active_params(FLASH, total) / 1e9, 2) == 13.27


def test_values_depend_on_no_mesh():
    whole = values(SPEC)
    assert equal(whole, values(SPEC, fsdp=2, expert=2, tensor=2))
    assert equal(whole, values(SPEC, Layout.of(["expert"]), expert=2, tensor=4))
    assert not equal(whole, values(SPEC, seed=1))


def test_one_more_parameter_changes_no_other():
    small = {"a": param((8, 4), (None, None)), "c": param((5,), (None,))}
    more = values(small | {"b": param((3, 3), (None, None))})
    assert equal(values(small), {"a": more["a"], "c": more["c"]})


def test_a_shard_of_a_tall_matrix_is_drawn_from_the_blocks_it_touches():
    spec = {"w": param((2 * BLOCK_ROWS + 8, 4), ("embed", None))}
    assert equal(values(spec), values(spec, fsdp=4))


def test_stacked_layers_differ():
    w = values({"w": stack(param((4, 4), (None, None)), 3)})["w"]
    assert len({w[i].tobytes() for i in range(3)}) == 3


def test_hash_tables_hold_distinct_experts_and_are_balanced():
    table = distinct_ids(16)(np.random.default_rng(0), (6, 4096)).T
    assert table.dtype == np.int32 and all(len(set(row)) == 6 for row in table)
    load = np.bincount(table.reshape(-1), minlength=16) / table.size * 16
    assert load.min() > 0.9 and load.max() < 1.1


def test_splitting_by_what_trains_is_undone_by_merging():
    params = values(SPEC)
    trainable, fixed = split_trainable(SPEC, params)
    assert equal(merge(trainable, fixed), params)
    names = {name.rsplit("/", 1)[-1] for name, leaf in named_leaves(SPEC) if not leaf.trainable}
    assert names == {"bias", "tid2eid", "wq_b", "weights_proj", "wkv", "wgate", "position_bias", "norm"}
    assert all("/indexer/" in n or n.endswith(("/bias", "/tid2eid")) for n, p in named_leaves(SPEC) if not p.trainable)


def test_kept_dtypes_do_not_follow_the_weights():
    tree = abstract(SPEC, Layout(), mesh_of(), jnp.bfloat16)
    kinds = {name.rsplit("/", 1)[-1]: leaf.dtype for name, leaf in named_leaves(tree)}
    assert kinds["wq_a"] == jnp.bfloat16 and kinds["gate"] == jnp.bfloat16
    for name in ("router", "bias", "sinks", "position_bias", "fn", "base", "scale", "q_norm", "attention_norm"):
        assert kinds[name] == jnp.float32, name
    assert kinds["tid2eid"] == jnp.int32


@pytest.mark.parametrize(
    ("name", "decays"),
    [("wq_a", True), ("gate", True), ("embedding", True), ("attention_norm", False), ("sinks", False),
     ("position_bias", False), ("base", False), ("scale", False)],
)  # fmt: skip
def test_norms_and_biases_do_not_decay(name, decays):
    leaves = [leaf for path, leaf in named_leaves(SPEC) if path.rsplit("/", 1)[-1] == name and leaf.trainable]
    assert leaves and all(leaf.decay is decays for leaf in leaves)


def test_abstract_trees_are_the_real_ones():
    mesh = mesh_of(fsdp=2, expert=2, tensor=2)
    real = initialize(SPEC, Layout(), mesh, jnp.bfloat16, 0)
    for a, b in zip(jax.tree.leaves(abstract(SPEC, Layout(), mesh, jnp.bfloat16)), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


def test_no_weight_is_left_whole_by_oversight():
    """Every parameter of Flash with four million values is cut over some axis; the message names those that are not."""
    whole = [
        name
        for name, leaf in named_leaves(DeepSeekV4.spec(FLASH))
        if np.prod(leaf.shape) >= 4e6 and all(axis is None for axis in Layout().pspec(*leaf.dims))
    ]
    assert all(name.endswith(("tid2eid",)) for name in whole), whole


def test_a_wrong_dim_is_named():
    spec = {"w": replace(param((4, 4), (None, None)), dims=("embedd", None))}
    with pytest.raises(AttributeError, match="embedd"):
        abstract(spec, Layout(), mesh_of(), jnp.float32)
