"""A rank that falls silent: how it is told, how it is taken back, and what is done about it if somebody asked."""

from dataclasses import replace

import pytest

from basilica.core import stalls
from basilica.core.phase import Phase, RankPhase
from basilica.core.policy import LOST_AFTER
from basilica.core.seen import SeenRank, Stalled

from .story import CREATED, Story, done, messages, spec_of, stopped, up


def silent(rank: int, attempt: int = 0, *, since: float = CREATED, **facts: str) -> SeenRank:
    return replace(up(rank, attempt), stalled=Stalled(since=since, usual_step_seconds=0.4, **facts))


@pytest.mark.parametrize(("usual", "seconds"), [(0.001, 5.0), (0.4, 5.0), (0.5, 5.0), (2.0, 20.0), (60.0, 600.0)])
def test_ten_times_the_usual_but_never_less_than_a_few_seconds(usual: float, seconds: float) -> None:
    assert stalls.limit(usual) == seconds


def test_a_stall_is_told_once_and_so_is_its_end() -> None:
    story = Story()
    story.all_up()
    plan = story.look(up(0), silent(1), after=10)
    text = "rank 1 has stopped reporting; it usually reports every 0.4 s"
    assert messages(plan, "RankStalled") == [text]
    assert plan.events[0].warning
    assert story.phase() is Phase.READY
    assert not plan.actions
    again = story.look(up(0), silent(1), after=10)
    assert (again.events, again.status) == ((), plan.status)
    assert messages(story.look(up(0), up(1)), "RankResumed") == ["rank 1 reports again"]
    assert story.rank(1).stalled is None


def test_ranks_that_fall_silent_together_are_one_event_with_the_first_named() -> None:
    story = Story(spec_of(1, 3, 4))
    story.all_up()
    plan = story.look(silent(0, since=CREATED + 2), up(1), silent(2, since=CREATED + 1), after=10)
    text = "ranks 0 and 2 have stopped reporting, rank 2 first; it usually reports every 0.4 s"
    assert messages(plan, "RankStalled") == [text]


def test_a_control_plane_that_comes_back_tells_nothing_twice_and_keeps_the_stack() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), silent(1, where="f (a.py:1)", stack="MainThread\n  f (a.py:1)"), after=10)
    plan = story.look(up(0), silent(1))  # found again, its stack not taken yet
    assert plan.events == ()
    known = story.rank(1).stalled
    assert known is not None
    assert known.stack == "MainThread\n  f (a.py:1)"


def test_a_stack_that_comes_later_is_kept() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), silent(1), after=10)
    plan = story.look(up(0), silent(1, where="f (a.py:1)", stack="MainThread"))
    assert plan.events == ()
    assert story.rank(1).stalled == Stalled(
        since=CREATED, usual_step_seconds=0.4, where="f (a.py:1)", stack="MainThread"
    )


def test_a_status_does_not_grow_with_the_stacks_of_all_ranks() -> None:
    story = Story(spec_of(1, 50, 50))
    story.all_up()
    story.look(*(silent(n, where="f (a.py:1)", stack="x" * 100) for n in range(50)), after=10)
    kept = [r for r in story.status.ranks if r.stalled is not None and r.stalled.stack]
    assert len(kept) == stalls.STACKS_KEPT
    assert all(r.stalled is not None and r.stalled.where for r in story.status.ranks)


def test_why_says_who_is_silent_and_where_its_main_thread_is() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), silent(1, where="all_reduce (train.py:12)"), after=12)
    assert story.why == (
        "2 of 2 ranks are up; rank 1 has reported nothing for over 10 s (usually every 0.4 s); "
        "its main thread is in all_reduce (train.py:12)"
    )


def test_why_shows_the_odd_one_out() -> None:
    story = Story(spec_of(1, 4, 4))
    story.all_up()
    waiting = [silent(n, since=CREATED + 1, where="all_reduce (train.py:12)") for n in (0, 1, 3)]
    story.look(*waiting, silent(2, where="read (data.py:3)"), after=400)
    assert story.why == (
        "4 of 4 ranks are up; ranks 0-3 have reported nothing for over 5 min (usually every 0.4 s): rank 2 fell silent "
        "first, its main thread is in read (data.py:3); ranks 0, 1 and 3 in all_reduce (train.py:12)"
    )


def test_a_rank_that_ends_is_not_said_to_report_again() -> None:
    story = Story(spec_of(1, 2, 2))
    story.all_up()
    story.look(up(0), silent(1), after=10)
    story.cancel()
    story.look(up(0), silent(1))
    story.look(stopped(0), stopped(1))
    assert "RankResumed" not in story.told
    assert story.settled()


# ---- restarts, where they are asked for ------------------------------------------------------------------------------


def restarting(target: int = 2, *, max_restarts: int = 1) -> Story:
    story = Story(spec_of(target, target, target, on_stall="restart", max_restarts=max_restarts))
    story.all_up()
    return story


