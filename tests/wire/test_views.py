"""An answer has one shape: the server's models, the client's views and the core's facts have the same fields."""

import dataclasses
import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from basilica.client import views
from basilica.core import policy, reports, seen, world
from basilica.core.phase import BenchPhase
from basilica.core.status import BenchStatus
from basilica.kube.manifests import crd
from basilica.wire import render
from basilica.wire import responses as out
from basilica.wire.base import Outgoing
from basilica.wire.views import camel, key_of, read, wire_field

PAIRS: list[tuple[type, type[Outgoing]]] = [
    (world.WorldStatus, out.World),
    (views.RankStatus, out.Rank),
    (views.RankReport, out.RankReport),
    (views.Stalled, out.RankStall),
    (views.RankExit, out.Exit),
    (views.Culprit, out.CulpritView),
    (views.BenchStatus, out.BenchView),
    (views.BenchResult, out.BenchResultView),
    (seen.BenchPoint, out.BenchPointView),
    (views.Event, out.EventView),
    (views.RankAgent, out.RankAgentView),
    (views.CrashLoop, out.CrashLoopView),
    (views.Goodput, out.GoodputView),
    (views.Loss, out.LossView),
    (views.Incident, out.IncidentView),
    (views.PlannedChange, out.NoticeView),
    (views.Series, out.SeriesView),
    (views.SeriesPoint, out.SeriesPointView),
]
ONLY_ON_THE_WIRE = {
    "Rank": {"attempt", "startedAt"},
    "BenchView": {"mode", "lastAttemptAt", "lastAttemptOutcome"},  # the published client's
}


def keys(model: type[Outgoing]) -> set[str]:
    return {info.alias or name for name, info in model.model_fields.items()}


def schema(*path: str) -> set[str]:
    """Return the fields of a part of the custom resource's status."""
    found: Any = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    for part in path:
        found = found["properties"][part]
    return set(found.get("items", found)["properties"])


def test_the_custom_resource_has_the_parts_of_an_answer() -> None:
    assert schema("world") == keys(out.World)
    assert schema("conditions") == keys(out.ConditionView) | {"observedGeneration"}
    assert schema("notice") == keys(out.NoticeView) - {"waitingFor"}
    only_in_the_api = {"logTail", "traceback", "message", "worker", "torchRank", "pid"}
    assert schema("rankExits") == keys(out.Exit) - only_in_the_api | {"error"}


def test_a_run_and_a_row_of_a_listing_are_read_by_name() -> None:
    mine = {key_of(field) for field in dataclasses.fields(views.RunView)} - {"raw"}
    assert mine <= keys(out.DeploymentResponse) | keys(out.Distributed)
    assert keys(out.DeploymentResponse) & keys(out.Distributed) == set(), "the two parts of an answer are read as one"


@pytest.mark.parametrize(("view", "model"), PAIRS, ids=lambda kind: kind.__name__)
def test_the_client_reads_what_the_server_writes(view: type, model: type[Outgoing]) -> None:
    mine = {key_of(field) for field in dataclasses.fields(view)}
    assert mine == keys(model) - ONLY_ON_THE_WIRE.get(model.__name__, set())


EXIT = world.RankExit(
    rank=3,
    attempt=1,
    exit_code=None,
    termination_reason="OOMKilled",
    restart_count=2,
    finished_at=20.5,
    seen_at=21.0,
    started_at=10.0,
    signal="SIGKILL",
    node="node-a",
    log_tail=("one", "two"),
    traceback="Traceback\nValueError: x",
)
RESULT = seen.BenchResult(
    measured_at=5.0,
    probe_node_a="",
    probe_node_b="b",
    busbw_gbps_p10=1.0,
    latency_us_at_1mib=7.5,
    size_bytes_swept=(1, 2),
    method="tcp",
    sweep=(seen.BenchPoint(size_bytes=1, algbw_gbps=1.0, busbw_gbps=2.0, latency_us=3.0, repeats=4),),
)


def travelled(answer: Outgoing) -> Any:
    return json.loads(answer.to_json())


def at(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, UTC)


def test_an_exit_arrives_as_it_was() -> None:
    culprit = policy.Culprit(exit=EXIT, evidence="it failed first", confidence="high")
    seen_by_client = read(views.RankExit, travelled(render.render_exit(EXIT, culprit)))
    assert seen_by_client == views.RankExit(
        3,
        -1,
        "OOMKilled",
        2,
        signal="SIGKILL",
        started_at=at(10),
        finished_at=at(20.5),
        node="node-a",
        role="culprit",
        log_tail=("one", "two"),
        traceback="Traceback\nValueError: x",
    )
    told = read(views.Culprit, travelled(render.render_culprit(culprit)))
    assert (told.rank, told.exit_code, told.evidence, told.log_tail) == (3, -1, "it failed first", ("one", "two"))


def test_a_bench_arrives_as_it_was() -> None:
    bench = BenchStatus(phase=BenchPhase.SUCCEEDED, started_at=1.0, completed_at=2.0, result=RESULT)
    body = travelled(render.render_bench(bench))
    assert (body["mode"], body["lastAttemptOutcome"], body["result"]["latencyUsAt1mib"]) == ("on-start", "success", 7.5)
    assert "message" not in body, "an empty text is left out"
    assert body["result"]["probeNodeA"] == "", "but not where a client needs the field"
    told = read(views.BenchStatus, body)
    assert (told.phase, told.started_at, told.completed_at) == ("Succeeded", at(1), at(2))
    assert told.result is not None
    assert told.result.sweep == RESULT.sweep
    assert (told.result.measured_at, told.result.size_bytes_swept) == (at(5), (1, 2))


def test_a_number_that_is_none_arrives_as_such() -> None:
    report = reports.Report(at=1.0, step=3, step_seconds=None, values={"loss": math.nan, "lr": 0.1})
    told = read(views.RankReport, travelled(render.filled(out.RankReport, report)))
    assert math.isnan(told.values["loss"])
    assert (told.values["lr"], told.step, told.at) == (0.1, 3, at(1))


def test_what_a_server_does_not_tell_has_its_neutral_value() -> None:
    rank = read(views.RankStatus, {"rank": 1, "stalled": {"since": "yesterday"}}, state="")
    assert (rank.pod_name, rank.phase, rank.restarts, rank.node) == ("", "Unknown", 0, None)
    assert rank.stalled == views.Stalled(since=None, usual_step_seconds=0.0)
    assert read(views.RankExit, {"rank": 1, "exitCode": 1, "terminationReason": None}).termination_reason == "Unknown"
    assert read(views.BenchStatus, {"mode": "on-start", "result": {}}).result == views.BenchResult(
        measured_at=at(0), probe_node_a="", probe_node_b=""
    )


@pytest.mark.parametrize("body", [{}, {"rank": 1}, {"rank": "1", "exitCode": 0}, {"rank": 1, "exitCode": 0.5}])
def test_what_nothing_can_stand_for_is_missed(body: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        read(views.RankExit, body)


@pytest.mark.parametrize(
    ("name", "key"),
    [("exit_code", "exitCode"), ("rank", "rank"), ("latency_us_at_1mib", "latencyUsAt1mib"), ("p_50", "p50")],
)
def test_names_on_the_wire(name: str, key: str) -> None:
    assert camel(name) == key


def test_a_field_may_be_called_otherwise() -> None:
    @dataclasses.dataclass
    class Thing:
        kind: str = dataclasses.field(metadata=wire_field("type"))

    assert key_of(dataclasses.fields(Thing)[0]) == "type"
