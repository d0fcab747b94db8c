"""Workers of torchrun agents: each failure is told once, with the right one to blame, and loops have a name."""

from dataclasses import replace

from basilica.core.incidents import IncidentKind
from basilica.core.seen import SeenAgent, SeenRank, SeenWorkerExit, Stalled
from basilica.core.world import EXITED_EARLY

from .story import CREATED, Story, done, messages, spec_of, up


def exit_of(number: int, worker: int = 0, code: int = 1, at: float = CREATED + 1, **facts: object) -> SeenWorkerExit:
    known = {"round": 1, "torch_rank": worker, "pid": 70 + worker, "reason": "Error" if code else "Completed", **facts}
    return SeenWorkerExit(number=number, worker=worker, exit_code=code, at=at, **known)  # type: ignore[arg-type]


def agent(rank: int, *exits: SeenWorkerExit, round: int = 1, pid: int = 7) -> SeenRank:
    """An agent of two workers that has started its workers."""
    of = SeenAgent(
        pid=pid,
        nproc=2,
        round=round,
        group_rank=rank,
        world=4,
        first_torch_rank=2 * rank,
        pids=(71, 72),
        meeting_since=CREATED,
        executing_since=CREATED + round,
        exits=exits,
    )
    return replace(up(rank), agent=of)


def boom(number: int, worker: int = 1, **facts: object) -> SeenWorkerExit:
    return exit_of(number, worker, message="RuntimeError: boom", **facts)  # type: ignore[arg-type]


def test_a_worker_that_fails_is_an_event_once() -> None:
    story = Story(spec_of(2, 2, 2))
    story.all_up()
    story.look(agent(0), agent(1))
    plan = story.look(agent(0, boom(3)), agent(1), after=1)
    text = "worker 1 of rank 0 (torch rank 1) exited with code 1 (RuntimeError: boom)"
    assert messages(plan, "WorkerFailed") == [text]
    assert plan.events[0].warning
    again = story.look(agent(0, boom(3)), agent(1), after=1)
    assert not again.events
    incident = story.status.incidents[-1]
    assert (incident.kind, incident.rank, incident.worker, incident.torch_rank) == (IncidentKind.FAILURE, 0, 1, 1)
    assert (incident.what, incident.exit_code, incident.failures) == (text, 1, 1)


def test_a_killed_worker_has_its_signal_and_the_rank_names_it() -> None:
    story = Story(spec_of(2, 2, 2, max_restarts=1))
    story.all_up()
    killed = exit_of(3, 1, 137, signal="SIGKILL", reason="OOMKilled")
    ended = replace(done(0, 1), agent=agent(0, killed).agent)
    plan = story.look(ended, agent(1), after=1)
    worker = "worker 1 of rank 0 (torch rank 1) was killed for memory (exit code 137, OOMKilled)"
    assert messages(plan, "WorkerFailed") == [worker]
    assert messages(plan, "RankFailed") == [f"rank 0 exited with code 1, since {worker}"]
    assert story.status.incidents[-1].reason == "OOMKilled"
    assert len(story.status.incidents) == 1


def test_an_echo_is_recorded_and_the_cause_is_blamed() -> None:
    story = Story(spec_of(2, 2, 2, max_restarts=1))
    story.all_up()
    echo = exit_of(3, 0, at=CREATED + 1.0, echo=True, message="ConnectionError: peer is gone", torch_rank=2)
    story.look(agent(0), agent(1, echo), after=1)
    assert story.status.incidents[-1].rank == 1, "it is all that is known so far"
    story.look(agent(0, boom(3, at=CREATED + 0.98)), agent(1, echo), after=0.1)
    incident = story.status.incidents[-1]
    assert (len(story.status.incidents), incident.rank, incident.worker) == (1, 0, 1)


