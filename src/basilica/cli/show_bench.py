"""The rendering of a bench's result for a terminal: a view in, Rich renderables out. Pure."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from basilica.cli.show import DIM, HEAD, WARNING, clean, timestamp
from basilica.client.views import BenchResult, BenchStatus

METHODS = {
    "nccl": "nccl",
    "gloo": "gloo, on the CPU",
    "tcp": "plain TCP, without torch: the traffic of an all-reduce, with nothing added up",
}


def bench(status: BenchStatus | None) -> RenderableType:
    if status is None:
        return Text("the bench is off: 'basilica train up --bench' turns it on")
    line = Text.assemble("bench ", (clean(status.phase), "green" if status.phase == "Succeeded" else WARNING))
    if status.message:
        line.append(f": {clean(status.message)}")
    found = status.result
    if found is None:
        return line
    parts: list[RenderableType] = [line, Text(verdict(found), HEAD)]
    if found.sweep:
        parts += [Text(""), sweep(found), Text("")]
    parts.append(facts(found))
    if not status.on_worker_nodes:
        parts.append(Text("not measured on the nodes of the ranks: their link may be another", WARNING))
    return Group(*parts)


def verdict(found: BenchResult) -> str:
    """Return the meaning of the result for a training, in a sentence."""
    if found.busbw_gbps_p50 is None:
        return "The bandwidth could not be measured."
    size = f" of {size_text(found.size_bytes_swept[-1])}" if found.size_bytes_swept else ""
    sentence = f"An all-reduce{size} between two ranks moves {gbps(found.busbw_gbps_p50)}"
    if found.busbw_gbps_p50 > 0:
        sentence += f": 1 GB of gradients takes {time_text(1e6 / found.busbw_gbps_p50)}"
    if found.sweep:
        sentence += f", and the shortest message {time_text(found.sweep[0].latency_us)}"
    return sentence + "."


def sweep(found: BenchResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style=HEAD)
    for column in ("SIZE", "BUS BANDWIDTH", "TIME", "REPEATS"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in found.sweep:
        row = (size_text(point.size_bytes), gbps(point.busbw_gbps), time_text(point.latency_us), str(point.repeats))
        table.add_row(*row)
    return table


def facts(found: BenchResult) -> Table:
    spread = [found.busbw_gbps_p10, found.busbw_gbps_p50, found.busbw_gbps_p90]
    rows = [
        ("bus bandwidth", ", ".join(f"{n} {_or_none(v)}" for n, v in zip(("p10", "p50", "p90"), spread, strict=True))),
        ("algorithm bandwidth", f"p50 {_or_none(found.algbw_gbps_p50)}"),
        ("time at 1 MiB", _or_none(found.latency_us_at_1mib, unit="us")),
        ("between", f"{clean(found.probe_node_a)} and {clean(found.probe_node_b)}"),
        ("with", METHODS.get(found.method or "", clean(found.method or "unknown"))),
        ("measured", timestamp(found.measured_at)),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, DIM), Text(value))
    return table


def _or_none(value: float | None, *, unit: str = "GB/s") -> str:
    if value is None:
        return "not measured"
    return gbps(value) if unit == "GB/s" else time_text(value)


def gbps(value: float) -> str:
    """Format a bandwidth: `12.3 GB/s`, and `410 MB/s` below 1 GB/s."""
    for unit, factor in (("GB/s", 1.0), ("MB/s", 1e3)):
        if value * factor >= 1:
            return f"{_short(value * factor)} {unit}"
    return f"{_short(value * 1e6)} kB/s" if value > 0 else "0"


def time_text(us: float) -> str:
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if us >= factor:
            return f"{_short(us / factor)} {unit}"
    return f"{_short(us)} us"


def size_text(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _short(value: float) -> str:
    """Format a number with three digits, never with an exponent."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
