"""What ranks report, through the API: last values, series, fresh values for watchers, and stalls."""

import asyncio
import json
import math
import sys
from pathlib import Path

import httpx2
import pytest

from basilica.core import stalls
from basilica.core.errors import RuntimeUnavailable
from basilica.core.seen import Stalled
from basilica.ports import Run
from basilica.server import reports
from tests.support.server import Server, ended, run_request, serving, wait_for
from tests.support.world import Json, SseReader, World, error_of, story

STEPS = """
import time, basilica
for step in range(10**9):
    basilica.report(step=step, loss=1 / (step + 1))
    time.sleep(0.02)
"""


async def ranks_of(world: World, name: str = "train") -> list[Json]:
    body = (await world.ann.get(f"/deployments/{name}")).json()
    ranks: list[Json] = body["distributed"]["ranks"]
    return ranks


@story
async def test_last_values_stand_with_the_ranks_and_bump_no_version(world: World) -> None:
    instance = await world.deploy(target=2)
    before = (await world.store.get(instance)).version
    world.runtime.report(instance, 1, 7, loss=0.25, lr=1e-3)
    ranks = await ranks_of(world)
    assert "report" not in ranks[0]
    told = ranks[1]["report"]
    assert told.pop("at").endswith("Z")
    assert told == {"step": 7, "stepSeconds": 0.5, "values": {"loss": 0.25, "lr": 0.001}}
    assert (await world.ann.get("/deployments/train/ranks")).json()["ranks"][1]["report"]["step"] == 7
    assert (await world.store.get(instance)).version == before


@story
async def test_what_is_not_finite_is_valid_json(world: World) -> None:
    instance = await world.deploy(target=1)
    world.runtime.report(instance, 0, 1, loss=math.nan, high=math.inf, low=-math.inf)
    answer = await world.ann.get("/deployments/train")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    body = json.loads(answer.content, parse_constant=refuse)
    values = body["distributed"]["ranks"][0]["report"]["values"]
    assert values == {"loss": "NaN", "high": "Infinity", "low": "-Infinity"}
    series = json.loads((await world.ann.get("/deployments/train/series")).content, parse_constant=refuse)["series"]
    assert [s["points"][0]["value"] for s in series] == ["Infinity", "NaN", "-Infinity"]


@story
async def test_series_by_rank_and_metric(world: World) -> None:
    instance = await world.deploy(target=2)
    for step in range(5):
        for rank in (0, 1):
            world.runtime.report(instance, rank, step, loss=step + rank, lr=0.1)
    found = (await world.ann.get("/deployments/train/series")).json()["series"]
    assert [(s["rank"], s["worker"], s["metric"]) for s in found] == [
        (0, 0, "loss"),
        (0, 0, "lr"),
        (1, 0, "loss"),
        (1, 0, "lr"),
    ]
    one = (await world.ann.get("/deployments/train/series?rank=1&metric=loss")).json()["series"]
    assert [(p["step"], p["value"], p["min"], p["max"], p["count"]) for p in one[0]["points"]] == [
        (n, n + 1.0, n + 1.0, n + 1.0, 1) for n in range(5)
    ]
    assert (await world.ann.get("/deployments/train/series?metric=nothing")).json() == {"series": []}


@pytest.mark.parametrize(
    "query", ["rank=-1", "rank=8", "rank=x", "points=1", "points=100000", "since=nan", "since=-1", "points=x"]
)
@story
async def test_junk_is_refused(world: World, query: str) -> None:
    await world.deploy(target=1)
    error_of(await world.ann.get(f"/deployments/train/series?{query}"), 400, "BASILICA_API_INVALID_REQUEST")
    if query.startswith("since"):
        watched = query.replace("since", "reported_since")
        answer = await world.ann.get(f"/deployments/train/watch?wait=0&{watched}")
        error_of(answer, 400, "BASILICA_API_INVALID_REQUEST")


@story
async def test_reports_of_others_are_not_there(world: World) -> None:
    instance = await world.deploy(target=1)
    error_of(await world.bob.get(f"/deployments/{instance}/series"), 404)


@story
async def test_a_runtime_that_cannot_tell_reports_does_not_hide_the_run(world: World) -> None:
    async def fail(run: Run) -> dict[int, object]:
        raise RuntimeUnavailable("the disk is gone")

    await world.deploy(target=1)
    world.runtime.reports = fail  # type: ignore[assignment,method-assign]
    answer = await world.ann.get("/deployments/train")
    assert (answer.status_code, answer.json()["phase"]) == (200, "ready")


