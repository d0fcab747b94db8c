"""`basilica train metrics` and the columns of the live view: what ranks reported, for people and for programs."""

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import basilica
from basilica.cli import metrics, show, show_live
from basilica.client.views import RankReport, RankStatus, Series, SeriesPoint, Stalled
from basilica.core.reports import ROUND_NUMBERS
from tests.cli.test_train_show import HOSTILE, NOW, drawn, run
from tests.support.server import Server, cli, ended, phase_is, run_request, serving, wait_for
from tests.support.terminal import at_terminal

Done = subprocess.CompletedProcess[str]
REPORT = """
import basilica, os
rank = int(os.environ["RANK"])
for step in range(50):
    basilica.report(step=step, loss=1 / (step + 1), rank=rank)
"""

ROUNDS = """
import basilica, os
import numpy as np
from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce
rank, uri = int(os.environ["RANK"]), "file://" + os.path.join(os.path.dirname(os.path.abspath(__file__)), "bucket")
with (
    ObjectStoreAllReduce(uri, rank, 2) as allreduce,
    ArrayDiLoCo([np.zeros(9, np.float32)], allreduce, sync_every=2) as diloco,
):
    while diloco.round < 3:
        diloco.step()
        basilica.report(step=diloco.step_count, loss=1.0)
"""


def series(values: list[float], *, rank: int = 0, worker: int = 0, metric: str = "loss") -> Series:
    points = tuple(
        SeriesPoint(at=NOW + timedelta(seconds=n), value=v, min=v - 1, max=v + 1, step=n) for n, v in enumerate(values)
    )
    return Series(rank=rank, worker=worker, metric=metric, points=points)


def reporting(rank: int = 0, *, stalled: bool = False, **values: float) -> RankStatus:
    return RankStatus(
        rank=rank,
        pod_name="p",
        phase="Running",
        restarts=0,
        state="running",
        report=RankReport(at=NOW, step=120, step_seconds=0.5, values=values),
        stalled=Stalled(since=NOW, usual_step_seconds=0.5, where="f (a.py:1)", stack="MainThread\n  f (a.py:1)")
        if stalled
        else None,
    )


# ---- how it looks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([1.0], "▅"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([1, math.nan, 2, math.inf], "▁x█x"),
        ([math.nan], "x"),
        ([-1e308, 1e308], "▅▅"),
    ],
)
def test_a_curve_in_a_few_characters(values: list[float], curve: str) -> None:
    assert metrics.sparkline(values) == curve


def test_the_table_has_last_values_ranges_and_marks_the_stalled() -> None:
    found = [series([4.0, 2.0, 3.0]), series([1.0, math.nan], rank=1)]
    text = drawn(metrics.table(found, [reporting(0), reporting(1, stalled=True)]))
    head, first, second = text.splitlines()
    assert head.split() == ["RANK", "METRIC", "STEP", "STEPS/S", "LAST", "MIN", "MAX", "COURSE"]
    assert first.split() == ["0", "loss", "2", "2", "3", "1", "5", "█▁▅"]
    assert second.split()[:5] == ["1", "loss", "1", "stalled", "nan"]


def test_workers_are_told_apart_only_where_there_are_several() -> None:
    assert "WORKER" in drawn(metrics.table([series([1.0]), series([1.0], worker=1)], []))
    assert "WORKER" not in drawn(metrics.table([series([1.0])], []))


def test_the_picture_is_svg_that_nobody_can_inject_into() -> None:
    found = [series([1.0, math.nan, 3.0], metric="<script>"), series([math.nan], rank=1, metric="a&b")]
    root = ET.fromstring(metrics.picture(found, "<b>" + HOSTILE))
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names == {"svg", "rect", "text", "polygon", "polyline", "title"}
    assert [e.text for e in root.iter() if e.text and "<script>" in e.text] == ["<script>"]


