"""The state file: its connections, its marks of ownership, and its tables as an ordered list of migrations."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from basilica.core.errors import StoreUnavailable
from basilica.stores.sqlite.errors import StateFileRefused

APPLICATION_ID = 0x62736C63  # "bslc", in the file's header
BUSY_SECONDS = 5.0
LOG_BYTES = 16 << 20
"""The size to which a larger write-ahead log is cut."""

REPAIR = "stop the server if it runs and run 'basilica doctor --repair': nothing is deleted"
OLDEST_SQLITE = (3, 37, 0)  # strict tables

Migration = Callable[[sqlite3.Connection], None]


def connect(path: Path, *, busy_seconds: float = BUSY_SECONDS, query_only: bool = False) -> sqlite3.Connection:
    """Return a connection whose commits survive a power cut. Transactions are begun and ended explicitly."""
    connection = sqlite3.connect(
        path, timeout=busy_seconds, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    connection.text_factory = _lenient  # one damaged text must not hide the rows around it
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
    connection.execute(f"PRAGMA query_only = {query_only:d}")
    return connection


def _lenient(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def prepare(path: Path, *, busy_seconds: float = BUSY_SECONDS, migrations: Sequence[Migration] | None = None) -> None:
    """Create the file if there is none, check that it is ours, and bring its tables up to date."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreUnavailable(f"SQLite 3.37 or newer is needed, and Python has {sqlite3.sqlite_version} here")
    migrations = MIGRATIONS if migrations is None else migrations
    with explained(path):
        _create_private(path)
        with closing(connect(path, busy_seconds=busy_seconds)) as connection:
            _check_ours(connection, path, len(migrations))
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreUnavailable(f"the file system of {path} does not support SQLite's write-ahead log")
            migrate(connection, migrations)


