"""The devices that a dry run compiles for, and the limit that their compiler keeps to."""

import os
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from trainer.config import Config
from trainer.topology import CPU, find_slice

_NO_CHIP_HOLDS = 2**40  # bytes


def target_devices(config: Config) -> list[Any]:
    """A TPU topology's devices, of as many slices as the config has copies of the model; or pretended CPU devices."""
    if config.compile_topology == CPU:
        return jax.devices("cpu")
    target = find_slice(config.compile_topology)
    options: dict[str, Any] = {"num_slices": config.dcn_data_parallelism} if config.dcn_data_parallelism > 1 else {}
    if target.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)  # by default a host has 2x2
    return topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **options).devices


def overflow_message(device: Any) -> str:
    """What a TPU's compiler says of a program that no chip could hold: it states the limit nowhere else."""
    x = jax.ShapeDtypeStruct((_NO_CHIP_HOLDS,), jnp.int8, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def versions(device: Any) -> dict[str, str]:
    """Of what made the program: another version may make another one."""
    found = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    if device.platform == "tpu":
        found["libtpu"] = metadata.version("libtpu") if any(metadata.distributions(name="libtpu")) else "unknown"
        found["libtpu_build"] = device.client.platform_version.splitlines()[-1]  # "Built on <date> cl/<number>"
    return found


def cache_folder() -> str | None:
    """Of JAX's persistent compilation cache, which is off without one."""
    config: Any = jax.config
    return config.jax_compilation_cache_dir


def cached_programs() -> set[str]:
    """Training steps in JAX's persistent compilation cache; none where it is off or no local folder."""
    folder = cache_folder()
    if not folder or not os.path.isdir(folder):
        return set()
    return {name for name in os.listdir(folder) if name.startswith("jit_step-") and name.endswith("-cache")}
