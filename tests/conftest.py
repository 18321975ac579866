"""Eight CPU devices for every test, whatever the machine has."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# The suite compiles far longer than it computes: LLVM at its quickest.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

import jax
import pytest

NUM_DEVICES = 8

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)


def pytest_sessionstart(session: pytest.Session) -> None:
    found = len(jax.devices())
    if found < NUM_DEVICES:
        pytest.exit(f"{found} devices instead of {NUM_DEVICES}: nothing sharded would be tested", returncode=1)
