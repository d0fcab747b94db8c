"""Reported metrics for people: a table with a small curve for each series, and the same as a picture. Pure."""

import math
from collections.abc import Sequence
from html import escape

from rich.table import Table
from rich.text import Text

from basilica.cli import show
from basilica.client.views import RankStatus, Series

CURVE_WIDTH = 24
WIDTH, HEIGHT, MARGIN = 720, 260, 56  # of one picture, in pixels
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=^"


def number(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Draw a series in a few characters; a value that is not finite is an `x`."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low

    def block(value: float) -> str:
        if not math.isfinite(value):
            return "x"
        share = (value - low) / span if 0 < span < math.inf else 0.5
        return blocks[min(len(blocks) - 1, int(share * len(blocks)))]

    return "".join(block(value) for value in values)


def table(series: Sequence[Series], ranks: Sequence[RankStatus], *, ascii_only: bool = False) -> Table:
    """Return a table with one row for each series: its last value, its range and its sparkline."""
    several = any(s.worker for s in series)
    rates = {r.rank: r.report.step_seconds for r in ranks if r.report is not None}
    stalled = {r.rank for r in ranks if r.stalled is not None}
    worker = ("WORKER",) if several else ()
    grid = show.columns("RANK", *worker, "METRIC", "STEP", "STEPS/S", "LAST", "MIN", "MAX", "COURSE")
    for one in series:
        last = one.points[-1]
        cells = [
            Text(str(one.rank), show.rank_colour(one.rank)),
            *((Text(str(one.worker)),) if several else ()),
            Text(show.clean(one.metric)),
            Text("-" if last.step is None else str(last.step)),
            Text("stalled", show.WARNING) if one.rank in stalled else Text(show.rate(rates.get(one.rank))),
            Text(number(last.value), "" if math.isfinite(last.value) else show.BAD),
            Text(number(min(p.min for p in one.points))),
            Text(number(max(p.max for p in one.points))),
            Text(sparkline([p.value for p in one.points[-CURVE_WIDTH:]], ascii_only=ascii_only)),
        ]
        grid.add_row(*cells)
    return grid


def picture(series: Sequence[Series], title: str) -> str:
    """Return an SVG with a chart for each metric, and in it a line for each rank with the range around it."""
    metrics = sorted({s.metric for s in series})
    charts = [_chart([s for s in series if s.metric == name], name, n * HEIGHT + 30) for n, name in enumerate(metrics)]
    height = len(metrics) * HEIGHT + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n'
        f'<text x="{MARGIN}" y="20" font-size="14">{escape(show.clean(title))}</text>\n{"".join(charts)}</svg>\n'
    )


def _chart(series: Sequence[Series], name: str, top: int) -> str:
    steps = all(p.step is not None for s in series for p in s.points)
    start = min((p.at.timestamp() for s in series for p in s.points if p.at is not None), default=0.0)
    lines = [[(_across(p.step, p.at, start, steps=steps), p.value, p.min, p.max) for p in s.points] for s in series]
    across = [x for line in lines for x, *_ in line]
    up = [y for line in lines for _, *ys in line for y in ys if math.isfinite(y)] or [0.0]
    left, right, low, high = min(across), max(across), min(up), max(up)
    width, height = WIDTH - 2 * MARGIN, HEIGHT - 70

    def x(value: float) -> float:
        return MARGIN + width * (value - left) / ((right - left) or 1.0)

    def y(value: float) -> float:
        return top + 14 + height * (1 - (value - low) / ((high - low) or 1.0))

    parts = [
        f'<text x="{MARGIN}" y="{top + 6}">{escape(show.clean(name))}</text>\n',
        f'<rect x="{MARGIN}" y="{top + 14}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>\n',
        f'<text x="{MARGIN - 4}" y="{y(high) + 8:.1f}" text-anchor="end">{number(high)}</text>\n',
        f'<text x="{MARGIN - 4}" y="{y(low):.1f}" text-anchor="end">{number(low)}</text>\n',
        f'<text x="{MARGIN}" y="{top + height + 28}">{number(left)}</text>\n',
        f'<text x="{MARGIN + width}" y="{top + height + 28}" text-anchor="end">{number(right)} '
        f"{'steps' if steps else 'seconds'}</text>\n",
    ]
    for one, line in zip(series, lines, strict=True):
        colour = COLOURS[one.rank % len(COLOURS)]
        whole = [point for point in line if all(map(math.isfinite, point))]
        around = [f"{x(a):.1f},{y(top_):.1f}" for a, _, _, top_ in whole]
        around += [f"{x(a):.1f},{y(bottom):.1f}" for a, _, bottom, _ in reversed(whole)]
        middle = " ".join(f"{x(a):.1f},{y(value):.1f}" for a, value, _, _ in whole)
        label = f"rank {one.rank}" + (f" worker {one.worker}" if one.worker else "")
        parts.append(f'<polygon points="{" ".join(around)}" fill="{colour}" fill-opacity="0.15"/>\n')
        parts.append(f'<polyline points="{middle}" fill="none" stroke="{colour}"><title>{label}</title></polyline>\n')
    return "".join(parts)


def _across(step: int | None, at: object, start: float, *, steps: bool) -> float:
    if steps and step is not None:
        return float(step)
    moment = getattr(at, "timestamp", None)
    return 0.0 if moment is None else moment() - start
