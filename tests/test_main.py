"""The command line: exit codes, messages, and a run that is killed, stopped and resumed as processes."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from runs import MODEL, rows_of
from trainer import __main__ as cli
from trainer import verify
from trainer.config import load
from trainer.convert.command import ARGUMENTS
from trainer.devices import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from trainer.errors import ConfigError, RunError

ROOT = Path(__file__).parents[1]
SMOKE = str(ROOT / "configs" / "cpu_smoke.yml")
FLASH = str(ROOT / "configs" / "models" / "deepseek_v4_flash.yml")

WRONG = [
    (["train", SMOKE, "ici_expert_paralelism=4"], "did you mean 'ici_expert_parallelism'?"),
    (["train", SMOKE, "ici_expert_parallelism=3"], "ici_expert_parallelism=3"),
    (["train", SMOKE, "per_device_batch_size=0.3"], "per_device_batch_size=0.3 x 1 = 0.3 is not a whole number"),
    (["train", SMOKE, "steps=ten"], "steps needs a whole number"),
    (["train", SMOKE, "--steps=10"], "overrides are written key=value, without leading dashes"),
    (["train", SMOKE, "run_name="], "run_name is empty"),
    (["train", SMOKE, "base_output_directory=/dev/null/x"], "cannot write to /dev/null/x/cpu_smoke"),
    (["train", "configs/cpu_smok.yml"], "no config file configs/cpu_smok.yml; did you mean configs/cpu_smoke.yml?"),
    (["config", SMOKE, "model.num_experts=0"], "model.num_experts=0 is not possible"),
    (["train"], "train needs CONFIG.yml; usage: python -m trainer train CONFIG.yml [key=value ...]"),
    (["verify", "folder"], "verify needs GOLDEN.npz"),
    (["trian", SMOKE], "there is no command 'trian'; did you mean train?"),
    ([], "a command is missing; the commands are train, eval, data, compile, config, verify"),
]


@pytest.fixture(autouse=True)
def as_before(monkeypatch, tmp_path):
    """Commands choose JAX's platform in the environment; and the container's last word goes elsewhere."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(ROOT)
    log = tmp_path / "termination-log"
    log.write_text("")
    monkeypatch.setattr(cli, "TERMINATION_LOG", str(log))
    return log


@pytest.mark.parametrize("arguments, text", WRONG)
def test_what_is_wrong_is_one_line_and_exit_2(arguments, text, capsys, as_before):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert text in err
    assert f"error: {as_before.read_text()}\n" == err


def test_nothing_wrong_is_found_with_jax():
    """All of the above, and help, in a process that can't import it."""
    code = f"""
import sys
sys.modules |= dict.fromkeys(("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore"))
from trainer.__main__ import main
for arguments in {[arguments for arguments, _ in WRONG]}:
    assert main(arguments) == 2, arguments
assert main(["--help"]) == main(["train", "--help"]) == 0
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr and run.stderr.count("\n") == len(WRONG)


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_shows_each_command_an_example_and_the_exit_codes(argument, capsys):
    assert cli.main([argument]) == 0
    out = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"python -m trainer {name} " in out
    assert "75  stopped" in out
    assert cli.main(["verify", argument]) == 0
    assert "train CONFIG.yml" not in capsys.readouterr().out


def test_examples_of_help_are_right():
    for name, command in cli.COMMANDS.items():
        for example in command.examples:
            words = shlex.split(example)
            if name == "convert":
                assert len(words) == 1 + len(ARGUMENTS[words[0]])
                continue
            needed = words[: len(command.needed)]
            assert all((ROOT / path).exists() for path in needed), (name, example)
            if name != "verify":
                rest = words[1 : words.index("--vs")] if "--vs" in words else words[1:]
                load(needed[0], [word for word in rest if not word.startswith("report=")])


@pytest.mark.parametrize("error, code", [(ConfigError("key=1 is wrong"), 2), (RunError("step 3: loss=nan"), 1)])
def test_each_error_has_its_exit_code_and_its_word_to_kubernetes(error, code, capsys, as_before, monkeypatch):
    def fails(*_):
        raise error

    failing = cli.Command(fails, (), "", "", ())
    monkeypatch.setitem(cli.COMMANDS, "fail", failing)
    assert cli.main(["fail"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"
    assert as_before.read_text() == str(error)
    as_before.unlink()
    assert cli.main(["fail"]) == code
    assert not as_before.exists()


def test_other_errors_keep_their_trace(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setitem(cli.COMMANDS, "fail", cli.Command(fails, (), "", "", ()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


def test_config_shows_origins_and_the_size_of_the_model(capsys):
    assert cli.main(["config", FLASH, "seed=3"]) == 0
    out = capsys.readouterr().out
    assert "# command line" in out and "deepseek_v4_flash.yml:" in out and "# default" in out
    assert out.splitlines()[-1] == "# 284.33B parameters in all (284,332,240,471), 13.27B active per token"
    assert yaml.safe_load(out)["model"]["num_experts"] == 256


def test_train_hands_the_configs_flags_to_libtpu_before_anything_is_written(tmp_path, monkeypatch):
    given = []

    def before_jax(*arguments):
        given.append(arguments)
        raise ConfigError("no further")

    monkeypatch.setattr(cli, "before_jax", before_jax)
    config = str(ROOT / "configs" / "v6e128_flash_lora_seq16384.yml")
    assert cli.main(["train", config, f"base_output_directory={tmp_path}/new"]) == 2
    assert given == [("tpu", "--xla_tpu_scoped_vmem_limit_kib=98304")]
    assert not (tmp_path / "new").exists()


def test_config_touches_no_device():
    """With a platform that does not exist, any use of a device raises."""
    code = """
