"""What processes reported over time, on its way to those who ask: made small enough to travel, and read again. Pure.

Points that do not fit are merged with their neighbours, so that the whole time stays visible, with every spike and NaN.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from basilica.core.reports import Series, SeriesPoint, SeriesQuery
from basilica.reports.points import Point, Spread, encode, merge_neighbours, merge_spreads, points_in

POINTS_IN_ALL = 200_000  # of one answer, however many series it has

Source = tuple[int, int]  # rank and worker
Told = Mapping[Source, Sequence[Point]]
Sample = tuple[int | None, float, Spread]  # step, time, value


# ---- travelling ------------------------------------------------------------------------------------------------------

RUN_BYTES, RANK_BYTES = 4 << 20, 64 << 10  # in the keyspace of a run
RATIO_MAX = 64  # of what is packed to its packing: others unpack it, and what is always the same packs very well
POINTS, LEAST_POINTS = 256, 32
RANKS_WITH_ALL_POINTS = 128
TELL_EVERY_S, WRITES_PER_S = 5.0, 20.0


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank may tell: so many points of each number, in so many bytes, every so many seconds."""

    points: int
    bytes: int
    every: float

    @classmethod
    def of(cls, world: int) -> "Share":
        """In a larger world a rank has less, so that the keyspace of the run stays small."""
        return cls(
            points=max(LEAST_POINTS, min(POINTS, POINTS * RANKS_WITH_ALL_POINTS // world)),
            bytes=min(RANK_BYTES, RUN_BYTES // world),
            every=max(TELL_EVERY_S, world / WRITES_PER_S),
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """`left_out`: of how many series not even one point had room."""

    data: bytes
    left_out: int = 0


def pack(told: Told, *, points: int, room: int) -> Packed:
    """At most so many points of each source, and fewer if they would have more bytes than there is room for."""
    most = max(1, min(points, max((len(each) for each in told.values()), default=1)))
    while True:
        size, data = _encoded({source: thinned(each, most) for source, each in told.items()})
        used = max(len(data), size // RATIO_MAX)
        if used <= room:
            return Packed(data)
        if most == 1:
            return _cut(told, room)
        most = max(1, min(most - 1, most * room // used))


def _cut(told: Told, room: int) -> Packed:
    """One point each, of as many series as there is room for, the lowest ranks first."""
    single = {source: thinned(each, 1)[0] for source, each in told.items() if each}
    names = [(source, name) for source, point in sorted(single.items()) for name in sorted(point.values)]
    kept = len(names)
    while kept:
        kept //= 2
        chosen: dict[Source, list[Point]] = {}
        for source, name in names[:kept]:
            before = chosen.setdefault(source, [single[source]._replace(values={})])[0]
            chosen[source] = [before._replace(values=before.values | {name: single[source].values[name]})]
        size, data = _encoded(chosen)
        if max(len(data), size // RATIO_MAX) <= room:
            return Packed(data, len(names) - kept)
    return Packed(b"", len(names))


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many: neighbours become one."""
    size = -(-len(points) // most)
    return merge_neighbours(list(points), size) if size > 1 else list(points)


def _encoded(told: Told) -> tuple[int, bytes]:
    """The lines of report files, by rank and worker: how many bytes, and those bytes compressed."""
    rows = {
        f"{rank} {worker}": b",".join(encode(_short(point, n)) for n, point in enumerate(points, 1))
        for (rank, worker), points in sorted(told.items())
    }
    text = b"{" + b",".join(b'"%s":[%s]' % (key.encode(), each) for key, each in rows.items()) + b"}"
    return len(text), zlib.compress(text)


def _short(point: Point, n: int) -> Point:
    """What a curve needs of a point: seven digits, and nothing but its values."""
    values = {
        name: (float(f"{spread[0]:.7g}"),) * 3 + (1,) if spread[3] == 1 else spread
        for name, spread in point.values.items()
    }
    return Point(n, point.at, 0.0, point.step, None, values, {})


def unpack(data: bytes, *, room: int) -> dict[Source, list[Point]]:
    """What was packed for that room; nothing of what was not: ranks may write what they like."""
    if len(data) > room:
        return {}
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, RATIO_MAX * (room + 1))
        rows = json.loads(text) if unpacker.eof else {}
        return {_source(key): list(points_in(each)) for key, each in rows.items() if isinstance(each, list)}
    except (zlib.error, ValueError, RecursionError, AttributeError):
        return {}


def _source(key: str) -> Source:
    rank, worker = key.split(" ")
    return int(rank), int(worker)


# ---- being asked for -------------------------------------------------------------------------------------------------


def series_of(told: Iterable[tuple[Source, Iterable[Point]]], query: SeriesQuery) -> list[Series]:
    """By rank, worker and name. A source may come several times, once for each of its processes."""
    found: dict[tuple[int, int, str], list[Sample]] = {}
    for (rank, worker), points in told:
        if query.ranks is None or rank in query.ranks:
            for name, samples in _samples(points, query).items():
                found.setdefault((rank, worker, name), []).extend(samples)
    points_each = max(2, min(query.points, POINTS_IN_ALL // max(1, len(found))))
    return [
        Series(rank=rank, worker=worker, metric=name, points=_thin(sorted(samples, key=_moment), points_each))
        for (rank, worker, name), samples in sorted(found.items())
    ]


def _samples(points: Iterable[Point], query: SeriesQuery) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for point in points:
        if point.at >= query.since:
            for name, spread in point.values.items():
                if query.metrics is None or name in query.metrics:
                    found.setdefault(name, []).append((point.step, point.at, spread))
    return found


def _moment(sample: Sample) -> float:
    return sample[1]


def _thin(samples: list[Sample], most: int) -> tuple[SeriesPoint, ...]:
    """At most so many: neighbours become one, with their mean, minimum and maximum."""
    size = max(1, -(-len(samples) // most))
    groups = (samples[i : i + size] for i in range(0, len(samples), size))
    return tuple(_merged(group) for group in groups)


def _merged(group: list[Sample]) -> SeriesPoint:
    step, at, spread = group[-1]
    if len(group) > 1:
        spread = merge_spreads([sample[2] for sample in group])
    return SeriesPoint(step, round(at, 3), *spread)
