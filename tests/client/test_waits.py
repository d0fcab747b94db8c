"""Every row of the waiting table, blocking and async, against servers that lag, lie, refuse and drop connections."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from basilica.client import flows
from basilica.client.api import BasilicaClient
from basilica.client.effects import Answer, Call, Flow, Now, Sleep
from basilica.client.training import DistributedTraining
from basilica.core.errors import (
    AuthenticationError,
    BelowMinimumWorld,
    DeploymentNotFound,
    NetworkError,
    UDTerminalState,
    WorldSizeOutOfBounds,
)
from tests.client.lying_server import DROP, Reply, lying, run_body, sequence

Waiter = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules with shorter pauses."""
    monkeypatch.setattr(flows, "FIRST_POLL", 0.01)
    monkeypatch.setattr(flows, "LONGEST_POLL", 0.01)
    monkeypatch.setattr(flows, "FIRST_DELAY", 0.005)
    monkeypatch.setattr(flows, "LONGEST_DELAY", 0.01)


@pytest.fixture(params=["blocking", "async"])
def call(request: pytest.FixtureRequest) -> Waiter:
    """Calls a method of a handle, or its twin."""

    def blocking(training: DistributedTraining, method: str, *args: Any, **options: Any) -> Any:
        with training._client:
            return getattr(training, method)(*args, **options)

    def twin(training: DistributedTraining, method: str, *args: Any, **options: Any) -> Any:
        async def story() -> Any:
            async with training._client:
                return await getattr(training, f"{method}_async")(*args, **options)

        return asyncio.run(story())

    return blocking if request.param == "blocking" else twin


def handle(url: str) -> DistributedTraining:
    return DistributedTraining(BasilicaClient(url, "key"), "run-1")


def ok(*args: Any, **more: Any) -> Reply:
    return 200, run_body(*args, **more)


def act_out(flow: Flow[Any], replies: list[Reply]) -> Any:
    """Drive a flow by hand: calls get the replies in turn, and a call or sleep lets its whole time pass."""
    now = 0.0
    answer: Any = None
    while True:
        try:
            effect = flow.send(answer)
        except StopIteration as done:
            return done.value
        match effect:
            case Now():
                answer = now
            case Sleep(seconds):
                now += seconds
                answer = None
            case Call(params=params):
                now += float(params.get("wait", 0))
                status, body = cast("tuple[int, Any]", replies.pop(0))
                answer = Answer(status, {}, json.dumps(body).encode())
            case _:
                raise AssertionError(effect)


FAILED = ok("failed", ready=0, exits={0: 0, 1: 137})


class TestMinWorld:
    def test_returns_when_enough_are_up(self, call: Waiter) -> None:
        with lying(sequence(ok("starting", ready=0), ok("starting", ready=0), ok(ready=1))) as server:
            assert call(handle(server.url), "wait_until_min_world", 5).ready == 1

    def test_returns_cleanly_on_succeeded(self, call: Waiter) -> None:
        with lying(sequence(ok("starting", ready=0), ok("succeeded", ready=0))) as server:
            call(handle(server.url), "wait_until_min_world", 5)

    def test_a_world_that_was_never_observed_is_not_reached(self, call: Waiter) -> None:
        with lying(sequence(ok("", ready=0, target=0, min=0))) as server, pytest.raises(BelowMinimumWorld):
            call(handle(server.url), "wait_until_min_world", 0.05)

    @pytest.mark.parametrize("phase", ["failed", "cancelled"])
    def test_a_lost_run_raises_with_its_exits(self, call: Waiter, phase: str) -> None:
        with lying(sequence(ok(phase, ready=0, exits={1: 3}))) as server:
            with pytest.raises(BelowMinimumWorld, match="rank 1: exit_code=3 reason=Error") as lost:
                call(handle(server.url), "wait_until_min_world", 5)
            assert (lost.value.phase, lost.value.rank_exits[0].exit_code) == (phase, 3)

    def test_the_time_is_up(self, call: Waiter) -> None:
        with lying(sequence(ok("starting", ready=0))) as server, pytest.raises(BelowMinimumWorld) as late:
            call(handle(server.url), "wait_until_min_world", 0.1)
        assert (late.value.ready, late.value.required_min, late.value.timeout) == (0, 1, 0.1)


