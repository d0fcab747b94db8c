"""Hundreds of runs of which nothing changes cost the API server watches and the lease, and nothing else."""

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from basilica.core.accounts import goodput_of
from basilica.core.events import Event
from basilica.core.goodput import Cause, Segment
from basilica.core.incidents import INCIDENTS_KEPT, Incident, IncidentKind
from basilica.core.phase import Phase, RankPhase
from basilica.core.policy import find_culprit
from basilica.core.spec import DeploymentSpec, Exec
from basilica.core.status import DeploymentStatus
from basilica.core.world import CrashLoop, RankAgent, RankExit, RankStatus, Steps, WorldSize
from basilica.kube.manifests.userdeployment import RANKS_MAX, body_of, instance_of
from basilica.stores.kubernetes import codec
from basilica.wire.render import render_exits
from basilica_testkube import KubeServer
from tests.operator.cluster import by_hand, eventually, operating, tell

MANY = 300
IDLE_SECONDS = 3.0


def phases(kube: KubeServer) -> list[str]:
    return [(obj.get("status") or {}).get("phase", "") for obj in kube.objects("userdeployments", "u-ann")]


def test_hundreds_of_idle_runs_cost_watches_and_the_lease() -> None:
    async def story(kube: KubeServer) -> None:
        for number in range(MANY):
            kube.create(by_hand(f"run-{number}", target=1), "u-ann")
        async with operating(kube, duration=15.0) as here:
            await eventually(lambda: all(phase == "ready" for phase in phases(kube)), every=0.5)
            await here.store._cluster.mirror.close()  # what it has not written by now it never will
            turned = here.operator.controller.turns if here.operator.controller else 0
            before = kube.requests.copy()
            await asyncio.sleep(IDLE_SECONDS)
            asked = kube.requests.since(before)
            assert asked.total == asked["patch", "leases"] + asked["get", "leases"], asked
            assert here.operator.controller is not None
            assert here.operator.controller.turns == turned

    tell(story, seconds=90.0)


def test_a_run_costs_a_number_of_requests_that_does_not_grow_with_its_ranks() -> None:
    """What the store asks for; what the runtime asks for is tested there."""

    def cost(ranks: int) -> int:
        asked = 0

        async def story(kube: KubeServer) -> None:
            nonlocal asked
            async with operating(kube, duration=15.0) as here:
                await eventually(lambda: here.operator.controller)
                before = kube.requests.copy()
                size = {"min": 1, "target": ranks, "max": ranks}
                obj = kube.create(by_hand(distributed={"worldSize": size}), "u-ann")
                instance = instance_of(obj)
                await eventually(lambda: len(here.runtime.running(instance)) == ranks)
                await here.ready(instance, ranks)
                for rank in range(ranks):
                    here.runtime.exit(instance, rank, 0)
                await here.until(instance, lambda d: d.status.settled)
                asked = kube.requests.since(before)["patch", "userdeployments/status"]

        tell(story, seconds=60.0)
        return asked

    assert cost(512) <= cost(2) + 3


def test_a_run_of_four_thousand_ranks_fits_into_an_object() -> None:
    spec = DeploymentSpec(name="large", program=Exec(("python", "train.py")), world=WorldSize(1, 4096, 4096))
    tail = tuple(f"step {n}: loss {n / 7:.4f}, grad norm {n / 3:.4f}" for n in range(40))
    ranks = tuple(
        RankStatus(
            rank=n,
            attempt=n % 3,
            phase=RankPhase.RUNNING,
            world_size=4096,
            pod_name=f"large-1a2b3c4d-{n}-x7k2p",
            node=f"ip-10-{n % 250}-{n // 250}-17.ec2.internal",
            provider="cyan",
            region="eu-west-1",
            gpus=8,
            started_at=1.7e9 + n / 7,
            metered_until=1.7e9 + n,
        )
        for n in range(4096)
    )
    exits = tuple(
        RankExit(
            rank=n,
            attempt=0,
            exit_code=1,
            termination_reason="Error",
            restart_count=0,
            finished_at=1.7e9 + n / 3,
            seen_at=1.7e9 + n / 3,
            log_tail=tail if n < 32 else (),
            traceback="Traceback …\n" * 50 if n < 32 else "",
        )
        for n in range(4096)
    )
    status = DeploymentStatus(
        created_at=1.7e9, phase=Phase.FAILED, world_target=4096, ranks=ranks, exits=exits, failures=exits[:32]
    )
    body = codec.status_body(spec, status, (), 1.7e9)
    whole = {"spec": body_of(spec), "status": body}
    assert len(json.dumps(whole)) < 1 << 20
    assert codec.state_of("large", str(body["state"])) == status


