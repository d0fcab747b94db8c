"""Stories told on a whole control plane with a fake runtime."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from basilica.controller import loop
from basilica.core import failing
from basilica.core.actions import Launch
from basilica.core.deployment import Deployment
from basilica.core.errors import (
    DeploymentNotFound,
    RuntimeUnavailable,
    StoreUnavailable,
    UDTerminalState,
    WorldClosed,
    WorldSizeOutOfBounds,
)
from basilica.core.mesh import SeenRendezvous
from basilica.core.phase import Phase
from basilica.core.seen import Sighting
from basilica.core.why import why
from basilica.ports import Run
from basilica.stores.memory import MemoryStore
from basilica.testing.fake_runtime import FakeRuntime
from tests.story.world import USER, World, world


def test_a_run_is_started_watched_and_succeeds() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy(target=2)
            await w.until(run, lambda d: d.status.ready == 2)
            w.runtime.exit(run, 0, 0)
            w.runtime.exit(run, 1, 0)
            ended = await w.until_settled(run)
            assert ended.status.phase is Phase.SUCCEEDED
            assert [e.exit_code for e in ended.status.exits] == [0, 0]
            assert await w.reasons(run) == ["Created", "WorldReady", "Succeeded"]

    asyncio.run(story())


def test_min_equal_to_target_fails_fast_and_stops_the_survivors() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy(low=3, target=3)
            await w.until(run, lambda d: d.status.ready == 3)
            w.runtime.exit(run, 1, 5)
            ended = await w.until_settled(run)
            assert ended.status.phase is Phase.FAILED
            assert "rank 1 exited with code 5" in ended.status.message
            assert {e.rank: e.termination_reason for e in ended.status.exits} == {
                0: "Cancelled",
                1: "Error",
                2: "Cancelled",
            }
            assert w.runtime.running(run) == []

    asyncio.run(story())


def test_scaling_up_and_down_drains_the_highest_ranks() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy(target=2, high=4)
            await w.plane.scale(USER, run, 4)
            await w.until(run, lambda d: d.status.ready == 4)
            assert w.runtime.running(run) == [0, 1, 2, 3]
            await w.plane.scale(USER, run, 1)
            await w.until(run, lambda d: w.runtime.running(run) == [0] and d.status.world_target == 1)
            await w.plane.scale(USER, run, 3)
            await w.until(run, lambda d: d.status.ready == 3)
            assert (run, 2, 1) in w.runtime.launches  # wanted again: a new attempt

    asyncio.run(story())


def test_scaling_is_refused_where_it_makes_no_sense() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy(target=2, high=4)
            await w.until(run, lambda d: d.status.ready == 2)
            with pytest.raises(WorldSizeOutOfBounds):
                await w.plane.scale(USER, run, 5)
            w.runtime.exit(run, 0, 0)
            await w.until(run, lambda d: d.status.closed)
            with pytest.raises(WorldClosed):
                await w.plane.scale(USER, run, 3)
            w.runtime.exit(run, 1, 0)
            await w.until_settled(run)
            with pytest.raises(UDTerminalState):
                await w.plane.scale(USER, run, 2)

    asyncio.run(story())


def test_a_restart_gives_every_rank_a_fresh_start() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy(target=2)
            await w.until(run, lambda d: d.status.ready == 2)
            await w.plane.restart(USER, run)
            await w.until(run, lambda d: d.status.ready == 2 and all(r.attempt == 1 for r in d.status.ranks))
            assert sorted(w.runtime.launches) == [(run, 0, 0), (run, 0, 1), (run, 1, 0), (run, 1, 1)]

    asyncio.run(story())


def test_cancel_keeps_the_record_and_delete_removes_it() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy()
            await w.until(run, lambda d: d.status.ready == 2)
            await w.plane.cancel(USER, run)
            assert (await w.until_settled(run)).status.phase is Phase.CANCELLED
            assert w.runtime.running(run) == []
            await w.plane.delete(USER, run)
            with pytest.raises(DeploymentNotFound):
                await w.until(run, lambda _: False)

    asyncio.run(story())


def test_another_users_run_does_not_exist() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy()
            for call in (w.plane.get, w.plane.cancel, w.plane.restart):
                with pytest.raises(DeploymentNotFound):
                    await call("bob", run)
            assert await w.plane.deployments("bob") == []

    asyncio.run(story())


def test_a_look_that_fails_changes_nothing_and_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FIRST_BACK_OFF", 0.001)

    async def story() -> None:
        async with world() as w:
            run = await w.deploy()
            before = await w.until(run, lambda d: d.status.ready == 2)
            w.runtime.broken = True
            w.runtime.exit(run, 0, 1)
            while w.controller.errors < 3:
                await asyncio.sleep(0)
            assert (await w.store.get(run)).status == before.status
            w.runtime.broken = False
            ended = await w.until(run, lambda d: bool(d.status.exits))
            assert ended.status.exits[0].exit_code == 1

    asyncio.run(story())


def test_a_controller_that_dies_between_save_and_apply_repeats_the_launch() -> None:
    class DiesBeforeLaunching(FakeRuntime):
        async def launch(self, run: object, launches: object) -> None:
            await asyncio.Event().wait()

    async def story() -> None:
        store = MemoryStore()
        async with world(DiesBeforeLaunching(), store) as first:
            run = await first.deploy(target=2)
            await first.until(run, lambda d: len(d.status.ranks) == 2)  # saved: both are to be launched
            for task in first.controller._tasks:
                task.cancel()
        async with world(FakeRuntime(), store) as second:
            await second.until(run, lambda d: d.status.ready == 2)
            assert sorted(second.runtime.launches) == [(run, 0, 0), (run, 1, 0)]

    asyncio.run(story())


def test_an_idle_run_gets_no_turns() -> None:
    async def story() -> None:
        async with world() as w:
            runs = [await w.deploy(f"run-{n}") for n in range(20)]
            for run in runs:
                await w.until(run, lambda d: d.status.ready == 2)
            await asyncio.sleep(0.05)  # whatever was still queued
            before = w.controller.turns
            await asyncio.sleep(0.2)
            assert w.controller.turns == before

    asyncio.run(story())


def test_the_time_to_live_ends_a_run_by_a_timer() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy(ttl_seconds=0.2)
            ended = await w.until_settled(run)
            assert ended.status.phase is Phase.CANCELLED
            assert "time to live" in ended.status.message

    asyncio.run(story())


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are recorded after a tenth of the time, and tried again often."""
    monkeypatch.setattr(failing, "RECORD_AFTER_S", 0.3)
    monkeypatch.setattr(loop, "LONGEST_BACK_OFF", 0.1)


