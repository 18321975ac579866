"""A compiled step, or the compiler's refusal of one, as the report has it."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from jax.sharding import Mesh

from trainer.config import Config
from trainer.dryrun.buffers import largest, peak_of
from trainer.dryrun.collectives import collectives
from trainer.dryrun.cost import flops_of, hbm_bytes, roofline
from trainer.dryrun.hlo import parse
from trainer.flops import forward_flops
from trainer.parallel import BatchShape
from trainer.topology import CPU, find_slice

BUFFERS = 40  # largest buffers in the report

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
# How libtpu words it: of arguments and results together, or of the temporaries alone.
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_ALLOCATION = re.compile(rf"Size: {_SIZE}\s+(?:Operator: (?P<operator>[^\n]*)\s+)?Shape: (?P<shape>\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Overflow:
    """What the compiler says of a program that does not fit."""

    needed_bytes: int
    limit_bytes: int
    temporary_bytes: int | None  # where it says so
    largest_buffers: list[dict[str, Any]]
    message: str


def read_overflow(text: str) -> Overflow | None:
    """The compiler's refusal as numbers; None where the text is another error."""
    used, temporaries = _USED.search(text), _TEMPORARIES.search(text)
    found = used or temporaries
    if "RESOURCE_EXHAUSTED" not in text or found is None:
        return None
    needed, limit = _bytes(found[1], found[2]), _bytes(found[3], found[4])
    buffers = [
        {"shape": one["shape"], "bytes": _bytes(one[1], one[2]), "source": (one["operator"] or "").strip(), "count": 1}
        for one in _ALLOCATION.finditer(text)
    ]
    return Overflow(needed, limit, needed if used is None else None, buffers, text.split("\n\n")[0])


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def analyse(text: str, jaxpr: Any, mesh: Mesh, config: Config, shape: BatchShape) -> dict[str, Any]:
    """`text`: the compiled program's. `jaxpr`: of the traced step."""
    program = parse(text)
    peak = peak_of(program)
    moved = collectives(program, dict(mesh.shape))
    flops = flops_of(jaxpr)
    model = forward_flops(config.model, shape.length).of_training(config.lora_rank > 0)
    result: dict[str, Any] = {
        "alive_at_peak_bytes": peak.num_bytes,
        "largest_buffers": [
            {"shape": b.shape, "bytes": b.num_bytes, "source": b.source, "count": b.count}
            for b in largest(peak)[:BUFFERS]
        ],
        "collectives": [{"kind": c.kind, "axes": c.axes, "count": c.count, "bytes": c.num_bytes} for c in moved],
        "flops_per_device": flops.total,
        "flops_by_scope": flops.by_scope,
        "recompute_flops_per_device": flops.recompute,
        "model_flops_per_device": model * shape.global_batch / mesh.size,
        "roofline": None,
    }
    if config.compile_topology != CPU:
        chip = find_slice(config.compile_topology).chip
        sent = sum(c.num_bytes for c in moved)
        result["roofline"] = asdict(roofline(flops.total, hbm_bytes(program), sent, chip))
    return result