def test_what_does_not_fit_is_given_up_from_the_least_important_on() -> None:
    def noise(seed: int) -> tuple[str, ...]:
        return tuple(f"{(seed * 7919 + n) ** 17:x}" for n in range(400))

    exits = tuple(
        RankExit(
            rank=n,
            attempt=0,
            exit_code=7,
            termination_reason="Error",
            restart_count=1,
            finished_at=1.0,
            seen_at=1.0,
            log_tail=noise(n),
        )
        for n in range(64)
    )
    status = DeploymentStatus(created_at=1.0, exits=exits, failures=exits)
    text = codec.state_text(status)
    assert len(text) <= codec.STATE_BYTES
    kept = codec.state_of("large", text)
    assert [replace(e, log_tail=()) for e in kept.exits] == [replace(e, log_tail=()) for e in exits]
    assert kept.failures[0].log_tail != ()


@pytest.mark.parametrize("over", [True, False], ids=["ended", "running"])
def test_the_largest_run_in_its_worst_state_fits_into_an_object(over: bool) -> None:
    """Nothing of it is alike: every rank on another machine, every time another, all have failed twice, and so have
    the workers of its agents.
    """
    chance = random.Random(7)

    def letters(count: int) -> str:
        return f"{chance.getrandbits(4 * count):0{count}x}"

    def moment() -> float:
        return 1.7e9 + chance.random() * 1e7

    def an_agent() -> RankAgent:
        return RankAgent(
            pid=chance.getrandbits(22),
            nproc=8,
            booked=chance.getrandbits(6),
            round=3,
            group_rank=chance.getrandbits(12),
            world=8 * RANKS_MAX,
            first_torch_rank=8 * chance.getrandbits(12),
            pids=tuple(chance.getrandbits(22) for _ in range(8)),
            early=(an_exit(0, 3, worker=chance.getrandbits(3)),),
        )

    def an_exit(n: int, attempt: int, worker: int | None = None) -> RankExit:
        return RankExit(
            rank=n,
            attempt=attempt,
            worker=worker,
            torch_rank=chance.getrandbits(15),
            pid=chance.getrandbits(22),
            message=letters(200),
            cause=letters(300),
            exit_code=chance.choice([1, 137, 139, None]),
            termination_reason="OOMKilled",
            restart_count=attempt,
            started_at=moment(),
            finished_at=moment(),
            seen_at=moment(),
            signal="SIGKILL",
            node=f"ip-{letters(12)}.eu-west-1.compute.internal",
            log_tail=tuple(letters(200) for _ in range(40)) if n < 32 else (),
            traceback=letters(4000) if n < 32 else "",
        )

    exits = tuple(an_exit(n, 9) for n in range(RANKS_MAX))
    ranks = tuple(
        RankStatus(
            rank=n,
            attempt=9,
            phase=RankPhase.LOST if over else RankPhase.RUNNING,
            launched_at=moment(),
            started_at=None if over else moment(),
            segment=None if over else Segment(Cause.TRAINING, moment()),
            agent=an_agent(),
            steps=Steps(
                reached=chance.getrandbits(20),
                process_at=moment(),
                first=chance.getrandbits(20),
                step=1 << 20,
                at=moment(),
            ),
            crashes=CrashLoop(since=moment(), at=moment(), count=9, worker=1, error=letters(200)),
            restarts=8,
            world_size=RANKS_MAX,
            pod_name=f"large-1a2b3c4d-{n}-{letters(5)}",
            node=exits[n].node,
            provider="cyan",
            region="eu-west-1",
            gpus=8,
            metered_until=moment(),
        )
        for n in range(RANKS_MAX)
    )
    status = DeploymentStatus(
        created_at=1.7e9,
        phase=Phase.FAILED if over else Phase.READY,
        world_target=RANKS_MAX,
        ranks=ranks,
        exits=exits if over else (),
        failures=(*exits, *(an_exit(n, 8, worker) for n in range(RANKS_MAX) for worker in (0, 1))),
        incidents=tuple(
            Incident(number=n, kind=IncidentKind.FAILURE, at=moment(), what=letters(400), over_at=moment(), cost=n)
            for n in range(INCIDENTS_KEPT)
        ),
    )
    env = {f"VARIABLE_{n}": letters(1000) for n in range(600)}
    spec = DeploymentSpec(
        name="large", program=Exec(("python", "train.py")), world=WorldSize(1, RANKS_MAX, RANKS_MAX), env=env
    )
    events = codec.fold((), [Event("RankFailed", letters(1900)) for _ in range(500)], 1.7e9)
    body = codec.status_body(spec, status, events, 1.7e9)
    whole = {"metadata": {"annotations": {"requested": "x" * codec.REQUESTED_BYTES}}, "spec": body_of(spec)}
    assert len(json.dumps(whole["spec"])) <= codec.SPEC_BYTES
    assert len(json.dumps({**whole, "status": body}).encode()) <= 1_500_000
    kept = codec.state_of("large", str(body["state"]))
    told = [(e.rank, e.attempt, e.exit_code) for e in kept.exits]
    assert told == [(e.rank, e.attempt, e.exit_code) for e in status.exits]
    assert find_culprit(kept.failures, None).exit.error  # type: ignore[union-attr]
    if over:
        assert body["rankExitsOmitted"] == RANKS_MAX - len(body["rankExits"])  # type: ignore[arg-type]
        return
    for before, after in zip(status.ranks, kept.ranks, strict=True):
        assert before.agent is not None
        assert after.agent is not None
        assert (after.agent.pid, after.agent.booked) == (before.agent.pid, before.agent.booked), "none is booked twice"
        assert before.steps is not None
        assert before.steps.process_at is not None
        assert after.steps is not None
        assert after.steps.is_of(before.steps.process_at), "its process is known again"
    assert goodput_of(spec, kept, 1.8e9).seconds == goodput_of(spec, status, 1.8e9).seconds