async def many_turns(w: World) -> None:
    seen = w.controller.turns
    while w.controller.turns < seen + 10:
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("quickly")
def test_a_run_that_nobody_can_look_at_says_so_once_until_somebody_can() -> None:
    async def story() -> None:
        async with world() as w:
            run = await w.deploy(target=2)
            before = await w.until(run, lambda d: d.status.ready == 2)
            w.runtime.broken = True
            w.controller.wake(run)
            told = await w.until(run, lambda d: d.status.failing is not None)
            sentence = why(told.spec, told.status, w.now())
            assert sentence.startswith(
                "the controller has not been able to look after this run for 0 s (the fake runtime"
            )
            assert sentence.endswith(
                "was told to fail); its ranks go on; this is what was seen before: 2 of 2 ranks are up"
            )
            await many_turns(w)
            assert (await w.store.get(run)).version == told.version, "one write for each failure, not for each try"
            w.runtime.broken = False
            again = await w.until(run, lambda d: d.status.failing is None)
            assert again.status == before.status
            assert await w.reasons(run) == ["Created", "WorldReady", "Unattended"]

    asyncio.run(story())


@pytest.mark.usefixtures("quickly")
def test_an_action_that_fails_is_said_too_and_writes_nothing_for_each_try() -> None:
    """The look goes well each time, and would take back what the action tells."""

    class Refusing(FakeRuntime):
        refuses = True

        async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
            if self.refuses:
                raise RuntimeUnavailable(f"cannot make what {run.instance} needs: quota exceeded")
            await super().launch(run, launches)

    async def story() -> None:
        runtime = Refusing()
        async with world(runtime) as w:
            run = await w.deploy(target=1)
            told = await w.until(run, lambda d: d.status.failing is not None)
            assert f"(cannot make what {run} needs: quota exceeded)" in why(told.spec, told.status, w.now())
            await many_turns(w)
            assert (await w.store.get(run)).version == told.version
            runtime.refuses = False
            up = await w.until(run, lambda d: d.status.ready == 1 and d.status.failing is None)
            assert why(up.spec, up.status, w.now()) == "1 of 1 ranks are up: nothing to wait for"

    asyncio.run(story())


@pytest.mark.usefixtures("quickly")
def test_a_run_that_ends_while_its_turns_fail_keeps_nothing_of_it() -> None:
    class Sticky(FakeRuntime):
        sticks = True

        async def end_rendezvous(self, run: Run) -> None:
            if self.sticks:
                raise RuntimeUnavailable("the rendezvous cannot be ended")

        async def observe(self, run: Run) -> Sighting:
            return replace(await super().observe(run), rendezvous=SeenRendezvous(endpoint="127.0.0.1:1"))

    async def story() -> None:
        runtime = Sticky()
        async with world(runtime) as w:
            run = await w.deploy(target=1)
            await w.until(run, lambda d: d.status.ready == 1)
            runtime.broken = True
            runtime.exit(run, 0, 0)
            await w.until(run, lambda d: d.status.failing is not None)
            runtime.broken = False
            ended = await w.until_settled(run)
            assert ended.status.failing is None
            await many_turns(w)  # which go on to fail, and must not be recorded in what is settled
            assert (await w.store.get(run)).version == ended.version
            runtime.sticks = False

    asyncio.run(story())


@pytest.mark.usefixtures("quickly")
def test_a_store_that_cannot_be_written_does_not_end_the_controller() -> None:
    class Full(MemoryStore):
        full = False

        async def save_status(self, *args: Any, **kwargs: Any) -> Deployment:
            if self.full:
                raise StoreUnavailable("no space left")
            return await super().save_status(*args, **kwargs)

    async def story() -> None:
        store = Full()
        async with world(store=store) as w:
            run = await w.deploy(target=1)
            await w.until(run, lambda d: d.status.ready == 1)
            w.runtime.broken = store.full = True
            w.controller.wake(run)
            while w.controller.errors < 10:
                await asyncio.sleep(0.01)
            store.full = False
            await w.until(run, lambda d: d.status.failing is not None)
            w.runtime.broken = False
            await w.until(run, lambda d: d.status.failing is None)

    asyncio.run(story())
