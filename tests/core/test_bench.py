"""The probe has a life of its own: it never delays or fails the run, and the run's end ends it."""

import pytest

from basilica.core.actions import EndProbe, Launch, Probe, Remove
from basilica.core.phase import BenchPhase, Phase
from basilica.core.policy import BENCH_DEADLINE
from basilica.core.seen import BenchResult
from basilica.core.spec import BenchOnStart
from basilica.core.status import BenchStatus

from .story import CREATED, Story, bench, done, spec_of, stopped, up

RESULT = BenchResult(measured_at=1.0, probe_node_a="a", probe_node_b="b", busbw_gbps_p50=180.0)


def benched(placement: str = "preferred", **settings: object) -> Story:
    chosen = BenchOnStart("strict") if placement == "strict" else BenchOnStart()
    return Story(spec_of(1, 2, 2, bench=chosen, **settings))


def phase_of(story: Story) -> BenchPhase:
    assert story.status.bench is not None
    return story.status.bench.phase


def test_it_has_as_long_as_the_wait_for_it() -> None:
    assert BENCH_DEADLINE == 1500


def test_off_unless_asked_for() -> None:
    story = Story()
    story.all_up()
    story.look(up(0), up(1), bench=bench(BenchPhase.RUNNING))
    assert story.status.bench is None
    assert story.plan.actions == ()


def test_it_begins_when_the_world_is_ready() -> None:
    story = benched()
    story.look()
    assert phase_of(story) is BenchPhase.PENDING
    assert all(isinstance(a, Launch) for a in story.plan.actions)
    assert story.look(up(0), up(1)).actions == (Probe("preferred"),)
    assert story.look(up(0), up(1)).actions == (Probe("preferred"),)  # until a look shows it
    assert story.look(up(0), up(1), bench=bench(BenchPhase.PENDING)).actions == ()


def test_strict_placement_is_passed_on() -> None:
    story = benched("strict")
    assert story.all_up().actions == (Probe("strict"),)


def test_from_pending_to_running_to_succeeded() -> None:
    story = benched()
    story.all_up()
    story.look(up(0), up(1), bench=bench(BenchPhase.RUNNING), after=5)
    assert story.status.bench == BenchStatus(phase=BenchPhase.RUNNING, started_at=CREATED + 5)
    story.look(up(0), up(1), bench=bench(BenchPhase.SUCCEEDED, result=RESULT), after=5)
    assert story.status.bench == BenchStatus(
        phase=BenchPhase.SUCCEEDED, started_at=CREATED + 5, completed_at=CREATED + 10, result=RESULT
    )
    assert story.told == ["WorldReady", "BenchStarted", "BenchSucceeded"]


def test_a_probe_that_ran_between_two_looks_has_both_events_and_both_times() -> None:
    story = benched()
    story.all_up()
    story.look(up(0), up(1), bench=bench(BenchPhase.SUCCEEDED, result=RESULT), after=5)
    assert story.status.bench == BenchStatus(
        phase=BenchPhase.SUCCEEDED, started_at=CREATED + 5, completed_at=CREATED + 5, result=RESULT
    )
    assert story.told == ["WorldReady", "BenchStarted", "BenchSucceeded"]


@pytest.mark.parametrize(
    ("phase", "event", "kind"),
    [
        (BenchPhase.SUCCEEDED, "BenchSucceeded", "Normal"),
        (BenchPhase.FAILED, "BenchFailed", "Warning"),
        (BenchPhase.TIMED_OUT, "BenchTimedOut", "Warning"),
        (BenchPhase.SKIPPED, "BenchSkipped", "Normal"),
    ],
)
def test_every_ending_is_final_and_has_its_event(phase: BenchPhase, event: str, kind: str) -> None:
    story = benched()
    story.all_up()
    story.look(up(0), up(1), bench=bench(BenchPhase.RUNNING))
    plan = story.look(up(0), up(1), bench=bench(phase, message="because"))
    assert [(e.reason, e.message, e.kind) for e in plan.events] == [(event, "because", kind)]
    before = story.status.bench
    story.look(up(0), up(1), bench=bench(BenchPhase.SUCCEEDED, result=RESULT))
    story.look(done(0), done(1), after=BENCH_DEADLINE)
    assert story.status.bench == before
    assert story.phase() is Phase.SUCCEEDED


