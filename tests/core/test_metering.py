"""What a run used: up to the moment of asking, and within what the controller's own clock allows."""

import pytest

from basilica.core import metering, policy
from basilica.core.phase import RankPhase

from .story import CREATED, Story, done, spec_of, stopped, up


def used(story: Story, after: float = 0.0) -> float:
    return metering.total(story.status, story.now + after).rank_seconds


def test_a_live_run_counts_up_to_the_moment_of_asking() -> None:
    story = Story()
    story.all_up()
    assert used(story, after=8) == 16
    assert metering.counted_until(story.status, story.now + 8) == story.now + 8
    assert metering.total(story.status).rank_seconds == 0  # up to its last change


def test_a_rank_that_is_out_of_sight_counts_no_further() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), after=5)
    assert used(story, after=10) == 5 + 10


def test_an_ended_run_counts_no_further() -> None:
    story = Story()
    story.all_up()
    story.cancel()
    story.look(up(0), up(1), after=5)
    assert used(story, after=100) == 10
    story.look(stopped(0), stopped(1), after=5)
    assert used(story, after=100) == 10
    assert metering.counted_until(story.status, story.now) is None


def test_what_ended_and_what_runs_are_added_up() -> None:
    story = Story(spec_of(1, 2, 2, max_restarts=0))
    story.all_up()
    story.look(up(0), done(1, 1), after=3)
    assert used(story, after=4) == 3 + 3 + 4


# ---- clocks of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-86400.0, 86400.0])
def test_the_clock_of_a_node_that_is_a_day_off_counts_only_what_the_controller_saw(wrong: float) -> None:
    story = Story(spec_of(1, 1, 1))
    story.look()
    story.look(up(0, since=story.now + wrong), after=1)
    assert 0 <= used(story, after=4) <= 5
    story.look(done(0, since=story.now + wrong, at=story.now + 4 + wrong), after=4)
    assert 0 <= used(story) <= 5


def test_a_restart_comes_within_its_delay_although_the_clock_was_set_back_between_two_controllers() -> None:
    story = Story(spec_of(1, 1, 1, max_restarts=3))
    story.all_up()
    story.look(done(0, 1))
    story.now -= 86400
    story.look()
    assert story.plan.wake_at == story.now + policy.restart_delay(1)
    story.look(after=policy.restart_delay(1))
    assert story.launched == [(0, 1)]


def test_a_rank_out_of_sight_is_lost_in_time_although_the_clock_was_set_back() -> None:
    story = Story(spec_of(1, 1, 1))
    story.all_up()
    story.look(after=1)
    story.now -= 86400
    story.look()
    story.look(after=policy.LOST_AFTER)
    assert story.rank(0).phase is RankPhase.WAITING


def test_a_time_to_live_counts_from_now_on_if_the_run_was_created_in_the_future() -> None:
    story = Story(spec_of(1, 1, 1, ttl_seconds=120.0))
    story.now = CREATED - 86400
    story.look()
    story.look(after=120)
    assert story.phase().terminal
    assert story.status.created_at == CREATED - 86400
