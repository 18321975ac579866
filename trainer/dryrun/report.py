"""The dry run's report for people: what JSON has, as tables that fit 120 columns."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

ROWS = 12  # of the largest buffers and collectives; the JSON report has more
CHANGES = 8

Result = dict[str, Any]
Format = Callable[[Any], str]


def render(results: Sequence[Result]) -> Group:
    """One dry run, or two side by side."""
    parts: list[RenderableType] = []
    for result in results:
        parts += [_heading(result), *_facts(result), Text()]
    parts += [_memory(results), Text()]
    for result in results:
        name = f" with {result['overrides']}" if len(results) > 1 and result["overrides"] else ""
        parts += _details(result, name)
    return Group(*parts)


def _heading(result: Result) -> Text:
    devices = result["devices"]
    text = Text(result["topology"], style="bold")
    if result["overrides"]:
        text.append(f" with {result['overrides']}")
    hosts = f"{devices['hosts']} host{'' if devices['hosts'] == 1 else 's'}"
    text.append(f": {devices['number']} x {devices['kind']}, {hosts}  ")
    if result["fits"]:
        return text.append("fits", style="bold green")
    return text.append("does not fit", style="bold red")


def _facts(result: Result) -> list[Text]:
    flags = {name: value for name, value in result["flags"].items() if value}
    versions = {name: version for name, version in result["versions"].items() if name != "libtpu_build"}
    lines = [
        f"mesh      {' x '.join(f'{axis} {size}' for axis, size in result['mesh'].items())}",
        f"placement {result['placement']['text']}",
        f"batch     {result['batch']['text']}",
        f"flags     {' '.join(f'{name}={value}' for name, value in flags.items()) or 'none'}",
        f"versions  {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"cache     {_cache(result)}",
        f"time      traced in {result['trace_s']:.1f} s, compiled in {result['compile_s']:.1f} s, "
        f"with {size(result['compiler_rss_bytes'])} of this machine's memory",
    ]
    return [Text(line) for line in lines]


def _cache(result: Result) -> str:
    """Whether a run can take the compiled step from JAX's persistent cache. What a TPU's own key holds was read from
    JAX's source, and not tried on one."""
    cache = result["compilation_cache"]
    if cache is None or not cache["folder"]:
        return "off; JAX_COMPILATION_CACHE_DIR would keep the compiled step for the run"
    if not cache["new_entries"]:
        return f"in {cache['folder']} already, or too quick to compile to be kept there"
    return f"kept in {cache['folder']}; that a pod run on TPUs looks for it under the same key is unverified"


def _memory(results: Sequence[Result]) -> Table:
    table = _table("Memory per device", *(result["overrides"] or "this config" for result in results))
    if len(results) == 1:
        table.columns[1].header = "size"
    for name, value in (
        ("weights", lambda r: r["arguments"]["weights"]),
        ("adapters", lambda r: r["arguments"]["adapters"]),
        ("optimizer state", lambda r: r["arguments"]["optimizer"]),
        ("inputs", lambda r: r["arguments"]["inputs"]),
        ("padding of these to whole tiles", _padding),
        ("temporaries, as the compiler packs them", lambda r: r["temporary_bytes"]),
        ("outputs that take no argument's place", _new_outputs),
        ("program", lambda r: r["code_bytes"]),
        ("peak: all of these", lambda r: r["peak_bytes"]),
        ("the compiler's limit", lambda r: r["limit_bytes"]),
        ("left", _left),
    ):
        _compared(table, name, [value(result) for result in results], size)
    table.rows[8].style = "bold"
    for name, value, written in (
        ("FLOP per step", lambda r: r["flops_per_device"], flops),
        ("compile time", lambda r: r["compile_s"], seconds),
    ):
        if len(results) > 1:
            _compared(table, name, [value(result) for result in results], written)
    return table


def _compared(table: Table, name: str, values: Sequence[Any], written: Format) -> None:
    cells = [written(value) for value in values]
    if len(values) == 2:
        known = None not in values
        difference = values[1] - values[0] if known else None
        cells.append("n/a" if difference is None else f"{'+' if difference > 0 else ''}{written(difference)}")
    table.add_row(name, *cells)


def _padding(result: Result) -> int | None:
    return result["argument_bytes"] - sum(result["arguments"].values()) if result["fits"] else None


def _new_outputs(result: Result) -> int | None:
    return result["output_bytes"] - result["donated_bytes"] if result["fits"] else None


def _left(result: Result) -> int | None:
    return None if result["limit_bytes"] is None else result["limit_bytes"] - result["peak_bytes"]


def _details(result: Result, name: str) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if result["largest_buffers"]:
        parts += [_buffers(result["largest_buffers"], name), Text()]
    if result["flops_per_device"]:
        parts += [_work(result, name), Text()]
    if result["collectives"]:
        parts += [_collectives(result["collectives"], name), Text()]
    if result["changes"]:
        parts += [_changes(result["changes"], name), Text()]
    if not result["fits"]:
        parts += [Text(f"The compiler{name}: {result['message'].strip()}"), Text()]
    return parts


def _buffers(buffers: Sequence[Result], name: str) -> Table:
    table = _table(f"Largest buffers{name}", "size", "shape", "source")
    table.columns[1].justify = "right"
    for number, buffer in enumerate(buffers[:ROWS], start=1):
        table.add_row(str(number), size(buffer["bytes"]), buffer["shape"], buffer["source"])
    return table


def _work(result: Result, name: str) -> Table:
    """FLOP by scope against what the model needs, and the least time they take."""
    total, model = result["flops_per_device"], result["model_flops_per_device"]
    table = _table(f"Work per device and step{name}", "FLOP", "share")
    for scope, number in result["flops_by_scope"].items():
        table.add_row(scope, flops(number), f"{number / total:.0%}")
    table.add_row("all of it", flops(total), "100%", style="bold")
    table.add_row("  of which recomputed in the backward", flops(result["recompute_flops_per_device"]),
                  f"{result['recompute_flops_per_device'] / total:.0%}")  # fmt: skip
    table.add_row("what the model needs, without recompute", flops(model), f"{model / total:.0%}")
    roof = result["roofline"]
    if roof is not None:
        for part, moved, rate in (("compute", "flops", "flops_per_s"), ("hbm", "hbm_bytes", "hbm_bytes_per_s"),
                                  ("ici", "ici_bytes", "ici_bytes_per_s")):  # fmt: skip
            amount = total if moved == "flops" else roof[moved]
            table.add_row(f"least time, {part}", f"{roof[f'{part}_s']:.3f} s", f"{amount:.3g} at {roof[rate]:.3g}/s")
    return table


def _collectives(collectives: Sequence[Result], name: str) -> Table:
    table = _table(f"Collectives per step{name}", "over", "count", "bytes per device")
    for one in collectives[:ROWS]:
        table.add_row(one["kind"], one["axes"], f"{one['count']:,}", size(one["bytes"]))
    return table


def _changes(changes: Sequence[Result], name: str) -> Table:
    table = _table(f"What would save memory{name}", "about", "enough", "by")
    for change in changes[:CHANGES]:
        enough = "yes" if change["enough"] else "no"
        table.add_row(change["change"], size(change["saves_bytes"]), enough, change["why"])
    return table


def _table(*headings: str) -> Table:
    table = Table(*headings, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "left"
    return table


def size(num_bytes: int | None) -> str:
    """In the unit that leaves two or three digits before the point."""
    if num_bytes is None:
        return "n/a"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


def flops(number: float | None) -> str:
    return "n/a" if number is None else f"{number:.3e}"


def seconds(number: float) -> str:
    return f"{number:.1f} s"
