"""What the SQLite store does beyond the contract: groups of writes, wake-ups after the commit, keys from elsewhere."""

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from basilica.core.errors import DeploymentNotFound, NameInUse, StaleVersion, StoreUnavailable
from basilica.core.phase import Phase
from basilica.core.spec import DeploymentSpec
from basilica.ports import ApiKey, Deployment
from basilica.stores.sqlite.cache import DeploymentCache, weigh
from basilica.stores.sqlite.keys import SqliteKeys
from basilica.stores.sqlite.store import SqliteStore
from basilica.testing.store_contract import CREATED, a_run, ended, let_others_run, run


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    await store.open()
    yield store
    await store.close()


def numbered(number: int) -> Deployment:
    return a_run(f"run-{number}", name=f"run-{number}")


# ---- groups of writes ----


def test_a_write_that_is_refused_fails_alone_in_its_group(tmp_path: Path) -> None:
    def broken(deployment: Deployment) -> DeploymentSpec:
        raise ZeroDivisionError

    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            old = await store.create(numbered(0))
            results = await asyncio.gather(
                store.save_status(old, replace(old.status, message="new"), now=1.0),
                store.save_status(old, replace(old.status, message="late"), now=1.0),
                store.create(numbered(1)),
                store.change_spec("run-0", broken),
                store.create(a_run("run-2", name="run-1")),
                store.change_spec("nobody", broken),
                store.create(numbered(3)),
                return_exceptions=True,
            )
            refusals = [type(result) for result in results if not isinstance(result, Deployment)]
            assert refusals == [StaleVersion, ZeroDivisionError, NameInUse, DeploymentNotFound]
            assert [d.instance for d in await store.deployments()] == ["run-3", "run-1", "run-0"]
            assert (await store.get("run-0")).status.message == "new"

    run(tell())


def test_many_tasks_writing_at_once_all_get_their_own_answer(tmp_path: Path) -> None:
    async def life(store: SqliteStore, number: int) -> Deployment:
        saved = await store.create(numbered(number), [CREATED])
        for message in "abc":
            saved = await store.save_status(saved, replace(saved.status, message=message), now=1.0)
        return await store.save_status(saved, ended(saved.status, 2.0), now=2.0)

    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            lives = await asyncio.gather(*(life(store, number) for number in range(300)))
        async with opened(tmp_path / "state.db") as store:
            assert sorted(await store.deployments(), key=_version) == sorted(lives, key=_version)
            assert len({d.version for d in lives}) == 300
            assert await store.live() == []

    run(tell())


def test_a_caller_that_goes_away_does_not_hide_its_write(tmp_path: Path) -> None:
    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            changes = store.changes()
            going = asyncio.ensure_future(store.create(numbered(1)))
            await asyncio.sleep(0)
            going.cancel()
            assert await anext(changes) == "run-1"
            assert (await store.get("run-1")).version == 1
            await changes.aclose()

    run(tell())


def test_a_change_is_announced_when_it_is_in_the_file_and_not_before(tmp_path: Path) -> None:
    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            changes = store.changes()
            writing = [asyncio.ensure_future(store.create(numbered(number))) for number in range(20)]
            with closing(sqlite3.connect(tmp_path / "state.db")) as other:
                for _ in writing:
                    instance = await anext(changes)
                    found = other.execute("SELECT version FROM deployments WHERE instance = ?", (instance,)).fetchone()
                    assert found == ((await store.get(instance)).version,)
            await asyncio.gather(*writing)
            await changes.aclose()

    run(tell())


def test_closing_finishes_what_was_queued(tmp_path: Path) -> None:
    async def tell() -> None:
        store = SqliteStore(tmp_path / "state.db")
        await store.open()
        writing = [asyncio.ensure_future(store.create(numbered(number))) for number in range(500)]
        await asyncio.sleep(0)
        await store.close()
        assert all(isinstance(created, Deployment) for created in await asyncio.gather(*writing))
        async with opened(tmp_path / "state.db") as store:
            assert len(await store.deployments()) == 500

    run(tell())


def test_a_status_is_saved_without_writing_the_spec_again(tmp_path: Path) -> None:
    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            large = a_run()
            large = replace(large, spec=replace(large.spec, env={f"V{n}": "x" * 100_000 for n in range(10)}))
            saved = await store.create(large)
            before = (tmp_path / "state.db-wal").stat().st_size
            for number in range(10):
                saved = await store.save_status(saved, replace(saved.status, message=str(number)), now=1.0)
            assert (tmp_path / "state.db-wal").stat().st_size - before < 1_000_000

    run(tell())


