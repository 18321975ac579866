"""The compiler in a process of its own: libtpu ends its process where something is wrong, and Ctrl-C has to end it.

The environment that libtpu wants is set there alone. Free of JAX.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainer.config import Config, to_yaml
from trainer.console import gib
from trainer.dryrun.allocation import DUMP_FLAG
from trainer.dryrun.progress import Progress
from trainer.errors import ConfigError, RunError
from trainer.libtpu import VARIABLE, refused_flag
from trainer.topology import CPU, find_slice

# In the folder that a dry run and its compiler share.
CONFIG_FILE, STAGE_FILE, RESULT_FILE, LOG_FILE, DUMP = "config.yml", "stage", "result.json", "log", "dump"

_POLL_S = 0.2
_LOG_LINES = 30  # of a failed compiler's log, where it left no traceback
_LIBRARY = "TPU_LIBRARY_PATH"  # where libtpu is, if not in a package
_INSTALL = "install it with `pip install 'jax[tpu]'`, or in this repository's .venv with `make pod`"


@dataclass(frozen=True)
class Compiled:
    """What the compiler's process reported."""

    result: dict[str, Any]
    rss_bytes: int  # most memory it held on this machine


def require_libtpu(environ: Mapping[str, str]) -> None:
    """Raises ConfigError where there is no TPU compiler."""
    if _LIBRARY not in environ and importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f"a dry run for TPUs needs libtpu, their compiler, and it is not installed; {_INSTALL}")


def child_environment(config: Config, flags: str, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the compiler's process: `environ` without what a TPU host or a pod's launcher sets in it."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("TPU_", "MEGASCALE_"))}
    if _LIBRARY in environ:
        kept[_LIBRARY] = environ[_LIBRARY]
    kept.pop(VARIABLE, None)
    package = str(Path(__file__).parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([package, kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [package])
    # The compiler works in many threads, and glibc keeps what each of them has freed in an arena of its own.
    kept |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "MALLOC_ARENA_MAX": "2"}
    if config.compile_topology != CPU:
        kept |= {
            "TPU_ACCELERATOR_TYPE": find_slice(config.compile_topology).name,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_LOG_DIR": str(folder),
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock is the whole machine's, and no TPU is used here
            "XLA_FLAGS": f"{kept['XLA_FLAGS'] if 'XLA_FLAGS' in kept else ''} {DUMP_FLAG}={folder / DUMP}".strip(),
        }
        if flags:
            kept[VARIABLE] = flags
    return kept


def compile_apart(config: Config, flags: str, folder: Path, progress: Progress) -> Compiled:
    """Compile the config's step in a process of its own, with `folder` for what passes between the two.

    Raises ConfigError for a flag that libtpu refuses, RunError with what the process wrote where it failed.
    """
    (folder / CONFIG_FILE).write_text(to_yaml(config), encoding="utf-8")
    environment = child_environment(config, flags, folder, os.environ)
    rss = 0
    with (folder / LOG_FILE).open("wb") as log, _process(folder, environment, log) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            rss = max(rss, _rss(watched))
            progress.show(_read(folder / STAGE_FILE), rss)
            time.sleep(_POLL_S)
    if process.returncode or not (folder / RESULT_FILE).exists():
        raise _failure(process.returncode, _read(folder / LOG_FILE), rss)
    return Compiled(json.loads(_read(folder / RESULT_FILE)), rss)


@contextmanager
def _process(folder: Path, environment: dict[str, str], log: Any) -> Iterator[subprocess.Popen]:
    """The process, in a session of its own so that Ctrl-C reaches only its parent, which ends it.

    It also ends by itself when its standard input does: when this process is gone, however that came about.
    """
    command = [sys.executable, "-m", "trainer.dryrun.child", str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # it ended in between
        return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _failure(code: int, log: str, rss: int) -> Exception:
    refused = refused_flag(log)
    if refused:
        return ConfigError(f"libtpu refuses a flag of libtpu_init_args or {VARIABLE}: {refused}")
    if code == -signal.SIGKILL:
        return RunError(
            f"the compiler was killed, most likely for memory: it held {gib(rss)} of this machine's "
            f"{gib(psutil.virtual_memory().total)}"
        )
    traceback = log.rfind("Traceback (most recent call last)")
    shown = log[traceback:] if traceback >= 0 else "\n".join(log.splitlines()[-_LOG_LINES:])
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
    return RunError(f"the compiler's process {ended}\n{shown.strip()}")