def test_the_live_view_shows_steps_and_the_loss_of_each_rank_once_something_is_reported() -> None:
    silent = run(2)
    assert "STEP" not in drawn(show_live.screen(show_live.Frame(view=silent), width=100, height=24))
    talking = replace(silent, ranks=(reporting(0, loss=0.25, acc=0.5), reporting(1, stalled=True, loss=math.nan)))
    text = drawn(show_live.screen(show_live.Frame(view=talking), width=100, height=24))
    head = next(line for line in text.splitlines() if line.startswith("RANK"))
    assert head.split() == ["RANK", "STATE", "RESTARTS", "STEP", "STEPS/S", "LOSS", "NODE"]
    rows = [line.split() for line in text.splitlines() if line[:2] in ("0 ", "1 ")]
    assert rows == [["0", "running", "0", "120", "2", "0.25"], ["1", "stalled", "0", "120", "2", "nan"]]


def test_without_a_loss_another_number_has_the_column() -> None:
    assert show.metric_of([reporting(reward=1.0, a=2.0)]) == "a"
    assert show.metric_of([reporting()]) == "loss"
    rounds = dict.fromkeys(ROUND_NUMBERS, 1.0)
    report = RankReport(at=NOW, step=1, step_seconds=0.5, values=rounds)
    assert show.metric_of([replace(reporting(), report=report)]) == "diloco_round"
    both = replace(report, values={"reward": 1.0, **rounds})
    assert show.metric_of([replace(reporting(), report=both)]) == "reward"
    assert show.metric_of(run(1).ranks) is None


def test_many_ranks_show_who_stands_out() -> None:
    ranks = tuple(reporting(n, stalled=n == 70, loss=1.0) for n in range(100))
    text = drawn(show.ranks(replace(run(100), ranks=ranks), rows=20))
    assert "1 stalled" in text
    assert "!" in text
    assert any(line.startswith("70") and "stalled" in line for line in text.splitlines())


def test_the_status_page_shows_the_threads_of_the_rank_that_fell_silent_first() -> None:
    late = reporting(0, stalled=True)
    assert late.stalled is not None
    late = replace(late, stalled=replace(late.stalled, since=NOW + timedelta(seconds=1), stack="Other"))
    text = drawn(show.status(replace(run(2), ranks=(late, reporting(1, stalled=True))), NOW, width=100))
    assert "the threads of rank 1:\n  MainThread\n    f (a.py:1)" in text.replace(" \n", "\n")
    assert "Other" not in text


def test_hostile_names_do_not_act_on_the_terminal() -> None:
    ranks = [replace(reporting(), report=RankReport(at=NOW, values={HOSTILE: 1.0}))]
    for text in (
        drawn(show.ranks_table(ranks), width=300),
        drawn(metrics.table([series([1.0], metric=HOSTILE)], ranks), width=300),
    ):
        assert "\x1b" not in text
        assert "\x9b" not in text
        assert "\u202e" not in text


# ---- against a server ------------------------------------------------------------------------------------------------

GO_ON = """
import basilica, time
for step in range(10**6):
    basilica.report(step=step, loss=0.5)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a run of two ranks that have reported and ended, one of DiLoCo, and one that has reported nothing."""
    directory = tmp_path_factory.mktemp("metrics")
    (directory / "train.py").write_text(REPORT)
    (directory / "rounds.py").write_text(ROUNDS)
    with serving(directory / "state") as running:
        size = {"min": 2, "target": 2, "max": 2}
        with running.client() as client:
            for name, command in (
                ("talks", [sys.executable, str(directory / "train.py")]),
                ("rounds", [sys.executable, str(directory / "rounds.py")]),
                ("mute", ["true"]),
            ):
                body = {"instanceName": name, "command": command, "distributed": {"worldSize": size}}
                client.post("/deployments", json=body).raise_for_status()
                wait_for(client, name, ended)
        yield running


@pytest.fixture
def train(server: Server) -> Callable[..., Done]:
    env = {"BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": server.key}
    return lambda *arguments: cli("train", *arguments, env=env)


def test_a_table_for_people(train: Callable[..., Done]) -> None:
    done = train("metrics", "talks")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:5] for line in done.stdout.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["0", "loss", "49"],
        ["0", "rank", "49"],
        ["1", "loss", "49"],
        ["1", "rank", "49"],
    ]