def test_a_failed_probe_does_not_fail_the_run_and_does_not_count_as_a_rank() -> None:
    story = benched()
    story.all_up()
    story.look(up(0), up(1), bench=bench(BenchPhase.FAILED))
    assert story.phase() is Phase.READY
    assert story.status.ready == 2


def test_a_result_that_was_measured_elsewhere_says_so() -> None:
    story = benched()
    story.all_up()
    seen = bench(BenchPhase.SUCCEEDED, result=RESULT, on_worker_nodes=False, message="measured on other nodes")
    story.look(up(0), up(1), bench=seen)
    assert story.status.bench is not None
    assert not story.status.bench.on_worker_nodes
    assert story.status.bench.message == "measured on other nodes"


def test_a_strict_probe_that_finds_no_room_stays_pending_and_times_out() -> None:
    story = benched("strict")
    assert story.all_up().wake_at == CREATED + BENCH_DEADLINE
    story.look(up(0), up(1), bench=bench(BenchPhase.PENDING), after=BENCH_DEADLINE - 1)
    assert phase_of(story) is BenchPhase.PENDING
    plan = story.look(up(0), up(1), bench=bench(BenchPhase.PENDING), after=1)
    assert phase_of(story) is BenchPhase.TIMED_OUT
    assert story.status.bench is not None
    assert story.status.bench.completed_at == CREATED + BENCH_DEADLINE
    assert plan.actions == (EndProbe(),)
    assert story.events == ["BenchTimedOut"]
    assert story.phase() is Phase.READY


def test_a_probe_that_never_ends_times_out_and_is_taken_down_while_the_run_goes_on() -> None:
    story = benched()
    story.all_up()
    story.look(up(0), up(1), bench=bench(BenchPhase.RUNNING), after=10)
    story.look(up(0), up(1), bench=bench(BenchPhase.RUNNING), after=BENCH_DEADLINE - 11)
    assert phase_of(story) is BenchPhase.RUNNING
    plan = story.look(up(0), up(1), bench=bench(BenchPhase.RUNNING), after=1)
    assert phase_of(story) is BenchPhase.TIMED_OUT
    assert plan.actions == (EndProbe(),)
    assert story.look(up(0), up(1), bench=bench(BenchPhase.RUNNING)).actions == (EndProbe(),)  # until it is gone
    assert story.look(up(0), up(1), bench=bench(BenchPhase.SKIPPED)).actions == ()
    assert phase_of(story) is BenchPhase.TIMED_OUT
    assert story.phase() is Phase.READY


@pytest.mark.parametrize("phase", [None, BenchPhase.PENDING, BenchPhase.RUNNING])
def test_the_end_of_the_run_skips_a_probe_that_is_not_done(phase: BenchPhase | None) -> None:
    story = benched()
    story.all_up()
    plan = story.look(done(0), done(1), bench=phase and bench(phase))
    assert story.phase() is Phase.SUCCEEDED
    assert phase_of(story) is BenchPhase.SKIPPED
    assert EndProbe() in plan.actions
    assert story.events == ["Succeeded", "BenchSkipped"]


def test_a_result_that_comes_with_the_end_of_the_run_is_kept() -> None:
    story = benched()
    story.all_up()
    story.look(done(0), done(1), bench=bench(BenchPhase.SUCCEEDED, result=RESULT))
    assert phase_of(story) is BenchPhase.SUCCEEDED


def test_a_probe_that_goes_on_after_its_end_is_taken_down_again() -> None:
    story = benched()
    story.all_up()
    story.look(done(0), done(1), bench=bench(BenchPhase.RUNNING))
    assert story.look(done(0), done(1), bench=bench(BenchPhase.RUNNING)).actions == (EndProbe(),)
    assert story.look(done(0), done(1)).actions == ()


def test_nothing_comes_after_the_removal() -> None:
    story = benched()
    story.look()
    story.delete()
    plan = story.look(stopped(0), stopped(1), bench=bench(BenchPhase.RUNNING))
    assert plan.actions == (EndProbe(), Remove())
