"""The sweep of a bench as a picture: two curves over the size, bus bandwidth above and time below.

SVG is written here without any package; every other format needs matplotlib.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from basilica.cli.show_bench import gbps, size_text, time_text
from basilica.client.views import BenchResult
from basilica.core.errors import BasilicaError
from basilica.version import pip_install

WIDTH, HEIGHT = 720, 560
LEFT, RIGHT, TOP, BETWEEN = 90, 30, 84, 66
PANEL = 170
HEADING_MAX = 70
INK, FAINT, CURVES = "#1f2933", "#d9dee4", ("#0f6fc5", "#c2410c")
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve: a value for each size. `ticks` are the marks of its axis, from its bottom to its top."""

    title: str
    values: tuple[float, ...]
    ticks: tuple[float, ...]
    written: Callable[[float], str]
    logarithmic: bool

    def share(self, value: float) -> float:
        """Return the height of this value in the panel, from 0 to 1."""
        scale = math.log if self.logarithmic else float
        low, high = scale(self.ticks[0]), scale(self.ticks[-1])
        return (scale(max(value, self.ticks[0])) - low) / (high - low)


def panels(found: BenchResult) -> tuple[Panel, Panel]:
    bus = tuple(point.busbw_gbps for point in found.sweep)
    took = tuple(point.latency_us for point in found.sweep)
    return (
        Panel("bus bandwidth", bus, _even_ticks(max(bus)), gbps, logarithmic=False),
        Panel("time of one all-reduce", took, _decades(min(took), max(took)), time_text, logarithmic=True),
    )


def _even_ticks(highest: float) -> tuple[float, ...]:
    """Return ticks from 0 in round steps to just above the highest value."""
    highest = max(highest, 1e-9)
    digit = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(digit * m for m in (1, 2, 2.5, 5, 10) if digit * m * 5 >= highest)
    return tuple(step * n for n in range(math.ceil(highest / step) + 1))


def _decades(low: float, high: float) -> tuple[float, ...]:
    first = math.floor(math.log10(max(low, 1e-3)))
    last = max(first + 1, math.ceil(math.log10(max(high, 1e-3))))
    return tuple(10.0**n for n in range(first, last + 1))


def draw(name: str, found: BenchResult, path: Path) -> None:
    """Write the picture; `OSError` or `ValueError` if the file cannot be written, or not in that format."""
    if path.suffix.lower() == ".svg":
        path.write_text(svg(name, found), encoding="utf-8")
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BasilicaError(
            f"only SVG can be drawn without matplotlib: use --plot {path.with_suffix('.svg')}, or {pip_install('plot')}"
        ) from None
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150, layout="constrained")
    sizes = range(len(found.sweep))
    for axes, panel, colour in zip(figure.subplots(2, 1, sharex=True), panels(found), CURVES, strict=True):
        axes.plot(sizes, panel.values, color=colour, marker="o", markersize=4)
        axes.set_yscale("log" if panel.logarithmic else "linear")
        axes.set_yticks(panel.ticks, [panel.written(tick) for tick in panel.ticks], minor=False)
        axes.set_yticks([], minor=True)
        axes.set_ylim(panel.ticks[0], panel.ticks[-1])
        axes.set_xticks(sizes, [size_text(point.size_bytes) for point in found.sweep])
        axes.set_title(panel.title, loc="left", fontsize=9)
        axes.grid(color=FAINT)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{heading(name, found)}\n{caption(found)}", fontsize=9, parse_math=False)
    figure.savefig(path)


def heading(name: str, found: BenchResult) -> str:
    title = f"{name}: {found.probe_node_a} to {found.probe_node_b}, {found.method or 'unknown method'}"
    printable = "".join(c if c.isprintable() else "?" for c in title)
    return printable if len(printable) <= HEADING_MAX else printable[: HEADING_MAX - 1] + "…"


def caption(found: BenchResult) -> str:
    spread = (("p10", found.busbw_gbps_p10), ("p50", found.busbw_gbps_p50), ("p90", found.busbw_gbps_p90))
    spreads = ", ".join(f"{name} {gbps(value)}" for name, value in spread if value is not None)
    return f"at {size_text(found.sweep[-1].size_bytes)}: {spreads}"


def svg(name: str, found: BenchResult) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{FONT}" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 28, heading(name, found), size=15, weight="600"),
        _text(LEFT, 48, caption(found)),
    ]
    sizes = [size_text(point.size_bytes) for point in found.sweep]
    for number, (panel, colour) in enumerate(zip(panels(found), CURVES, strict=True)):
        parts += _panel(panel, sizes, TOP + number * (PANEL + BETWEEN), colour)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, sizes: Sequence[str], top: float, colour: str) -> list[str]:
    width, bottom = WIDTH - LEFT - RIGHT, top + PANEL
    parts = [_text(LEFT, top - 8, panel.title, weight="600")]
    for tick in panel.ticks:
        y = bottom - PANEL * panel.share(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + width}" stroke="{FAINT}"/>')
        parts.append(_text(LEFT - 8, y + 4, panel.written(tick), anchor="end"))
    across = [LEFT + width * (n + 0.5) / len(sizes) for n in range(len(sizes))]
    dots = [(x, bottom - PANEL * panel.share(value)) for x, value in zip(across, panel.values, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for (x, y), size, value in zip(dots, sizes, panel.values, strict=True):
        tooltip = f"<title>{size}: {panel.written(value)}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{tooltip}</circle>')
        parts.append(_text(x, bottom + 18, size, anchor="middle"))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "400") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
