"""Series on their way: thinned evenly, never larger than their room, and nothing but what was packed comes out."""

import base64
import json
import math
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basilica.core.reports import SeriesQuery
from basilica.reports.points import Point
from basilica.reports.relay import parse_published, series_text
from basilica.reports.series import (
    POINTS,
    RANK_BYTES,
    RATIO_MAX,
    RUN_BYTES,
    Packed,
    Share,
    Source,
    pack,
    series_of,
    thinned,
    unpack,
)
from tests.support.exploring import examples


def points(count: int, *names: str, seed: int = 0) -> list[Point]:
    noise = random.Random(seed)

    def value() -> tuple[float, float, float, int]:
        v = noise.random()
        return v, v, v, 1

    return [Point(n, 1.7e9 + n / 3, 0.0, n, None, {name: value() for name in names}, {}) for n in range(1, count + 1)]


def test_what_fits_comes_out_as_it_went_in() -> None:
    told = {(3, 0): points(100, "loss"), (3, 1): points(5, "loss", "lr")}
    found = unpack(pack(told, points=256, room=100_000).data, room=100_000)
    assert found.keys() == told.keys()
    for source, each in told.items():
        assert [(p.step, round(p.at, 3)) for p in found[source]] == [(p.step, round(p.at, 3)) for p in each]
        for before, after in zip(each, found[source], strict=True):
            assert after.values == {name: pytest.approx(spread, rel=1e-6) for name, spread in before.values.items()}


def test_too_many_points_are_merged_evenly_and_no_spike_is_lost() -> None:
    told = points(10_000, "loss")
    told[7_000] = told[7_000]._replace(values={"loss": (99.0, 99.0, 99.0, 1)})
    told[9_000] = told[9_000]._replace(values={"loss": (math.nan, math.nan, math.nan, 1)})
    found = unpack(pack({(0, 0): told}, points=256, room=RANK_BYTES).data, room=RANK_BYTES)[0, 0]
    assert len(found) == 250
    assert {p.values["loss"][3] for p in found} == {40}
    assert found[-1].step == 10_000
    assert max(p.values["loss"][2] for p in found) == 99.0
    assert sum(math.isnan(p.values["loss"][0]) for p in found) == 1


@pytest.mark.parametrize("world", [1, 8, 128, 129, 512, 4096])
def test_the_series_of_a_run_stay_small_however_many_ranks_it_has(world: int) -> None:
    """Eight workers that report four numbers each, of which no two are alike."""
    share = Share.of(world)
    room = share.bytes * 3 // 4
    told = {(7, worker): points(1000, "loss", "lr", "tokens", "norm", seed=worker) for worker in range(8)}
    packed = pack(told, points=share.points, room=room)
    text = series_text(packed)
    assert len(text) <= share.bytes <= RANK_BYTES
    assert share.bytes * world <= RUN_BYTES
    assert share.bytes / share.every * world <= 1 << 20  # what the keyspace writes down in a second
    found = parse_published(text)
    assert {source for source, each in found.items() if each} <= told.keys()
    assert packed.left_out == 0 or world == 4096
    for source, each in found.items():
        assert len(each) <= share.points
        assert each[-1].step == told[source][-1].step


def test_one_number_of_a_rank_has_all_its_points_in_worlds_of_usual_size() -> None:
    for world, expected in ((1, POINTS), (128, POINTS), (512, 64)):
        share = Share.of(world)
        found = unpack(
            pack({(0, 0): points(1 << 12, "loss")}, points=share.points, room=share.bytes * 3 // 4).data,
            room=RANK_BYTES,
        )
        assert len(found[0, 0]) == expected, world


def test_what_has_no_room_even_as_a_point_is_counted() -> None:
    told = {(0, worker): points(3, *(f"name-{n}-{worker}" for n in range(64)), seed=worker) for worker in range(64)}
    packed = pack(told, points=256, room=2000)
    assert len(packed.data) <= 2000
    kept = unpack(packed.data, room=2000)
    assert sum(len(p.values) for each in kept.values() for p in each) + packed.left_out == 64 * 64
    assert min(kept) == (0, 0)
    assert pack(told, points=256, room=1) == Packed(b"", 64 * 64)
    assert unpack(b"", room=1) == {}
    assert unpack(pack({(0, 0): []}, points=256, room=100).data, room=100) == {(0, 0): []}


def test_what_is_always_the_same_packs_well_and_is_bounded_all_the_same() -> None:
    same = [p._replace(values={f"n{i}": (1.0, 1.0, 1.0, 1) for i in range(64)}) for p in points(256, "x")]
    told: dict[Source, list[Point]] = {(0, worker): same for worker in range(64)}
    data = pack(told, points=256, room=10_000).data
    assert len(data) <= 10_000
    assert len(zlib.decompress(data)) <= RATIO_MAX * 10_000
    assert unpack(data, room=10_000).keys() == told.keys()


@given(st.binary(max_size=200))
@settings(max_examples=examples(200))
def test_ranks_may_write_what_they_like(garbage: bytes) -> None:
    for data in (garbage, zlib.compress(garbage)):
        assert isinstance(unpack(data, room=1000), dict)
        assert isinstance(parse_published(base64.urlsafe_b64encode(data).decode()), dict)
    assert parse_published(garbage.decode("latin-1")) == {} or garbage == b""


@pytest.mark.parametrize(
    "text",
    [
        b"{" + b" " * (RATIO_MAX * 1000 + 100) + b"}",
        b"[1, 2]",
        b'{"0 0": 7}',
        b'{"zero": [[1,1.0,0.0,1,null,{"a":1},{},1]]}',
        json.dumps({"0 0": [[1, 1e300, 0.0, 1, None, {"a": 1}, {}, 1], None, "x", [], [1, 2]]}).encode(),
    ],
)
def test_what_was_not_packed_is_nothing(text: bytes) -> None:
    found = unpack(zlib.compress(text), room=1000)
    assert not any(found.values())


def test_thinning_is_by_neighbours() -> None:
    assert thinned([], 4) == []
    assert [p.step for p in thinned(points(9, "a"), 4)] == [3, 6, 9]
    assert [p.step for p in thinned(points(4, "a"), 4)] == [1, 2, 3, 4]


def test_several_processes_of_one_worker_are_one_series() -> None:
    early, late = points(4, "a"), [p._replace(at=p.at + 100, step=(p.step or 0) + 4) for p in points(4, "a")]
    [found] = series_of(
        [((0, 0), late), ((0, 0), early), ((1, 0), points(2, "b"))], SeriesQuery(metrics=frozenset({"a"}))
    )
    assert [p.step for p in found.points] == list(range(1, 9))