# ---- watching --------------------------------------------------------------------------------------------------------


@story
async def test_a_watcher_gets_fresh_values_while_ranks_report(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "PACE_SECONDS", 0.01)
        instance = await world.deploy(target=1)
        path = f"/deployments/{instance}/watch?reported_since=0"
        async with world.listening() as client, client.stream("GET", path) as response:
            reader = SseReader(response)
            first = await reader.next()
            for step in (1, 2, 3):
                world.runtime.report(instance, 0, step, loss=1 / step)
                event = await reader.next()
                assert (event.event, event.id) == ("status", first.id)
                assert event.data["distributed"]["ranks"][0]["report"]["step"] == step
                await asyncio.sleep(0.002)  # the next report is of another millisecond
            world.runtime.exit(instance, 0, 0)
            rest = await reader.rest()
    assert rest[-1].event == "end"
    assert rest[-2].data["distributed"]["ranks"][0]["report"]["step"] == 3


@story
async def test_a_watcher_that_did_not_ask_is_not_told_of_reports(world: World) -> None:
    instance = await world.deploy(target=1)
    version = (await world.store.get(instance)).version
    asking = asyncio.create_task(world.ann.get(f"/deployments/{instance}/watch?wait=600&since={version}"))
    for step in range(20):
        world.runtime.report(instance, 0, step)
        await asyncio.sleep(0.001)
    assert not asking.done()
    world.runtime.exit(instance, 0, 0)
    assert (await asking).json()["version"] > version


@story
async def test_fresh_values_are_paced_however_fast_ranks_report(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "PACE_SECONDS", 0.2)
        instance = await world.deploy(target=1)
        version = (await world.store.get(instance)).version
        world.runtime.report(instance, 0, 0)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        answer = await world.ann.get(f"/deployments/{instance}/watch?wait=600&since={version}&reported_since=0")
        assert loop.time() - begun >= 0.2
        assert answer.json()["distributed"]["ranks"][0]["report"]["step"] == 0
        assert answer.json()["version"] == version


@story
async def test_a_long_poll_that_knows_the_last_report_waits_for_the_next(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "PACE_SECONDS", 0.01)
        instance = await world.deploy(target=1)
        version = (await world.store.get(instance)).version
        world.runtime.report(instance, 0, 1)
        known = (await world.runtime.reports(await world.plane.run("ann", instance)))[0].at
        path = f"/deployments/{instance}/watch?wait=600&since={version}&reported_since={known:.3f}"
        asking = asyncio.create_task(world.ann.get(path))
        await asyncio.sleep(0.05)
        assert not asking.done()
        world.runtime.report(instance, 0, 2)
        assert (await asking).json()["distributed"]["ranks"][0]["report"]["step"] == 2


@story
async def test_a_runtime_that_fails_does_not_make_watchers_ask_in_a_loop(world: World) -> None:
    asked = 0

    async def fail(run: Run, after: float) -> None:
        nonlocal asked
        asked += 1
        raise RuntimeUnavailable("the disk is gone")

    instance = await world.deploy(target=1)
    world.runtime.next_report = fail  # type: ignore[method-assign]
    version = (await world.store.get(instance)).version
    path = f"/deployments/{instance}/watch?wait=0.2&since={version}&reported_since=0"
    assert (await world.ann.get(path)).status_code == 200
    assert asked == 1


# ---- stalls ----------------------------------------------------------------------------------------------------------


@story
async def test_a_stall_is_told_everywhere(world: World) -> None:
    instance = await world.deploy(target=2)
    stack = "MainThread\n  all_reduce (train.py:12)"
    since = world.clock.now() - 12
    stall = Stalled(since=since, usual_step_seconds=0.4, where="all_reduce (train.py:12)", stack=stack)
    world.runtime.stall(instance, 1, stall)
    await world.until(instance, lambda d: d.status.ranks[1].stalled is not None)
    told = (await ranks_of(world))[1]["stalled"]
    assert told.pop("since").endswith("Z")
    assert told == {"usualStepSeconds": 0.4, "where": "all_reduce (train.py:12)", "stack": stack}
    why = (await world.ann.get("/deployments/train/why")).json()["why"]
    assert "rank 1 has reported nothing for over 10 s (usually every 0.4 s)" in why
    assert why.endswith("; its main thread is in all_reduce (train.py:12)")
    world.runtime.stall(instance, 1, None)
    await world.until(instance, lambda d: d.status.ranks[1].stalled is None)
    events = (await world.ann.get("/deployments/train/events")).json()["events"]
    assert [(e["type"], e["reason"]) for e in events[:2]] == [("Normal", "RankResumed"), ("Warning", "RankStalled")]
    assert "stalled" not in (await ranks_of(world))[1]


