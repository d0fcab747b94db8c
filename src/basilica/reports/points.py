"""The lines of a report file: points of a series, and their merging. Pure; shared by writer and readers.

The first line describes the process that writes the file, the others are points. A point is a JSON array:

    [n, at, mono, step, usual, {name: value or [mean, min, max, count]}, {name: last value}, n]

`n` is the count of the reports of the process, at both ends: a line with two different ones was read during a write.
`usual` is the median time between steps, known after a few. The last values are those that the point itself does not
contain.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

NAME_LENGTH_MAX = 100
STEP_MAX = 2**53
TIME_MAX = 1e11  # seconds
Spread = tuple[float, float, float, int]  # mean, minimum, maximum, count


class Point(NamedTuple):
    """One line of a report file: a report, or several that were merged."""

    n: int
    at: float
    mono: float
    step: int | None
    usual: float | None
    values: dict[str, Spread]
    last: dict[str, float]


def read_points(lines: Iterable[bytes]) -> Iterator[Point]:
    """Return the points of a report file, in order, without torn lines and without duplicates of a merge."""
    whole = [line for line in lines if line]
    try:
        rows = json.loads(b"[" + b",".join(whole) + b"]")  # much quicker than line by line
    except (ValueError, RecursionError):
        rows = [_row(line) for line in whole]
    return points_in(rows)


def points_in(rows: Iterable[Any]) -> Iterator[Point]:
    """Return the rows that are points, each newer than those before it."""
    newest = 0
    for row in rows:
        point = _point(row)
        if point is not None and point.n > newest:
            newest = point.n
            yield point


def parse(line: bytes) -> Point | None:
    """Return the point; None for a torn line."""
    return _point(_row(line))


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _point(row: Any) -> Point | None:
    """Return the point; None for rows that our writer cannot have written: the rank can write anything to its file."""
    try:
        n, at, mono, step, usual, values, last, again = row
        spreads = {_name(name): _spread(v) if type(v) is list else _single(float(v)) for name, v in values.items()}
        latest = {name: float(v) for name, v in values.items() if type(v) is not list}
        latest |= {_name(name): float(v) for name, v in last.items()}
        times = 0 <= at < TIME_MAX and 0 <= mono < TIME_MAX and (usual is None or 0 <= usual < TIME_MAX)
        whole = type(n) is int and n == again and (step is None or (type(step) is int and abs(step) < STEP_MAX))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None
    return Point(n, at, mono, step, usual, spreads, latest) if times and whole else None


def _name(name: str) -> str:
    if not name.isprintable() or len(name) > NAME_LENGTH_MAX:
        raise ValueError(name)
    return name


def _single(value: float) -> Spread:
    return value, value, value, 1


def _spread(given: list[Any]) -> Spread:
    mean, low, high, count = given
    if type(count) is not int or not 0 < count < STEP_MAX:
        raise ValueError(count)
    return float(mean), float(low), float(high), count


def encode(point: Point) -> bytes:
    values = ",".join(f"{json.dumps(name)}:{spread_text(spread)}" for name, spread in point.values.items())
    last = ",".join(f"{json.dumps(name)}:{number_text(value)}" for name, value in point.last.items())
    step, usual = json.dumps(point.step), json.dumps(point.usual)
    return f"[{point.n},{point.at:.3f},{point.mono:.3f},{step},{usual},{{{values}}},{{{last}}},{point.n}]".encode()


def merge_neighbours(points: list[Point], size: int) -> list[Point]:
    """Merge each `size` points into one."""
    return [merge(points[i : i + size]) for i in range(0, len(points), size)]


def merge(points: list[Point]) -> Point:
    """Merge points into one, which has the step and time of the last."""
    spreads: dict[str, list[Spread]] = {}
    for point in points:
        for name, spread in point.values.items():
            spreads.setdefault(name, []).append(spread)
    final = points[-1]
    values = {name: merge_spreads(found) for name, found in spreads.items()}
    return Point(final.n, final.at, 0.0, final.step, None, values, {})


def merge_spreads(spreads: list[Spread]) -> Spread:
    """Merge spreads. A NaN in any of them makes the mean NaN; minimum and maximum are those of the others."""
    count = sum(spread[3] for spread in spreads)
    mean = sum(spread[0] * spread[3] for spread in spreads) / count
    lows = [spread[1] for spread in spreads if not math.isnan(spread[1])]
    highs = [spread[2] for spread in spreads if not math.isnan(spread[2])]
    return mean, min(lows, default=mean), max(highs, default=mean), count


def number_text(value: float) -> str:
    if value - value == 0.0:
        return repr(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def spread_text(spread: Spread) -> str:
    mean, low, high, count = spread
    if count == 1:
        return number_text(mean)
    if low > high:  # only NaN
        low = high = mean
    return f"[{_short(mean)},{_short(low)},{_short(high)},{count}]"


def _short(value: float) -> str:
    return f"{value:.7g}" if value - value == 0.0 else number_text(value)
