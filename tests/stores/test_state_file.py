"""The state file: who may use it, which files are refused, and how its tables come up to date."""

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from basilica.core.errors import StoreUnavailable
from basilica.stores.sqlite import schema
from basilica.stores.sqlite.errors import StateFileRefused, StateInUse
from basilica.stores.sqlite.ownership import Ownership
from basilica.stores.sqlite.salvage import copy_rows
from basilica.stores.sqlite.store import SqliteStore
from basilica.testing.store_contract import CREATED, a_run, run

NOBODY = 65534


async def opened(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    await store.open()
    return store


def open_and_close(path: Path) -> None:
    async def tell() -> None:
        await (await opened(path)).close()

    run(tell())


def ask(path: Path, query: str) -> object:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchone()[0]


# ---- what is opened ----


def test_the_file_is_made_with_its_directory_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.db"

    async def tell() -> None:
        store = await opened(path)
        await store.create(a_run())
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        await store.close()

    run(tell())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert ask(path, "PRAGMA journal_mode") == "wal"


def test_an_empty_file_is_taken_into_use(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.touch()
    open_and_close(path)
    assert ask(path, "PRAGMA user_version") == len(schema.MIGRATIONS)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_text("my notes\n" * 1000)
    with pytest.raises(StateFileRefused, match=r"state\.db is not a Basilica state file"):
        open_and_close(path)
    assert path.read_text() == "my notes\n" * 1000


def test_somebody_else_s_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StateFileRefused, match="is not a Basilica state file"):
        open_and_close(path)
    assert path.read_bytes() == before


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    open_and_close(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StateFileRefused, match=r"newer Basilica .* 99"):
        open_and_close(path)


def test_a_path_that_cannot_be_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match=r"file/state\.db: (Not a directory|File exists)"):
        open_and_close(tmp_path / "file" / "state.db")
    (tmp_path / "directory" / "state.db").mkdir(parents=True)
    with pytest.raises(StoreUnavailable, match=r"directory/state\.db"):
        open_and_close(tmp_path / "directory" / "state.db")


