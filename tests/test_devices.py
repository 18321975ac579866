"""The hardware a config names is the hardware it gets."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from runs import tiny_config
from trainer.devices import (
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
    Process,
    before_jax,
    describe,
    find_devices,
    this_process,
)
from trainer.errors import ConfigError
from trainer.libtpu import VARIABLE

ROOT = Path(__file__).parents[1]


def trainer(code):
    """Runs Python code in a process that has not started JAX, nor been told of a platform."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_", "XLA_"))}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_cpu_devices_are_made_without_flags():
    code = """
import sys
from trainer.devices import before_jax, find_devices
from types import SimpleNamespace
before_jax("cpu")
assert "jax" not in sys.modules
config = SimpleNamespace(hardware="cpu", num_cpu_devices=3)
devices = find_devices(config, lambda text: print(text, "jax" in sys.modules))
print([d.platform for d in devices])
"""
    assert trainer(code) == "process 0/1 False\n['cpu', 'cpu', 'cpu']\n"


def test_missing_tpus_are_an_error_with_what_was_found():
    code = """
import os
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
from trainer.devices import before_jax, find_devices
from trainer.errors import ConfigError
from types import SimpleNamespace
before_jax("tpu")
try:
    find_devices(SimpleNamespace(hardware="tpu", num_cpu_devices=1), lambda text: None)
except ConfigError as error:
    print(error)
"""
    text = trainer(code)
    assert text.startswith("hardware=tpu, and JAX finds 1 cpu (cpu) here (Unable to initialize backend 'tpu'")
    assert text.count("\n") == 1


@pytest.mark.parametrize("hardware", ["gpu", "tpu"])
def test_other_hardware_is_never_taken_in_its_place(hardware, tmp_path):
    """This process has CPU devices."""
    before = jax.config.jax_platforms
    try:
        with pytest.raises(ConfigError, match=rf"hardware={hardware}, and JAX finds {jax.device_count()} cpu \(cpu\)"):
            find_devices(tiny_config(tmp_path, hardware=hardware), lambda text: None)
    finally:
        jax.config.update("jax_platforms", before)


def test_libtpu_gets_the_flags_that_the_dry_run_compiles_with(monkeypatch):
    flags = "--xla_tpu_scoped_vmem_limit_kib=98304"
    for name in (VARIABLE, "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    before_jax("cpu", flags)
    assert VARIABLE not in os.environ
    before_jax("tpu", flags)
    assert (os.environ[VARIABLE], os.environ["JAX_PLATFORMS"]) == (flags, "tpu")
    before_jax("tpu")
    assert os.environ[VARIABLE] == flags
    with pytest.raises(ConfigError, match="differ; leave one of them empty"):
        before_jax("tpu", "--xla_tpu_other=1")


def test_chips_of_another_kind_than_planned_are_refused(tmp_path, monkeypatch):
    found = [SimpleNamespace(platform="tpu", device_kind="TPU v5")] * 4
    monkeypatch.setattr(jax, "devices", lambda: found)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    planned = {"hardware": "tpu", "compile_topology": "v6e-4"}
    with pytest.raises(
        ConfigError, match=r"compile_topology=v6e-4 is made of v6e chips, and JAX finds 4 tpu \(TPU v5\)"
    ):
        find_devices(tiny_config(tmp_path, **planned), lambda text: None)
    found[:] = [SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")] * 4
    assert find_devices(tiny_config(tmp_path, **planned), lambda text: None) == found


def test_devices_are_described_by_kind():
    assert describe(jax.devices()[:2]) == "2 cpu (cpu)"


LAUNCHED = {COORDINATOR: "localhost:1234", NUM_PROCESSES: "4", PROCESS_ID: "3"}
POD = {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    "environ, process",
    [({}, (0, 1)), (LAUNCHED, (3, 4)), (POD, (1, 3)), ({"TPU_WORKER_HOSTNAMES": "localhost"}, (0, 1))],
)
def test_processes_are_numbered_by_the_launcher(environ, process):
    assert this_process(environ) == Process(*process)


@pytest.mark.parametrize(
    "change, text",
    [
        ({PROCESS_ID: "4"}, "process 4 of 4"),
        ({PROCESS_ID: "x"}, "process x of 4"),
        ({NUM_PROCESSES: "-1"}, "process 3 of -1"),
    ],
)
def test_impossible_process_numbers_are_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        this_process(LAUNCHED | change)


def test_a_launcher_that_gives_half_is_refused():
    with pytest.raises(ConfigError, match="process nothing of 4"):
        this_process({COORDINATOR: "localhost:1234", NUM_PROCESSES: "4"})


def test_cpu_devices_are_shared_out_to_processes(tmp_path, monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="num_cpu_devices=6 don't divide into 4 processes"):
        find_devices(tiny_config(tmp_path, num_cpu_devices=6), lambda text: None)
