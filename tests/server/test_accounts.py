"""The account of a run through the API, with ranks that report, agents with workers, and a planned change."""

from time import time
from typing import Any

from basilica.core.seen import AnswerState, SeenAgent, SeenAnswer, SeenProgress, SeenWorkerExit
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
