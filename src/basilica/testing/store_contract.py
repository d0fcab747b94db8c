"""What every `Store` and every `Keys` promises, as test classes. Subclass one, say how to open yours, and run pytest:

class TestMyStore(StoreContract):
    @asynccontextmanager
    async def opened(self, directory: Path) -> AsyncIterator[Store]:
        yield MyStore(directory)
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from basilica.core.errors import (
    Conflict,
    DeploymentNotFound,
    NameInUse,
    QuotaExceeded,
    StaleVersion,
    UDTerminalState,
)
from basilica.core.events import Event
from basilica.core.phase import Phase, RankPhase
from basilica.core.spec import BenchOnStart, DeploymentSpec, Exec, Gpus, Resources, Shell, Wanted
from basilica.core.status import BenchStatus, Condition, DeploymentStatus, Milestone, Resize, Usage, WorldSample
from basilica.core.world import RankExit, RankStatus, WorldSize
from basilica.ports import ApiKey, Deployment, Keys, Limits, Store

STORY_SECONDS = 20.0
EVENTS_KEPT = 1000
A_DAY = 86400.0

CREATED = Event("Created", "it was created")

Contract = TypeVar("Contract", bound="StoreContract | KeysContract")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run one story to its end; one that hangs fails."""
    asyncio.run(asyncio.wait_for(coroutine, STORY_SECONDS))


def story(test: Callable[[Contract, Any], Awaitable[None]]) -> Callable[[Contract, Path], None]:
    """Make a test of a coroutine that takes an open store."""

    def told(self: Contract, tmp_path: Path) -> None:
        async def tell() -> None:
            async with self.opened(tmp_path) as opened:
                await test(self, opened)

        run(tell())

    told.__name__, told.__qualname__, told.__doc__ = test.__name__, test.__qualname__, inspect.getdoc(test)
    return told


def a_run(
    instance: str = "train-1",
    *,
    name: str = "train",
    user: str = "ann",
    target: int = 2,
    created_at: float = 1000.0,
    script: str = "train.sh",
) -> Deployment:
    """A new run, as the server hands it to `create`."""
    return Deployment(
        instance=instance,
        user=user,
        namespace=f"u-{user}",
        spec=DeploymentSpec(name=name, program=Shell(script), world=WorldSize(1, target, 8)),
        status=DeploymentStatus(created_at=created_at),
        version=0,
    )


def ended(status: DeploymentStatus, at: float, *, settled: bool = True) -> DeploymentStatus:
    return replace(status, phase=Phase.SUCCEEDED, terminal_at=at, settled=settled)


def cancelled(deployment: Deployment) -> DeploymentSpec:
    return deployment.spec.ended_by(Wanted.CANCEL)


