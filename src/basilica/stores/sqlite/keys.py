"""API keys in the state file, usable beside the server that owns it."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from basilica.core.errors import Conflict, StoreUnavailable
from basilica.ports import ApiKey
from basilica.stores.sqlite import schema
from basilica.stores.sqlite.ownership import Ownership

Result = TypeVar("Result")


class SqliteKeys:
    """Each lookup is one indexed read: as cheap as asking SQLite whether anything changed, and never out of date."""

    def __init__(self, path: Path, *, busy_seconds: float = schema.BUSY_SECONDS) -> None:
        self.path = path
        self._busy_seconds = busy_seconds
        self._reader: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file. Only a missing or outdated one needs ownership; `StateInUse` if another process has it."""
        with schema.explained(self.path):
            if not schema.up_to_date(self.path):
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                ownership = Ownership.take(self.path)
                try:
                    schema.prepare(self.path, busy_seconds=self._busy_seconds)
                finally:
                    ownership.release()
            self._reader = schema.connect(self.path, busy_seconds=self._busy_seconds, query_only=True)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    async def add_key(self, key: ApiKey) -> None:
        def add(db: sqlite3.Connection) -> None:
            try:
                db.execute(
                    "INSERT INTO keys VALUES (?, ?, ?, ?, ?)", (key.id, key.user, key.digest, key.created_at, key.note)
                )
            except sqlite3.IntegrityError:
                raise Conflict(f"there is a key {key.id!r}, or the same key under another name, already") from None

        # In a thread: another write may hold the lock for a while, and the loop must not wait for it.
        await asyncio.to_thread(self._write, add)

    async def find_key(self, digest: str) -> ApiKey | None:
        found = self._select("WHERE digest = ?", digest)
        return found[0] if found else None

    async def keys(self) -> list[ApiKey]:
        return self._select("ORDER BY created_at, id")

    async def revoke_key(self, id: str) -> bool:
        return await asyncio.to_thread(
            self._write, lambda db: db.execute("DELETE FROM keys WHERE id = ?", (id,)).rowcount > 0
        )

    def _select(self, which: str, *values: str) -> list[ApiKey]:
        if self._reader is None:
            raise StoreUnavailable("the key store is not open")
        with schema.explained(self.path):
            rows = self._reader.execute(f"SELECT id, user, digest, created_at, note FROM keys {which}", values)
            return [
                ApiKey(id=id, user=user, digest=digest, created_at=created_at, note=note)
                for id, user, digest, created_at, note in rows
            ]

    def _write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        with schema.explained(self.path), closing(schema.connect(self.path, busy_seconds=self._busy_seconds)) as db:
            db.execute("BEGIN IMMEDIATE")
            result = work(db)
            db.execute("COMMIT")
            return result
