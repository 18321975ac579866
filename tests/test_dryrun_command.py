"""The dry run's command, end to end: on the CPU's compiler always, on the TPU's where it is installed (slow)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainer.dryrun.command import run
from trainer.errors import ConfigError, RunError

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "models" / "deepseek_v4_tiny.yml"
ONE_LAYER = [
    "model.compress_ratios=[0]",
    "model.first_num_hash_layers=0",
    "max_target_length=32",
    "per_device_batch_size=1",
]
CPU = [*ONE_LAYER, "compile_topology=cpu", "num_cpu_devices=2", "ici_tensor_parallelism=2", "lora_rank=2"]
CONTRACT = {
    "fits", "limit_bytes", "peak_bytes", "argument_bytes", "temporary_bytes", "output_bytes", "compile_s",
    "flops_per_device", "largest_buffers", "collectives",
}  # fmt: skip
COMMAND = """
import sys
from trainer.dryrun.command import run
sys.exit(run(sys.argv[1], sys.argv[2:]))
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What a developer's shell may have set would end up in the compiler's process."""
    for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def cpu_report(tmp_path_factory):
    """(exit code, report, console) of one dry run for two CPU devices."""
    report = tmp_path_factory.mktemp("report") / "report.json"
    done = start([*CPU, f"report={report}"]).communicate(timeout=300)
    return json.loads(report.read_text()), done[0].decode(), done[1].decode()


def start(arguments: list[str]) -> subprocess.Popen:
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(TINY), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip


def message(*arguments: str, vs: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        run(str(TINY), arguments, vs)
    return str(error.value)


# On the CPU.


def test_the_report_has_what_the_contract_says(cpu_report):
    report, _, _ = cpu_report
    assert report.keys() >= CONTRACT
    assert report["fits"] is True and report["limit_bytes"] is None
    assert report["mesh"] == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 2}
    for buffer in report["largest_buffers"]:
        assert buffer.keys() >= {"shape", "bytes", "source"}
    for collective in report["collectives"]:
        assert collective.keys() >= {"kind", "axes", "count", "bytes"}
    assert report["flops_per_device"] > 0


def test_arguments_add_up_to_what_the_compiler_counts(cpu_report):
    report, _, _ = cpu_report
    assert sum(report["arguments"].values()) == report["argument_bytes"]
    assert report["peak_bytes"] == (
        report["argument_bytes"] + report["temporary_bytes"] + report["output_bytes"] - report["donated_bytes"]
        + report["code_bytes"]
    )  # fmt: skip
    assert 0 < report["donated_bytes"] <= report["output_bytes"]


def test_with_adapters_the_optimizer_holds_two_moments_of_them_alone(cpu_report):
    report, _, _ = cpu_report
    arguments = report["arguments"]
    assert 0 < arguments["adapters"] < arguments["weights"] / 10
    assert 0 <= arguments["optimizer"] - 2 * arguments["adapters"] <= 64  # counters


def test_the_console_shows_it_within_120_columns(cpu_report):
    _, console, progress = cpu_report
    assert "cpu: 2 x cpu, 1 host  fits" in console and "peak: all of these" in console
    assert max(map(len, console.splitlines()[:-1])) <= 120  # the last names the file
    assert "cpu: compiling · 0:0" in progress and "GiB resident" in progress


def test_the_config_is_refused_before_anything_starts():
    assert message(*ONE_LAYER).startswith(
        "compile_topology is empty; name what to compile for: a slice such as v6e-128"
    )
    assert "did you mean v6e-4?" in message("compile_topology=v6e-5")
    assert "unknown key 'compile_topolgy'" in message("compile_topolgy=cpu")
    assert "product 1; devices: 4 (compile_topology=v6e-4)" in message("compile_topology=v6e-4")
    assert "number is not known here" in message("compile_topology=v6e-4", "dcn_data_parallelism=-1")
    assert "'vmem' is no flag of libtpu" in message("compile_topology=v6e-4", "libtpu_init_args=vmem")
    assert "unknown key 'nonsense'" in message(*CPU, vs="nonsense=1")
    assert "argument 'nonsense': overrides are written key=value" in message(*CPU, vs="nonsense")


@pytest.mark.parametrize("given", ["missing/report.json", ".", ""])
def test_a_report_that_cannot_be_written_is_refused_first(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "report=" in message(*CPU, f"report={given}")
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_not_made_before_there_is_one(tmp_path):
    file = tmp_path / "report.json"
    assert message(*CPU, f"report={file}", "dtype=int8") and not file.exists()
    file.write_text("kept")
    assert message("compile_topology=v6e-4", f"report={file}") and file.read_text() == "kept"
    assert "names one file" in message(*CPU, f"report={file}", f"report={file}")


def test_without_libtpu_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    text = message(*ONE_LAYER, "compile_topology=v6e-1")
    assert "needs libtpu" in text and "pip install 'jax[tpu]'" in text and "make pod" in text


def test_the_flags_of_the_environment_and_of_the_config_have_to_agree(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    assert "differ" in message(*ONE_LAYER, "compile_topology=v6e-1", "libtpu_init_args=--xla_tpu_a=2")


def stub(monkeypatch, tmp_path: Path, script: str) -> None:
    """A shell script in place of the compiler's process; $3 is the folder it shares with its parent."""
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr("trainer.dryrun.process.sys.executable", str(path))


