"""Changes of specs, statuses and events, and what is left of a run that is deleted."""

import asyncio
from dataclasses import replace

import pytest

from basilica.core.errors import DeploymentNotFound, StaleVersion, UDTerminalState
from basilica.core.events import Event
from basilica.core.goodput import Ledger
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import Usage
from basilica.ports import Deployment, Store
from basilica.testing.store_contract.stories import CREATED, Opens, a_run, cancelled, ended, story

EVENTS_KEPT = 1000


class Changing(Opens[Store]):
    """Each change is whole, on the state it was made for, or not at all."""

    @story
    async def test_versions_only_ever_grow(self, store: Store) -> None:
        versions = []
        for number in range(3):
            run = await store.create(a_run(f"run-{number}", name=f"run-{number}"))
            saved = await store.save_status(run, replace(run.status, message="new"), now=1.0)
            versions += [run.version, saved.version]
            await store.delete(run.instance)
        assert versions == sorted(set(versions))
        assert versions[0] > 0

    @story
    async def test_a_status_saved_on_an_old_version_is_refused_whole(self, store: Store) -> None:
        old = await store.create(a_run())
        new = await store.change_spec("train-1", lambda d: d.spec.scaled(3))
        with pytest.raises(StaleVersion):
            await store.save_status(old, replace(old.status, message="late"), [CREATED], now=1.0)
        with pytest.raises(StaleVersion):
            await store.save_status(old, old.status, now=1.0)
        assert await store.get("train-1") == new
        assert await store.events("train-1") == []

    @story
    async def test_of_many_statuses_saved_at_once_one_is_kept(self, store: Store) -> None:
        before = await store.create(a_run())
        results = await asyncio.gather(
            *(store.save_status(before, replace(before.status, message=str(n)), now=1.0) for n in range(20)),
            return_exceptions=True,
        )
        (kept,) = [result for result in results if isinstance(result, Deployment)]
        assert sum(isinstance(result, StaleVersion) for result in results) == 19
        assert await store.get("train-1") == kept

    @story
    async def test_a_status_saved_for_a_deleted_run_is_not_found(self, store: Store) -> None:
        before = await store.create(a_run())
        await store.delete("train-1")
        for status in (before.status, replace(before.status, message="late")):
            with pytest.raises(DeploymentNotFound):
                await store.save_status(before, status, now=1.0)

    @story
    async def test_a_status_that_changes_nothing_writes_nothing(self, store: Store) -> None:
        before = await store.create(a_run())
        assert await store.save_status(before, replace(before.status), now=1.0) == before
        repeated = await store.save_status(before, before.status, [CREATED], now=1.0)
        assert repeated.version > before.version

    @story
    async def test_a_spec_is_changed_from_its_newest_state(self, store: Store) -> None:
        await store.create(a_run(target=1))
        await asyncio.gather(
            *(store.change_spec("train-1", lambda d: d.spec.scaled(d.spec.world.target + 1)) for _ in range(6))
        )
        after = await store.get("train-1")
        assert (after.spec.world.target, after.spec.generation) == (7, 7)

    @story
    async def test_a_change_may_refuse_and_then_nothing_happened(self, store: Store) -> None:
        def refuse(deployment: Deployment) -> DeploymentSpec:
            raise UDTerminalState(deployment.status.phase, 3)

        before = await store.create(a_run())
        with pytest.raises(UDTerminalState):
            await store.change_spec("train-1", refuse, [CREATED])
        assert await store.get("train-1") == before
        assert await store.events("train-1") == []

    @story
    async def test_a_spec_that_does_not_change_writes_nothing(self, store: Store) -> None:
        await store.create(a_run())
        first = await store.change_spec("train-1", cancelled, [Event("Cancelled", "asked for")])
        assert await store.change_spec("train-1", cancelled, [Event("Cancelled", "asked for")]) == first
        assert [e.count for e in await store.events("train-1")] == [1]

    @story
    async def test_the_controller_has_to_do_with_what_is_not_settled_or_is_to_be_deleted(self, store: Store) -> None:
        running = await store.create(a_run("a", name="a"))
        assert await store.live() == ["a"]
        over = await store.save_status(running, ended(running.status, 1.0, settled=False), now=1.0)
        assert await store.live() == ["a"]
        await store.save_status(over, ended(over.status, 1.0), now=1.0)
        assert await store.live() == []
        await store.change_spec("a", cancelled)
        assert await store.live() == []
        await store.change_spec("a", lambda d: d.spec.ended_by(Wanted.DELETE))
        assert await store.live() == ["a"]
        await store.delete("a")
        assert await store.live() == []

    @story
    async def test_equal_events_are_folded_and_the_newest_comes_first(self, store: Store) -> None:
        saved = await store.create(a_run(created_at=10.0), [CREATED])
        lost = Event("RankLost", "rank 1 is lost", warning=True)
        for now in (20.0, 30.0):
            saved = await store.save_status(saved, saved.status, [lost, Event("WorldReady", f"at {now}")], now=now)
        found = await store.events("train-1")
        assert [(e.kind, e.reason, e.count, e.first_at, e.last_at) for e in found] == [
            ("Normal", "WorldReady", 1, 30.0, 30.0),
            ("Warning", "RankLost", 2, 20.0, 30.0),
            ("Normal", "WorldReady", 1, 20.0, 20.0),
            ("Normal", "Created", 1, 10.0, 10.0),
        ]
        assert found[1].message == "rank 1 is lost"
        assert found[1].version == saved.version

    @story
    async def test_events_are_read_since_a_version_and_up_to_a_number(self, store: Store) -> None:
        first = await store.create(a_run(created_at=1.0), [CREATED])
        second = await store.save_status(first, first.status, [Event("A", "a"), Event("B", "b")], now=2.0)
        assert [e.reason for e in await store.events("train-1", since=first.version)] == ["B", "A"]
        assert [e.reason for e in await store.events("train-1", limit=1)] == ["B"]
        assert await store.events("train-1", since=second.version) == []
        assert await store.events("train-1", since=10**30) == []
        assert await store.events("train-1", limit=0) == []
        assert len(await store.events("train-1", since=-(10**30), limit=10**30)) == 3

    @story
    async def test_a_clock_that_goes_back_leaves_no_event_that_ended_before_it_began(self, store: Store) -> None:
        saved = await store.create(a_run(created_at=100.0), [CREATED])
        await store.save_status(saved, saved.status, [CREATED], now=50.0)
        (event,) = await store.events("train-1")
        assert (event.first_at, event.last_at, event.count) == (100.0, 100.0, 2)

    @story
    async def test_the_number_of_events_is_bounded_and_created_stays(self, store: Store) -> None:
        saved = await store.create(a_run(created_at=0.0), [CREATED])
        for now in (1.0, 2.0, 3.0):
            many = [Event("RankFailed", f"{now} {n}") for n in range(EVENTS_KEPT // 2)]
            saved = await store.save_status(saved, saved.status, many, now=now)
        found = await store.events("train-1")
        assert len(found) == EVENTS_KEPT
        assert found[0].message == f"3.0 {EVENTS_KEPT // 2 - 1}"
        assert found[-2].message == "2.0 1"
        assert found[-1].reason == "Created"

    @story
    async def test_a_deleted_run_is_gone_and_its_usage_stays(self, store: Store) -> None:
        saved = await store.create(a_run(created_at=5.0), [CREATED])
        ledger = Ledger(training=5_500_000, rendezvous=1_000_000, degraded=500_000, unattributed=1_000_000)
        used = replace(ended(saved.status, 9.0), usage=Usage(8.0, 4.0), ledger=ledger)
        await store.save_status(saved, used, now=9.0)
        await store.delete("train-1")
        with pytest.raises(DeploymentNotFound):
            await store.get("train-1")
        assert await store.events("train-1") == []
        (row,) = await store.usage("ann")
        assert (row.user, row.instance, row.name) == ("ann", "train-1", "train")
        assert (row.rank_seconds, row.gpu_seconds, row.created_at, row.ended_at) == (8.0, 4.0, 5.0, 9.0)
        assert (row.training_seconds, row.lost_seconds) == (5.5, 1.5)

    @story
    async def test_usage_is_per_user_newest_first_in_pages(self, store: Store) -> None:
        for number in range(4):
            saved = await store.create(a_run(f"run-{number}", name=f"run-{number}"))
            await store.save_status(saved, replace(saved.status, usage=Usage(float(number))), now=1.0)
        await store.create(a_run("bobs", user="bob"))
        assert [row.rank_seconds for row in await store.usage("ann")] == [3.0, 2.0, 1.0, 0.0]
        assert [row.instance for row in await store.usage("ann", limit=2, offset=1)] == ["run-2", "run-1"]
        assert await store.usage("ann", limit=0) == []
        assert [row.ended_at for row in await store.usage("bob")] == [None]

    @story
    async def test_retention_names_what_is_settled_and_old(self, store: Store) -> None:
        for number, at, settled in ((0, 30.0, True), (1, 10.0, True), (2, 10.0, False), (3, 50.0, True)):
            saved = await store.create(a_run(f"run-{number}", name=f"run-{number}"))
            await store.save_status(saved, ended(saved.status, at, settled=settled), now=at)
        await store.create(a_run("live", name="live"))
        assert await store.prune(before=50.0) == ["run-1", "run-0"]
        assert len(await store.deployments()) == 5
