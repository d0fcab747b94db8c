"""The account of a run through the API, with ranks that report, agents with workers, and a planned change."""

import asyncio
from time import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from basilica.controller.tally import Tally
from basilica.core.deployment import Deployment
from basilica.core.goodput import Cause, Segment
from basilica.core.seen import AnswerState, SeenAgent, SeenAnswer, SeenProgress, SeenWorkerExit
from basilica.core.status import DeploymentStatus
from basilica.core.world import RankStatus
from tests.support.specs import WHOLE
from tests.support.world import World, story


async def gang_of(world: World, instance: str) -> dict[str, Any]:
    gang: dict[str, Any] = (await world.ann.get(f"/deployments/{instance}")).json()["distributed"]
    return gang


@story
async def test_ranks_that_report_are_charged_with_training_and_the_end_names_the_goodput(world: World) -> None:
    instance = await world.deploy(target=2)
    assert {rank["cause"] for rank in (await gang_of(world, instance))["ranks"]} == {"unattributed"}
    now = time()
    for rank in (0, 1):
        seen = SeenProgress(first_at=now, first_step=1, at=now, step=5 + rank, step_seconds=0.1)
        world.runtime.change(instance, rank, progress=seen)
    await world.until(instance, lambda d: all(r.steps is not None for r in d.status.ranks))
    gang = await gang_of(world, instance)
    assert [(rank["cause"], rank["step"]) for rank in gang["ranks"]] == [("training", 5), ("training", 6)]
    assert gang["goodput"]["seconds"]["unattributed"] == 0, "the time before the first report was the start"
    await world.end(instance, 0, 0)
    gang = await gang_of(world, instance)
    assert gang["goodput"]["least"] == gang["goodput"]["most"] > 0
    assert "; goodput " in gang["blockedOn"]
    why = (await world.ann.get(f"/deployments/{instance}/why")).json()["why"]
    assert why == gang["blockedOn"]


@story
async def test_a_worker_that_fails_is_an_incident_with_its_names(world: World) -> None:
    instance = await world.deploy(target=1)
    agent = SeenAgent(pid=7, nproc=2, round=1, world=2, pids=(8, 9), meeting_since=time(), executing_since=time())
    world.runtime.change(instance, 0, agent=agent)
    await world.until(instance, lambda d: d.status.ranks[0].agent is not None)
    exit = SeenWorkerExit(
        number=1, worker=1, torch_rank=1, pid=9, exit_code=1, reason="Error", at=time(), message="ValueError: nan"
    )
    again = SeenAgent(pid=7, nproc=2, round=1, world=2, meeting_since=time(), exits=(exit,))
    world.runtime.change(instance, 0, agent=again)
    await world.until(instance, lambda d: len(d.status.incidents) > 0)
    gang = await gang_of(world, instance)
    (worker,) = gang["workerExits"]
    assert (worker["worker"], worker["torchRank"], worker["pid"], worker["message"]) == (1, 1, 9, "ValueError: nan")
    (incident,) = gang["incidents"]
    assert (incident["kind"], incident["worker"], incident["torchRank"]) == ("failure", 1, 1)
    assert "overAt" not in incident
    (rank,) = gang["ranks"]
    assert (rank["cause"], rank["crashes"]["count"], rank["crashes"]["worker"]) == ("rendezvous", 1, 1)
    assert rank["agent"]["torchRanks"] == [0, 1]


@story
async def test_a_planned_change_is_shown_until_its_ranks_are_ready(world: World) -> None:
    instance = await world.deploy(target=2)
    for rank in (0, 1):
        world.runtime.change(instance, rank, answer=SeenAnswer(state=AnswerState.LISTENING))
    await world.until(instance, lambda d: all(r.listens for r in d.status.ranks))
    await world.ann.post(f"/deployments/{instance}/cancel")
    await world.until(instance, lambda d: d.status.notice is not None)
    notice = (await gang_of(world, instance))["notice"]
    assert (notice["kind"], notice["number"]) == ("cancel", 1)
    assert notice["since"] < notice["until"]
    for rank in (0, 1):
        world.runtime.change(instance, rank, answer=SeenAnswer(state=AnswerState.READY, number=1, at=time()))
    await world.settled(instance)
    assert "notice" not in await gang_of(world, instance)


async def samples_of(world: World) -> dict[tuple[str, ...], float]:
    text = (await world.stranger.get("/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@story
async def test_metrics_count_the_time_of_runs_that_live_and_of_those_that_ended(world: World) -> None:
    first = await world.deploy("first", target=2)
    now = time()
    world.runtime.change(first, 0, progress=SeenProgress(first_at=now, first_step=1, at=now, step=1))
    await world.until(first, lambda d: d.status.ranks[0].steps is not None)
    exit = SeenWorkerExit(number=1, worker=0, torch_rank=0, pid=9, exit_code=1, reason="Error", at=time())
    world.runtime.change(first, 1, agent=SeenAgent(pid=7, nproc=1, round=1, exits=(exit,)))
    await world.until(first, lambda d: len(d.status.incidents) > 0)
    live = await samples_of(world)
    assert live["basilica_rank_seconds_total", "training"] > 0
    assert live["basilica_incidents_total", "failure"] == 1
    assert live["basilica_worker_failures_total",] == 1
    await world.end(first, 0, 0)
    after = await samples_of(world)
    assert after["basilica_rank_seconds_total", "training"] >= live["basilica_rank_seconds_total", "training"]
    await world.ann.delete(f"/deployments/{first}")
    while (await world.ann.get(f"/deployments/{first}")).status_code != 404:
        await asyncio.sleep(0)
    assert (await samples_of(world))["basilica_rank_seconds_total", "training"] == after[
        "basilica_rank_seconds_total", "training"
    ], "a run that is deleted is counted once"


@story
async def test_usage_has_the_time_that_trained_and_the_time_that_was_lost(world: World) -> None:
    instance = await world.deploy(target=1)
    now = time()
    world.runtime.change(instance, 0, progress=SeenProgress(first_at=now, first_step=1, at=now, step=1))
    await world.until(instance, lambda d: d.status.ranks[0].steps is not None)
    (live,) = (await world.ann.get("/usage")).json()["usage"]
    assert live["trainingSeconds"] > 0, "that of a live run is counted up to now"
    await world.end(instance, 0)
    (row,) = (await world.ann.get("/usage")).json()["usage"]
    seconds = (await gang_of(world, instance))["goodput"]["seconds"]
    assert row["trainingSeconds"] == seconds["training"] >= live["trainingSeconds"]
    assert row["lostSeconds"] == pytest.approx(seconds["queued"] + seconds["starting"])


def test_what_metrics_have_shown_never_falls() -> None:
    def run(cause: Cause) -> Deployment:
        status = DeploymentStatus(
            created_at=0.0, world_target=1, ranks=(RankStatus(rank=0, segment=Segment(cause, 0.0)),)
        )
        return Deployment(instance="a", user="u", namespace="u-u", spec=WHOLE, status=status, version=1)

    tally = Tally()
    assert tally.seconds([run(Cause.UNATTRIBUTED)], 10.0)["rank", "unattributed"] == 10
    found_out = tally.seconds([run(Cause.STARTING)], 12.0)
    assert found_out["rank", "unattributed"] == 10, "a counter that falls reads as a restart"
    assert (found_out["rank", "starting"], found_out["gpu", "starting"]) == (12, 24)