def test_exits_are_shown_as_the_api_shows_them() -> None:
    def an_exit(n: int, code: int | None, **more: Any) -> RankExit:
        return RankExit(
            rank=n,
            attempt=1,
            exit_code=code,
            termination_reason="Error",
            restart_count=1,
            finished_at=1.7e9,
            seen_at=1.7e9,
            **more,
        )

    failed = an_exit(1, 1, node="node-1", started_at=1.6e9)
    exits = (an_exit(0, 0), failed, an_exit(2, None), an_exit(3, 143, stopped=True))
    status = DeploymentStatus(created_at=1.0, phase=Phase.FAILED, exits=exits, failures=exits[1:3], world_target=4)
    spec = DeploymentSpec(name="x", program=Exec(("true",)), world=WorldSize(1, 4, 4))
    shown: Any = codec.status_body(spec, status, (), 1.7e9)["rankExits"]
    culprit = find_culprit(status.failures, status.whole_at)
    fields = ("rank", "exitCode", "restartCount", "terminationReason", "node", "role")
    for mine, theirs in zip(shown, render_exits(status, culprit), strict=True):
        wire = json.loads(theirs.to_json())
        assert {f: mine.get(f) for f in fields} == {f: wire.get(f) for f in fields}
        assert mine.keys() <= {*wire.keys(), "error"}
    running = codec.status_body(spec, replace(status, phase=Phase.READY), (), 1.7e9)
    assert running["rankExits"] is None