@story
async def test_a_stalled_rank_is_restarted_if_that_was_asked_for(world: World) -> None:
    size = {"min": 1, "target": 1, "max": 1}
    gang = {"worldSize": size, "command": "x", "onStall": "restart", "maxRestarts": 1}
    answer = await world.ann.post("/deployments", json={"instanceName": "train", "distributed": gang})
    instance = answer.json()["instanceName"]
    await world.until(instance, lambda d: d.status.ready == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stalls, "FLOOR", 0.1)
        world.runtime.stall(instance, 0, Stalled(since=world.clock.now(), usual_step_seconds=0.01))
        found = await world.until(instance, lambda d: bool(d.status.ranks) and d.status.ranks[0].restarts == 1)
    assert [e.termination_reason for e in found.status.failures] == ["Stalled"]


@story
async def test_what_to_do_about_a_stall_is_one_of_two(world: World) -> None:
    gang = {"worldSize": {"min": 1, "target": 1, "max": 1}, "command": "x", "onStall": "kill"}
    answer = await world.ann.post("/deployments", json={"instanceName": "train", "distributed": gang})
    assert "distributed.onStall" in error_of(answer, 400)["message"]


# ---- a real server ---------------------------------------------------------------------------------------------------


def test_reports_go_on_while_the_server_is_killed_and_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    server = Server(tmp_path / "state")
    with server.client() as client:
        client.post("/deployments", json=run_request("talk", f"exec {sys.executable} {script}")).raise_for_status()
        wait_for(client, "talk", lambda body: body["phase"] == "ready")
        before = next_step(client, 3)
    server.kill()
    again = Server(tmp_path / "state")
    try:
        with again.client() as client:
            assert next_step(client, before + 1) > before
            (loss,) = client.get("/deployments/talk/series?points=2000").json()["series"]
            steps = [p["step"] for p in loss["points"]]
            assert steps == list(range(len(steps)))  # nothing is missing from while nobody was there
            client.delete("/deployments/talk?wait=20").raise_for_status()
    finally:
        again.stop()


def next_step(client: httpx2.Client, least: int) -> int:
    """The rank's step, as soon as it has come so far; the server says when there is news."""
    for _ in range(60):
        body = client.get("/deployments/talk/watch?wait=10&reported_since=0&since=1000000").json()
        told = body["distributed"]["ranks"][0].get("report")
        if told and told["step"] >= least:
            return int(told["step"])
    raise AssertionError("no such step")


HANGS_ONCE = """
import os, time, basilica
def all_reduce():
    time.sleep(600)
for step in range(30):
    basilica.report(step=step, loss=1.0)
    time.sleep(0.01)
if os.environ["BASILICA_ATTEMPT"] == "0":
    all_reduce()
"""


def test_a_rank_that_hangs_is_shown_with_its_stack_and_restarted_where_that_was_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGS_ONCE)
    request = run_request("hangs", f"exec {sys.executable} {script}")
    request["distributed"] |= {"onStall": "restart", "maxRestarts": 1}
    with serving(tmp_path / "state") as server, server.client() as client:
        client.post("/deployments", json=request).raise_for_status()
        shown = wait_for(client, "hangs", lambda body: "stalled" in str(body["distributed"]["ranks"]))
        stalled = shown["distributed"]["ranks"][0]["stalled"]
        assert f"all_reduce ({script}:4)" in stalled["stack"]
        assert stalled["where"] == "all_reduce (train.py:4)"
        assert "rank 0, which had stalled, to stop, and then to start again" in shown["distributed"]["blockedOn"]
        done = wait_for(client, "hangs", ended)
        assert (done["phase"], done["distributed"]["rankExits"][0]["restartCount"]) == ("succeeded", 1)
        events = client.get("/deployments/hangs/events").json()["events"]
        failed = [e["message"] for e in events if e["reason"] == "RankFailed"]
        assert failed == ["rank 0 was stopped because it had stalled (exit code 143)"]
        assert "RankStalled" in {e["reason"] for e in events}