def up_to_date(path: Path) -> bool:
    """Whether the file is ours and has today's tables, so that it can be used without `prepare`."""
    if not path.exists():
        return False
    with explained(path), closing(connect(path, query_only=True)) as connection:
        _check_ours(connection, path, len(MIGRATIONS))
        return _version(connection) == len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    """Run the pending migrations, each in a transaction of its own: a crash leaves it whole or undone."""
    while (version := _version(connection)) < len(migrations):
        connection.execute("BEGIN IMMEDIATE")
        try:
            migrations[version](connection)
            connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Translate errors of SQLite and the operating system about the file into errors that a user can act on."""
    try:
        yield
    except sqlite3.Error as error:
        if _primary_code(error) == sqlite3.SQLITE_NOTADB:
            raise StateFileRefused(
                str(path), f"is not a Basilica state file, or its beginning is damaged; if it should be one, {REPAIR}"
            ) from error
        raise StoreUnavailable(explain(error, path)) from error
    except OSError as error:
        raise StoreUnavailable(f"cannot use the state file {path}: {error.strerror or error}") from error


def explain(error: sqlite3.Error, path: Path) -> str:
    """Return one sentence, with the path, for a database error."""
    match _primary_code(error):
        case sqlite3.SQLITE_FULL:
            return f"the disk is full: {path} cannot be written"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"the state file {path} is locked by another process"
        case sqlite3.SQLITE_READONLY:
            return f"the state file {path} may not be written"
        case sqlite3.SQLITE_CANTOPEN:
            return f"the state file {path} cannot be opened: missing rights, no space, or no such directory"
        case sqlite3.SQLITE_IOERR:
            return f"reading or writing the state file {path} failed: {error}"
        case sqlite3.SQLITE_CORRUPT:
            return f"the state file {path} is damaged: {error}; {REPAIR}"
        case _:
            return f"the state file {path} could not be used: {error}"


def _primary_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code; errors of Python's own module have none."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _create_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Only ever opened here when it is new: closing a second descriptor would drop SQLite's own locks on the file.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_ours(connection: sqlite3.Connection, path: Path, known: int) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    version = _version(connection)
    if application != APPLICATION_ID and (objects or version):
        raise StateFileRefused(str(path), "is not a Basilica state file")
    if version > known:
        raise StateFileRefused(
            str(path),
            f"was written by a newer Basilica (its format is {version}, this one knows {known}): upgrade Basilica",
        )


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _first_tables(connection: sqlite3.Connection) -> None:
    """Create the tables. The spec has one of its own, so that saving a status does not write it again.

    `live`: the phase is not terminal, so the run holds its name and counts against limits. `open`: the controller still
    has work for it.
    """
    for statement in (
        f"PRAGMA application_id = {APPLICATION_ID}",
        "CREATE TABLE counter (version INTEGER NOT NULL) STRICT",
        "INSERT INTO counter VALUES (0)",
        """CREATE TABLE deployments (
            id INTEGER PRIMARY KEY,
            instance TEXT NOT NULL UNIQUE,
            user TEXT NOT NULL,
            namespace TEXT NOT NULL,
            name TEXT NOT NULL,
            version INTEGER NOT NULL,
            live INTEGER NOT NULL,
            open INTEGER NOT NULL,
            target INTEGER NOT NULL,
            terminal_at REAL,
            status TEXT NOT NULL
        ) STRICT""",
        "CREATE UNIQUE INDEX live_names ON deployments (namespace, name) WHERE live",
        "CREATE INDEX live_ranks ON deployments (user, target) WHERE live",
        "CREATE INDEX open_deployments ON deployments (id, instance) WHERE open",
        "CREATE INDEX ended_deployments ON deployments (terminal_at, instance) WHERE NOT open",
        "CREATE INDEX deployment_names ON deployments (namespace, name, id)",
        "CREATE INDEX deployment_versions ON deployments (version)",
        """CREATE TABLE specs (
            deployment INTEGER PRIMARY KEY REFERENCES deployments ON DELETE CASCADE,
            spec TEXT NOT NULL
        ) STRICT""",
        """CREATE TABLE events (
            deployment INTEGER NOT NULL REFERENCES deployments ON DELETE CASCADE,
            reason TEXT NOT NULL,
            message TEXT NOT NULL,
            kind TEXT NOT NULL,
            count INTEGER NOT NULL,
            first_at REAL NOT NULL,
            last_at REAL NOT NULL,
            version INTEGER NOT NULL,
            position INTEGER NOT NULL,
            PRIMARY KEY (deployment, reason, message)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE idempotency (
            user TEXT NOT NULL,
            key TEXT NOT NULL,
            deployment INTEGER NOT NULL REFERENCES deployments ON DELETE CASCADE,
            digest TEXT NOT NULL,
            created_at REAL NOT NULL,
            PRIMARY KEY (user, key)
        ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX idempotency_deployments ON idempotency (deployment)",
        "CREATE INDEX idempotency_ages ON idempotency (created_at)",
        """CREATE TABLE usage (
            id INTEGER PRIMARY KEY,
            user TEXT NOT NULL,
            instance TEXT NOT NULL UNIQUE,
            name TEXT NOT NULL,
            rank_seconds REAL NOT NULL,
            gpu_seconds REAL NOT NULL,
            created_at REAL NOT NULL,
            ended_at REAL
        ) STRICT""",
        "CREATE INDEX usage_users ON usage (user, id)",
        "CREATE TABLE deletions (version INTEGER PRIMARY KEY, instance TEXT NOT NULL) STRICT",
        """CREATE TABLE keys (
            id TEXT PRIMARY KEY,
            user TEXT NOT NULL,
            digest TEXT NOT NULL UNIQUE,
            created_at REAL NOT NULL,
            note TEXT NOT NULL
        ) STRICT""",
    ):
        connection.execute(statement)


def _account_of_time(connection: sqlite3.Connection) -> None:
    """Add the time that trained and the time that was lost to the usage; of earlier runs, neither is known."""
    for column in ("training_seconds", "lost_seconds"):
        connection.execute(f"ALTER TABLE usage ADD COLUMN {column} REAL NOT NULL DEFAULT 0")


MIGRATIONS: Sequence[Migration] = (_first_tables, _account_of_time)
