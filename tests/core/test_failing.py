"""Turns that fail are recorded once, said in `why`, and forgotten by the first that does not."""

import json
from dataclasses import replace

import pytest

from basilica.core import metering
from basilica.core.errors import RuntimeUnavailable
from basilica.core.failing import (
    CHANGE_AFTER_S,
    PROBLEM_CHARS,
    RECORD_AFTER_S,
    describe_problem,
    record_failure,
    without_failure,
)
from basilica.core.mesh import SeenRendezvous
from basilica.core.moments import shifted
from basilica.core.status import DeploymentStatus, FailingTurns
from basilica.core.why import Absence, why
from basilica.stores.encoding import decode_status, encode_status
from basilica.stores.kubernetes.codec import state_of, state_text

from .story import Story, done, spec_of, stopped, up

AWAY = "the rendezvous of train-x does not answer"
BLIND = FailingTurns(since=100.0, problem=AWAY, recorded_at=105.0)


def status_of(failing: FailingTurns | None = None, *, settled: bool = False) -> DeploymentStatus:
    return DeploymentStatus(created_at=50.0, failing=failing, settled=settled)


@pytest.mark.parametrize(
    ("status", "since", "problem", "now", "recorded"),
    [
        (status_of(), 100.0, AWAY, 100.0 + RECORD_AFTER_S - 0.1, None),
        (status_of(), 100.0, AWAY, 100.0 + RECORD_AFTER_S, 100.0),
        (status_of(settled=True), 100.0, AWAY, 200.0, None),
        (status_of(BLIND), 100.0, AWAY, 10_000.0, None),  # once for each failure, however long it lasts
        (status_of(BLIND), 100.0, "another", 105.0 + CHANGE_AFTER_S - 0.1, None),  # words that change with each try
        (status_of(BLIND), 100.0, "another", 105.0 + CHANGE_AFTER_S, 100.0),
        (status_of(BLIND), 140.0, "another", 150.0, 100.0),  # by a controller that took over
    ],
)
def test_when_a_failure_is_recorded(
    status: DeploymentStatus, since: float, problem: str, now: float, recorded: float | None
) -> None:
    found = record_failure(status, since, problem, now)
    if recorded is None:
        assert found is None
        return
    assert found is not None
    after, [event] = found
    assert after == replace(status, failing=FailingTurns(since=recorded, problem=problem, recorded_at=now))
    assert (event.reason, event.kind) == ("Unattended", "Warning")
    assert event.message == f"the controller cannot look after the run: {problem}"


def test_a_turn_that_does_not_fail_leaves_nothing_of_it() -> None:
    assert without_failure(status_of(BLIND)) == status_of()
    clean = status_of()
    assert without_failure(clean) is clean


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeUnavailable(AWAY), AWAY),
        (RuntimeUnavailable("two\n  lines"), "two lines"),
        (KeyError("x"), "an error in the controller, which its log has in full: KeyError: 'x'"),
        (TimeoutError(), "an error in the controller, which its log has in full: TimeoutError"),
    ],
)
def test_the_sentence_for_an_error(error: Exception, sentence: str) -> None:
    assert describe_problem(error) == sentence


def test_the_sentence_for_an_error_is_short() -> None:
    assert len(describe_problem(RuntimeUnavailable("long " * 1000))) == PROBLEM_CHARS


# ---- why -------------------------------------------------------------------------------------------------------------


def failing(story: Story, seconds: float) -> None:
    found = record_failure(story.status, story.now, AWAY, story.now + seconds)
    assert found is not None
    story.status, story.now = found[0], story.now + seconds


def test_why_says_that_nobody_looks_after_the_run_and_what_was_seen_before() -> None:
    story = Story()
    story.all_up()
    failing(story, 14)
    assert story.why == (
        f"the controller has not been able to look after this run for 14 s ({AWAY}); its ranks go on; "
        "this is what was seen before: 2 of 2 ranks are up"
    )


def test_what_was_waited_for_before_is_said_as_well() -> None:
    story = Story(spec_of(1, 2, 2, max_restarts=1))
    story.all_up()
    story.look(up(0), done(1, 3))
    failing(story, 5)
    assert story.why.endswith(
        "this is what was seen before: 1 of 2 ranks are up; waiting for rank 1, which exited with code 3, "
        "to start again in 0 s (restart 1 of 1)"
    )


def test_a_run_that_is_to_end_and_cannot_says_so() -> None:
    story = Story()
    story.all_up()
    story.cancel()
    story.look(up(0), up(1))
    failing(story, 40)
    assert story.why == (
        "cancelled: cancelled by the user; waiting for ranks 0 and 1 to stop (at most 10 s); "
        f"the controller has not been able to look after this run for 40 s ({AWAY})"
    )
    story.look(stopped(0), stopped(1))
    assert (story.settled(), story.status.failing) == (True, None)
    assert story.why == "cancelled: cancelled by the user"


