"""Memory: the devices' own peak where they report one, the compiler's count elsewhere, None where nobody knows."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from trainer.console import gib
from trainer.memory import ProgramMemory, device_memory, process_bytes, program_memory

PROGRAM = ProgramMemory(arguments=100, outputs=90, donated=80, temporaries=1000, code=7)


def device(platform, stats):
    return SimpleNamespace(platform=platform, memory_stats=lambda: stats)


TPU = device("tpu", {"peak_bytes_in_use": 50, "bytes_in_use": 3})
BUSIER = device("tpu", {"peak_bytes_in_use": 60})
GPU = device("gpu", {"peak_bytes_in_use": 50})
CPU = device("cpu", None)


@pytest.mark.parametrize(
    "devices, program, num_bytes, source",
    [
        ([TPU, BUSIER], PROGRAM, 1060, "peak of the device's allocator + compiled temporaries"),
        ([GPU], PROGRAM, 50, "peak of the device's allocator"),
        ([CPU, CPU], PROGRAM, 1117, "compiled memory analysis"),
        ([device("tpu", {})], PROGRAM, 1117, "compiled memory analysis"),
        ([CPU], None, None, "compiled memory analysis"),
        ([TPU], None, None, "compiled memory analysis"),
    ],
)
def test_memory_says_what_was_counted(devices, program, num_bytes, source):
    memory = device_memory(devices, program)
    assert (memory.num_bytes, memory.source) == (num_bytes, source)


def test_donated_outputs_count_once():
    x = jnp.zeros((256, 256), jnp.float32)
    kept = program_memory(jax.jit(lambda a: a + 1).lower(x).compile())
    donated = program_memory(jax.jit(lambda a: a + 1, donate_argnums=0).lower(x).compile())
    assert kept.arguments == kept.outputs == donated.donated == 4 * 256 * 256
    assert kept.total - donated.total == 4 * 256 * 256


def test_a_backend_that_tells_nothing_is_none():
    assert program_memory(SimpleNamespace(memory_analysis=lambda: None)) is None


def test_nothing_is_printed_as_zero():
    assert [gib(size) for size in (None, 3 * 2**29, 2**24, 0)] == ["n/a", "1.50 GiB", "0.016 GiB", "0 GiB"]


def test_process_memory_is_its_own():
    assert process_bytes() > 2**20
