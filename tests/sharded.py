"""Functions on one device's shard, run on a mesh with whole arrays in and out."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trainer.mesh import make_mesh
from trainer.parallel import Degrees


def mesh_of(fsdp: int = 1, expert: int = 1, tensor: int = 1) -> Mesh:
    degrees = Degrees(1, fsdp, expert, tensor)
    return make_mesh(degrees, jax.devices()[: degrees.product])


def on_mesh(mesh: Mesh, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`local` under shard_map; differentiable from outside, inside `jax.set_mesh(mesh)`."""

    def whole(*args: Any) -> Any:
        def place(spec: P, x: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.reshard(leaf, spec), x)

        placed = jax.tree.map(place, in_specs, args, is_leaf=lambda s: isinstance(s, P))
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*placed)

    return whole
