"""What replicas report of their rounds: all of it at once, for every round, and nothing outside a deployment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from basilica.core.reports import ROUND_NUMBERS
from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce
from basilica.reports import writer
from basilica.reports.points import Point, read_points
from tests.diloco.gang import fresh_uri

ROUNDS = 3


def train(uri: str, **options: Any) -> None:
    arrays = [np.zeros(8, np.float32), np.zeros(8, np.float32)]
    with (
        ObjectStoreAllReduce(uri, 0, 1, timeout=30) as allreduce,
        ArrayDiLoCo(arrays, allreduce, sync_every=4, **options) as diloco,
    ):
        while diloco.round < ROUNDS:
            diloco.step(samples=5)


def told(place: Path) -> list[Point]:
    (file,) = [path for path in place.iterdir() if path.suffix != ".stack"]
    return list(read_points(file.read_bytes().split(b"\n")[1:]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process as a rank that has not reported yet."""
    monkeypatch.setenv(writer.FILE_ENV, str(tmp_path / "reports" / "0.1"))
    monkeypatch.delenv(writer.BELL_ENV, raising=False)
    monkeypatch.setattr(writer, "_here", writer._Process())
    return tmp_path / "reports"


def test_every_round_is_told_whole(place: Path) -> None:
    train(fresh_uri())
    points = told(place)
    assert [set(point.values) for point in points] == [set(ROUND_NUMBERS)] * ROUNDS
    last = points[-1].last
    assert [point.values["diloco_round"][0] for point in points] == [0, 1, 2]
    assert {name: last[name] for name in ROUND_NUMBERS[1:7]} == {
        "diloco_fragment": 0,
        "diloco_replica": 0,
        "diloco_counted": 1,
        "diloco_weight": 20,
        "diloco_members": 1,
        "diloco_world": 1,
    }
    assert last["diloco_waited_for"] == -1
    assert min(last["diloco_bytes_up"], last["diloco_bytes_down"]) >= 0
    assert last["diloco_round_s"] >= last["diloco_wait_s"] >= 0
    assert points[-1].usual is None  # so nobody is called stalled by them


def test_each_fragment_has_rounds_of_its_own(place: Path) -> None:
    train(fresh_uri(), fragments=2)
    rounds = [(point.values["diloco_round"][0], point.values["diloco_fragment"][0]) for point in told(place)]
    assert rounds == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_long_run_keeps_its_rounds_apart(place: Path) -> None:
    """Where the file is full, points are merged; but a point has one round as long as steps outnumber rounds."""
    for round in range(200):
        for step in range(60):
            writer.report(step=60 * round + step, loss=0.123456789, other=0.987654321)
        writer.note(**{name: float(round) for name in ROUND_NUMBERS})
    points = [point.values["diloco_round"] for point in told(place) if "diloco_round" in point.values]
    assert max(count for *_, count in points) == 1
    newest = told(place)[-1].last["diloco_round"]  # of a point that is still being gathered
    assert [mean for mean, *_ in points] == list(range(len(points)))
    assert (len(points), newest) in ((200, 199), (199, 199))
    assert next(iter(told(place))).values["loss"][3] > 1, "nothing was merged: the test does not test"


def test_outside_a_deployment_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(writer.FILE_ENV, raising=False)
    monkeypatch.setattr(writer, "_here", writer._Process())
    monkeypatch.chdir(tmp_path)
    train(fresh_uri())
    assert list(tmp_path.iterdir()) == []
