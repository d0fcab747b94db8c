"""The ledger: every second of every wanted rank has one cause, by the times of the facts themselves."""

from dataclasses import replace

import pytest

from basilica.core import goodput
from basilica.core.accounts import goodput_of
from basilica.core.goodput import Cause, Ledger, Segment
from basilica.core.seen import SeenAgent, SeenProgress, SeenRank, Stalled
from basilica.core.status import DeploymentStatus
from basilica.core.world import Steps

from .story import CREATED, Story, done, queued, spec_of, starting, up


def steps(first: int, last: int, *, since: float, at: float, every: float | None = 0.1) -> SeenProgress:
    return SeenProgress(first_at=since, first_step=first, at=at, step=last, step_seconds=every)


def reporting(rank: int, progress: SeenProgress, attempt: int = 0, **facts: object) -> SeenRank:
    return replace(up(rank, attempt), progress=progress, **facts)  # type: ignore[arg-type]


def agent(rank: int, *, meeting: float, executing: float | None = None, round: int = 1, **facts: object) -> SeenRank:
    of = SeenAgent(pid=7, nproc=2, round=round, meeting_since=meeting, executing_since=executing)
    return replace(up(rank), agent=of, **facts)  # type: ignore[arg-type]


def amounts(story: Story) -> dict[str, float]:
    """The seconds of each cause that has any, up to the time of the story."""
    seconds = goodput_of(story.spec, story.status, story.now).seconds
    return {cause.value: round(amount, 6) for cause, amount in seconds.items() if amount}


def total(status: DeploymentStatus, now: float) -> int:
    return sum(goodput.totals(status.ledger, [r.segment for r in status.ranks if r.segment is not None], now).values())


def test_each_second_has_one_cause_from_the_queue_to_the_end() -> None:
    story = Story(spec_of(1, 1, 1))
    story.look()
    story.look(queued(0), after=2)
    story.look(starting(0), after=3)
    story.look(up(0, since=CREATED + 6), after=2)
    trains = steps(1, 5, since=CREATED + 10, at=CREATED + 12)
    story.look(reporting(0, trains), after=5)
    assert amounts(story) == {"queued": 3, "starting": 7, "training": 2}
    story.look(done(0), after=8)
    assert amounts(story) == {"queued": 3, "starting": 7, "training": 10}
    story.now += 100
    assert amounts(story) == {"queued": 3, "starting": 7, "training": 10}, "a run that is over costs nothing more"


def test_a_program_that_reports_nothing_is_unattributed_and_never_guessed() -> None:
    story = Story(spec_of(1, 2, 2))
    story.all_up()
    story.now += 60
    assert amounts(story) == {"unattributed": 120}
    shares = goodput_of(story.spec, story.status, story.now)
    assert (shares.least, shares.most) == (0.0, 1.0)


def test_the_first_report_names_the_time_before_it() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.now += 4
    assert amounts(story) == {"unattributed": 4}
    story.look(reporting(0, steps(1, 1, since=CREATED + 3, at=CREATED + 3)))
    assert amounts(story) == {"starting": 3, "training": 1}


def test_steps_that_were_taken_before_are_recomputed() -> None:
    story = Story(spec_of(1, 1, 1, max_restarts=1))
    story.all_up()
    story.look(reporting(0, steps(1, 60, since=CREATED + 1, at=CREATED + 7)), after=7)
    story.look(replace(done(0, 1), progress=steps(1, 62, since=CREATED + 1, at=CREATED + 8)), after=1)
    story.look(after=1)
    story.look(up(0, 1, since=CREATED + 10), after=1)
    again = steps(41, 41, since=CREATED + 12, at=CREATED + 12)
    story.look(reporting(0, again, 1), after=2)
    assert story.plan.wake_at == pytest.approx(CREATED + 12 + 22 * 0.1), "it looks again when the rank has caught up"
    story.look(reporting(0, steps(41, 71, since=CREATED + 12, at=CREATED + 15), 1), after=3)
    assert story.status.ledger.steps_recomputed == 62 - 41 + 1
    found = amounts(story)
    assert found["recomputing"] == pytest.approx(15 - 8 * 0.1 - 12), "step 63, the first new one, came 8 steps ago"
    assert found["degraded"] == 1
    assert sum(found.values()) == 15