class StoreContract:
    """Specs, statuses, events, usage and wake-ups."""

    def opened(self, directory: Path) -> AbstractAsyncContextManager[Store]:
        """An empty store, closed at the end. `directory` is empty and private to the test."""
        raise NotImplementedError

    # ---- keeping and finding ----

    @story
    async def test_a_run_reads_back_as_it_was_written(self, store: Store) -> None:
        everything = replace(
            a_run(),
            spec=DeploymentSpec(
                name="train",
                program=Exec(("python", "-c", "print('ü')", "")),
                world=WorldSize(1, 2, 3),
                env={"A": "1", "B": ""},
                secrets={"TOKEN": "s3cret"},
                nccl_env={"NCCL_DEBUG": "INFO"},
                resources=Resources(cpu=0.5, memory_bytes=1 << 40, gpus=Gpus(2, ("H100",), 80)),
                bench=BenchOnStart("strict"),
                workdir="/tmp",
                deadline_seconds=0.1,
            ),
            status=DeploymentStatus(
                created_at=1234.000001,
                phase=Phase.DEGRADED,
                message="waiting",
                ranks=(RankStatus(rank=1, attempt=3, phase=RankPhase.RUNNING, started_at=1.5),),
                exits=(_an_exit(0, log_tail=("one", "two\n")),),
                failures=(_an_exit(None),),
                conditions=(Condition(type="Ready", status="False", reason="r", message="m", since=1.0),),
                bench=BenchStatus(message="off"),
                usage=Usage(0.1, 0.2),
                history=(WorldSample(1.0, 2, 1),),
                last_resize=Resize(1.0, 1, 2, "asked"),
                milestones=(Milestone("ready", 2.0),),
                warned=("no gpu",),
            ),
        )
        created = await store.create(everything)
        assert created == replace(everything, version=created.version, owner=created.owner)
        assert await store.get("train-1") == created

    @story
    async def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        for name in ("nobody", "", "a/b", "ü", "\ud800", "nul\0"):
            with pytest.raises(DeploymentNotFound):
                await store.get(name)
            with pytest.raises(DeploymentNotFound):
                await store.find("u-ann", name)
            assert await store.events("nobody") == []
        with pytest.raises(DeploymentNotFound):
            await store.change_spec("nobody", cancelled)
        with pytest.raises(DeploymentNotFound):
            await store.save_status(a_run(), a_run().status, [CREATED], now=1.0)
        await store.delete("nobody")

    @story
    async def test_a_run_is_found_by_its_instance_name_or_as_the_newest_of_its_name(self, store: Store) -> None:
        first = await store.create(a_run("train-1"))
        await store.save_status(first, ended(first.status, 1.0), now=1.0)
        second = await store.create(a_run("train-2"))
        assert await store.find("u-ann", "train") == second
        assert (await store.find("u-ann", "train-1")).instance == "train-1"

    @story
    async def test_an_instance_name_goes_before_a_friendly_name(self, store: Store) -> None:
        await store.create(a_run("train-1", name="other"))
        await store.create(a_run("train-2", name="train-1"))
        assert (await store.find("u-ann", "train-1")).instance == "train-1"

    @story
    async def test_another_namespace_s_run_is_not_found(self, store: Store) -> None:
        await store.create(a_run("train-1", user="ann"))
        for name in ("train", "train-1"):
            with pytest.raises(DeploymentNotFound):
                await store.find("u-bob", name)
        bobs = await store.create(a_run("train-2", name="train-1", user="bob"))
        assert await store.find("u-bob", "train-1") == bobs

    @story
    async def test_a_listing_is_of_one_namespace_or_of_all_newest_first(self, store: Store) -> None:
        for number, user in enumerate(("ann", "bob", "ann")):
            await store.create(a_run(f"run-{number}", name=f"run-{number}", user=user))
        assert [d.instance for d in await store.deployments("u-ann")] == ["run-2", "run-0"]
        assert [d.instance for d in await store.deployments()] == ["run-2", "run-1", "run-0"]
        assert await store.deployments("u-nobody") == []

    # ---- names, limits, idempotency ----

    @story
    async def test_a_live_run_holds_its_name_and_an_ended_one_does_not(self, store: Store) -> None:
        first = await store.create(a_run("train-1"))
        with pytest.raises(NameInUse) as refused:
            await store.create(a_run("train-2"))
        assert refused.value.instance == "train-1"
        with pytest.raises(DeploymentNotFound):
            await store.get("train-2")
        await store.create(a_run("train-3", user="bob"))
        await store.save_status(first, ended(first.status, 1.0, settled=False), now=1.0)
        await store.create(a_run("train-4"))

    @story
    async def test_of_many_creates_of_one_name_at_once_one_wins(self, store: Store) -> None:
        results = await asyncio.gather(*(store.create(a_run(f"train-{n}")) for n in range(20)), return_exceptions=True)
        assert sum(isinstance(result, Deployment) for result in results) == 1
        assert sum(isinstance(result, NameInUse) for result in results) == 19
        assert len(await store.deployments()) == 1

    @story
    async def test_an_instance_name_is_given_once_and_for_ever(self, store: Store) -> None:
        await store.create(a_run("train-1"))
        with pytest.raises(Conflict, match="train-1"):
            await store.create(a_run("train-1", name="other"))
        assert (await store.get("train-1")).spec.name == "train"
        await store.delete("train-1")
        with pytest.raises(Conflict, match="train-1"):
            await store.create(a_run("train-1"))

    @story
    async def test_limits_count_what_is_live_of_one_user(self, store: Store) -> None:
        limits = Limits(deployments=2, ranks=5)
        first = await store.create(a_run("a", name="a", target=2), limits=limits)
        with pytest.raises(QuotaExceeded) as ranks:
            await store.create(a_run("b", name="b", target=4), limits=limits)
        assert (ranks.value.what, ranks.value.limit, ranks.value.current, ranks.value.requested) == ("ranks", 5, 2, 4)
        await store.create(a_run("b", name="b", target=3), limits=limits)
        with pytest.raises(QuotaExceeded) as runs:
            await store.create(a_run("c", name="c", target=1), limits=limits)
        assert (runs.value.what, runs.value.limit, runs.value.current) == ("deployments", 2, 2)
        await store.create(a_run("d", name="d", user="bob", target=5), limits=limits)
        await store.save_status(first, ended(first.status, 1.0), now=1.0)
        await store.create(a_run("c", name="c", target=2), limits=limits)

    @story
    async def test_scaling_up_is_limited_and_scaling_down_is_not(self, store: Store) -> None:
        await store.create(a_run(target=3))
        with pytest.raises(QuotaExceeded):
            await store.change_spec("train-1", lambda d: d.spec.scaled(6), limits=Limits(ranks=5))
        assert (await store.get("train-1")).spec.world.target == 3
        await store.change_spec("train-1", lambda d: d.spec.scaled(5), limits=Limits(ranks=5))
        await store.change_spec("train-1", lambda d: d.spec.scaled(4), limits=Limits(ranks=2))

    @story
    async def test_a_create_repeated_with_its_key_gives_the_first_one_s_run(self, store: Store) -> None:
        first = await store.create(a_run("train-1"), [CREATED], idempotency_key="k")
        assert await store.create(a_run("train-2"), [CREATED], idempotency_key="k") == first
        now = await store.change_spec("train-1", cancelled)
        assert await store.create(a_run("train-3"), [CREATED], idempotency_key="k") == now
        assert [d.instance for d in await store.deployments()] == ["train-1"]
        assert [e.count for e in await store.events("train-1")] == [1]

    @story
    async def test_an_idempotency_key_stands_for_one_spec_of_one_user(self, store: Store) -> None:
        await store.create(a_run("train-1"), idempotency_key="k")
        with pytest.raises(Conflict, match="another request"):
            await store.create(a_run("train-2", name="other"), idempotency_key="k")
        await store.create(a_run("train-3", user="bob"), idempotency_key="k")
        assert len(await store.deployments()) == 2

    @story
    async def test_the_order_of_variables_makes_no_other_request(self, store: Store) -> None:
        new = a_run()
        one = replace(new, spec=replace(new.spec, env={"A": "1", "B": "2"}))
        two = replace(new, spec=replace(new.spec, env={"B": "2", "A": "1"}))
        assert await store.create(one, idempotency_key="k") == await store.create(two, idempotency_key="k")

    @story
    async def test_a_refused_create_leaves_its_idempotency_key_free(self, store: Store) -> None:
        with pytest.raises(QuotaExceeded):
            await store.create(a_run(target=2), idempotency_key="k", limits=Limits(ranks=1))
        await store.create(a_run(target=1), idempotency_key="k", limits=Limits(ranks=1))

    @story
    async def test_an_idempotency_key_is_forgotten_after_a_day_and_with_its_run(self, store: Store) -> None:
        await store.create(a_run("train-1", created_at=0.0), idempotency_key="k")
        with pytest.raises(NameInUse):
            await store.create(a_run("train-2", created_at=A_DAY), idempotency_key="k")
        await store.create(a_run("train-3", name="other", created_at=A_DAY), idempotency_key="l")
        await store.delete("train-3")
        await store.create(a_run("train-4", name="third", created_at=A_DAY), idempotency_key="l")

    # ---- changes ----

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

    # ---- events ----

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

    # ---- deleting, usage, retention ----

    @story
    async def test_a_deleted_run_is_gone_and_its_usage_stays(self, store: Store) -> None:
        saved = await store.create(a_run(created_at=5.0), [CREATED])
        used = replace(ended(saved.status, 9.0), usage=Usage(8.0, 4.0))
        await store.save_status(saved, used, now=9.0)
        await store.delete("train-1")
        with pytest.raises(DeploymentNotFound):
            await store.get("train-1")
        assert await store.events("train-1") == []
        (row,) = await store.usage("ann")
        assert (row.user, row.instance, row.name) == ("ann", "train-1", "train")
        assert (row.rank_seconds, row.gpu_seconds, row.created_at, row.ended_at) == (8.0, 4.0, 5.0, 9.0)

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

    # ---- wake-ups ----

    @story
    async def test_a_reader_of_changes_sees_each_changed_run_once(self, store: Store) -> None:
        async with aclosing(store.changes()) as changes:
            run = await store.create(a_run("a", name="a"))
            await store.save_status(run, replace(run.status, message="new"), now=1.0)
            await store.create(a_run("b", name="b"))
            await store.delete("a")
            assert [await anext(changes), await anext(changes)] == ["a", "b"]
            await store.change_spec("b", cancelled)
            assert await anext(changes) == "b"

    @story
    async def test_a_reader_is_woken(self, store: Store) -> None:
        async with aclosing(store.changes()) as changes:
            waiting = asyncio.ensure_future(anext(changes))
            await let_others_run()
            assert not waiting.done()
            await store.create(a_run())
            assert await waiting == "train-1"

    @story
    async def test_what_was_refused_or_changed_nothing_wakes_nobody(self, store: Store) -> None:
        run = await store.create(a_run(), idempotency_key="k")
        async with aclosing(store.changes()) as changes:
            with pytest.raises(NameInUse):
                await store.create(a_run("train-2"))
            await store.create(a_run("train-3"), idempotency_key="k")
            await store.save_status(run, run.status, now=1.0)
            await store.change_spec("train-1", lambda d: d.spec)
            await store.delete("nobody")
            await store.create(a_run("last", name="last"))
            assert await anext(changes) == "last"

    @story
    async def test_a_reader_that_comes_back_gets_what_it_missed_deletions_too(self, store: Store) -> None:
        seen = await store.create(a_run("a", name="a"))
        gone = await store.create(a_run("b", name="b"))
        await store.create(a_run("c", name="c"))
        await store.change_spec("a", cancelled)
        await store.delete(gone.instance)
        async with aclosing(store.changes(since=seen.version)) as changes:
            await store.create(a_run("d", name="d"))
            assert [await anext(changes) for _ in range(4)] == ["c", "a", "b", "d"]
        async with aclosing(store.changes(since=10**30)) as changes:
            await store.create(a_run("e", name="e"))
            assert await anext(changes) == "e"

    @story
    async def test_a_wait_returns_at_once_if_the_change_has_happened(self, store: Store) -> None:
        run = await store.create(a_run())
        assert await store.wait_change("train-1", run.version - 1, 0.0) == run
        assert await store.wait_change("train-1", run.version, 0.0) is None

    @story
    async def test_a_wait_is_woken_by_the_change_of_its_run_only(self, store: Store) -> None:
        runs = [await store.create(a_run(f"run-{n}", name=f"run-{n}")) for n in range(3)]
        waits = [asyncio.ensure_future(store.wait_change(r.instance, r.version, None)) for r in runs]
        await let_others_run()
        changed = await store.change_spec("run-1", cancelled)
        assert await waits[1] == changed
        assert not waits[0].done()
        assert not waits[2].done()
        for wait in waits:
            wait.cancel()

    @story
    async def test_a_wait_for_a_version_to_come_goes_on_over_earlier_changes(self, store: Store) -> None:
        run = await store.create(a_run(target=1))
        far = run.version + 10**9  # versions grow, and not by one in every store
        wait = asyncio.ensure_future(store.wait_change("train-1", far, None))
        await let_others_run()
        for target in (2, 3):
            await store.change_spec("train-1", lambda d, target=target: d.spec.scaled(target))  # type: ignore[misc]
            await let_others_run()
            assert not wait.done()
        wait.cancel()

    @story
    async def test_a_wait_ends_when_the_time_is_up(self, store: Store) -> None:
        run = await store.create(a_run())
        assert await store.wait_change("train-1", run.version, 0.01) is None

    @story
    async def test_a_wait_for_a_run_that_is_deleted_is_told_so(self, store: Store) -> None:
        run = await store.create(a_run())
        wait = asyncio.ensure_future(store.wait_change("train-1", run.version, None))
        await let_others_run()
        await store.delete("train-1")
        with pytest.raises(DeploymentNotFound):
            await wait
        with pytest.raises(DeploymentNotFound):
            await store.wait_change("train-1", 0, None)

    @story
    async def test_no_change_is_missed_by_a_reader_that_waits_again_and_again(self, store: Store) -> None:
        run = await store.create(a_run())

        async def count(upto: int) -> None:
            nonlocal run
            for number in range(upto):
                run = await store.save_status(run, replace(run.status, message=str(number)), now=1.0)

        writing = asyncio.ensure_future(count(50))
        version, message = run.version, ""
        while message != "49":
            changed = await store.wait_change("train-1", version, None)
            assert changed is not None
            version, message = changed.version, changed.status.message
        await writing


