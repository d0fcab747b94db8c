"""Salvage of the readable rows of a damaged state file."""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from basilica.stores.sqlite import schema

TABLES = ("deployments", "specs", "events", "usage", "keys")


def copy_rows(damaged: Path, target: Path) -> dict[str, int]:
    """Copy every readable row into a new file; return how many, by table. The damaged file stays as it is."""
    with tempfile.TemporaryDirectory(dir=damaged.parent) as directory:
        copy = Path(directory) / damaged.name
        for suffix in ("", "-wal"):  # opening a file makes SQLite apply its log, which changes both
            with suppress(FileNotFoundError):
                shutil.copy(f"{damaged}{suffix}", f"{copy}{suffix}")
        with closing(schema.connect(target)) as into:
            into.execute("PRAGMA foreign_keys = OFF")
            try:
                with closing(schema.connect(copy)) as source:
                    found = {table: _copy(source, into, table) for table in TABLES}
                    _copy_version(source, into)
            except sqlite3.Error:  # not even a database
                return {}
            into.execute("DELETE FROM specs WHERE deployment NOT IN (SELECT id FROM deployments)")
            into.execute("DELETE FROM events WHERE deployment NOT IN (SELECT id FROM deployments)")
    return found


def _copy(source: sqlite3.Connection, into: sqlite3.Connection, table: str) -> int:
    theirs = {str(row[1]) for row in _rows(source, f"PRAGMA table_info({table})")}  # an older file has fewer
    columns = [str(row[1]) for row in into.execute(f"PRAGMA table_info({table})") if str(row[1]) in theirs]
    if not columns:
        return 0
    statement = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    copied = 0
    for order in ("ASC", "DESC"):  # from both ends, up to where it is damaged
        for row in _rows(source, f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1 {order}"):
            with suppress(sqlite3.Error, UnicodeError):
                copied += into.execute(statement, row).rowcount
    return copied


def _rows(source: sqlite3.Connection, statement: str) -> Iterator[tuple[object, ...]]:
    with suppress(sqlite3.Error):
        yield from source.execute(statement)


def _copy_version(source: sqlite3.Connection, into: sqlite3.Connection) -> None:
    """Set the version to at least that of every row."""
    newest = [row[0] for row in _rows(source, "SELECT version FROM counter")]
    newest += [row[0] or 0 for row in into.execute("SELECT max(version) FROM deployments")]
    into.execute("UPDATE counter SET version = ?", (max(int(str(number)) for number in newest),))