def test_a_worker_that_exits_0_early_is_blamed_for_the_echoes_of_its_peers() -> None:
    story = Story(spec_of(2, 2, 2))
    story.all_up()
    early = exit_of(3, 1, 0, at=CREATED + 1)
    assert not story.look(agent(0, early), agent(1), after=1).events, "it may be the first of all to be done"
    echo = exit_of(4, 0, at=CREATED + 1.2, echo=True)
    plan = story.look(agent(0, early, echo), agent(1), after=0.3)
    blamed = "worker 1 of rank 0 (torch rank 1) exited with code 0 before its peers were done, which then failed"
    assert blamed in messages(plan, "WorkerFailed")
    incident = story.status.incidents[-1]
    assert (incident.rank, incident.worker, incident.reason) == (0, 1, EXITED_EARLY)


def test_a_worker_that_is_done_alone_is_told_of_and_blamed_for_nothing() -> None:
    story = Story(spec_of(2, 2, 2))
    story.all_up()
    early = exit_of(3, 1, 0, at=CREATED + 1)
    story.look(agent(0, early), agent(1), after=1)
    assert story.plan.wake_at == CREATED + 2
    plan = story.look(agent(0, early), agent(1), after=1)
    assert messages(plan, "WorkerDone") == [
        "worker 1 of rank 0 (torch rank 1) has exited with code 0; the others go on"
    ]
    assert not story.look(agent(0, early), agent(1), after=1).events
    assert not story.status.incidents


def test_workers_that_end_together_are_no_incident() -> None:
    story = Story(spec_of(2, 2, 2))
    story.all_up()
    both = (exit_of(3, 0, 0, at=CREATED + 1), exit_of(4, 1, 0, at=CREATED + 1.1))
    story.look(agent(0, *both), agent(1, both[0]), after=1.2)
    plan = story.look(
        replace(done(0), agent=agent(0, *both).agent), replace(done(1), agent=agent(1, *both).agent), after=1
    )
    assert [event.reason for event in plan.events] == ["Succeeded"]
    assert not story.status.incidents


def test_a_crash_loop_is_named() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.look(agent(0))
    exits: list[SeenWorkerExit] = []
    for number in range(5):
        exits.append(boom(3 * number + 1, at=story.now + 9))
        story.look(agent(0, *exits[-3:], round=number + 2), after=10)
    assert story.why.endswith("worker 1 of rank 0 has failed 5 times in 40 s: RuntimeError: boom")
    story.now += 61
    assert "has failed" not in story.why


def test_a_second_agent_of_one_attempt_counts_its_events_anew() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.look(agent(0, boom(9)), after=1)
    plan = story.look(agent(0, boom(2), pid=8), after=1)
    assert len(messages(plan, "WorkerFailed")) == 1


def test_an_incident_is_over_when_all_work_again_and_has_cost_the_time_between() -> None:
    story = Story(spec_of(2, 2, 2, max_restarts=1))
    story.all_up()
    story.look(up(0), done(1, 1), after=10)
    assert story.status.incidents[-1].is_open
    story.look(up(0), after=1)
    story.look(up(0), up(1, 1, since=CREATED + 13), after=2)
    incident = story.status.incidents[-1]
    assert (incident.at, incident.over_at) == (CREATED + 10, CREATED + 13)
    assert incident.cost == 3_000_000, "rank 1 was away for 3 s; what rank 0 did meanwhile is not known"


def test_a_stall_is_an_incident_until_the_rank_reports_again() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.look(replace(up(0), stalled=Stalled(since=CREATED + 1, usual_step_seconds=0.1)), after=7)
    assert story.status.incidents[-1].kind is IncidentKind.STALL
    story.look(up(0), after=3)
    assert story.status.incidents[-1].cost == 9_000_000


def test_the_end_of_a_run_ends_its_incident() -> None:
    story = Story(spec_of(2, 2, 2))
    story.all_up()
    story.look(up(0), done(1, 1), after=10)
    assert story.status.incidents[-1].over_at == story.status.terminal_at


def test_the_message_of_a_failed_run_names_the_worker() -> None:
    story = Story(spec_of(2, 2, 2))
    story.all_up()
    killed = exit_of(3, 1, 137, signal="SIGKILL", reason="SIGKILL")
    story.look(replace(done(0, 1), agent=agent(0, killed).agent), agent(1), after=1)
    assert story.status.message.startswith(
        "worker 1 of rank 0 (torch rank 1) was ended by SIGKILL (exit code 137); 1 of 2 ranks could still succeed"
    )
