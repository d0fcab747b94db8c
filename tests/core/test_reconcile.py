"""Stories of single runs: what a look shows, and what the controller decides to do and to say about it."""

from dataclasses import replace

import pytest

from basilica.core import policy
from basilica.core.actions import Launch, Plan, Remove, Stop
from basilica.core.phase import Phase, RankPhase
from basilica.core.reconcile import RELAUNCH_DELAY, reconcile
from basilica.core.seen import SeenRank, Sight, Sighting
from basilica.core.status import HISTORY_MAX, DeploymentStatus, Resize
from basilica.core.world import RankExit, RankStatus, WorldStatus

from .story import (
    CREATED,
    Story,
    done,
    messages,
    never_started,
    queued,
    spec_of,
    starting,
    stopped,
    unknown,
    up,
)


class TestStarting:
    def test_the_first_turn_launches_every_wanted_rank(self) -> None:
        story = Story(spec_of(1, 3, 4))
        plan = story.look()
        assert plan.actions == (Launch(0, 0, 3), Launch(1, 0, 3), Launch(2, 0, 3))
        assert story.phase() is Phase.PENDING
        assert story.status.observed_generation == 1
        assert story.status.world_target == 3

    def test_from_pending_to_ready_to_succeeded(self) -> None:
        story = Story(spec_of(2, 2, 2))
        story.look()
        assert story.phase() is Phase.PENDING
        story.look(queued(0), queued(1))
        assert story.phase() is Phase.PENDING
        story.look(starting(0), queued(1))
        assert story.phase() is Phase.STARTING
        story.look(up(0), starting(1))
        assert story.phase() is Phase.STARTING
        story.look(up(0), up(1), after=3)
        assert story.phase() is Phase.READY
        assert story.status.whole_at == CREATED + 3
        story.look(done(0), up(1))
        assert story.phase() is Phase.READY
        assert story.status.ready == 2
        story.look(done(0), done(1), after=1)
        assert story.phase() is Phase.SUCCEEDED
        assert story.status.message == "2 of 2 ranks exited 0"
        assert story.exits == [(0, 0, "Completed"), (1, 0, "Completed")]
        assert story.settled()
        assert story.status.terminal_at == CREATED + 4
        assert story.told == ["WorldReady", "Succeeded"]
        milestones = [(m.name, m.at) for m in story.status.milestones]
        assert milestones == [("world_ready", CREATED + 3), ("succeeded", CREATED + 4)]

    def test_a_run_that_ends_between_two_looks_was_ready(self) -> None:
        story = Story()
        story.look()
        story.look(done(0), done(1))
        assert story.told == ["WorldReady", "Succeeded"]
        assert story.status.ready == 2

    def test_min_ranks_are_enough_to_be_ready(self) -> None:
        story = Story(spec_of(2, 3, 3))
        story.look()
        story.look(up(0), starting(1), starting(2))
        assert story.phase() is Phase.STARTING
        story.look(up(0), up(1), starting(2))
        assert story.phase() is Phase.READY
        assert story.status.whole_at is None
        assert story.status.world(story.spec.world) == WorldStatus(2, 3, 2, 3, below_minimum=False)

    def test_a_launch_that_no_look_shows_is_asked_for_again(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.look()
        plan = story.look(after=0.1)
        assert story.launched == [(0, 0)]
        assert RELAUNCH_DELAY == 1
        assert plan.wake_at == story.now + RELAUNCH_DELAY

    def test_one_that_is_there_is_not(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.look()
        for sight in (starting(0), queued(0), unknown(0), up(0)):
            story.look(sight)
            assert story.launched == []

    def test_nothing_is_launched_for_a_run_cancelled_before_the_first_turn(self) -> None:
        story = Story()
        story.cancel()
        plan = story.look()
        assert plan.actions == ()
        assert story.phase() is Phase.CANCELLED
        assert story.settled()

    def test_a_program_that_cannot_be_started_fails_the_run_at_once_with_that_sentence(self) -> None:
        story = Story(spec_of(1, 3, 3, max_restarts=3))
        story.look()
        error = "there is no program 'trian'"
        story.look(up(0), done(1, None, since=None, start_error=error), starting(2))
        assert story.phase() is Phase.FAILED
        assert story.status.message == f"could not be started: {error}"
        assert story.stopping == [(0, 0), (2, 0)]
        assert story.exits == [(1, None, "Error")]

    def test_a_drained_rank_that_could_not_start_is_nobodys_problem(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.look()
        story.scale(1)
        story.look(up(0), done(1, None, since=None, start_error="no room"))
        assert story.phase() is Phase.READY

    def test_a_warning_of_the_runtime_is_passed_on_once(self) -> None:
        story = Story()
        story.look(warnings=(("NoGpus", "there is no GPU here; running on the CPU"),))
        story.look(warnings=(("NoGpus", "there is no GPU here; running on the CPU"),))
        assert story.told == ["NoGpus"]

    def test_with_the_loudness_of_a_warning(self) -> None:
        plan = Story().look(warnings=(("NoGpus", "there is no GPU here"),))
        assert [(e.reason, e.message, e.kind) for e in plan.events] == [("NoGpus", "there is no GPU here", "Warning")]

    def test_a_rank_that_is_on_its_way_out_does_not_make_the_world_ready(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.look()
        story.scale(1)
        story.look(starting(0), up(1))
        assert story.phase() is Phase.STARTING
        assert story.events == ["ScaleObserved"]
        story.look(queued(0), up(1))
        assert story.phase() is Phase.PENDING


class TestFailing:
    def test_with_min_equal_to_target_the_first_loss_ends_it_and_stops_the_survivors(self) -> None:
        story = Story(spec_of(2, 2, 2, grace_seconds=7))
        story.all_up()
        plan = story.look(up(0), done(1, 3), after=5)
        assert story.phase() is Phase.FAILED
        assert plan.actions == (Stop(0, 0, 7),)
        assert story.exits == [(1, 3, "Error")]
        assert "rank 1 exited with code 3" in story.status.message
        assert not story.settled()
        story.look(stopped(0), done(1, 3), after=1)
        assert story.exits == [(1, 3, "Error"), (0, 143, "Cancelled")]
        assert story.settled()
        assert story.told == ["WorldReady", "RankFailed", "RankLost", "Failed"]

    def test_failures_are_told_as_warnings_and_success_is_not(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        plan = story.look(up(0), done(1, 1))
        assert [(e.reason, e.kind) for e in plan.events] == [("RankFailed", "Warning"), ("RankLost", "Warning")]
        plan = story.look(done(0))
        assert [(e.reason, e.kind) for e in plan.events] == [("Succeeded", "Normal")]
        story = Story(spec_of(1, 1, 1, max_restarts=1))
        story.all_up()
        plan = story.look(done(0, 1))
        assert {e.reason: e.kind for e in plan.events} == {
            "RankFailed": "Warning",
            "RankRestarted": "Normal",
            "WorldShrunkBelowMin": "Warning",
        }
        story.look(after=1)
        story.look(up(0, 1))
        plan = story.look(done(0, 1, 1))
        assert {e.reason: e.kind for e in plan.events}["Failed"] == "Warning"

    def test_an_exit_holds_all_that_is_known_of_it(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.look(
            done(0, 137, at=CREATED + 8, reason="OOMKilled", signal="SIGKILL", node="n7", log_tail=("a", "b")), after=9
        )
        assert story.status.exits == (
            RankExit(
                rank=0,
                attempt=0,
                exit_code=137,
                termination_reason="OOMKilled",
                restart_count=0,
                finished_at=CREATED + 8,
                seen_at=CREATED + 9,
                started_at=CREATED,
                signal="SIGKILL",
                node="n7",
                log_tail=("a", "b"),
            ),
        )
        rank = story.rank(0)
        assert (rank.started_at, rank.restart_at, rank.missing_since, rank.note) == (None, None, None, "")

    def test_with_min_below_target_it_goes_on_without_the_lost_rank_and_may_still_succeed(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        story.look(up(0), done(1, 1))
        assert story.phase() is Phase.READY
        assert story.plan.actions == ()
        assert "RankLost" in story.events
        story.look(done(0), done(1, 1))
        assert story.phase() is Phase.SUCCEEDED
        assert story.status.message == "1 of 2 ranks exited 0"
        assert story.exits == [(1, 1, "Error"), (0, 0, "Completed")]

    def test_all_lost_is_failed_even_with_min_one(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.look(done(0, 1))
        assert story.phase() is Phase.FAILED

    def test_ranks_that_exit_0_do_not_save_a_run_with_too_few_of_them(self) -> None:
        story = Story(spec_of(2, 3, 3))
        story.all_up()
        story.look(done(0), done(1, 1), up(2))
        assert story.phase() is Phase.READY
        story.look(done(0), done(1, 1), done(2, 1))
        assert story.phase() is Phase.FAILED

    def test_verdicts_are_final_whatever_comes_later(self) -> None:
        story = Story(spec_of(2, 2, 2, max_restarts=0))
        story.all_up()
        story.look(done(0, 1), up(1))
        verdict = (story.phase(), story.status.message, story.status.terminal_at)
        story.look(done(0, 1), done(1, 0), after=10)
        story.scale(2)
        story.look(up(0), up(1), after=10)
        story.cancel()
        story.look(after=1e6)
        assert (story.phase(), story.status.message, story.status.terminal_at) == verdict
        assert story.launched == []

    def test_a_rank_that_ends_well_after_the_end_keeps_its_own_exit(self) -> None:
        story = Story(spec_of(2, 2, 2))
        story.all_up()
        story.look(done(0, 1), up(1))
        story.look(done(1, 0))
        assert story.exits == [(0, 1, "Error"), (1, 0, "Completed")]
        assert story.phases() == [RankPhase.LOST, RankPhase.SUCCEEDED]

    def test_a_victim_that_crashes_after_the_end_is_lost_and_counts_as_a_failure(self) -> None:
        story = Story(spec_of(2, 2, 2))
        story.all_up()
        story.look(done(0, 1), up(1))
        story.look(done(1, 1), after=1)
        assert story.phases() == [RankPhase.LOST, RankPhase.LOST]
        culprit = policy.find_culprit(story.status.failures, story.status.whole_at)
        assert culprit is not None
        assert [policy.role_of(e, culprit) for e in story.status.exits] == ["culprit", "victim"]

    def test_only_so_many_exits_keep_the_end_of_their_log(self) -> None:
        many = policy.LOG_TAILS_KEPT + 8
        story = Story(spec_of(many, many, many))
        story.all_up()
        story.look(*(done(n, 0, log_tail=("bye",)) for n in range(many)))
        assert sum(bool(e.log_tail) for e in story.status.exits) == policy.LOG_TAILS_KEPT


class TestRestarting:
    def test_a_failed_rank_waits_then_restarts_as_a_new_attempt(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=2))
        story.all_up()
        plan = story.look(done(0, 1))
        assert story.phase() is Phase.DEGRADED
        assert story.launched == []
        assert plan.wake_at == story.now + 1
        assert story.exits == []
        assert story.events == ["RankFailed", "RankRestarted", "WorldShrunkBelowMin"]
        story.look(done(0, 1), after=0.9)
        assert story.launched == []
        story.look(done(0, 1), after=0.1)
        assert story.launched == [(0, 1)]
        assert story.rank(0).restarts == 1
        story.look(up(0, 1))
        assert story.phase() is Phase.READY
        assert story.events == ["WorldRecovered"]

    def test_each_restart_waits_twice_as_long_until_the_budget_is_used_up(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=3))
        story.all_up()
        waits = []
        for attempt in range(4):
            plan = story.look(done(0, 1, attempt))
            waits.append(None if plan.wake_at is None else plan.wake_at - story.now)
            story.look(after=100)
        assert waits == [1, 2, 4, None]
        assert story.phase() is Phase.FAILED
        assert [(e.attempt, e.restart_count) for e in story.status.exits] == [(3, 3)]

    def test_what_the_platform_did_costs_nothing(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=0))
        story.all_up()
        for attempt in range(5):
            plan = story.look(done(0, 137, attempt, reason="Evicted", by_platform=True))
            assert plan.wake_at == story.now + policy.FIRST_RESTART_DELAY
            assert story.events[:1] == ["RankRestarted"]
            story.look(after=1)
            assert story.launched == [(0, attempt + 1)]
            story.look(up(0, attempt + 1))
        assert story.rank(0).restarts == 0
        assert story.phase() is Phase.READY
        assert policy.find_culprit(story.status.failures, story.status.whole_at) is None

    def test_an_older_attempt_that_is_still_seen_is_stopped_and_does_not_count(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=1))
        story.all_up()
        story.look(done(0, 1))
        story.look(after=1)
        story.look(up(0, 0), starting(0, 1))
        assert story.stopping == [(0, 0)]
        assert story.status.ready == 0
        assert story.rank(0).phase is RankPhase.LAUNCHED

    def test_a_rank_nobody_knows_is_stopped(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.look(up(0), up(7, 3))
        assert story.stopping == [(7, 3)]
        story.look(up(0), done(7, 1, 3))
        assert story.stopping == []

    def test_a_rank_waiting_for_its_restart_when_the_run_ends_keeps_its_failure_as_exit(self) -> None:
        story = Story(spec_of(1, 2, 2, max_restarts=1))
        story.all_up()
        story.look(up(0), done(1, 3))
        story.cancel()
        story.look(up(0), done(1, 3))
        assert story.exits == [(1, 3, "Error")]
        assert story.rank(1).phase is RankPhase.DROPPED
        story.look(stopped(0))
        assert story.exits == [(1, 3, "Error"), (0, 143, "Cancelled")]

    def test_each_of_several_waiting_ranks_keeps_its_own(self) -> None:
        story = Story(spec_of(1, 3, 3, max_restarts=1))
        story.all_up()
        story.look(done(0, 3), done(1, 4), up(2))
        story.cancel()
        story.look(up(2))
        assert story.exits == [(0, 3, "Error"), (1, 4, "Error")]
        assert [r.restart_at for r in story.status.ranks] == [None, None, None]

    def test_so_does_one_whose_restart_never_started(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=1))
        story.all_up()
        story.look(done(0, 3))
        story.look(after=1)
        story.cancel()
        story.look()
        assert story.stopping == [(0, 1)]
        assert story.exits == []
        story.look(never_started(0, 1))
        assert story.exits == [(0, 3, "Error")]
        assert story.settled()

    def test_an_exit_is_not_recorded_a_second_time(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        story.look(up(0), done(1, 3))
        story.spec = story.spec.restarted()
        story.look(up(0))  # rank 1 gets another chance in the fresh gang
        assert story.rank(1).attempt == 1
        story.cancel()
        story.look(up(0))
        assert story.exits == [(1, 3, "Error")]

    def test_the_first_failure_since_the_world_was_whole_is_to_blame(self) -> None:
        story = Story(spec_of(2, 2, 2, max_restarts=1))
        story.all_up()
        story.look(done(0, 1), up(1), after=10)
        story.look(after=1)
        story.look(up(0, 1), up(1), after=1)  # whole again
        story.look(up(0, 1), done(1, 137, reason="OOMKilled"), after=10)
        story.look(up(0, 1), after=1)
        story.look(done(0, 1, 1), up(1, 1), after=0.5)
        assert story.phase() is Phase.FAILED
        culprit = policy.find_culprit(story.status.failures, story.status.whole_at)
        assert culprit is not None
        # Rank 1 came back in the very look that showed rank 0 down again: the world was never whole in between.
        assert (culprit.exit.rank, culprit.exit.termination_reason) == (1, "OOMKilled")

    def test_a_clock_that_is_set_back_does_not_hide_the_culprit(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.look(done(0, 1), after=-50)
        assert "rank 0 exited with code 1" in story.status.message


class TestVanishing:
    def test_a_rank_that_no_look_shows_is_gone_only_after_a_while(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        plan = story.look(after=5)
        assert plan.wake_at == story.now + policy.LOST_AFTER
        assert story.phase() is Phase.READY
        story.look(after=policy.LOST_AFTER - 0.1)
        assert story.rank(0).phase is RankPhase.RUNNING
        plan = story.look(after=0.1)
        assert plan.actions == (Stop(0, 0, 0.0),)
        assert (story.rank(0).attempt, story.rank(0).phase) == (1, RankPhase.WAITING)
        story.look(after=1)
        assert story.launched == [(0, 1)]
        assert story.rank(0).restarts == 0

    @pytest.mark.parametrize("sign", [up(0), unknown(0)])
    def test_any_sign_of_it_starts_the_wait_again(self, sign: SeenRank) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.look()
        story.look(sign, after=20)
        story.look(after=20)
        story.look(after=policy.LOST_AFTER - 1)
        assert story.rank(0).attempt == 0

    def test_a_look_that_cannot_tell_changes_nothing(self) -> None:
        story = Story()
        story.all_up()
        before = story.status
        assert story.look(unknown(0), unknown(1), after=60) == Plan(before)

    def test_when_it_comes_back_it_is_stopped(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.look()
        story.look(after=31)
        story.look(up(0, 0), after=1)
        assert (0, 0) in story.stopping

    def test_also_after_the_end_of_the_run(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.cancel()
        story.look()
        story.look(after=31)
        assert story.settled()
        story.look(up(0, 0), after=1)
        assert story.stopping == [(0, 0)]

    def test_a_rank_that_was_stopped_unseen_and_never_shows_up_does_not_hold_the_end_up(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.look()
        story.cancel()
        plan = story.look()
        assert story.stopping == [(0, 0)]
        assert plan.wake_at == story.now + policy.LOST_AFTER
        story.look(after=policy.LOST_AFTER)
        assert story.settled()
        assert story.exits == []

    def test_a_stopped_rank_that_vanishes_was_stopped(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        story.scale(1)
        story.look(up(0), up(1))
        story.look(up(0))
        story.look(up(0), after=31)
        assert story.rank(1).phase is RankPhase.DROPPED
        assert story.events == []


class TestScaling:
    def test_up_adds_ranks(self) -> None:
        story = Story(spec_of(1, 2, 4))
        story.all_up()
        story.scale(4)
        plan = story.look(up(0), up(1), after=9)
        assert plan.actions == (Launch(2, 0, 4), Launch(3, 0, 4))
        assert story.status.observed_generation == 2
        assert story.status.last_resize == Resize(story.now, 2, 4, "scale")
        assert story.events == ["ScaleObserved"]

    def test_down_drains_the_highest_ranks_and_that_is_no_failure(self) -> None:
        story = Story(spec_of(1, 3, 4, grace_seconds=4))
        story.all_up()
        story.scale(1)
        plan = story.look(up(0), up(1), up(2))
        assert plan.actions == (Stop(1, 0, 4), Stop(2, 0, 4))
        story.look(up(0), stopped(1), done(2, 1), after=1)
        assert story.phases() == [RankPhase.RUNNING, RankPhase.DROPPED, RankPhase.DROPPED]
        assert story.plan.events == ()
        story.look(done(0))
        assert story.phase() is Phase.SUCCEEDED
        assert story.exits == [(0, 0, "Completed")]

    def test_a_drained_rank_that_ends_with_0_does_not_close_the_world(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        story.scale(1)
        story.look(up(0), up(1))
        story.look(up(0), done(1, 0))
        assert not story.status.closed

    def test_down_and_up_again_is_a_new_attempt_with_a_fresh_budget(self) -> None:
        story = Story(spec_of(1, 2, 2, max_restarts=1))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.look(up(0), after=1)
        story.look(up(0), up(1, 1))
        assert story.rank(1).restarts == 1
        story.scale(1)
        story.look(up(0), up(1, 1))
        story.scale(2)
        story.look(up(0), up(1, 1))
        assert story.stopping == [(1, 1)]  # not before the old one is gone
        assert story.launched == []
        story.look(up(0), stopped(1, 1))
        assert story.launched == [(1, 2)]
        assert story.rank(1).restarts == 0

    def test_a_lost_rank_comes_back_by_scaling_down_and_up(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.scale(1)
        story.look(up(0))
        story.scale(2)
        story.look(up(0))
        assert story.launched == [(1, 1)]

    def test_a_lost_rank_is_started_afresh_when_somebody_scales(self) -> None:
        story = Story(spec_of(1, 2, 3))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.scale(3)
        story.look(up(0))
        assert story.launched == [(1, 1), (2, 0)]

    def test_scaling_down_to_lost_ranks_does_not_fail_the_run(self) -> None:
        story = Story(spec_of(2, 4, 4))
        story.all_up()
        story.look(done(0, 1), done(1, 1), up(2), up(3))
        story.scale(2)
        story.look(up(2), up(3))
        assert not story.phase().terminal
        assert story.launched == [(0, 1), (1, 1)]

    def test_an_ended_run_is_not_ready(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.look(done(0, 1))
        ready = next(c for c in story.status.conditions if c.type == "Ready")
        assert (ready.status, ready.reason) == ("False", "Failed")

    def test_a_rank_in_its_back_off_is_dropped_with_the_scale_down(self) -> None:
        story = Story(spec_of(1, 2, 2, max_restarts=1))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.scale(1)
        plan = story.look(up(0))
        assert story.rank(1).phase is RankPhase.DROPPED
        assert plan.wake_at is None
        assert policy.find_culprit(story.status.failures, story.status.whole_at) is None

    def test_ready_never_counts_ranks_beyond_the_target(self) -> None:
        story = Story(spec_of(1, 3, 3))
        story.all_up()
        story.scale(1)
        story.look(up(0), up(1), up(2))
        assert story.status.ready == 1

    def test_a_rank_number_equal_to_the_target_is_beyond_it(self) -> None:
        ranks = tuple(RankStatus(rank=n, phase=RankPhase.RUNNING) for n in range(3))
        assert DeploymentStatus(created_at=0.0, world_target=2, ranks=ranks).ready == 2

    def test_from_the_first_exit_0_the_world_is_closed(self) -> None:
        story = Story(spec_of(1, 2, 3))
        story.all_up()
        story.look(done(0), up(1))
        story.scale(3)
        story.look(done(0), up(1))
        assert story.plan.actions == ()
        assert [e.kind for e in story.plan.events] == ["Warning"]
        assert story.events == ["WorldClosed"]
        assert story.status.world_target == 2
        assert story.status.observed_generation == 2
        story.look(done(0), done(1))
        assert story.phase() is Phase.SUCCEEDED

    def test_on_a_run_that_has_ended_it_is_ignored_with_a_warning(self) -> None:
        story = Story(spec_of(1, 2, 3))
        story.all_up()
        story.look(done(0), done(1))
        story.scale(3)
        story.look()
        assert story.events == ["UDTerminalState"]
        assert [e.kind for e in story.plan.events] == ["Warning"]
        assert story.status.observed_generation == 1, "it was not acted on"
        assert story.status.world_target == 2
        assert story.look().events == ()

    def test_several_scales_between_two_turns_are_one(self) -> None:
        story = Story(spec_of(1, 2, 4))
        story.all_up()
        story.scale(4)
        story.scale(2)
        story.look(up(0), up(1))
        assert story.plan.actions == ()
        assert story.events == []
        assert story.status.observed_generation == 3

    def test_history_of_the_world_is_bounded(self) -> None:
        story = Story(spec_of(1, 1, 2))
        story.all_up()
        for turn in range(3 * HISTORY_MAX):
            story.scale(1 + turn % 2)
            story.look(up(0), after=1)
        assert len(story.status.history) == HISTORY_MAX
        assert story.status.history[-1].at == story.now


class TestRestartingTheGang:
    def test_with_resize_restart_the_gang_starts_anew_with_the_new_size(self) -> None:
        story = Story(spec_of(1, 2, 3, resize="restart"))
        story.all_up()
        story.scale(3)
        story.look(up(0), up(1))
        assert story.stopping == [(0, 0), (1, 0)]
        assert story.launched == []
        story.look(stopped(0), up(1))
        assert story.launched == []  # the old gang must be gone as a whole
        plan = story.look(stopped(0), stopped(1))
        assert plan.actions == (Launch(0, 1, 3), Launch(1, 1, 3), Launch(2, 0, 3))
        assert [r.restarts for r in story.status.ranks] == [0, 0, 0]

    def test_back_and_forth_does_not_mix_the_old_gang_with_the_new(self) -> None:
        story = Story(spec_of(1, 2, 3, resize="restart"))
        story.all_up()
        story.scale(3)
        story.look(up(0), up(1))
        story.scale(2)
        story.look(stopped(0), up(1))
        assert story.launched == []
        story.look(stopped(0), stopped(1))
        assert story.launched == [(0, 1), (1, 1)]

    def test_a_lost_rank_gets_another_chance_with_the_new_gang(self) -> None:
        story = Story(spec_of(1, 2, 3, resize="restart"))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.scale(3)
        story.look(up(0))
        story.look(stopped(0))
        assert story.launched == [(0, 1), (1, 1), (2, 0)]

    def test_with_resize_join_nobody_is_restarted(self) -> None:
        story = Story(spec_of(1, 2, 3, resize="join"))
        story.all_up()
        story.scale(3)
        story.look(up(0), up(1))
        assert story.stopping == []
        assert story.plan.actions == (Launch(2, 0, 3),)

    def test_a_rank_that_restarts_alone_does_not_restart_the_others(self) -> None:
        story = Story(spec_of(1, 2, 3, resize="restart", max_restarts=1))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.look(up(0), after=1)
        assert story.plan.actions == (Launch(1, 1, 2),)

    def test_the_user_may_ask_for_a_fresh_gang_of_the_same_size(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.all_up()
        story.spec = story.spec.restarted()
        story.look(up(0), up(1))
        assert story.stopping == [(0, 0), (1, 0)]
        story.look(stopped(0), up(1))
        assert story.launched == []
        story.look(stopped(1))
        assert story.launched == [(0, 1), (1, 1)]

    def test_a_lost_rank_is_part_of_the_fresh_gang_with_a_fresh_budget(self) -> None:
        story = Story(spec_of(1, 2, 2, max_restarts=1))
        story.all_up()
        story.look(up(0), done(1, 1))
        story.look(up(0), after=1)
        story.look(up(0), done(1, 1, 1))
        assert (story.rank(1).phase, story.rank(1).restarts) == (RankPhase.LOST, 1)
        story.spec = story.spec.restarted()
        story.look(up(0))
        story.look(stopped(0))
        assert story.launched == [(0, 1), (1, 2)]
        assert [r.restarts for r in story.status.ranks] == [0, 0]

    def test_ranks_that_were_ready_before_a_restart_keep_the_start_deadline(self) -> None:
        story = Story(spec_of(1, 1, 2, resize="restart", start_deadline_seconds=20))
        story.look()
        story.scale(2)
        story.look(up(0), after=25)  # late look: it had been up in time, and is stopped for the resize right away
        assert story.phase() is Phase.DEGRADED
        story.look(up(0), after=1)
        assert not story.phase().terminal


class TestEndingOnPurpose:
    def test_cancel_stops_everything_and_settles_when_all_are_gone(self) -> None:
        story = Story()
        story.all_up()
        story.cancel()
        story.look(up(0), up(1))
        assert story.phase() is Phase.CANCELLED
        assert story.status.message == "cancelled by the user"
        assert story.stopping == [(0, 0), (1, 0)]
        assert story.events == ["Cancelled"]
        story.look(stopped(0), up(1))
        assert not story.settled()
        assert story.stopping == [(1, 0)]  # asked again: the first may have been lost with the controller
        story.look(stopped(0), stopped(1, code=0))
        assert story.settled()
        assert story.exits == [(0, 143, "Cancelled"), (1, 0, "Cancelled")]
        assert all(e.stopped and not e.failed for e in story.status.exits)

    def test_a_settled_run_gets_its_own_status_back_and_no_actions(self) -> None:
        story = Story()
        story.all_up()
        story.look(done(0), done(1))
        assert story.settled()
        before = story.status
        assert story.look(done(0), done(1), after=1e6) == Plan(before)
        assert story.look(after=1e6) == Plan(before)

    def test_a_run_of_which_nothing_changed_gets_its_own_status_back(self) -> None:
        story = Story()
        story.all_up()
        before = story.status
        assert story.look(up(0), up(1), after=600) == Plan(before)

    def test_delete_removes_only_when_nothing_runs_any_more(self) -> None:
        story = Story()
        story.all_up()
        story.delete()
        story.look(up(0), up(1))
        assert story.phase() is Phase.CANCELLED
        assert Remove() not in story.plan.actions
        story.look(stopped(0), up(1))
        assert Remove() not in story.plan.actions
        assert story.look(stopped(0), stopped(1)).actions == (Remove(),)
        assert story.look().actions == (Remove(),)  # until somebody has done it

    def test_delete_of_a_finished_run_removes_it_at_once(self) -> None:
        story = Story()
        story.all_up()
        story.look(done(0), done(1))
        assert story.plan.actions == ()
        story.delete()
        assert story.look(done(0), done(1)).actions == (Remove(),)
        assert story.phase() is Phase.SUCCEEDED
        assert story.events == []

    def test_a_rank_given_up_for_lost_is_stopped_and_looked_for_before_the_removal(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.delete()
        story.look()
        plan = story.look(after=31)
        assert plan.actions == (Stop(0, 0, 0.0),)
        assert plan.wake_at is not None
        assert story.look(up(0)).actions == (Stop(0, 0, story.spec.grace_seconds),)
        assert story.look(stopped(0)).actions == (Remove(),)

    def test_cancel_then_delete(self) -> None:
        story = Story()
        story.all_up()
        story.cancel()
        story.look(stopped(0), stopped(1))
        story.delete()
        assert story.look().actions == (Remove(),)
        assert story.status.message == "cancelled by the user"


class TestDeadlines:
    def test_at_the_end_of_its_time_to_live_a_live_run_is_cancelled(self) -> None:
        story = Story(spec_of(1, 1, 1, ttl_seconds=60))
        assert story.look().wake_at == CREATED + 60
        story.look(up(0), after=59.9)
        assert story.phase() is Phase.READY
        story.look(up(0), after=0.1)
        assert story.phase() is Phase.CANCELLED
        assert story.status.message == "its time to live of 60 s ran out"
        assert story.stopping == [(0, 0)]

    def test_zero_means_no_limit(self) -> None:
        story = Story(spec_of(1, 1, 1, ttl_seconds=0, deadline_seconds=0, start_deadline_seconds=0))
        story.look()
        assert story.look(queued(0), after=1e9).wake_at is None
        assert not story.phase().terminal

    def test_a_finished_run_is_left_alone(self) -> None:
        story = Story(spec_of(1, 1, 1, ttl_seconds=60))
        story.all_up()
        story.look(done(0))
        before = story.status
        assert story.look(done(0), after=100) == Plan(before)

    def test_also_one_that_finished_while_nobody_looked(self) -> None:
        story = Story(spec_of(1, 1, 1, ttl_seconds=60, deadline_seconds=60))
        story.all_up()
        story.look(done(0, at=CREATED + 30), after=600)
        assert story.phase() is Phase.SUCCEEDED

    def test_a_run_that_is_not_done_by_its_deadline_fails(self) -> None:
        story = Story(spec_of(1, 1, 1, deadline_seconds=60))
        story.all_up()
        story.look(up(0), after=60)
        assert story.phase() is Phase.FAILED
        assert story.status.message == "not done within its deadline of 60 s"
        story.look(stopped(0))
        assert story.exits == [(0, 143, "DeadlineExceeded")]

    def test_a_run_that_is_not_up_by_its_start_deadline_fails(self) -> None:
        story = Story(spec_of(2, 2, 2, start_deadline_seconds=60))
        assert story.look().wake_at == CREATED + 60
        story.look(up(0), queued(1), after=60)
        assert story.phase() is Phase.FAILED
        assert story.status.message == "fewer than 2 ranks were up within 60 s"

    def test_a_run_that_was_up_in_time_may_shrink_later(self) -> None:
        story = Story(spec_of(1, 1, 1, start_deadline_seconds=60, max_restarts=1))
        story.all_up()
        story.look(done(0, 1), after=70)
        assert story.phase() is Phase.DEGRADED

    def test_ranks_that_came_up_while_nobody_looked_are_not_late(self) -> None:
        story = Story(spec_of(1, 1, 1, start_deadline_seconds=60))
        story.look()
        story.look(up(0), after=70)
        assert story.phase() is Phase.READY

    def test_the_controller_wakes_for_whatever_comes_first(self) -> None:
        story = Story(spec_of(1, 1, 1, ttl_seconds=600, deadline_seconds=90, max_restarts=1))
        assert story.all_up().wake_at == CREATED + 90
        assert story.look(done(0, 1)).wake_at == CREATED + 1


class TestMetering:
    def test_what_ran_is_counted_from_its_start_to_its_end(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.look()
        story.look(up(0, since=CREATED + 1, gpus=2), up(1, since=CREATED + 2), after=10)
        assert story.rank_seconds == 9 + 8
        story.look(done(0, at=CREATED + 20, since=CREATED + 1, gpus=2), up(1, since=CREATED + 2), after=11)
        assert story.rank_seconds == 19 + 19
        story.look(done(1, at=CREATED + 25, since=CREATED + 2), after=9)
        assert story.rank_seconds == 19 + 23
        assert story.status.usage.gpu_seconds == 2 * 19

    def test_an_attempt_that_no_look_showed_running_is_counted_too(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.look()
        story.look(done(0, since=CREATED + 1, at=CREATED + 4), after=10)
        assert story.rank_seconds == 3

    def test_all_attempts_are_counted(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=1))
        story.look()
        story.look(done(0, 1, since=CREATED, at=CREATED + 5), after=6)
        story.look(after=1)
        story.look(done(0, 0, 1, since=CREATED + 8, at=CREATED + 10), after=4)
        assert story.rank_seconds == 5 + 2

    def test_it_stops_at_the_terminal_moment(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.cancel()
        story.look(up(0), after=30)
        assert story.rank_seconds == 30
        story.look(up(0), after=5)
        assert story.rank_seconds == 30
        story.look(stopped(0), after=5)
        assert story.rank_seconds == 30

    def test_a_rank_that_ended_before_the_terminal_moment_but_was_seen_after_it_is_counted_to_its_end(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.look()
        story.look(up(0))
        story.cancel()
        story.look(up(0), after=30)
        story.look(stopped(0), done(1, 1, at=CREATED + 10), after=5)
        assert story.rank_seconds == 30 + 10

    def test_one_that_started_after_the_terminal_moment_costs_nothing(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.look()
        story.cancel()
        story.look(starting(0))
        story.look(stopped(0, since=CREATED + 3), after=9)
        assert story.rank_seconds == 0

    def test_a_rank_that_nobody_sees_is_counted_until_it_was_missed(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        story.look(after=10)
        story.look(after=31)
        assert story.rank_seconds == 10

    def test_a_late_word_of_the_end_takes_nothing_back(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=1))
        story.look()
        story.look(up(0), after=20)
        story.look(done(0, 1, at=CREATED + 5), after=1)
        assert story.rank_seconds == 20

    def test_a_node_whose_clock_is_ahead_costs_nothing_extra(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=1))
        story.all_up()
        story.look(done(0, 1, at=CREATED + 10_000), after=10)
        assert story.rank_seconds == 10

    def test_a_runtime_that_does_not_tell_the_start_is_counted_from_the_first_look(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.look()
        seen = replace(up(0), started_at=None)
        story.look(seen, after=5)
        story.look(replace(done(0), started_at=None), after=5)
        assert story.rank_seconds == 5


class TestOneTurn:
    def test_is_deterministic(self) -> None:
        spec, status = spec_of(), DeploymentStatus(created_at=CREATED)
        look = Sighting(ranks=(up(0), done(1, 1)))
        assert reconcile(spec, status, look, 1.0) == reconcile(spec, status, look, 1.0)

    def test_made_again_on_the_same_look_changes_nothing_more(self) -> None:
        story = Story(spec_of(1, 3, 3, max_restarts=1))
        story.look()
        look = (up(0), done(1, 1, at=CREATED), queued(2))
        first = story.look(*look)
        again = story.look(*look)
        assert (again.status, again.events) == (first.status, ())

    def test_repeats_actions_that_a_dying_controller_never_took(self) -> None:
        story = Story(spec_of(1, 2, 2))
        story.look()
        assert story.look().actions == (Launch(0, 0, 2), Launch(1, 0, 2))
        story.cancel()
        first = story.look(up(0), starting(1))
        assert story.look(up(0), starting(1)).actions == first.actions

    def test_ends_without_evidence_are_no_ends(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.all_up()
        before = story.status
        story.look(SeenRank(rank=0, attempt=0, sight=Sight.ENDED))
        assert story.status == before

    def test_the_condition_keeps_the_time_of_its_last_change(self) -> None:
        story = Story(spec_of(1, 1, 1, max_restarts=1))
        story.look()
        story.look(up(0), after=5)
        story.look(up(0), after=5)
        ready = {c.type: c for c in story.status.conditions}["Ready"]
        assert (ready.status, ready.reason, ready.since) == ("True", "RanksReady", CREATED + 5)
        below = {c.type: c for c in story.status.conditions}["BelowMinimum"]
        assert (below.status, below.reason, below.since) == ("False", "RanksReady", CREATED + 5)
        story.look(done(0, 1), after=5)
        conditions = {c.type: (c.status, c.reason, c.since) for c in story.status.conditions}
        assert conditions["Ready"] == ("False", "RanksMissing", CREATED + 15)
        assert conditions["BelowMinimum"] == ("True", "RanksMissing", CREATED + 15)

    def test_where_a_rank_runs_is_remembered(self) -> None:
        story = Story(spec_of(1, 1, 1))
        story.look()
        story.look(replace(up(0, node="n1", gpus=4), pod_name="story-0", provider="aws", region="eu"))
        story.look(replace(up(0, node=""), provider=None))
        rank = story.rank(0)
        assert (rank.node, rank.pod_name, rank.provider, rank.region, rank.gpus) == ("n1", "story-0", "aws", "eu", 4)

    def test_messages_of_events_hold_no_times_so_that_equal_ones_fold(self) -> None:
        texts = []
        for start in (0.0, 1234.5):
            story = Story(spec_of(1, 1, 1, max_restarts=1), now=CREATED + start)
            story.all_up()
            plan = story.look(done(0, 1))
            texts.append([*messages(plan, "RankFailed"), *messages(plan, "RankRestarted")])
        assert texts[0] == texts[1] == ["rank 0 exited with code 1", "rank 0 restarts: 1 of 1"]
