import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded import mesh_of, on_mesh
from test_params import TINY
from trainer.models.deepseek_v4 import DeepSeekV4
from trainer.params import named_leaves
from trainer.sharding import Layout, gather_length, gather_weight, scatter_length, varying_like


def test_every_dim_of_the_model_is_in_the_table_and_every_entry_is_used():
    dims = {dim for _, leaf in named_leaves(DeepSeekV4.spec(TINY)) for dim in leaf.dims if dim}
    assert dims | {"batch", "length"} == set(Layout.__dataclass_fields__)


def test_pspec_gives_the_axes_of_dims():
    assert Layout().pspec("batch", "length") == P(("data", "fsdp", "expert"), "tensor")
    assert Layout().pspec("experts", "expert_embed", None, "expert_mlp") == P(
        ("expert", "tensor"), ("fsdp",), None, None
    )
    assert Layout.of(["expert"]).pspec("experts", "expert_embed", None, "expert_mlp") == P(
        ("expert",), ("fsdp",), None, "tensor"
    )
    with pytest.raises(AttributeError, match="lenght"):
        Layout().pspec("lenght")


def test_no_other_module_decides_where_a_dim_lies():
    """A PartitionSpec outside the table is empty: replicated, as losses and counts are."""
    for path in Path("trainer").rglob("*.py"):
        if path.name == "sharding.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "P":
                assert not node.args, f"{path}:{node.lineno}"


@pytest.mark.parametrize("num_rows", [1, 2])
def test_gathers_and_scatters_are_each_others_backward(num_rows):
    mesh = mesh_of(fsdp=2, tensor=4)
    x = np.random.default_rng(0).standard_normal((num_rows, 8, 3)).astype(np.float32)

    def local(x, w):
        whole, pull = jax.vjp(gather_length, x)
        w_whole, pull_w = jax.vjp(lambda w: gather_weight(w, ("embed", "heads"), Layout()), w)
        return whole, pull(whole)[0], scatter_length(whole), w_whole, pull_w(varying_like(w_whole, w))[0]

    split, rows = P(None, "tensor"), P("fsdp")
    run = on_mesh(mesh, local, (split, rows), (P(None, ("tensor",)), split, split, P(("fsdp",)), rows))
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    with jax.set_mesh(mesh):
        whole, back, scattered, w_whole, w_back = jax.jit(run)(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_array_equal(np.asarray(whole)[:, :8], x)
    np.testing.assert_allclose(back, 4 * x, rtol=1e-6)  # four devices hold the whole, and each has a cotangent
    np.testing.assert_array_equal(scattered, back)
    np.testing.assert_array_equal(np.asarray(w_whole)[:4], w)
    np.testing.assert_allclose(w_back, 2 * w)