def test_a_controller_that_is_away_itself_is_the_greater_news() -> None:
    story = Story()
    story.all_up()
    failing(story, 14)
    sentence = why(story.spec, story.status, story.now, Absence("operator", 20.0))
    known = "2 of 2 ranks are up: nothing to wait for"
    assert sentence == f"no operator has been at work for 20 s; this is what the last one saw: {known}"


def test_a_turn_decides_with_the_failure_in_its_status_and_does_not_take_it_away() -> None:
    """Its actions may fail again: to take it away and to write it again would be two writes for each try."""
    story = Story()
    story.all_up()
    failing(story, 14)
    before = story.status
    story.look(up(0), up(1))
    assert story.status == before


# ---- a rendezvous that does not answer, while turns do not fail ------------------------------------------------------


def silent(since: float) -> SeenRendezvous:
    return SeenRendezvous(endpoint="10.0.0.1:2379", silent_since=since)


def test_why_names_a_rendezvous_that_does_not_answer() -> None:
    story = Story()
    story.all_up()
    since = story.now
    story.look(up(0), up(1), after=4, rendezvous=silent(since))
    said = (
        "2 of 2 ranks are up; waiting for a sign of the run's rendezvous, which has not answered for {} s (ranks go on)"
    )
    assert story.why == said.format(4)
    first = story.status
    story.look(up(0), up(1), after=10, rendezvous=silent(since + 0.01))
    assert story.status == first, "each look computes it anew, and a status changes only when something does"
    assert story.why == said.format(14)
    story.look(up(0), up(1), after=1, rendezvous=SeenRendezvous(endpoint="10.0.0.1:2379"))
    assert story.why == "2 of 2 ranks are up: nothing to wait for"
    assert story.status.rendezvous_silent_since is None


def test_a_run_that_has_ended_waits_for_no_rendezvous() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), up(1), after=4, rendezvous=silent(story.now))
    story.cancel()
    story.look(stopped(0), stopped(1), rendezvous=silent(story.now))
    assert story.settled()
    assert story.status.rendezvous_silent_since is None


def test_what_nobody_saw_is_not_metered_by_saying_so() -> None:
    """An end that is read later may lie before the moment at which the silence was written down."""
    told, untold = Story(), Story()
    for story in (told, untold):
        story.all_up()
    told.look(up(0), up(1), after=20, rendezvous=silent(told.now))
    told.look(up(0), up(1), after=5, rendezvous=SeenRendezvous(endpoint="10.0.0.1:2379"))
    failing(told, 5)
    untold.now = told.now
    for story in (told, untold):
        story.look(done(0, at=110.0), done(1, at=110.0))
        assert metering.total(story.status).rank_seconds == 2 * 10.0


# ---- a node that is lost, whose rank nobody has a record of ----------------------------------------------------------


def test_a_rank_whose_node_is_lost_is_not_waited_for_again() -> None:
    """The runtime has waited until nothing can run there: to miss the rank for another half minute is of no use."""
    story = Story()
    story.all_up()
    story.look(up(1), after=95, nodes_lost=frozenset({0}))
    assert story.why.startswith("1 of 2 ranks are up; waiting for rank 0, which was lost through no fault of its own")
    story.look(up(1), after=5)
    assert (0, 1) in story.launched
    assert story.status.ranks[0].restarts == 0


def test_a_rank_that_is_seen_is_not_lost_whatever_became_of_a_node() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), up(1), after=95, nodes_lost=frozenset({0}))
    assert story.why == "2 of 2 ranks are up: nothing to wait for"


# ---- records ---------------------------------------------------------------------------------------------------------


def test_stores_keep_it_and_read_what_was_written_before_it_was_known() -> None:
    status = replace(status_of(BLIND), rendezvous_silent_since=99.5)
    assert decode_status(encode_status(status)) == status
    assert state_of("train-x", state_text(status)) == status
    old = json.loads(encode_status(status))
    del old["failing"], old["rendezvous_silent_since"]
    assert decode_status(json.dumps(old)) == status_of()


def test_its_moments_move_with_the_clock() -> None:
    moved = shifted(replace(status_of(BLIND), rendezvous_silent_since=99.5), 10.0)
    assert moved.failing == FailingTurns(since=110.0, problem=AWAY, recorded_at=115.0)
    assert (moved.rendezvous_silent_since, moved.latest) == (109.5, 115.0)
