"""What a traced step computes on one device, and the least time that takes.

FLOP are counted in the jaxpr, where loops still have their lengths and every op its named scope: the compiler's own
count takes a loop's body once. Data-dependent loops (further rounds of the exchange) count no turn.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.dryrun.collectives import executions
from trainer.dryrun.hlo import HBM, Program, leaves, scope_of
from trainer.topology import Chip

SCOPES = ("indexer", "attention", "hyper_connections", "route", "experts", "shared_expert", "moe", "loss", "optimizer")
NOTHING_MOVES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "after-all",
                 "copy-done", "slice-done", "call-done", "optimization-barrier", "partition-id"}  # fmt: skip


@dataclass(frozen=True)
class Flops:
    """FLOP per device and step, in all and by named scope."""

    total: float
    by_scope: dict[str, float]
    recompute: float  # of the total: done again in the backward


def flops_of(jaxpr: Any) -> Flops:
    """`jaxpr`: of the traced step (`jax.stages.Traced.jaxpr.jaxpr`); its `shard_map` holds one device's shapes."""
    by_scope: dict[str, float] = defaultdict(float)
    recompute = 0.0
    for name_stack, flops in _products(jaxpr, 1, ""):
        text = scope_of(name_stack.replace("(", "/").replace(")", "/"))
        words = text.split()
        by_scope[next((scope for scope in SCOPES if scope in words), "other")] += flops
        recompute += flops if "rematted_computation" in name_stack else 0
    largest_first = dict(sorted(by_scope.items(), key=lambda item: -item[1]))
    return Flops(sum(by_scope.values()), largest_first, recompute)


def _products(jaxpr: Any, times: int, above: str) -> Iterator[tuple[str, float]]:
    """(name stack, FLOP) of every matrix product."""
    for eqn in jaxpr.eqns:
        stack = f"{above}/{eqn.source_info.name_stack}"
        name = eqn.primitive.name
        if name == "dot_general":
            (contracting, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracting)
            yield stack, 2.0 * times * math.prod(eqn.outvars[0].aval.shape) * depth
        elif name.startswith("ragged_dot"):
            rows, weights = (v.aval.shape for v in eqn.invars[:2])
            yield stack, 2.0 * times * _ragged(rows, weights, eqn.outvars[0].aval.shape)
        elif name in ("splash_forward", "splash_backward"):
            batch, heads, queries, width = eqn.invars[0].aval.shape
            products = 2 if name == "splash_forward" else 7
            yield stack, 2.0 * products * times * batch * heads * queries * eqn.invars[1].aval.shape[1] * width
        elif name == "while":
            continue
        else:
            inner_times = times * eqn.params["length"] if name == "scan" else times
            for inner in _inner(eqn):
                yield from _products(inner, inner_times, stack)


def _ragged(rows: tuple[int, ...], weights: tuple[int, ...], out: tuple[int, ...]) -> float:
    """Every row meets one group's matrix: [R, K] x [E, K, N] -> [R, N]; or the weights' gradient, [R, K] x [R, N]."""
    if len(weights) == 3:
        return float(math.prod(rows) * (weights[2] if rows[-1] == weights[1] else weights[1]))
    return float(rows[0] * out[-1] * out[-2])


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs in an equation; of one with a derivative of its own, what it computes."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                found.append(item)
            elif hasattr(item, "jaxpr") and hasattr(item.jaxpr, "eqns"):
                found.append(item.jaxpr)
    return found[:1] if eqn.primitive.name.startswith("custom_") else found


def hbm_bytes(program: Program) -> float:
    """An estimate of what a step moves to and from main memory: every result there is written once and read once, and
    of a result written in place only the part that is new. Loops of unknown length turn once."""
    sizes: dict[str, int] = {}
    total = 0.0
    for line, times in executions(program):
        size = sum(array.num_bytes for array in leaves(line.shape) if array.space == HBM)
        sizes[line.name] = size
        if line.opcode in NOTHING_MOVES:
            continue
        if "dynamic-update-slice" in line.name:
            parts = [sizes[name] for name in line.operands if name in sizes and sizes[name] < size]
            size = max(parts, default=0)
        total += 2.0 * times * size
    return total


@dataclass(frozen=True)
class Roofline:
    """Seconds that each part of a device needs at the least, and the rates they were taken from."""

    compute_s: float
    hbm_s: float
    ici_s: float
    bound: str
    flops_per_s: float
    hbm_bytes_per_s: float
    ici_bytes_per_s: float  # along one dim of the torus, both directions
    hbm_bytes: float
    ici_bytes: float


def roofline(flops: float, moved: float, sent: float, chip: Chip) -> Roofline:
    """Of one device. Parts overlap at best, and add up at worst."""
    compute, hbm = chip.bf16_flops_per_s / chip.devices, chip.hbm_bytes_per_s / chip.devices
    ici = 2 * chip.link_bytes_per_s
    seconds = {"compute": flops / compute, "HBM": moved / hbm, "ICI": sent / ici}
    return Roofline(
        compute_s=seconds["compute"],
        hbm_s=seconds["HBM"],
        ici_s=seconds["ICI"],
        bound=max(seconds, key=lambda part: seconds[part]),
        flops_per_s=compute,
        hbm_bytes_per_s=hbm,
        ici_bytes_per_s=ici,
        hbm_bytes=moved,
        ici_bytes=sent,
    )