class TestTargetWorld:
    def test_a_stale_target_after_scale_does_not_count(self, call: Waiter) -> None:
        """Two ranks of a target of two read "all ready" right after scale(3), until the server has acted."""
        stale, moving, there = ok(ready=2, target=2), ok(ready=2, target=3), ok(ready=3, target=3)
        with lying(sequence(stale, stale, stale, stale, moving, moving, there)) as server:
            training = handle(server.url)
            assert call(training, "scale", 3).target == 3
            assert call(training, "wait_until_target_world", 5).ready == 3

    def test_another_process_is_not_fooled_either(self, call: Waiter) -> None:
        """It did not ask for the scale; the generations tell it."""
        behind = ok(ready=2, target=3, generation=2, observedGeneration=1, version=5)
        there = ok(ready=3, target=3, generation=2, observedGeneration=2, version=6)
        with lying(sequence(behind, behind, there)) as server:
            assert call(handle(server.url), "wait_until_target_world", 5).ready == 3

    def test_after_scaling_down_the_surplus_must_be_gone(self, call: Waiter) -> None:
        old = ok(ready=1, target=1, generation=2, observedGeneration=2, version=5, running=[0, 1, 2])
        new = ok(ready=1, target=1, generation=2, observedGeneration=2, version=6, running=[0])
        with lying(sequence(old, old, new)) as server:
            call(handle(server.url), "wait_until_target_world", 5)
            assert server.count("GET") == 3

    def test_succeeded_counts_even_with_nothing_ready(self, call: Waiter) -> None:
        with lying(sequence(ok(ready=1), ok("succeeded", ready=0))) as server:
            call(handle(server.url), "wait_until_target_world", 5)

    def test_the_required_number_is_the_requested_target(self, call: Waiter) -> None:
        with lying(sequence(ok(ready=2, target=2))) as server:
            training = handle(server.url)
            call(training, "scale", 4)
            with pytest.raises(BelowMinimumWorld) as late:
                call(training, "wait_until_target_world", 0.1)
            assert late.value.required_min == 4

    def test_a_newer_scale_replaces_the_remembered_target(self, call: Waiter) -> None:
        with lying(sequence(ok(ready=2, target=2))) as server:
            training = handle(server.url)
            call(training, "scale", 4)
            call(training, "scale", 2)
            assert call(training, "wait_until_target_world", 0.1).ready == 2


class TestComplete:
    def test_the_final_world_on_success(self, call: Waiter) -> None:
        with lying(sequence(ok(), ok(), ok("succeeded", exits={0: 0, 1: 0}))) as server:
            assert call(handle(server.url), "wait_until_complete", 5).ready == 2

    @pytest.mark.parametrize("phase", ["succeeded", "failed", "cancelled"])
    def test_over_already_at_entry(self, call: Waiter, phase: str) -> None:
        with lying(sequence(ok(phase))) as server, pytest.raises(UDTerminalState) as over:
            call(handle(server.url), "wait_until_complete", 5)
        assert (over.value.phase, over.value.requested_target) == (phase, None)

    def test_a_failure_names_every_bad_rank(self, call: Waiter) -> None:
        text = r"UD 'run' reached terminal phase 'failed' \(rank 1: exit_code=137 reason=Error\)"
        with lying(sequence(ok(), ok(), FAILED)) as server, pytest.raises(BelowMinimumWorld, match=text):
            call(handle(server.url), "wait_until_complete", 5)

    def test_a_failure_at_the_very_last_look_is_no_time_out(self) -> None:
        with pytest.raises(BelowMinimumWorld) as lost:
            act_out(flows.wait_complete(flows.Remembered("run-1"), 0.005), [ok(), FAILED])
        assert lost.value.phase == "failed"

    def test_nor_is_one_that_a_watched_server_tells_of_when_the_time_is_up(self) -> None:
        ours = {"generation": 1, "observedGeneration": 1, "version": 1}
        failed = ok("failed", ready=0, exits={1: 3}, **ours)
        with pytest.raises(BelowMinimumWorld) as lost:
            act_out(flows.wait_complete(flows.Remembered("run-1"), 5), [ok(**ours), failed])
        assert lost.value.phase == "failed"

    def test_a_lost_run_without_exits_says_so(self, call: Waiter) -> None:
        script, text = sequence(ok(), ok(), ok("cancelled", ready=0)), "no per-rank exits recorded"
        with lying(script) as server, pytest.raises(BelowMinimumWorld, match=text):
            call(handle(server.url), "wait_until_complete", 5)


class TestJoin:
    def test_a_run_that_ended_before_the_call_is_fine(self, call: Waiter) -> None:
        with lying(sequence(ok("succeeded", ready=2))) as server:
            assert call(handle(server.url), "join").ready == 2

    def test_a_failed_one_raises(self, call: Waiter) -> None:
        with lying(sequence(FAILED)) as server, pytest.raises(BelowMinimumWorld):
            call(handle(server.url), "join")


