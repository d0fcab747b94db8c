"""Series of reported numbers: thinned and packed for the keyspace, unpacked, and selected for a query. Pure.

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
PointsBySource = Mapping[Source, Sequence[Point]]
Sample = tuple[int | None, float, Spread]  # step, time, value


# ---- packing ---------------------------------------------------------------------------------------------------------

RUN_BYTES, RANK_BYTES = 4 << 20, 64 << 10  # in the keyspace of a run
RATIO_MAX = (
    64  # of the unpacked size to the packed: a constant series packs very well, and readers must have room to unpack it
)
POINTS, LEAST_POINTS = 256, 32
RANKS_WITH_ALL_POINTS = 128
PUBLISH_EVERY_S, WRITES_PER_S = 5.0, 20.0


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a rank in the keyspace: points of each number, bytes in all, and seconds between two writes."""

    points: int
    bytes: int
    every: float

    @classmethod
    def of(cls, world: int) -> "Share":
        """Return the share in a world of this size: less in a larger one, so that the keyspace stays small."""
        return cls(
            points=max(LEAST_POINTS, min(POINTS, POINTS * RANKS_WITH_ALL_POINTS // world)),
            bytes=min(RANK_BYTES, RUN_BYTES // world),
            every=max(PUBLISH_EVERY_S, world / WRITES_PER_S),
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed series. `left_out` is the number of series of which not even one point had room."""

    data: bytes
    left_out: int = 0


def pack(given: PointsBySource, *, points: int, room: int) -> Packed:
    """Pack at most `points` points of each source, and fewer if their bytes would exceed `room`."""
    most = max(1, min(points, max((len(each) for each in given.values()), default=1)))
    while True:
        size, data = _encoded({source: thinned(each, most) for source, each in given.items()})
        used = max(len(data), size // RATIO_MAX)
        if used <= room:
            return Packed(data)
        if most == 1:
            return _cut(given, room)
        most = max(1, min(most - 1, most * room // used))


def _cut(given: PointsBySource, room: int) -> Packed:
    """Pack one point each, of as many series as there is room for, the lowest ranks first."""
    single = {source: thinned(each, 1)[0] for source, each in given.items() if each}
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
    """Merge neighbours until there are at most `most` points."""
    size = -(-len(points) // most)
    return merge_neighbours(list(points), size) if size > 1 else list(points)


def _encoded(given: PointsBySource) -> tuple[int, bytes]:
    """Return the size of the lines of report files, by rank and worker, and the lines compressed."""
    rows = {
        f"{rank} {worker}": b",".join(encode(_short(point, n)) for n, point in enumerate(points, 1))
        for (rank, worker), points in sorted(given.items())
    }
    text = b"{" + b",".join(b'"%s":[%s]' % (key.encode(), each) for key, each in rows.items()) + b"}"
    return len(text), zlib.compress(text)


def _short(point: Point, n: int) -> Point:
    """Return the point as a curve needs it: seven digits, and no other fields than its values."""
    values = {
        name: (float(f"{spread[0]:.7g}"),) * 3 + (1,) if spread[3] == 1 else spread
        for name, spread in point.values.items()
    }
    return Point(n, point.at, 0.0, point.step, None, values, {})


def unpack(data: bytes, *, room: int) -> dict[Source, list[Point]]:
    """Unpack series that were packed for that room; anything else gives none: ranks can write any bytes."""
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


# ---- queries ---------------------------------------------------------------------------------------------------------


def series_of(given: Iterable[tuple[Source, Iterable[Point]]], query: SeriesQuery) -> list[Series]:
    """Return the series by rank, worker and name. A source may come several times, once for each of its processes."""
    found: dict[tuple[int, int, str], list[Sample]] = {}
    for (rank, worker), points in given:
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
    """Merge neighbours, with their mean, minimum and maximum, until there are at most `most` points."""
    size = max(1, -(-len(samples) // most))
    groups = (samples[i : i + size] for i in range(0, len(samples), size))
    return tuple(_merged(group) for group in groups)


def _merged(group: list[Sample]) -> SeriesPoint:
    step, at, spread = group[-1]
    if len(group) > 1:
        spread = merge_spreads([sample[2] for sample in group])
    return SeriesPoint(step, round(at, 3), *spread)