import sys
from trainer import __main__ as cli
cli.before_jax = lambda *_: None
sys.exit(cli.main(["config", "configs/cpu_smoke.yml"]))
"""
    environ = os.environ | {"JAX_PLATFORMS": "none"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("# 992.0K parameters in all (992,017), ")


@pytest.mark.parametrize(
    "found, ok, code",
    [
        ({"logits": 1e-6, "loss": 9e-5}, True, 0),
        ({"logits": 1e-6, "grad/head": 2e-4}, False, 1),
        ({"logits": float("inf")}, False, 1),
    ],
)
def test_verify_shows_the_largest_and_ends_with_json(found, ok, code, capsys, monkeypatch):
    monkeypatch.setattr(verify, "differences", lambda config, folder, golden: (found, {}))
    monkeypatch.setattr(verify, "find_devices", lambda config, say: None)
    tiny = ROOT / "tests" / "data" / "deepseek_v4_tiny"
    assert cli.main(["verify", str(tiny), str(tiny / "golden.npz")]) == code
    lines = capsys.readouterr().out.splitlines()
    worst = max(found, key=lambda name: found[name])
    assert lines[1].split() == [f"{found[worst]:.2e}", worst]
    shown = {name: value if value < 1 else None for name, value in found.items()}
    assert json.loads(lines[-1]) == {"ok": ok, "max_rel": shown}


@pytest.mark.parametrize(
    "folder, golden, text",
    [
        ("nowhere", "deepseek_v4_tiny/golden.npz", "nowhere/config.json: no such file"),
        ("deepseek_v4_tiny", "nothing.npz", "nothing.npz: not a golden .npz file"),
    ],
)
def test_verify_names_what_is_missing(folder, golden, text, capsys):
    data = ROOT / "tests" / "data"
    assert cli.main(["verify", str(data / folder), str(data / golden)]) == 2
    assert text in capsys.readouterr().err


class Trainer:
    """`python -m trainer train` as a process; `environ` is added to its environment."""

    def __init__(self, folder: Path, *overrides: str, environ: dict[str, str] | None = None):
        self._out = folder / f"out{len(list(folder.glob('out*')))}"
        command = [sys.executable, "-m", "trainer", "train", str(folder / "run.yml"), *overrides]
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        }
        with self._out.open("w") as out:
            added = cache | (environ or {})
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | added, stdout=out, stderr=out)

    def until(self, happened):
        """Waits for it, looking often; the process has to be there still."""
        for _ in range(100_000):
            if happened():
                return
            assert self.process.poll() is None, self.output()
            time.sleep(0.001)
        raise AssertionError(self.output())

    def end(self, number=None):
        """-> the exit code, after a signal or by itself"""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(timeout=120)

    def output(self):
        return self._out.read_text()


@pytest.fixture
def run_folder(tmp_path):
    run = {
        "run_name": "killed",
        "base_output_directory": str(tmp_path),
        "hardware": "cpu",
        "dtype": "float32",
        "remat_policy": "none",
        "steps": 1_000_000,
        "log_period": 1_000,
        "per_device_batch_size": 2,
        "max_target_length": 32,
        "checkpoint_period": 1,
        "model": MODEL,
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(run))
    return tmp_path / "killed"


def test_killed_while_saving_then_resumed_then_stopped(run_folder):
    checkpoints = run_folder / "checkpoints"
    trainer = Trainer(run_folder.parent)

    def unfinished():
        """With its save under way; the process stands still meanwhile."""
        names = [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []
        if not any(name.isdigit() for name in names) or all(name.isdigit() for name in names):
            return []
        trainer.process.send_signal(signal.SIGSTOP)
        found = [path.name for path in checkpoints.iterdir() if not path.name.isdigit()]
        if not found:
            trainer.process.send_signal(signal.SIGCONT)
        return found

    trainer.until(unfinished)
    (leftover,) = unfinished()
    assert trainer.end(signal.SIGKILL) == -signal.SIGKILL
    last = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())

    trainer = Trainer(run_folder.parent)
    trainer.until(lambda: rows_of(run_folder)[-1]["step"] > last + 5)
    assert trainer.end(signal.SIGTERM) == 75, trainer.output()
    output = trainer.output()
    assert f"skipped {checkpoints / leftover}: its save never finished" in output
    assert f"restore step {last}: " in output
    assert "SIGTERM: stopping once the work at hand" in output
    stopped_at = rows_of(run_folder)[-1]["step"]
    assert f"stopped by SIGTERM after step {stopped_at} of 1000000: saved" in output
    assert max(int(path.name) for path in checkpoints.iterdir()) == stopped_at
    assert not [path for path in checkpoints.iterdir() if not path.name.isdigit()]

    trainer = Trainer(run_folder.parent, f"steps={stopped_at}")
    assert trainer.end() == 0, trainer.output()
    assert f"changed since the last start: steps: 1000000 -> {stopped_at}" in trainer.output()
    assert f"nothing to do: the run is at step {stopped_at}" in trainer.output()
    assert [row["step"] for row in rows_of(run_folder)] == list(range(1, stopped_at + 1))


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(run_folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    mesh = ("num_cpu_devices=2", "ici_fsdp_parallelism=2", "per_device_batch_size=1", "checkpoint_period=1000000")
    small = ("model.compress_ratios=[0]", "log_period=1")

    def environ(process):
        return {COORDINATOR: address, NUM_PROCESSES: "2", PROCESS_ID: str(process)}

    trainers = [Trainer(run_folder.parent, *mesh, *small, environ=environ(process)) for process in (0, 1)]
    try:
        metrics = run_folder / "metrics.jsonl"
        trainers[0].until(lambda: metrics.exists() and len(rows_of(run_folder)) > 10)
        trainers[1].process.send_signal(signal.SIGINT)
        assert [trainer.end() for trainer in trainers] == [75, 75], trainers[1].output()
    finally:
        for trainer in trainers:
            trainer.process.kill()
    (step,) = (int(path.name) for path in (run_folder / "checkpoints").iterdir())
    assert [row["step"] for row in rows_of(run_folder)] == list(range(1, step + 1))
    first, second = (trainer.output() for trainer in trainers)
    assert first.startswith("process 0/2\n") and second.startswith("process 1/2\n")
    assert f"stopped by SIGTERM after step {step} of 1000000: saved" in first
    assert "process 1 of 2 reads 1: rows 1, columns 0-31" in second
    assert "mesh:" in first and "mesh:" not in second and "loss" not in second
    assert len(list((run_folder / "tensorboard").iterdir())) == 1


def test_a_second_signal_ends_a_run_at_once():
    """Even while the main thread is deep in something that never looks at Python, as a compile is."""
    code = """
import hashlib
from trainer.signals import StopSignal
with StopSignal():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("SIGINT: stopping once the work at hand")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=10) == 128 + signal.SIGTERM
        finally:
            process.kill()
