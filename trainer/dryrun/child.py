"""The compiler's process: `python -m trainer.dryrun.child FOLDER` compiles the config in FOLDER for its topology.

It leaves the result in FOLDER as JSON, and the stage it is in while it works. See `trainer.dryrun.process`.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from trainer.config import Config, load
from trainer.dryrun.allocation import temporary_bytes
from trainer.dryrun.analysis import Overflow, analyse, read_overflow
from trainer.dryrun.changes import Step, changes
from trainer.dryrun.memory import ArgumentBytes, argument_bytes
from trainer.dryrun.process import CONFIG_FILE, DUMP, RESULT_FILE, STAGE_FILE
from trainer.dryrun.target import cache_folder, cached_programs, overflow_message, target_devices, versions
from trainer.memory import program_memory
from trainer.mesh import make_mesh, placement
from trainer.parallel import BatchShape, Degrees, batch_shape, resolve_degrees
from trainer.state import trace_step
from trainer.step import Program, build_program
from trainer.topology import CPU

Stage = Callable[[str], object]


def dry_run(config: Config, stage: Stage, dump: Path) -> dict[str, Any]:
    """Compile the step that `train` runs, and everything there is to say about it, as JSON has it. `dump`: where the
    compiler leaves its own accounts."""
    stage("describing the devices")
    degrees, devices = resolve_degrees(config), target_devices(config)
    mesh = make_mesh(degrees, devices, split_physical_axes=config.allow_split_physical_axes)
    shape = batch_shape(config, degrees)
    laid, program = placement(mesh), build_program(config, mesh)
    arguments = argument_bytes(program, config, shape)
    facts: dict[str, Any] = {
        "devices": {"kind": laid.devices, "number": mesh.size, "hosts": len({d.process_index for d in devices})},
        "mesh": dict(mesh.shape),
        "placement": asdict(laid) | {"text": str(laid)},
        "batch": asdict(shape) | {"text": str(shape)},
        "arguments": asdict(arguments),
        "versions": versions(devices[0]),
        "compilation_cache": None,
    }
    stage("tracing the step")
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        traced = trace_step(program, config, shape)
        lowered = traced.lower()
    facts["trace_s"] = time.perf_counter() - start
    stage("compiling")
    before, start = cached_programs(), time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        overflow = read_overflow(str(error))
        if overflow is None:
            raise
        facts["compile_s"] = time.perf_counter() - start
        stage("looking for what would fit")
        return facts | does_not_fit(config, degrees, shape, arguments, overflow)
    facts["compile_s"] = time.perf_counter() - start
    facts["compilation_cache"] = {
        "folder": cache_folder(),
        "new_entries": sorted(cached_programs() - before),
    }
    stage("reading the program")
    facts |= fits(program, compiled, dump)
    return facts | analyse(compiled.as_text() or "", traced.jaxpr.jaxpr, mesh, config, shape)


def fits(program: Program, compiled: Any, dump: Path) -> dict[str, Any]:
    device = program.mesh.devices.flat[0]
    probe = read_overflow(overflow_message(device)) if device.platform == "tpu" else None
    memory = program_memory(compiled)
    if memory is None:
        raise RuntimeError(f"the compiler for {device.platform} does not say what its programs need")
    allocated = temporary_bytes(dump)
    if allocated is not None:
        memory = replace(memory, temporaries=allocated)
    return {
        "fits": True,
        "limit_bytes": None if probe is None else probe.limit_bytes,
        "peak_bytes": memory.total,
        "argument_bytes": memory.arguments,
        "output_bytes": memory.outputs,
        "donated_bytes": memory.donated,  # outputs in the place of arguments
        "temporary_bytes": memory.temporaries,
        "code_bytes": memory.code,
        "changes": [],
        "message": "",
    }


def does_not_fit(
    config: Config, degrees: Degrees, shape: BatchShape, arguments: ArgumentBytes, overflow: Overflow
) -> dict[str, Any]:
    """What is known of a step that the compiler refuses: its message, and what the arguments take."""
    temporary = overflow.temporary_bytes
    if temporary is None:
        temporary = max(0, overflow.needed_bytes - arguments.total)

    def arguments_of(other: Config) -> ArgumentBytes:
        degrees = resolve_degrees(other)
        mesh = make_mesh(degrees, target_devices(other), split_physical_axes=True)
        return argument_bytes(build_program(other, mesh), other, batch_shape(other, degrees))

    over = overflow.needed_bytes - overflow.limit_bytes
    found = changes(Step(config, degrees, shape, arguments, temporary, over, arguments_of))
    return {
        "fits": False,
        "limit_bytes": overflow.limit_bytes,
        "peak_bytes": overflow.needed_bytes,
        "argument_bytes": arguments.total,
        "output_bytes": None,
        "donated_bytes": None,
        "temporary_bytes": temporary,
        "code_bytes": None,
        "largest_buffers": overflow.largest_buffers,
        "collectives": [],
        "flops_per_device": None,
        "roofline": None,
        "changes": [
            {"change": str(c), "saves_bytes": c.saves_bytes, "enough": c.saves_bytes >= over, "why": c.why}
            for c in found
        ],
        "message": overflow.message,
    }


def main(folder: Path) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = load(folder / CONFIG_FILE).config
    if config.compile_topology == CPU:
        jax.config.update("jax_num_cpu_devices", config.num_cpu_devices)
    result = dry_run(config, (folder / STAGE_FILE).write_text, folder / DUMP)
    (folder / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")


def _end_with_parent() -> None:
    """Standard input is a pipe from the parent that nothing is written to. It ends when the parent does."""
    os.read(sys.stdin.fileno(), 1)  # not sys.stdin.read: at exit Python wants the lock that would hold
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