# ---- wake-ups ----


def test_a_reader_that_stops_is_forgotten(tmp_path: Path) -> None:
    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            never_read, closed, dropped = store.changes(), store.changes(), store.changes()
            await store.create(numbered(1))
            assert await anext(closed) == await anext(dropped) == "run-1"
            await closed.aclose()
            assert len(store._bell._readers) == 2
            del never_read, dropped
            await let_others_run()  # asyncio closes a dropped generator in a task of its own
            assert len(store._bell._readers) == 0

    run(tell())


def test_a_wait_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            made = await store.create(numbered(1))
            cancelled = asyncio.ensure_future(store.wait_change("run-1", made.version, None))
            await asyncio.sleep(0)
            cancelled.cancel()
            assert await store.wait_change("run-1", made.version, 0.01) is None
            assert store._bell._waiters == {}

    run(tell())


# ---- memory ----


def test_the_cache_keeps_what_was_used_last_within_its_size() -> None:
    runs = [numbered(number) for number in range(4)]
    cache = DeploymentCache(3 * weigh(runs[0]))
    for deployment in runs[:3]:
        cache.put(deployment)
    assert cache.get("run-0") == runs[0]
    cache.put(runs[3])
    assert [cache.get(d.instance) is not None for d in runs] == [True, False, True, True]
    cache.drop("run-0")
    cache.drop("run-0")
    assert len(cache) == 2


def test_the_cache_does_not_go_back_to_an_older_state() -> None:
    cache = DeploymentCache(1 << 20)
    new, old = replace(numbered(1), version=2), replace(numbered(1), version=1)
    cache.put(new)
    cache.put(old)
    assert cache.get("run-1") == new


def test_large_runs_weigh_what_their_users_made_large() -> None:
    small = numbered(1)
    large = replace(small, spec=replace(small.spec, secrets={"KEY": "x" * 100_000}))
    assert weigh(large) - weigh(small) == 100_003


def test_what_was_deleted_while_a_long_listing_was_made_does_not_come_back(tmp_path: Path) -> None:
    async def tell() -> None:
        async with opened(tmp_path / "state.db") as store:
            for number in range(20):
                await store.create(numbered(number))
        async with opened(tmp_path / "state.db") as store:
            listing = asyncio.ensure_future(store.deployments())
            deleting = [asyncio.ensure_future(store.delete(f"run-{number}")) for number in range(20)]
            await asyncio.gather(listing, *deleting)
            assert await store.deployments() == []
            for number in range(20):
                with pytest.raises(DeploymentNotFound):
                    await store.get(f"run-{number}")

    run(tell())


# ---- keys ----


def a_key(id: str) -> ApiKey:
    return ApiKey(id=id, user="ann", digest=f"digest of {id}", created_at=1.0)


def test_keys_change_beside_a_server_and_it_sees_them_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state.db"

    async def tell() -> None:
        async with opened(path) as store:
            server, command = SqliteKeys(path), SqliteKeys(path)
            await server.open()
            await command.open()
            busy = asyncio.gather(*(store.create(numbered(number)) for number in range(100)))
            for id in ("k1", "k2", "k3"):
                await command.add_key(a_key(id))
                assert await server.find_key(f"digest of {id}") == a_key(id)
                assert await command.revoke_key(id)
                assert await server.find_key(f"digest of {id}") is None
            await busy
            await command.close()
            await server.close()

    run(tell())


def test_keys_can_be_made_before_the_first_server(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.db"

    async def tell() -> None:
        keys = SqliteKeys(path)
        await keys.open()
        await keys.add_key(a_key("k1"))
        await keys.close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with opened(path) as store:
            saved = await store.create(numbered(1))
            await store.save_status(saved, replace(saved.status, phase=Phase.READY), now=1.0)
            await keys.open()
            assert await keys.keys() == [a_key("k1")]
            await keys.close()

    run(tell())


def test_keys_that_cannot_be_written_are_an_error_and_no_hang(tmp_path: Path) -> None:
    async def tell() -> None:
        keys = SqliteKeys(tmp_path / "state.db", busy_seconds=0.05)
        with pytest.raises(StoreUnavailable, match="not open"):
            await keys.keys()
        await keys.open()
        with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked"):
                await keys.add_key(a_key("k1"))
        assert await keys.keys() == []
        await keys.close()

    run(tell())


def _version(deployment: Deployment) -> int:
    return deployment.version
