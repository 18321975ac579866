"""The dry run: compile the step of a config for devices that are not here, and say what each of them would hold.

python -m trainer compile CONFIG.yml compile_topology=v6e-128 [key=value ...] [report=FILE.json] [--vs "key=value"]
"""

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.config import Config, load
from trainer.dryrun.process import compile_apart, require_libtpu
from trainer.dryrun.progress import Progress
from trainer.dryrun.report import render
from trainer.errors import ConfigError
from trainer.libtpu import init_args
from trainer.parallel import batch_shape, resolve_degrees
from trainer.topology import CPU
from trainer.validate import validate

DOES_NOT_FIT = 3
INTERRUPTED = 130  # as shells report Ctrl-C

_REPORT = "report="


@dataclass(frozen=True)
class Variant:
    """One config to compile."""

    name: str
    config: Config
    flags: str  # of libtpu


def run(path: str, arguments: Sequence[str], vs: str | None = None) -> int:
    """The whole command. Returns the exit code: 0, 3 where a step does not fit, 130 after Ctrl-C.

    Raises ConfigError for a wrong config, report file or flag, before anything is compiled where that can be, and
    RunError where the compiler failed.
    """
    overrides = [argument for argument in arguments if not argument.startswith(_REPORT)]
    report = _report_file([argument.removeprefix(_REPORT) for argument in arguments if argument.startswith(_REPORT)])
    variants = [_variant(path, overrides, "")]
    if vs is not None:
        variants.append(_variant(path, _changed(overrides, shlex.split(vs)), vs))
    if any(variant.config.compile_topology != CPU for variant in variants):
        require_libtpu(os.environ)
    try:
        results = [_compile(variant) for variant in variants]
    except KeyboardInterrupt:
        return INTERRUPTED
    console = Console(highlight=False)
    console.print(render(results))
    if report is not None:
        _write(report, results)
        console.print(f"report written to {report}", markup=False, soft_wrap=True)
    return 0 if all(result["fits"] for result in results) else DOES_NOT_FIT


def _variant(path: str, overrides: Sequence[str], name: str) -> Variant:
    """The config as the dry run compiles it: on what `compile_topology` names, whatever its `hardware`."""
    config = load(path, overrides).config
    if not config.compile_topology:
        raise ConfigError("compile_topology is empty; name what to compile for: a slice such as v6e-128, or cpu")
    if config.compile_topology == CPU:
        config, flags = replace(config, hardware="cpu"), ""
    else:
        config = replace(config, hardware="tpu", num_cpu_devices=1)
        flags = init_args(config.libtpu_init_args, os.environ)
    validate(config)
    batch_shape(config, resolve_degrees(config))
    return Variant(name, config, flags)


def _changed(overrides: Sequence[str], by: Sequence[str]) -> list[str]:
    """The overrides with those of the second variant in place of, or behind, the first's."""
    keys = {argument.partition("=")[0] for argument in by}
    return [argument for argument in overrides if argument.partition("=")[0] not in keys] + list(by)


def _compile(variant: Variant) -> dict[str, Any]:
    title = f"{variant.config.compile_topology}{f' ({variant.name})' if variant.name else ''}"
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder, Progress(title) as progress:
        compiled = compile_apart(variant.config, variant.flags, Path(folder), progress)
    facts = {
        "overrides": variant.name,
        "topology": variant.config.compile_topology,
        "flags": {
            "libtpu_init_args": variant.flags,
            "XLA_FLAGS": os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else "",
        },
        "compiler_rss_bytes": compiled.rss_bytes,
    }
    return compiled.result | facts


def _report_file(given: Sequence[str]) -> Path | None:
    """The file of `report=FILE`, known to be writable before minutes of compiling."""
    if not given:
        return None
    if len(given) > 1 or not given[0]:
        raise ConfigError("report=FILE names one file to write the report to, as JSON")
    path = Path(given[0])
    new = not path.exists()
    try:
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"report={path}: cannot be written: {error.strerror}") from None
    return path


def _write(path: Path, results: Sequence[dict[str, Any]]) -> None:
    report = results[0] | ({"vs": results[1]} if len(results) > 1 else {})
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