def test_a_process_that_dies_before_it_has_caught_up_has_recomputed_what_it_took() -> None:
    story = Story(spec_of(1, 1, 1, max_restarts=3))
    story.all_up()
    story.look(replace(done(0, 1), progress=steps(1, 50, since=CREATED + 1, at=CREATED + 5)), after=5)
    story.look(after=1)
    story.look(replace(done(0, 1, 1), progress=steps(41, 44, since=CREATED + 7, at=CREATED + 8)), after=2)
    assert story.status.ledger.steps_recomputed == 4
    story.look(after=4)
    story.look(reporting(0, steps(41, 41, since=story.now, at=story.now), 2), after=1)
    assert story.rank(0).steps is not None
    assert story.rank(0).steps.repeat_to == 50  # type: ignore[union-attr]


def test_ranks_that_begin_together_repeat_nothing_though_one_is_seen_to_report_first() -> None:
    story = Story(spec_of(1, 3, 3))
    story.all_up()
    ahead = steps(1, 13, since=CREATED + 1, at=CREATED + 2.2)
    story.look(reporting(0, ahead), up(1), up(2), after=3)
    later = steps(1, 21, since=CREATED + 1, at=CREATED + 3)
    beside = steps(1, 20, since=CREATED + 1.05, at=CREATED + 3)
    before = steps(1, 21, since=CREATED + 0.9, at=CREATED + 3)
    story.look(reporting(0, later), reporting(1, beside), reporting(2, before), after=1)
    assert story.status.ledger.steps_recomputed == 0
    assert [r.steps.repeat_to for r in story.status.ranks if r.steps is not None] == [None, None, None]
    assert "recomputing" not in amounts(story)


def test_a_rank_that_joins_later_with_an_older_checkpoint_repeats_steps_of_the_others() -> None:
    story = Story(spec_of(1, 2, 2))
    story.all_up()
    story.look(reporting(0, steps(1, 101, since=CREATED + 1, at=CREATED + 11)), up(1), after=12)
    joined = steps(41, 42, since=CREATED + 11.5, at=CREATED + 11.6)
    story.look(reporting(0, steps(1, 101, since=CREATED + 1, at=CREATED + 11)), reporting(1, joined), after=1)
    assert story.rank(1).steps is not None
    assert story.rank(1).steps.repeat_to == 101  # type: ignore[union-attr]


def test_another_worker_of_the_same_start_repeats_nothing() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    second = steps(1, 13, since=CREATED + 3, at=CREATED + 4.2)
    story.look(agent(0, meeting=CREATED + 1, executing=CREATED + 2, progress=second), after=5)
    first = steps(1, 20, since=CREATED + 3.1, at=CREATED + 5)
    story.look(agent(0, meeting=CREATED + 1, executing=CREATED + 2, progress=first), after=1)
    story.look(agent(0, meeting=CREATED + 6.5, progress=second), after=1)  # both have died, and either may be shown
    assert story.status.ledger.steps_recomputed == 0
    again = steps(11, 26, since=CREATED + 9, at=CREATED + 10.5)
    story.look(agent(0, meeting=CREATED + 6.5, executing=CREATED + 8, round=2, progress=again), after=4)
    assert story.status.ledger.steps_recomputed == 20 - 11 + 1


@pytest.mark.parametrize(
    ("known", "moment", "reached"),
    [
        (Steps(reached=9), 5.0, 9),  # of an earlier attempt
        (Steps(reached=21, process_at=10.0, first=1, step=21, at=20.0), 9.0, 0),
        (Steps(reached=21, process_at=10.0, first=1, step=21, at=20.0), 10.4, 0),
        (Steps(reached=21, process_at=10.0, first=1, step=21, at=20.0), 15.0, 10),
        (Steps(reached=21, process_at=10.0, first=1, step=21, at=20.0), 21.0, 21),
        (Steps(reached=50, process_at=10.0, first=41, step=41, at=10.0, repeat_to=50), 10.1, 50),
        (Steps(reached=1, process_at=10.0, first=1, step=1, at=10.0), 10.05, 0),  # one report has no pace
    ],
)
def test_the_step_that_had_been_reached_by_a_moment(known: Steps, moment: float, reached: int) -> None:
    assert known.reached_before(moment) == reached