class KeysContract:
    """API keys, by digest."""

    def opened(self, directory: Path) -> AbstractAsyncContextManager[Keys]:
        """No keys yet; closed at the end."""
        raise NotImplementedError

    @story
    async def test_a_key_is_found_by_its_digest_until_it_is_revoked(self, keys: Keys) -> None:
        key = _a_key("k1", "d1")
        await keys.add_key(key)
        assert await keys.find_key("d1") == key
        assert await keys.find_key("d2") is None
        assert await keys.revoke_key("k1")
        assert await keys.find_key("d1") is None
        assert not await keys.revoke_key("k1")

    @story
    async def test_keys_are_listed_in_the_order_they_were_made(self, keys: Keys) -> None:
        for id, at in (("b", 2.0), ("c", 1.0), ("a", 2.0)):
            await keys.add_key(_a_key(id, f"digest of {id}", at))
        assert [key.id for key in await keys.keys()] == ["c", "a", "b"]

    @story
    async def test_neither_an_id_nor_a_digest_is_taken_twice(self, keys: Keys) -> None:
        await keys.add_key(_a_key("k1", "d1"))
        for key in (_a_key("k1", "d2"), _a_key("k2", "d1")):
            with pytest.raises(Conflict):
                await keys.add_key(key)
        assert len(await keys.keys()) == 1


def _a_key(id: str, digest: str, at: float = 1.0) -> ApiKey:
    return ApiKey(id=id, user="ann", digest=digest, created_at=at, note="for tests")


def _an_exit(code: int | None, log_tail: tuple[str, ...] = ()) -> RankExit:
    return RankExit(
        rank=0,
        attempt=1,
        exit_code=code,
        termination_reason="Unknown" if code is None else "Completed",
        restart_count=0,
        finished_at=3.25,
        seen_at=3.5,
        log_tail=log_tail,
    )


async def let_others_run() -> None:
    """Long enough for every task that can run to come to its next wait."""
    for _ in range(10):
        await asyncio.sleep(0)
