"""Those who wait are woken."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from basilica.core.errors import DeploymentNotFound, NameInUse
from basilica.ports import Store
from basilica.testing.store_contract.stories import Opens, a_run, cancelled, let_others_run, story


class Waking(Opens[Store]):
    """Nobody misses a change, and nobody is woken for nothing."""

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
