"""No phase without a reason: one sentence says what the run is waiting for, or how it ended."""

from basilica.core.status import DeploymentStatus
from basilica.core.why import why

from .story import CREATED, Story, done, queued, spec_of, starting, stopped, up


def test_before_the_first_turn() -> None:
    sentence = why(spec_of(), DeploymentStatus(created_at=CREATED), CREATED)
    assert sentence == "the controller has yet to act on the latest change of the spec"


def test_launched_and_not_up_yet() -> None:
    story = Story(spec_of(1, 3, 3))
    story.look()
    assert story.why == "0 of 3 ranks are up; waiting for ranks 0-2 to start"
    story.look(up(0), starting(1), starting(2))
    assert story.why == "1 of 3 ranks are up; waiting for ranks 1 and 2 to start"


def test_in_line_for_gpus() -> None:
    story = Story(spec_of(1, 2, 2))
    story.look()
    story.look(queued(0, "behind 'other' for 2 GPUs"), queued(1, "behind 'other' for 2 GPUs"))
    assert story.why == "0 of 2 ranks are up; waiting for ranks 0 and 1: behind 'other' for 2 GPUs"


def test_all_is_well() -> None:
    story = Story()
    story.all_up()
    assert story.why == "2 of 2 ranks are up: nothing to wait for"


def test_restarting_after_a_failure() -> None:
    story = Story(spec_of(2, 2, 2, max_restarts=3))
    story.all_up()
    story.look(up(0), done(1, 3))
    assert story.why == (
        "1 of 2 ranks are up, fewer than the minimum of 2; "
        "waiting for rank 1, which exited with code 3, to start again in 1 s (restart 1 of 3)"
    )


def test_ranks_that_failed_alike_are_named_together() -> None:
    story = Story(spec_of(2, 5, 5, max_restarts=3))
    story.all_up()
    story.look(up(0), done(1, 3), done(2, 3), done(3, 3), done(4, 7))
    assert story.why == (
        "1 of 5 ranks are up, fewer than the minimum of 2; waiting for"
        " ranks 1-3, which exited with code 3, to start again in 1 s (restart 1 of 3);"
        " rank 4, which exited with code 7, to start again in 1 s (restart 1 of 3)"
    )


def test_starting_again_after_the_platform_took_a_rank() -> None:
    story = Story(spec_of(1, 2, 2, max_restarts=1))
    story.all_up()
    story.look(up(0), done(1, 3))
    story.look(up(0), after=1)
    story.look(up(0), done(1, None, 1, reason="Evicted", by_platform=True))
    assert story.why == (
        "1 of 2 ranks are up; waiting for rank 1, which was lost through no fault of its own, to start again in 1 s"
    )


def test_going_on_without_a_lost_rank() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), done(1, 1))
    assert story.why == "1 of 2 ranks are up; rank 1 lost, the run goes on without"


def test_scaled_and_not_acted_on_yet_then_draining() -> None:
    story = Story(spec_of(1, 3, 3))
    story.all_up()
    story.scale(1)
    assert story.why == "the controller has yet to act on the latest change of the spec"
    story.look(up(0), up(1), up(2))
    assert story.why == "1 of 1 ranks are up; waiting for ranks 1 and 2 to stop (scaled down to 1)"


def test_restarting_the_gang() -> None:
    story = Story(spec_of(1, 2, 3, resize="restart"))
    story.all_up()
    story.scale(3)
    story.look(up(0), up(1))
    assert story.why == (
        "0 of 3 ranks are up, fewer than the minimum of 1; "
        "waiting for rank 2 to be launched; ranks 0 and 1 to stop, and then to start again"
    )


def test_a_rank_out_of_sight() -> None:
    story = Story()
    story.all_up()
    story.look(up(0))
    assert story.why == "2 of 2 ranks are up; waiting for a sign of rank 1: not seen in the last look"


def test_a_restart_that_is_due_is_not_in_the_past() -> None:
    story = Story(spec_of(1, 1, 1, max_restarts=1))
    story.all_up()
    story.look(done(0, 1))
    assert "in 0 s" in why(story.spec, story.status, story.now + 60)


def test_ended_with_only_a_stranger_left_to_stop() -> None:
    story = Story()
    story.all_up()
    story.look(done(0), done(1), up(7))
    assert not story.settled()
    assert story.why == "succeeded: 2 of 2 ranks exited 0"


def test_ended_and_winding_down() -> None:
    story = Story(spec_of(2, 2, 2, grace_seconds=7))
    story.all_up()
    story.look(up(0), done(1, 3))
    verdict = f"failed: {story.status.message}"
    assert "rank 1 exited with code 3" in verdict
    assert story.why == f"{verdict}; waiting for rank 0 to stop (at most 7 s)"
    story.look(stopped(0))
    assert story.why == verdict
    story.delete()
    assert story.why == f"{verdict}; being deleted"
