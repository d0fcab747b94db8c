"""Full disks, locks and kills: a write is whole or not at all, what was acknowledged stays, and afterwards it works."""

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from basilica.core.errors import DeploymentNotFound, StoreUnavailable
from basilica.ports import Deployment
from basilica.stores.sqlite.store import SqliteStore
from basilica.testing.store_contract import CREATED, a_run, run

KILLS = 25


# ---- no space ----


@contextmanager
def small_disk(directory: Path) -> Iterator[Callable[[], None]]:
    """A disk of 2 MB, most of it taken; what it yields makes room."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", directory], check=False).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        (directory / "ballast").write_bytes(bytes(1 << 20))
        yield (directory / "ballast").unlink
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@contextmanager
def small_files(directory: Path) -> Iterator[Callable[[], None]]:
    """No file may grow beyond 1 MB, until the limit is lifted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield lift
    finally:
        lift()


@pytest.mark.parametrize(
    ("no_space", "sentence"),
    [(small_disk, "the disk is full: .*state.db"), (small_files, "writing the state file .*state.db failed")],
)
def test_without_space_a_run_is_there_whole_or_not_at_all(
    tmp_path: Path,
    no_space: Callable[[Path], AbstractContextManager[Callable[[], None]]],
    sentence: str,
) -> None:
    async def tell(make_room: Callable[[], None]) -> None:
        store = SqliteStore(tmp_path / "state.db")
        await store.open()
        acknowledged: list[Deployment] = []

        async def create_for_ever() -> None:
            for number in range(100):
                acknowledged.append(await store.create(_large(f"run-{number}"), [CREATED]))

        with pytest.raises(StoreUnavailable, match=sentence):
            await create_for_ever()
        refused = f"run-{len(acknowledged)}"
        assert acknowledged

        async def nothing_is_half_written() -> None:
            assert await store.deployments() == acknowledged[::-1]
            with pytest.raises(DeploymentNotFound):
                await store.get(refused)
            assert await store.events(refused) == []
            assert len(await store.usage("ann")) == len(acknowledged)

        await nothing_is_half_written()
        make_room()
        await nothing_is_half_written()
        acknowledged.append(await store.create(_large(refused), [CREATED]))
        await store.close()
        store = SqliteStore(tmp_path / "state.db")
        await store.open()
        assert await store.deployments() == acknowledged[::-1]
        await store.close()

    with no_space(tmp_path) as make_room:
        run(tell(make_room))


def test_a_group_of_writes_for_which_there_is_no_space_fails_as_a_group(tmp_path: Path) -> None:
    """Large enough together that SQLite runs out of space before the commit, in the middle of a statement."""

    async def tell(make_room: Callable[[], None]) -> None:
        store = SqliteStore(tmp_path / "state.db")
        await store.open()
        wanted = [_large(f"run-{number}") for number in range(100)]
        results = await asyncio.gather(*(store.create(new) for new in wanted), return_exceptions=True)
        created = [result for result in results if isinstance(result, Deployment)]
        refused = [result for result in results if not isinstance(result, Deployment)]
        assert refused
        assert {str(error) for error in refused} == {f"the disk is full: {tmp_path / 'state.db'} cannot be written"}
        assert await store.deployments() == created[::-1]
        make_room()
        await store.create(a_run())
        await store.close()

    with small_disk(tmp_path) as make_room:
        run(tell(make_room))


def test_opening_without_space_is_a_clear_error_and_works_when_there_is_room(tmp_path: Path) -> None:
    async def tell(make_room: Callable[[], None]) -> None:
        _fill(tmp_path / "more")
        with pytest.raises(StoreUnavailable, match=r"state\.db"):
            await SqliteStore(tmp_path / "state.db").open()
        make_room()
        store = SqliteStore(tmp_path / "state.db")
        await store.open()
        await store.create(a_run())
        await store.close()

    with small_disk(tmp_path) as make_room:
        run(tell(make_room))


def _fill(file: Path) -> None:
    with suppress(OSError), open(file, "wb", buffering=0) as growing:
        while True:
            growing.write(bytes(4096))


def _large(name: str) -> Deployment:
    """Of a size that no other write has, so that the one that fails is this one's."""
    small = a_run(name, name=name)
    return replace(small, spec=replace(small.spec, env={"LARGE": os.urandom(30_000).hex()}))


# ---- locks ----


def test_a_locked_file_is_an_error_after_a_while_and_no_hang(tmp_path: Path) -> None:
    async def tell() -> None:
        store = SqliteStore(tmp_path / "state.db", busy_seconds=0.05)
        await store.open()
        kept = await store.create(a_run())
        with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match=r"state\.db is locked by another process"):
                await store.save_status(kept, replace(kept.status, message="new"), now=1.0)
            assert await store.get("train-1") == kept
            assert await store.deployments() == [kept]
            other.execute("ROLLBACK")
        await store.save_status(kept, replace(kept.status, message="new"), now=1.0)
        await store.close()

    run(tell())


def test_a_file_that_is_locked_when_it_is_opened_is_an_error(tmp_path: Path) -> None:
    async def tell() -> None:
        with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            store = SqliteStore(tmp_path / "state.db", busy_seconds=0.05)
            with pytest.raises(StoreUnavailable, match=r"state\.db is locked by another process"):
                await store.open()
        await store.open()
        await store.close()

    run(tell())


# ---- kills ----


def test_what_was_acknowledged_survives_kill_nine(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4))
    victim = Path(__file__).with_name("kill_writer.py")
    told = subprocess.run(
        [sys.executable, victim, tmp_path / "state.db", str(KILLS), str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, f"seed {seed}: {told.stderr}"
    assert int(told.stdout) > KILLS
