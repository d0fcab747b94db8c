"""Stories of torchrun agents: whose failure an exit is, and when the incident that it made is over."""

from dataclasses import replace

import pytest

from basilica.core.seen import SeenAgent, SeenProgress, SeenRank, SeenWorkerExit, Stalled

from .story import CREATED, Story, done, messages, spec_of, up

STARTED = CREATED + 1


def agent(rank: int, round: int = 1, *exits: SeenWorkerExit, since: float = STARTED) -> SeenAgent:
    pids = (10 * rank + 1, 10 * rank + 2)
    return SeenAgent(
        pid=rank + 5,
        nproc=2,
        round=round,
        world=4,
        first_torch_rank=2 * rank,
        pids=pids,
        exits=exits,
        meeting_since=since,
        executing_since=since,
    )


def fall(
    number: int, at: float, *, worker: int = 0, code: int = 1, echo: bool = False, round: int = 1
) -> SeenWorkerExit:
    message = "ConnectionResetError: a peer left" if echo else "RuntimeError: boom"
    return SeenWorkerExit(
        number=number,
        worker=worker,
        torch_rank=worker,
        pid=1,
        exit_code=code,
        reason="Error",
        at=at,
        round=round,
        echo=echo,
        message=message,
    )


def training(rank: int, seen: SeenAgent, first_at: float, step: int = 5) -> SeenRank:
    progress = SeenProgress(first_at=first_at, first_step=1, at=first_at + 1, step=step, step_seconds=0.05)
    return replace(up(rank), agent=seen, progress=progress)


@pytest.fixture
def story() -> Story:
    """Two ranks with an agent each, whose workers train."""
    story = Story(spec_of(1, 2, 2, max_restarts=3))
    story.look()
    story.look(*(training(n, agent(n), STARTED + 1) for n in (0, 1)), after=5)
    assert story.status.was_ready
    return story


def test_an_incident_is_not_over_before_the_agent_has_started_its_workers_again(story: Story) -> None:
    """For a moment the agent goes on as if all were well, and its rank with it."""
    fell = fall(3, story.now)
    story.look(training(0, agent(0, 1, fell), STARTED + 1), training(1, agent(1), STARTED + 1))
    assert [each.is_open for each in story.status.incidents] == [True]
    echo = fall(3, story.now, echo=True)
    story.look(training(0, agent(0, 1, fell), STARTED + 1), training(1, agent(1, 1, echo), STARTED + 1), after=0.1)
    assert [each.failures for each in story.status.incidents] == [2]
    again = story.now + 1
    ranks = (
        training(0, agent(0, 2, fell, since=again), again + 1, step=6),
        training(1, agent(1, 2, echo, since=again), again + 1, step=6),
    )
    story.look(*ranks, after=4)
    (incident,) = story.status.incidents
    assert (incident.is_open, incident.rank, incident.worker) == (False, 0, 0)


def test_an_agent_that_is_killed_is_not_ended_by_a_worker_that_failed_long_before(story: Story) -> None:
    old = fall(3, story.now, echo=True)
    story.look(training(0, agent(0, 1, old), STARTED + 1), training(1, agent(1), STARTED + 1))
    again = story.now + 1
    story.look(*(training(n, agent(n, 2, since=again), again + 1, step=6) for n in (0, 1)), after=4)
    killed = done(0, 137, signal="SIGKILL", reason="SIGKILL")
    story.look(replace(killed, agent=agent(0, 2, old, since=again)), training(1, agent(1, 2, since=again), again + 1))
    assert "rank 0 was ended by SIGKILL (exit code 137)" in messages(story.plan, "RankFailed")


def test_an_agent_that_is_killed_is_not_ended_by_a_worker_that_fell_just_before(story: Story) -> None:
    fell = fall(3, story.now, echo=True)
    killed = replace(done(0, 137, signal="SIGKILL", reason="SIGKILL"), agent=agent(0, 1, fell))
    story.look(killed, training(1, agent(1), STARTED + 1))
    assert "rank 0 was ended by SIGKILL (exit code 137)" in messages(story.plan, "RankFailed")


def test_an_agent_that_exits_names_the_worker_of_its_last_round(story: Story) -> None:
    old, new = fall(3, story.now, code=3), fall(6, story.now + 4, worker=1, round=2)
    story.look(training(0, agent(0, 1, old), STARTED + 1), training(1, agent(1), STARTED + 1))
    again = story.now + 1
    story.look(*(training(n, agent(n, 2, since=again), again + 1, step=6) for n in (0, 1)), after=3)
    ended = replace(done(0, 1), agent=agent(0, 2, old, new, since=again))
    story.look(ended, training(1, agent(1, 2, since=again), again + 1), after=1)
    cause = "worker 1 of rank 0 (torch rank 1) exited with code 1 (RuntimeError: boom)"
    assert f"rank 0 exited with code 1, since {cause}" in messages(story.plan, "RankFailed")


def test_a_failure_that_is_known_later_than_its_echo_is_the_culprit(story: Story) -> None:
    """A process that exits closes its connections some time before it has ended."""
    echo, own = fall(3, story.now, echo=True), fall(3, story.now + 0.4, worker=1, code=3)
    story.look(training(0, agent(0, 1, echo), STARTED + 1), training(1, agent(1), STARTED + 1), after=0.1)
    assert [(each.rank, each.exit_code) for each in story.status.incidents] == [(0, 1)]
    story.look(training(0, agent(0, 1, echo), STARTED + 1), training(1, agent(1, 1, own), STARTED + 1), after=0.5)
    assert [(each.rank, each.worker, each.exit_code) for each in story.status.incidents] == [(1, 1, 3)]


