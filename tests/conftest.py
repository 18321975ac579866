"""Eight CPU devices for every test, whatever the machine has."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import pytest

NUM_DEVICES = 8

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)


def pytest_sessionstart(session: pytest.Session) -> None:
    found = len(jax.devices())
    if found < NUM_DEVICES:
        pytest.exit(f"{found} devices instead of {NUM_DEVICES}: nothing sharded would be tested", returncode=1)
