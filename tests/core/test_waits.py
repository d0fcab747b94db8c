"""Every row of the table of waits, on our own server and on one without generations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from basilica.client.views import RankExit
from basilica.core.errors import BelowMinimumWorld, DistributedError, UDTerminalState
from basilica.core.phase import BenchPhase
from basilica.core.waits import (
    Rule,
    Snapshot,
    bench_complete,
    complete,
    min_world,
    refuse_ended,
    target_world,
    timed_out,
)
from basilica.core.world import WorldStatus


def seen(phase: str = "ready", ready: int = 2, target: int = 2, low: int = 1, **facts: Any) -> Snapshot:
    world = WorldStatus(ready, target, low, 8, ready < low)
    return Snapshot(name="waiting", phase=phase, world=world, **facts)


ours: dict[str, Any] = {"generation": 3, "observed_generation": 3}
EXITS = (RankExit(0, 0, "Completed"), RankExit(1, 137, "OOMKilled", 2))


class TestMinWorld:
    @pytest.mark.parametrize(("ready", "over"), [(0, False), (1, False), (2, True), (3, True)])
    def test_is_over_when_min_ranks_are_up(self, ready: int, over: bool) -> None:
        assert min_world(seen("starting", ready, 3, 2), 5) is over

    def test_returns_cleanly_on_success_even_with_an_empty_world(self) -> None:
        assert min_world(seen("succeeded", 0, 2, 2), 5)

    def test_a_world_of_which_nothing_is_known_yet_is_not_reached(self) -> None:
        assert not min_world(seen("", 0, 0, 0), 5)

    def test_phases_we_do_not_know_are_not_terminal(self) -> None:
        assert not min_world(seen("hibernating", 0), 5)
        assert min_world(seen("hibernating", 1), 5)


class TestTargetWorld:
    def test_is_over_when_the_target_is_up(self) -> None:
        assert not target_world(seen(ready=1, **ours), 5)
        assert target_world(seen(ready=2, **ours), 5)

    def test_a_world_of_one_is_a_world(self) -> None:
        assert target_world(seen(ready=1, target=1, **ours), 5)

    def test_a_server_that_has_not_observed_anything_yet_is_waited_for(self) -> None:
        assert not target_world(seen(ready=2, target=2, generation=1), 5)

    def test_a_status_from_before_the_resize_does_not_count(self) -> None:
        assert not target_world(seen(ready=3, target=3, generation=3, observed_generation=2), 5)

    def test_a_status_of_a_later_generation_does(self) -> None:
        assert target_world(seen(generation=3, observed_generation=4), 5)

    def test_after_scaling_down_no_rank_above_the_target_may_still_run(self) -> None:
        assert not target_world(seen(surplus=1, **ours), 5)
        assert target_world(seen(surplus=0, **ours), 5)

    def test_without_generations_the_client_waits_for_the_target_it_asked_for(self) -> None:
        stale = seen(ready=2, target=2, requested_target=3)
        assert not target_world(stale, 5)
        assert not target_world(replace(stale, world=WorldStatus(2, 3, 1, 8, below_minimum=False)), 5)
        assert target_world(replace(stale, world=WorldStatus(3, 3, 1, 8, below_minimum=False)), 5)

    def test_without_generations_scaling_down_waits_for_the_new_target_too(self) -> None:
        assert not target_world(seen(ready=3, target=3, requested_target=2), 5)
        assert not target_world(seen(ready=2, target=2, requested_target=2, surplus=1), 5)
        assert target_world(seen(ready=2, target=2, requested_target=2), 5)

    def test_without_generations_and_without_a_scale_the_status_speaks_for_itself(self) -> None:
        assert target_world(seen(ready=2, target=2), 5)
        assert not target_world(seen(ready=1, target=2), 5)

    def test_with_generations_the_specs_own_target_counts_even_if_somebody_else_scaled(self) -> None:
        assert not target_world(seen(ready=3, target=5, requested_target=3, **ours), 5)

    def test_returns_cleanly_on_success_even_with_an_empty_world(self) -> None:
        assert target_world(seen("succeeded", 0, 2, requested_target=7), 5)

    def test_a_world_of_which_nothing_is_known_yet_is_not_reached(self) -> None:
        assert not target_world(seen("", 0, 0, 0), 5)

    def test_a_lost_run_names_the_requested_target_not_a_stale_one(self) -> None:
        with pytest.raises(BelowMinimumWorld) as caught:
            target_world(seen("failed", 2, 2, requested_target=3), 5)
        assert caught.value.required_min == 3


class TestComplete:
    @pytest.mark.parametrize("phase", ["", "pending", "ready", "degraded", "hibernating"])
    def test_goes_on_until_the_end(self, phase: str) -> None:
        assert not complete(seen(phase), 5)

    def test_is_over_on_success(self) -> None:
        assert complete(seen("succeeded"), 5)

    def test_requires_the_worlds_min(self) -> None:
        with pytest.raises(BelowMinimumWorld) as caught:
            complete(seen("failed", 0, 4, 2, requested_target=3), 5)
        assert caught.value.required_min == 2

    @pytest.mark.parametrize("phase", ["succeeded", "failed", "cancelled"])
    def test_refuses_a_run_that_is_over_at_entry(self, phase: str) -> None:
        with pytest.raises(UDTerminalState) as caught:
            refuse_ended(seen(phase))
        assert (caught.value.phase, caught.value.requested_target) == (phase, None)

    @pytest.mark.parametrize("phase", ["", "ready", "degraded", "hibernating"])
    def test_accepts_one_that_is_not(self, phase: str) -> None:
        refuse_ended(seen(phase))


@pytest.mark.parametrize("rule", [min_world, target_world, complete])
@pytest.mark.parametrize("phase", ["failed", "cancelled"])
def test_a_lost_run_raises_whatever_was_waited_for(rule: Rule, phase: str) -> None:
    with pytest.raises(BelowMinimumWorld) as caught:
        rule(seen(phase, 2, 2, rank_exits=EXITS, **ours), 9.0)
    error = caught.value
    assert isinstance(error, DistributedError)
    assert (error.ready, error.timeout, error.rank_exits, error.phase) == (2, 9.0, EXITS, phase)
    assert f"UD 'waiting' reached terminal phase '{phase}' (rank 1: exit_code=137 reason=OOMKilled)" in str(error)


@pytest.mark.parametrize(("rule", "required"), [(min_world, 1), (target_world, 3), (complete, 1)])
def test_when_the_time_is_up_the_error_says_what_was_required(rule: Rule, required: int) -> None:
    error = timed_out(seen("starting", 0, 2, requested_target=3), 300, rule=rule)
    assert (error.ready, error.required_min, error.timeout, error.phase) == (0, required, 300, "starting")
    assert str(error).startswith("UD 'waiting': waited 300 s for ")
    assert str(error).endswith(f"; phase 'starting', 0 ready of {required} required, target 3")


class TestBench:
    @pytest.mark.parametrize("phase", list(BenchPhase))
    def test_all_four_endings_end_the_wait(self, phase: BenchPhase) -> None:
        assert bench_complete(seen(bench_phase=phase.value), 5) is phase.terminal

    def test_without_a_probe_there_is_nothing_to_wait_for(self) -> None:
        assert bench_complete(seen(bench_phase=None), 5)

    def test_a_phase_we_do_not_know_is_no_end(self) -> None:
        assert not bench_complete(seen(bench_phase="Cooling"), 5)
        assert not bench_complete(seen(bench_phase=""), 5)

    def test_the_run_does_not_matter(self) -> None:
        assert not bench_complete(seen("failed", bench_phase="Running"), 5)


def test_rules_are_what_handles_take() -> None:
    rules: list[Callable[[Snapshot, float], bool]] = [min_world, target_world, complete, bench_complete]
    assert len(set(rules)) == 4