def test_rounds_of_diloco_do_not_fill_the_table(train: Callable[..., Done]) -> None:
    done = train("metrics", "rounds")
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [["0", "loss", "6"], ["1", "loss", "6"]]
    assert "there are DiLoCo rounds: basilica console rounds shows them" in done.stderr
    done = train("metrics", "rounds", "--metric", "diloco_round", "--json")
    for one in json.loads(done.stdout)["series"]:
        assert [(p["value"], p["count"]) for p in one["points"]] == [(0, 1), (1, 1), (2, 1)]


def test_json_for_programs_and_a_picture(train: Callable[..., Done], tmp_path: Path) -> None:
    picture = tmp_path / "loss.svg"
    done = train("metrics", "talks", "--metric", "loss", "--rank", "1", "--json", "--plot", picture)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["series"]
    assert (one["rank"], one["worker"], one["metric"]) == (1, 0, "loss")
    assert [p["value"] for p in one["points"]] == [1 / (n + 1) for n in range(50)]
    ET.fromstring(picture.read_text())


def test_what_cannot_be_shown_is_said_in_a_line(train: Callable[..., Done]) -> None:
    for arguments in (("mute",), ("talks", "--metric", "accuracy")):
        done = train("metrics", *arguments)
        assert (done.returncode, done.stdout) == (0, "")
        assert "basilica.report(step=…, loss=…)" in done.stderr
    done = train("metrics", "talks", "--plot", "/nonexistent/x.svg")
    assert done.returncode == 1
    assert done.stderr.startswith("basilica: cannot draw into /nonexistent/x.svg")


def test_the_live_view_goes_on_while_ranks_report(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GO_ON)
    env = {"BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": server.key, "XDG_CONFIG_HOME": str(tmp_path)}
    with server.client() as client:
        client.post("/deployments", json=run_request("live", f"exec {sys.executable} {script}")).raise_for_status()
    with at_terminal("train", "watch", "live", env=env) as terminal:
        terminal.read_until(r"STEPS/S +LOSS")
        first = re.findall(r"running +0 +(\d+)", terminal.read_until(r"running +0 +\d+ +[\d.]+ +0\.5"))
        second = re.findall(r"running +0 +(\d+)", terminal.read_until(r"running +0 +\d+ +[\d.]+ +0\.5"))
        terminal.type("q")
        assert terminal.wait() == 0
    assert int(second[-1]) > int(first[-1])


def test_somebody_who_follows_changes_is_told_of_reports_only_if_asked(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GO_ON)
    with server.client() as client:
        client.post("/deployments", json=run_request("told", f"exec {sys.executable} {script}")).raise_for_status()
        wait_for(client, "told", phase_is("ready"))
    with basilica.BasilicaClient(server.url, server.key) as sdk:
        training = sdk.training("told")
        moments: list[datetime] = []
        for view in training.changes(reports=True):
            if isinstance(view, basilica.RunView) and view.reported_at is not None:
                moments.append(view.reported_at)
            if len(moments) == 4:
                break
        assert moments[1:] == sorted(set(moments[1:]))  # the run itself may have changed once more at the beginning
        training.cancel()
        quiet = [view for view in training.changes() if isinstance(view, basilica.RunView)]
        assert len({view.version for view in quiet}) == len(quiet)


def test_the_sdk_reads_values_and_series(server: Server) -> None:
    with basilica.BasilicaClient(server.url, server.key) as client:
        training = client.training("talks")
        told = training.ranks[1].report
        assert told is not None
        assert (told.step, told.values) == (49, {"loss": 0.02, "rank": 1.0})
        assert isinstance(told.at, datetime)
        assert told.at.tzinfo == UTC or told.at.utcoffset() == timedelta(0)
        (one,) = training.series("loss", 0, points=5)
        assert [(p.step, p.count, p.max) for p in one.points] == [
            (9, 10, 1.0),
            (19, 10, 1 / 11),
            (29, 10, 1 / 21),
            (39, 10, 1 / 31),
            (49, 10, 1 / 41),
        ]
        assert training.series(since=(told.at + timedelta(hours=1)).timestamp()) == []
        with pytest.raises(basilica.ValidationError):
            training.series(rank=7)