def test_an_early_exit_that_is_known_later_than_its_echo_is_the_culprit(story: Story) -> None:
    echo, own = fall(3, story.now, echo=True), fall(3, story.now + 0.4, worker=1, code=0)
    story.look(training(0, agent(0, 1, echo), STARTED + 1), training(1, agent(1), STARTED + 1), after=0.1)
    ranks = (training(0, agent(0, 1, echo), STARTED + 1), training(1, agent(1, 1, own), STARTED + 1))
    for _ in range(3):
        story.look(*ranks, after=0.5)
    assert [(each.rank, each.worker, each.reason) for each in story.status.incidents] == [(1, 1, "ExitedEarly")]
    assert story.told.count("WorkerFailed") == 2


def test_a_rank_that_begins_again_starts_until_it_reports_whatever_the_others_do(story: Story) -> None:
    other = training(1, agent(1), STARTED + 1)
    story.look(done(0, 1), other)
    restarted = replace(up(0, 1, since=story.now + 2), agent=None, progress=None)
    story.look(other, after=1.5)
    story.look(restarted, other, after=1)
    assert story.rank(0).segment is not None
    assert [each.is_open for each in story.status.incidents] == [True]
    first_at = story.now + 3
    progress = SeenProgress(first_at=first_at, first_step=4, at=first_at + 0.5, step=8, step_seconds=0.1)
    story.look(replace(restarted, progress=progress), other, after=4)
    (incident,) = story.status.incidents
    assert (incident.is_open, incident.steps_recomputed) == (False, 2)
    assert story.status.ledger.starting > 3_000_000


def test_an_agent_whose_workers_are_done_has_finished_though_it_takes_time_to_end(story: Story) -> None:
    ends = [fall(3 + n, story.now, worker=n, code=0) for n in (0, 1)]
    ending = replace(agent(0, 1, *ends), meeting_since=story.now + 1, executing_since=None)
    story.look(training(0, ending, STARTED + 1), training(1, agent(1), STARTED + 1), after=3)
    segment = story.rank(0).segment
    assert segment is not None
    assert (segment.cause, segment.since) == ("finished", story.now - 3)


def test_ranks_that_begin_together_repeat_no_steps_of_each_other() -> None:
    story = Story(spec_of(1, 2, 2))
    story.look()
    story.look(training(0, agent(0), STARTED + 1), replace(up(1), agent=agent(1)), after=5)
    story.look(training(0, agent(0), STARTED + 1), training(1, agent(1), STARTED + 3), after=1)
    assert story.status.ledger.steps_recomputed == 0


def test_an_early_exit_of_a_round_that_is_over_keeps_no_incident_open(story: Story) -> None:
    """The agents had started their workers again before the look that showed the exit."""
    at, again = story.now, story.now + 1
    early, echo = fall(3, at, worker=1, code=0), fall(3, at, echo=True)
    ranks = (
        training(0, agent(0, 2, early, since=again), again + 1, step=6),
        training(1, agent(1, 2, echo, since=again), again + 1, step=6),
    )
    for _ in range(3):
        story.look(*ranks, after=4)
    (incident,) = story.status.incidents
    assert (incident.is_open, incident.rank, incident.worker, incident.reason) == (False, 0, 1, "ExitedEarly")
    assert "WorkerDone" not in story.told


def test_a_silence_that_began_before_the_look_that_showed_the_rank_at_work_is_a_stall_since_then(story: Story) -> None:
    def silent(since: float | None) -> SeenRank:
        stalled = None if since is None else Stalled(since=since, usual_step_seconds=0.1)
        return replace(training(1, agent(1), STARTED + 1), stalled=stalled)

    other = training(0, agent(0), STARTED + 1)
    story.look(other, silent(story.now), after=6)
    story.look(other, silent(None), after=1)
    resumed = story.now
    story.look(other, silent(resumed - 0.01), after=6)
    segment = story.rank(1).segment
    assert segment is not None
    assert (segment.cause, segment.since) == ("stalled", resumed)


def test_the_incident_of_a_stall_names_the_rank_that_fell_silent_first(story: Story) -> None:
    silent = Stalled(since=story.now - 1, usual_step_seconds=0.1)
    first = replace(training(1, agent(1), STARTED + 1), stalled=silent)
    story.look(training(0, agent(0), STARTED + 1), first, after=5)
    (incident,) = story.status.incidents
    assert (incident.kind, incident.rank) == ("stall", 1)


def test_processes_of_a_rank_that_stall_and_go_on_one_after_the_other_are_one_stall(story: Story) -> None:
    def silent(since: float | None) -> list[SeenRank]:
        stalled = None if since is None else Stalled(since=since, usual_step_seconds=0.1, stack=f"of {since}")
        ranks = [training(n, agent(n), STARTED + 1) for n in (0, 1)]
        return [ranks[0], replace(ranks[1], stalled=stalled)]

    at = story.now
    for since in (at + 0.05, at, at + 0.05):
        story.look(*silent(since), after=6 if since == at + 0.05 else 0.1)
    story.look(*silent(None), after=0.1)
    assert story.told.count("RankStalled") == 1
    assert [each.at for each in story.status.incidents] == [at + 0.05]
    story.look(*silent(story.now + 1), after=8)
    assert story.told.count("RankStalled") == 2