def test_missing_rights_are_a_clear_error(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with unprivileged(), pytest.raises(StoreUnavailable, match=r"closed/state\.db: Permission denied"):
        open_and_close(closed / "state.db")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Rights do not stop root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# ---- who owns it ----


def test_a_second_opener_is_told_who_the_first_is_and_the_first_goes_on(tmp_path: Path) -> None:
    async def tell() -> None:
        store = await opened(tmp_path / "state.db")
        with pytest.raises(StateInUse, match=rf"state\.db is in use by process {os.getpid()}") as refused:
            await opened(tmp_path / "state.db")
        assert refused.value.pid == os.getpid()
        await store.create(a_run())
        await store.close()
        await (await opened(tmp_path / "state.db")).close()

    run(tell())


OWN_AND_FORK = """
import os, pathlib, sys, time
from basilica.stores.sqlite.ownership import Ownership
from basilica.stores.sqlite.salvage import copy_rows
held = Ownership.take(pathlib.Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_ownership_dies_with_its_process_even_if_a_forked_child_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with subprocess.Popen([sys.executable, "-c", OWN_AND_FORK, path], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            with pytest.raises(StateInUse) as refused:
                Ownership.take(path)
            assert refused.value.pid == owner.pid
            owner.kill()
            owner.wait()
            os.kill(child, 0)
            Ownership.take(path).release()
        finally:
            os.kill(child, signal.SIGKILL)


# ---- migrations ----


def _add_colour(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE deployments ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue'")


def _add_colour_and_stop(connection: sqlite3.Connection) -> None:
    _add_colour(connection)
    raise RuntimeError("stopped half-way")


def test_a_migration_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "state.db"

    async def tell() -> None:
        store = await opened(path)
        await store.create(a_run(), [CREATED])
        await store.close()

    run(tell())
    schema.prepare(path, migrations=[*schema.MIGRATIONS, _add_colour])
    assert ask(path, "SELECT instance || ' is ' || colour FROM deployments") == "train-1 is blue"
    assert ask(path, "PRAGMA user_version") == len(schema.MIGRATIONS) + 1
    schema.prepare(path, migrations=[*schema.MIGRATIONS, _add_colour])


OLD_USAGE = """INSERT INTO usage (user, instance, name, rank_seconds, gpu_seconds, created_at, ended_at)
               VALUES ('ann', 'old-1', 'old', 8.0, 4.0, 1.0, 9.0)"""


def test_usage_from_before_there_were_accounts_of_time_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    schema.prepare(path, migrations=schema.MIGRATIONS[:1])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(OLD_USAGE)

    async def tell() -> None:
        store = await opened(path)
        (row,) = await store.usage("ann")
        assert (row.instance, row.rank_seconds, row.training_seconds, row.lost_seconds) == ("old-1", 8.0, 0.0, 0.0)
        await store.close()

    run(tell())


def test_rows_of_a_file_from_before_a_migration_are_salvaged(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "state.db", tmp_path / "state.db"
    schema.prepare(old, migrations=schema.MIGRATIONS[:1])
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute(OLD_USAGE)
    schema.prepare(new)
    assert copy_rows(old, new)["usage"] == 1
    assert ask(new, "SELECT rank_seconds + training_seconds FROM usage") == 8.0


def test_a_migration_that_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    open_and_close(path)
    with pytest.raises(RuntimeError, match="half-way"):
        schema.prepare(path, migrations=[*schema.MIGRATIONS, _add_colour_and_stop])
    assert ask(path, "PRAGMA user_version") == len(schema.MIGRATIONS)
    schema.prepare(path, migrations=[*schema.MIGRATIONS, _add_colour])


MIGRATE_AND_DIE = """
import os, pathlib, signal, sys
from basilica.stores.sqlite import schema
def half(connection):
    connection.execute("PRAGMA cache_size = 1")
    for statement in ("CREATE TABLE wide (x)", "INSERT INTO wide SELECT hex(zeroblob(100000))"):
        connection.execute(statement)
    os.kill(os.getpid(), signal.SIGKILL)
schema.prepare(pathlib.Path(sys.argv[1]), migrations=[*schema.MIGRATIONS[:int(sys.argv[2])], half])
"""


@pytest.mark.parametrize("after", [0, len(schema.MIGRATIONS)])
def test_a_process_killed_in_a_migration_leaves_the_file_as_it_was(tmp_path: Path, after: int) -> None:
    path = tmp_path / "state.db"
    schema.prepare(path, migrations=schema.MIGRATIONS[:after])
    killed = subprocess.run([sys.executable, "-c", MIGRATE_AND_DIE, path, str(after)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert ask(path, "PRAGMA user_version") == after
    assert ask(path, "SELECT count(*) FROM sqlite_master WHERE name = 'wide'") == 0
    open_and_close(path)


def test_a_state_file_of_another_minor_version_is_read(tmp_path: Path) -> None:
    """Fields that a later version added are ignored, fields that an earlier one did not write take their defaults."""
    path = tmp_path / "state.db"

    async def tell() -> None:
        store = await opened(path)
        kept = await store.create(a_run())
        await store.close()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("UPDATE specs SET spec = json_remove(json_set(spec, '$.fresh', 1), '$.grace_seconds')")
            connection.execute("UPDATE deployments SET status = json_set(status, '$.fresh', json('{\"a\": [1]}'))")
        store = await opened(path)
        assert await store.get("train-1") == kept
        await store.close()

    run(tell())


def test_a_run_that_cannot_be_read_is_named_and_its_secrets_are_not(tmp_path: Path) -> None:
    path = tmp_path / "state.db"

    async def tell() -> None:
        store = await opened(path)
        await store.create(a_run())
        await store.close()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("UPDATE specs SET spec = json_set(spec, '$.secrets', json('{\"TOKEN\": [\"s3cret\"]}'))")
        store = await opened(path)
        with pytest.raises(
            StoreUnavailable, match=r"train-1. cannot be read: its spec is damaged: secrets\.TOKEN"
        ) as unreadable:
            await store.get("train-1")
        assert "s3cret" not in str(unreadable.value)
        await store.close()

    run(tell())


def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
    async def tell() -> None:
        for store in (SqliteStore(tmp_path / "never.db"), await opened(tmp_path / "state.db")):
            await store.close()
            for attempt in (store.create(a_run()), store.get("train-1"), store.deployments(), store.delete("x")):
                with pytest.raises(StoreUnavailable, match=r"not open|closed"):
                    await attempt

    run(tell())


def test_closing_ends_iterations_and_waits(tmp_path: Path) -> None:
    async def tell() -> None:
        store = await opened(tmp_path / "state.db")
        made = await store.create(a_run())
        changes = asyncio.ensure_future(_all(store))
        wait = asyncio.ensure_future(store.wait_change("train-1", made.version, None))
        await asyncio.sleep(0)
        await store.close()
        assert await changes == []
        with pytest.raises(StoreUnavailable, match="closed"):
            await wait

    run(tell())


async def _all(store: SqliteStore) -> list[str]:
    return [instance async for instance in store.changes()]