def test_an_agent_meets_and_its_workers_start() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.look(agent(0, meeting=CREATED + 2, round=0), after=3)
    assert amounts(story) == {"starting": 2, "rendezvous": 1}
    story.look(agent(0, meeting=CREATED + 2, executing=CREATED + 4), after=2)
    assert amounts(story) == {"starting": 2, "rendezvous": 2, "unattributed": 1}
    trains = steps(1, 1, since=CREATED + 6, at=CREATED + 6)
    story.look(agent(0, meeting=CREATED + 2, executing=CREATED + 4, progress=trains), after=2)
    assert amounts(story) == {"starting": 4, "rendezvous": 2, "training": 1}


def test_workers_that_are_started_again_between_two_looks_are_booked_by_their_own_times() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    first = steps(1, 1, since=CREATED + 2, at=CREATED + 2)
    story.look(agent(0, meeting=CREATED, executing=CREATED + 1, progress=first), after=2)
    second = steps(2, 2, since=CREATED + 9, at=CREATED + 9)
    story.look(agent(0, meeting=CREATED + 5, executing=CREATED + 6, round=2, progress=second), after=8)
    assert amounts(story) == {"rendezvous": 2, "starting": 4, "training": 4}


def test_a_stall_counts_from_the_last_report() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    trains = steps(1, 9, since=CREATED + 1, at=CREATED + 4)
    story.look(reporting(0, trains), after=4)
    silent = Stalled(since=CREATED + 4, usual_step_seconds=0.1)
    story.look(reporting(0, trains, stalled=silent), after=6)
    assert amounts(story) == {"starting": 1, "training": 3, "stalled": 6}
    story.look(reporting(0, replace(trains, step=10, at=CREATED + 12)), after=2)
    assert amounts(story) == {"starting": 1, "training": 3, "stalled": 8}


def test_ranks_that_report_nothing_share_the_cause_of_the_one_that_does() -> None:
    story = Story(spec_of(1, 3, 3))
    story.all_up()
    trains = steps(1, 1, since=CREATED + 2, at=CREATED + 2)
    story.look(reporting(0, trains), up(1), up(2), after=2)
    story.now += 3
    assert amounts(story) == {"starting": 6, "training": 9}
    silent = Stalled(since=CREATED + 4, usual_step_seconds=0.1)
    story.look(reporting(0, trains, stalled=silent), up(1), up(2), after=7)
    assert amounts(story) == {"starting": 6, "training": 6, "stalled": 24}


def test_a_lost_rank_is_the_missing_part_of_the_world() -> None:
    story = Story(spec_of(1, 2, 2))
    story.all_up()
    story.look(up(0), done(1, 1, at=CREATED + 3), after=4)
    story.now += 6
    assert amounts(story) == {"unattributed": 13, "degraded": 7}


def test_a_rank_that_succeeded_earlier_than_the_others_is_finished() -> None:
    story = Story(spec_of(2, 2, 2))
    story.all_up()
    story.look(done(0, at=CREATED + 3), up(1), after=3)
    story.look(done(0, at=CREATED + 3), done(1), after=5)
    assert amounts(story) == {"unattributed": 11, "finished": 5}


def test_a_resize_opens_and_closes_places_at_the_moment_of_the_change() -> None:
    story = Story(spec_of(1, 2, 4))
    story.all_up()
    story.scale(3)
    story.look(up(0), up(1), after=10)
    story.scale(1)
    story.look(up(0), up(1), starting(2), after=10)
    story.now += 5
    assert total(story.status, story.now) == (2 * 10 + 3 * 10 + 1 * 5) * 1_000_000


def test_an_open_segment_is_renamed_and_a_closed_one_never() -> None:
    segment = Segment(Cause.UNATTRIBUTED, 5.0, resolvable=True)
    assert goodput.resolve(segment, Cause.STARTING) == Segment(Cause.STARTING, 5.0)
    ledger, after = goodput.enter(Ledger(), segment, Cause.TRAINING, 3.0)
    assert (ledger, after) == (Ledger(), Segment(Cause.TRAINING, 5.0)), "no segment ends before it began"
    assert goodput.enter(Ledger(), replace(segment, resolvable=False), Cause.TRAINING, 7.5)[0].unattributed == 2_500_000