class TestBench:
    def test_off_is_none(self, call: Waiter) -> None:
        with lying(sequence(ok())) as server:
            assert call(handle(server.url), "wait_until_bench_complete", 5) is None

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed", "TimedOut", "Skipped"])
    def test_every_ending_ends_the_wait(self, call: Waiter, phase: str) -> None:
        with lying(sequence(ok(bench="Running"), ok(bench=phase))) as server:
            assert call(handle(server.url), "wait_until_bench_complete", 5).phase == phase

    def test_the_time_is_up(self, call: Waiter) -> None:
        with lying(sequence(ok(bench="Pending"))) as server, pytest.raises(TimeoutError):
            call(handle(server.url), "wait_until_bench_complete", 0.05)


class TestOneLook:
    """`timeout=0` is one look and no sleep."""

    WAITS = ("wait_until_min_world", "wait_until_target_world", "join")

    @pytest.mark.parametrize("wait", WAITS)
    def test_it_is_there(self, call: Waiter, wait: str) -> None:
        with lying(sequence(ok("succeeded"))) as server:
            call(handle(server.url), wait, timeout=0)
            assert server.count("GET") == 1

    @pytest.mark.parametrize("wait", WAITS)
    def test_it_is_not(self, call: Waiter, wait: str) -> None:
        with lying(sequence(ok("starting", ready=0))) as server:
            with pytest.raises(BelowMinimumWorld):
                call(handle(server.url), wait, timeout=0)
            assert server.count("GET") == 1

    @pytest.mark.parametrize("wait", WAITS)
    def test_it_was_lost(self, call: Waiter, wait: str) -> None:
        with lying(sequence(FAILED)) as server, pytest.raises(BelowMinimumWorld) as lost:
            call(handle(server.url), wait, timeout=0)
        assert lost.value.phase == "failed"


class TestTrouble:
    def test_502_503_429_and_dropped_connections_are_asked_again(self, call: Waiter) -> None:
        bad = {"error": {"code": "x", "message": "m", "timestamp": "t", "retryable": True}}
        with lying(
            sequence((502, bad), DROP, (503, bad), (429, bad), ok(), DROP, (504, {}), ok("succeeded"))
        ) as server:
            call(handle(server.url), "join", 5)
            assert server.count("DELETE") == server.count("POST") == 0  # a blip never ends a run

    def test_a_server_that_stays_away_is_a_network_error(self, call: Waiter) -> None:
        with lying(sequence(DROP)) as server, pytest.raises(NetworkError):
            call(handle(server.url), "join", 0.1)

    def test_a_server_that_goes_away_during_a_wait_ends_it_at_its_time(self, call: Waiter) -> None:
        with lying(sequence(ok("starting", ready=0), DROP)) as server, pytest.raises(BelowMinimumWorld):
            call(handle(server.url), "wait_until_min_world", 0.1)

    def test_a_wrong_key_is_told_at_once(self, call: Waiter) -> None:
        body = {"error": {"code": "BASILICA_API_AUTH_ERROR", "message": "no", "timestamp": "t", "retryable": False}}
        with lying(sequence((401, body))) as server:
            with pytest.raises(AuthenticationError):
                call(handle(server.url), "join", 5)
            assert server.count("GET") == 1

    def test_a_missing_run_is_told_at_once(self, call: Waiter) -> None:
        with lying(sequence((404, {}))) as server, pytest.raises(DeploymentNotFound) as missing:
            call(handle(server.url), "join", 5)
        assert missing.value.name == "run-1"

    def test_a_500_that_says_not_found_is_no_missing_run(self, call: Waiter) -> None:
        body = {"error": {"code": "x", "message": "node not found", "timestamp": "t", "retryable": False}}
        with lying(sequence((500, body))) as server, pytest.raises(Exception, match="node not found") as trouble:
            call(handle(server.url), "join", 5)
        assert not isinstance(trouble.value, DeploymentNotFound)


class TestScale:
    @pytest.mark.parametrize("target", [0, -1, 5])
    def test_out_of_bounds_is_refused_before_anything_is_changed(self, call: Waiter, target: int) -> None:
        with lying(sequence(ok())) as server:
            with pytest.raises(WorldSizeOutOfBounds) as refused:
                call(handle(server.url), "scale", target)
            assert (refused.value.requested, refused.value.min, refused.value.max) == (target, 1, 4)
            assert server.count("POST") == 0

    def test_an_ended_run_is_refused_before_anything_is_changed(self, call: Waiter) -> None:
        with lying(sequence(ok("failed"))) as server:
            with pytest.raises(UDTerminalState) as refused:
                call(handle(server.url), "scale", 3)
            assert (refused.value.phase, refused.value.requested_target) == ("failed", 3)
            assert server.count("POST") == 0
