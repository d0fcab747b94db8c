"""The account of a run on the wire: goodput, incidents, notices, and the workers of torchrun agents."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from basilica.client import views
from basilica.core import goodput, world
from basilica.core.deployment import Deployment
from basilica.core.goodput import Cause, Ledger, Segment
from basilica.core.incidents import Incident, IncidentKind
from basilica.core.notices import Notice, NoticeKind
from basilica.core.phase import Phase, RankPhase
from basilica.core.status import DeploymentStatus
from basilica.core.why import Absence
from basilica.stores.kubernetes import codec
from basilica.wire.render import render_deployment
from tests.support.specs import WHOLE

NOW = 1000.0
SECOND = 1_000_000
EXIT = world.RankExit(
    rank=1,
    attempt=0,
    exit_code=137,
    termination_reason="OOMKilled",
    restart_count=0,
    finished_at=970.0,
    seen_at=970.5,
    signal="SIGKILL",
    worker=3,
    torch_rank=11,
    pid=4711,
    message="RuntimeError: CUDA error",
)
STATUS = DeploymentStatus(
    created_at=900.0,
    phase=Phase.READY,
    world_target=2,
    ranks=(
        world.RankStatus(
            rank=0,
            phase=RankPhase.RUNNING,
            segment=Segment(Cause.TRAINING, 950.0),
            steps=world.Steps(reached=41),
            agent=world.RankAgent(
                pid=1, nproc=2, round=3, group_rank=1, world=4, first_torch_rank=2, pids=(21, 22), booked=5
            ),
        ),
        world.RankStatus(
            rank=1,
            segment=Segment(Cause.DEGRADED, 990.0),
            agent=world.RankAgent(pid=1, nproc=2),
            crashes=world.CrashLoop(since=960.0, at=970.0, count=3, worker=3, error="boom"),
        ),
    ),
    failures=(EXIT, replace(EXIT, worker=None, torch_rank=None, cause="worker 3 of rank 1 was ended by SIGKILL")),
    ledger=Ledger(starting=60 * SECOND, training=80 * SECOND, steps_recomputed=9),
    incidents=(
        Incident(
            number=4,
            kind=IncidentKind.RESIZE,
            at=920.0,
            what="2 ranks were wanted",
            over_at=930.0,
            cost=5 * SECOND,
            steps_recomputed=1,
        ),
        Incident(
            number=5,
            kind=IncidentKind.FAILURE,
            at=970.0,
            what="worker 3 of rank 1 was killed",
            rank=1,
            worker=3,
            torch_rank=11,
            exit_code=137,
            signal="SIGKILL",
            reason="OOMKilled",
            failures=2,
            cost=50 * SECOND,
            steps_recomputed=7,
        ),
    ),
    notice=Notice(number=6, kind=NoticeKind.SCALE, since=999.0, until=1010.0, reason="scaled", target=3, step=50),
)


def travelled(status: DeploymentStatus, unattended: Absence | None = None) -> dict[str, Any]:
    run = Deployment(instance="train-1", user="u", namespace="u-u", spec=WHOLE, status=status, version=1)
    answer: dict[str, Any] = json.loads(render_deployment(run, NOW, unattended=unattended).to_json())
    return answer


def at(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, UTC)


def test_the_goodput_has_every_cause_in_the_ledgers_order() -> None:
    body = travelled(STATUS)["distributed"]["goodput"]
    assert list(body["seconds"]) == [cause.value for cause in goodput.Cause]
    assert body["seconds"]["training"] == 130
    assert (body["wallSeconds"], body["rankSeconds"], body["gpusPerRank"]) == (100, 200, 2)
    assert (body["least"], body["most"], body["stepsRecomputed"]) == (0.65, 0.65, 9)
    assert body["largestLoss"] == {"cause": "starting", "seconds": 60}


def test_nothing_lost_is_no_largest_loss() -> None:
    body = travelled(replace(STATUS, ledger=Ledger(), ranks=STATUS.ranks[:1]))["distributed"]["goodput"]
    assert "largestLoss" not in body


def test_a_status_that_may_be_old_is_not_counted_on() -> None:
    body = travelled(replace(STATUS, whole_at=960.0), Absence("operator", 30.0))["distributed"]["goodput"]
    assert body["wallSeconds"] == 60


def test_the_client_reads_goodput_incidents_and_notice() -> None:
    run = views.parse_run(travelled(STATUS))
    assert run.goodput is not None
    assert run.goodput.seconds["degraded"] == 10
    assert run.goodput.largest_loss == views.Loss(cause="starting", seconds=60)
    assert str(run.goodput) == "goodput 65.0 % (training 1 m 5 s of 1 m 40 s x 2 ranks; largest loss: starting 30 s)"
    over, still_open = run.incidents
    assert (over.kind, over.is_open, over.over_at, over.cost_seconds) == ("resize", False, at(930), 5)
    assert over.cost_gpu_seconds == 10
    assert still_open.is_open
    assert (still_open.worker, still_open.torch_rank, still_open.signal) == (3, 11, "SIGKILL")
    assert (still_open.cost_seconds, still_open.cost_gpu_seconds, still_open.steps_recomputed) == (20, 40, 2)
    assert run.notice == views.PlannedChange(
        number=6, kind="scale", since=at(999), until=at(1010), reason="scaled", target=3, step=50
    )


def test_a_notice_names_the_ranks_that_it_waits_for_until_the_change_is_made() -> None:
    assert STATUS.notice is not None
    first, second = (replace(rank, listens=True, phase=RankPhase.RUNNING) for rank in STATUS.ranks)
    waiting = replace(STATUS, ranks=(replace(first, ready_for=6), replace(second, ready_for=5)))
    notice = views.parse_run(travelled(waiting)).notice
    assert notice is not None
    assert (notice.waiting_for, notice.done_at) == ((1,), None)
    made = views.parse_run(travelled(replace(waiting, notice=replace(STATUS.notice, done_at=999.5)))).notice
    assert made is not None
    assert (made.waiting_for, made.done_at) == ((), at(999.5))


def test_the_client_reads_agents_causes_and_crash_loops_of_ranks() -> None:
    first, second = views.parse_run(travelled(STATUS)).ranks
    assert first.agent == views.RankAgent(round=3, group_rank=1, world=4, torch_ranks=(2, 3), pids=(21, 22))
    assert (first.cause, first.cause_since, first.step, first.crashes) == ("training", at(950), 41, None)
    assert second.agent is not None
    assert second.agent.torch_ranks == (), "its workers have yet to be started"
    assert (second.cause, second.step) == ("degraded", None)
    assert second.crashes == views.CrashLoop(count=3, since=at(960), at=at(970), worker=3, error="boom")


def test_failures_of_workers_arrive_beside_the_exits_of_ranks() -> None:
    run = views.parse_run(travelled(STATUS))
    assert run.exits == (), "the run is not over"
    (worker,) = run.worker_exits
    assert (worker.worker, worker.torch_rank, worker.pid, worker.signal) == (3, 11, 4711, "SIGKILL")
    assert worker.place == "worker 3 of rank 1 (torch rank 11)"
    assert worker.error == "RuntimeError: CUDA error"


def test_the_culprit_of_a_failed_run_is_the_worker() -> None:
    other = replace(EXIT, worker=2, torch_rank=10, finished_at=971.0, echo=True)
    failed = replace(
        STATUS,
        phase=Phase.FAILED,
        terminal_at=980.0,
        exits=(STATUS.failures[1],),
        failures=(*STATUS.failures, other),
    )
    run = views.parse_run(travelled(failed))
    assert run.culprit is not None
    assert (run.culprit.worker, run.culprit.torch_rank, run.culprit.pid) == (3, 11, 4711)
    assert run.culprit.place == "worker 3 of rank 1 (torch rank 11)"
    assert [(e.role, e.cause) for e in run.exits] == [("culprit", "worker 3 of rank 1 was ended by SIGKILL")]
    assert [e.role for e in run.worker_exits] == ["culprit", "victim"]


def test_a_server_without_accounts_is_read() -> None:
    body = travelled(STATUS)
    for part in ("goodput", "incidents", "notice", "workerExits"):
        del body["distributed"][part]
    run = views.parse_run(body)
    assert (run.goodput, run.incidents, run.notice, run.worker_exits) == (None, (), None, ())


def test_the_custom_resource_has_the_goodput_in_few_words_and_the_notice() -> None:
    body = codec.status_body(WHOLE, STATUS, (), NOW)
    assert body["goodput"] == {"percent": "65.0", "lost": "starting 30 s"}
    assert body["notice"] == {
        "number": 6,
        "kind": "scale",
        "since": "1970-01-01T00:16:39Z",
        "until": "1970-01-01T00:16:50Z",
        "reason": "scaled",
        "target": 3,
        "step": 50,
    }
    silent = replace(STATUS, ledger=Ledger(unattributed=50 * SECOND, queued=50 * SECOND), ranks=(), notice=None)
    assert codec.status_body(WHOLE, silent, (), NOW)["goodput"] == {"percent": "0.0-50.0", "lost": "queued 50 s"}
    assert codec.status_body(WHOLE, silent, (), NOW)["notice"] is None, "a patch with null removes it"
    new = DeploymentStatus(created_at=NOW)
    assert codec.status_body(WHOLE, new, (), NOW)["goodput"] is None
