"""What agents publish of their ranks' programs: parsed once, kept as long as it is shown, and who is woken by it."""

from dataclasses import replace

import pytest

from basilica.core.seen import AnswerState, Leaving, SeenAgent, SeenAnswer, SeenProgress, SeenWorkerExit, Sight
from basilica.progress.activity import Activity
from basilica.progress.published import PublishedActivity, encode, parse
from basilica.rendezvous.orders import AttemptRecord
from basilica.runtimes.kubernetes import activities as module
from basilica.runtimes.kubernetes.activities import Activities
from basilica.runtimes.kubernetes.parse import Gang, PodFacts
from basilica.runtimes.kubernetes.wakes import ActivityTally, Tally
from basilica.runtimes.rules import ENDED_ATTEMPTS_SHOWN

PROGRESS = SeenProgress(first_at=10.0, first_step=0, at=11.0, step=3, step_seconds=0.5)
LEAVING = Leaving(kind="preemption", until=40.0, reason="drained")
FAILED = SeenWorkerExit(number=1, worker=0, torch_rank=0, pid=7, exit_code=1, reason="Error", at=12.0)


def published(attempt: int = 0, leaving: Leaving | None = None, **parts: object) -> PublishedActivity:
    return PublishedActivity(attempt=attempt, activity=Activity(**parts), leaving=leaving)  # type: ignore[arg-type]


def answer(state: str, number: int = 0) -> SeenAnswer:
    return SeenAnswer(state=AnswerState(state), number=number, at=12.0)


def take(known: Activities, found: PublishedActivity, rank: object = 0) -> bool:
    return known.take(f"/basilica/activity/{rank}", encode(found))


BEFORE = published(progress=PROGRESS, answer=answer("listening"))


@pytest.mark.parametrize(
    ("after", "fresh", "wakes"),
    [
        (BEFORE, False, False),
        (published(progress=replace(PROGRESS, step=9, at=14.0), answer=answer("listening")), False, False),
        (published(progress=replace(PROGRESS, step=9, at=14.0), answer=answer("listening")), True, True),
        (published(progress=replace(PROGRESS, first_at=13.0), answer=answer("listening")), False, True),
        (published(progress=PROGRESS, answer=answer("ready", 1)), False, True),
        (published(progress=PROGRESS, answer=answer("listening"), leaving=LEAVING), False, True),
        (published(progress=PROGRESS, answer=answer("listening"), agent=SeenAgent(pid=5, nproc=1)), False, True),
        (published(attempt=1), False, True),
    ],
)
def test_the_controller_is_woken_by_what_it_decides_on(after: PublishedActivity, fresh: bool, wakes: bool) -> None:
    known = Activities()
    assert take(known, BEFORE)
    known.fresh_steps = frozenset({0}) if fresh else frozenset({1})
    assert take(known, after) is wakes
    assert known.by_attempt[0, after.attempt] == after


@pytest.mark.parametrize("rank", ["x", "-1", "1/2", "", "٣", "9" * 30])
def test_what_names_no_rank_is_left_alone(rank: str) -> None:
    known = Activities()
    assert not take(known, BEFORE, rank)
    assert known.by_attempt == {}


@pytest.mark.parametrize("text", ["", "no activity", '{"attempt": -3}'])
def test_what_was_known_stays_true_without_its_key(text: str) -> None:
    known = Activities()
    take(known, BEFORE)
    assert not known.take("/basilica/activity/0", text)
    assert known.by_attempt == {(0, 0): BEFORE}


def test_a_keyspace_that_is_read_anew_is_parsed_where_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Activities()
    values = {f"/basilica/activity/{rank}": encode(published(answer=answer("listening"))) for rank in range(8)}
    known.reload(values)
    parsed: list[str] = []

    def counting(text: str) -> PublishedActivity | None:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(module, "parse", counting)
    known.reload({**values, "/basilica/activity/3": encode(published(answer=answer("ready", 1))), "/basilica/x": "y"})
    assert len(parsed) == 1
    assert known.by_attempt[3, 0].activity.answer == answer("ready", 1)


def test_attempts_are_kept_as_long_as_they_are_shown() -> None:
    known = Activities()
    for attempt in range(50):
        take(known, published(attempt, progress=PROGRESS))
    assert sorted(known.by_attempt) == [(0, attempt) for attempt in range(49 - ENDED_ATTEMPTS_SHOWN, 50)]


def test_a_look_shows_what_the_program_does() -> None:
    agent = SeenAgent(pid=5, nproc=1, round=2)
    pod = PodFacts(name="p", uid="u", rank=0, created="", node="n", phase="Running", state="running")
    found = published(1, LEAVING, agent=agent, progress=PROGRESS, answer=answer("ready", 1))
    records = {(0, attempt): AttemptRecord(pod="u", node="n", started_at=5.0) for attempt in (0, 1)}
    gang = Gang(orders={}, records=records, pods=(pod,), activities={(0, 1): found})
    earlier, seen = gang.see(20.0)
    assert (seen.agent, seen.progress, seen.answer, seen.leaving) == (agent, PROGRESS, answer("ready", 1), LEAVING)
    assert (earlier.agent, earlier.progress, earlier.answer, earlier.leaving) == (None, None, None, None)
    assert seen.sight is Sight.RUNNING


# ---- what does not wait ----------------------------------------------------------------------------------------------

ONE_READY = ActivityTally(notice=1, listening=2, unready=1)


@pytest.mark.parametrize(
    ("before", "after", "turned"),
    [
        (ONE_READY, ONE_READY, False),
        (ONE_READY, replace(ONE_READY, unready=0), True),
        (replace(ONE_READY, unready=0), replace(ONE_READY, unready=0), False),
        (replace(ONE_READY, unready=0), replace(ONE_READY, unready=0, notice=2), True),
        (ActivityTally(listening=2, unready=2), ActivityTally(listening=2, unready=0), False),
        (ONE_READY, replace(ONE_READY, late=1), True),
        (ONE_READY, replace(ONE_READY, leaving=1), True),
        (replace(ONE_READY, leaving=1), ONE_READY, False),
        (ONE_READY, replace(ONE_READY, worker_failures=1), True),
        (replace(ONE_READY, worker_failures=1), replace(ONE_READY, worker_failures=2), False),
    ],
)
def test_what_somebody_waits_for_does_not_wait(before: ActivityTally, after: ActivityTally, turned: bool) -> None:
    assert Tally(activity=after).turned_since(Tally(activity=before)) is turned


def test_the_counts_are_those_of_live_ranks() -> None:
    known = Activities()
    failing = SeenAgent(pid=5, nproc=1, exits=(FAILED, replace(FAILED, number=2, exit_code=0)))
    take(known, published(answer=answer("ready", 3)), 0)
    take(known, published(answer=answer("ready", 2)), 1)
    take(known, published(answer=answer("late", 3), agent=failing), 2)
    take(known, published(answer=answer("listening"), leaving=LEAVING), 3)
    take(known, published(progress=PROGRESS), 4)
    take(known, published(answer=answer("listening"), leaving=LEAVING), 5)
    live = [(rank, 0) for rank in range(5)]
    counted = ActivityTally(notice=3, listening=4, unready=3, late=1, leaving=1, worker_failures=1)
    assert known.tally([*live, (9, 0)], 3) == counted
    assert Activities().tally(live, 3) == ActivityTally(notice=3)