def test_unless_asked_nothing_is_ever_stopped_for_a_stall() -> None:
    story = Story(spec_of(2, 2, 2, max_restarts=5))
    story.all_up()
    for _ in range(5):
        story.look(silent(0), silent(1), after=1000)
        assert story.plan.actions == ()


def test_the_rank_that_fell_silent_first_is_restarted_and_it_costs_a_restart() -> None:
    story = restarting()
    story.look(silent(0, since=CREATED + 1), silent(1), after=10)
    assert story.stopping == [(1, 0)]
    assert "waiting for rank 1, which had stalled, to stop, and then to start again" in story.why
    story.look(silent(0, since=CREATED + 1), stopped(1))
    assert story.told[-2:] == ["RankFailed", "RankRestarted"]
    assert messages(story.plan, "RankFailed") == ["rank 1 was stopped because it had stalled (exit code 143)"]
    assert story.rank(1).restarts == 1
    story.look(silent(0, since=CREATED + 1), after=1)
    assert story.launched == [(1, 1)]
    assert story.stopping == []


def test_the_others_have_their_time_again_from_when_the_world_is_whole() -> None:
    story = restarting()
    story.look(silent(0, since=CREATED + 1), silent(1), after=10)
    story.look(silent(0, since=CREATED + 1), stopped(1))
    story.look(silent(0, since=CREATED + 1), after=1)
    story.look(silent(0, since=CREATED + 1), up(1, 1), after=60)
    assert story.stopping == []
    assert story.plan.wake_at == story.now + stalls.limit(0.4)
    story.look(silent(0, since=CREATED + 1), up(1, 1), after=stalls.limit(0.4))
    assert story.stopping == [(0, 0)]


def test_one_that_goes_on_when_the_other_is_back_is_left_alone() -> None:
    story = restarting()
    story.look(silent(0, since=CREATED + 1), silent(1), after=10)
    story.look(silent(0, since=CREATED + 1), stopped(1))
    story.look(silent(0, since=CREATED + 1), after=1)
    story.look(up(0), up(1, 1), after=60)
    story.look(up(0), up(1, 1), after=600)
    assert story.plan.actions == ()


@pytest.mark.parametrize("code", [143, 0, None])
def test_without_a_restart_left_the_stall_fails_the_run_and_names_the_culprit(code: int | None) -> None:
    story = restarting(max_restarts=0)
    story.look(up(0), silent(1), after=10)
    story.look(up(0), stopped(1, code=code))
    assert story.phase() is Phase.FAILED
    assert (1, code, "Stalled") in story.exits
    assert [e.rank for e in story.status.failures] == [1]


def test_a_rank_that_ends_by_itself_while_it_is_being_stopped_keeps_its_own_end() -> None:
    story = restarting()
    story.look(up(0), silent(1), after=10)
    story.look(up(0), replace(stopped(1), ended=replace(stopped(1).ended, stopped=False, reason="Error", signal=None)))  # type: ignore[type-var]
    assert story.rank(1).phase is RankPhase.WAITING
    assert [e.termination_reason for e in story.status.failures] == ["Error"]


def test_nobody_is_stopped_for_a_stall_while_a_rank_is_out_of_sight() -> None:
    """The missing one may be what the silent ones wait for, or be the silent one itself."""
    story = restarting(max_restarts=0)
    story.look(up(0), silent(1))
    story.look(up(0), after=10)
    assert story.stopping == []
    story.look(up(0), after=LOST_AFTER)
    assert messages(story.plan, "RankRestarted") == [
        "rank 1 ended, nobody knows how (Unknown): not its own doing, it starts again"
    ]
    assert (story.phase(), story.rank(1).restarts) == (Phase.DEGRADED, 0)


def test_a_stalled_rank_that_vanishes_with_its_platform_while_it_stops_has_not_failed() -> None:
    story = restarting(max_restarts=0)
    story.look(up(0), silent(1), after=10)
    assert story.stopping == [(1, 0)]
    story.look(up(0))
    story.look(up(0), after=LOST_AFTER)
    assert "RankFailed" not in story.told
    assert story.status.failures == ()
    assert (story.phase(), story.rank(1).restarts) == (Phase.DEGRADED, 0)
    story.look(up(0), after=1)
    assert story.launched == [(1, 1)]


def test_a_stalled_rank_that_was_evicted_while_it_stops_has_not_failed() -> None:
    story = restarting(max_restarts=1)
    story.look(up(0), silent(1), after=10)
    story.look(up(0), done(1, None, reason="Evicted", stopped=True, by_platform=True))
    assert story.status.failures == ()
    assert story.rank(1).restarts == 0


def test_a_run_that_is_cancelled_meanwhile_restarts_nothing() -> None:
    story = restarting()
    story.look(up(0), silent(1), after=10)
    story.cancel()
    story.look(up(0), silent(1))
    story.look(stopped(0), stopped(1))
    assert story.phase() is Phase.CANCELLED
    assert story.settled()
    assert "RankFailed" not in story.told