@pytest.mark.parametrize(
    ("script", "error", "expected"),
    [
        ("echo \"ERROR: Unknown command line flag 'xla_tpu_x'\" >&2; exit 1", ConfigError,
         "libtpu refuses a flag of libtpu_init_args or LIBTPU_INIT_ARGS: Unknown command line flag 'xla_tpu_x'"),
        ("echo noise; echo 'Traceback (most recent call last):'; echo 'ValueError: wrong'; exit 1", RunError,
         "the compiler's process ended with 1\nTraceback (most recent call last):\nValueError: wrong"),
        ("echo '*** SIGABRT'; kill -ABRT $$", RunError, "the compiler's process was ended by signal 6\n*** SIGABRT"),
        ("kill -KILL $$", RunError, "the compiler was killed, most likely for memory"),
        ("exit 0", RunError, "the compiler's process ended with 0"),
    ],
)  # fmt: skip
def test_how_the_compiler_may_fail(script, error, expected, monkeypatch, tmp_path):
    stub(monkeypatch, tmp_path, script)
    with pytest.raises(error) as raised:
        run(str(TINY), CPU)
    assert str(raised.value).startswith(expected)


def test_two_variants_side_by_side(monkeypatch, tmp_path, cpu_report, capsys):
    """The second has its own overrides in place of the first's; one that does not fit makes the exit code 3."""
    base = tmp_path / "result.json"
    base.write_text(json.dumps(cpu_report[0]))
    smaller = tmp_path / "smaller.json"
    smaller.write_text(json.dumps(cpu_report[0] | {"fits": False, "peak_bytes": 1, "message": "RESOURCE_EXHAUSTED"}))
    script = f"grep -q 'lora_rank: 2' $3/config.yml && cp {base} $3/result.json || cp {smaller} $3/result.json"
    stub(monkeypatch, tmp_path, script)
    report = tmp_path / "report.json"
    assert run(str(TINY), [*CPU, f"report={report}"], vs="lora_rank=4 dtype=float32") == 3
    written = json.loads(report.read_text())
    assert (written["fits"], written["vs"]["fits"]) == (True, False)
    assert written["vs"]["overrides"] == "lora_rank=4 dtype=float32"
    console = capsys.readouterr().out
    assert "cpu with lora_rank=4 dtype=float32: 2 x cpu, 1 host  does not fit" in console
    assert "The compiler with lora_rank=4 dtype=float32: RESOURCE_EXHAUSTED" in console


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_the_compiler_ends_with_its_parent(stop):
    parent = start(CPU)
    try:
        for line in parent.stderr:
            if b"tracing" in line:
                break
        [child] = psutil.Process(parent.pid).children()
        parent.send_signal(stop)
        assert parent.wait(timeout=30) == (130 if stop == signal.SIGINT else -signal.SIGKILL)
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running()
    finally:
        parent.kill()
        parent.communicate()


# On the TPU's compiler.

V6E_4 = [*ONE_LAYER, "compile_topology=v6e-4", "ici_expert_parallelism=2", "ici_tensor_parallelism=-1", "lora_rank=2"]


@pytest.mark.slow
def test_v6e_4_twice_at_once(tmp_path):
    """libtpu's lock is the whole machine's, and two dry runs do not wait for each other."""
    started = time.monotonic()
    both = [start([*V6E_4, f"report={tmp_path}/{number}.json"]) for number in range(2)]
    for one in both:
        _, errors = one.communicate(timeout=300)
        assert one.returncode == 0, errors.decode()
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert first["compile_s"] + second["compile_s"] > 0.6 * (time.monotonic() - started)
    for report in (first, second):
        assert report.keys() >= CONTRACT
        assert 31 * 2**30 < report["limit_bytes"] < 32 * 2**30
        assert report["devices"] == {"kind": "TPU v6 lite", "number": 4, "hosts": 1}
        assert report["placement"]["text"] == "torus 2x2: expert=2 along y (2) · tensor=2 along x (2)"
        assert report["argument_bytes"] >= sum(report["arguments"].values())
        assert {one["kind"] for one in report["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert first["temporary_bytes"] == second["temporary_bytes"]


@pytest.mark.slow
def test_v6e_4_too_large(tmp_path, capsys):
    report = tmp_path / "report.json"
    too_large = ["attention=dot_product", "max_target_length=131072", f"report={report}"]
    kept = [one for one in V6E_4 if not one.startswith("max_target_length")]
    assert run(str(TINY), [*kept, *too_large]) == 3
    written = json.loads(report.read_text())
    assert written.keys() >= CONTRACT and written["fits"] is False
    assert written["peak_bytes"] > written["limit_bytes"] > 31 * 2**30
    best = written["changes"][0]
    assert best["change"] == "attention=chunked" and best["enough"]
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.slow
def test_v6e_4_with_a_flag_that_libtpu_does_not_know():
    assert "Unknown command line flag 'xla_tpu_nonsense'" in message(*V6E_4, "libtpu_init_args=--xla_tpu_nonsense=1")
