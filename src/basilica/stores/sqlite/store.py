"""The embedded store: one SQLite file, owned by one server.

Writes go through one thread that commits in groups; reads are served from memory or, without waiting for writers,
from a connection of their own. Each commit is announced in the loop's thread: first the cache is updated, then the bell
rings, then the writer's caller goes on.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from basilica.core.damage import DamagedRun
from basilica.core.errors import DeploymentDamaged, DeploymentNotFound, StoreUnavailable
from basilica.core.events import Event, RecordedEvent
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.machine.high_water import HighWaterMark
from basilica.machine.space_ahead import SpaceAhead
from basilica.ports import NO_LIMITS, Deployment, Limits, UsageRow
from basilica.stores.bell import Bell
from basilica.stores.sqlite import schema, tables, usage
from basilica.stores.sqlite.cache import CACHE_CHARACTERS, DeploymentCache
from basilica.stores.sqlite.ownership import Ownership
from basilica.stores.sqlite.writer import Writer

SLICE_SECONDS = 0.005
"""A long listing yields to the event loop this often."""

MARK_SUFFIX = ".mark"
"""The suffix of the file that records the newest version of the state file."""


class SqliteStore:
    """`now` dates the events of spec changes, which come without a time of their own.

    `admit` is asked in the writer's thread before a new run is kept, and raises to refuse it; `release` gives up a
    piece of held back space when the disk is full. `log_bytes_ahead`: how much space the write-ahead log keeps for
    itself (and the file half as much), so that the ends of runs can be written on a disk that others fill.
    `damaged` are the runs whose
    record turned out to be unreadable; `lost`, the version that the file should have had and the one it had.
    """

    def __init__(
        self,
        path: Path,
        *,
        busy_seconds: float = schema.BUSY_SECONDS,
        cache_characters: int = CACHE_CHARACTERS,
        now: Callable[[], float] = time.time,
        admit: Callable[[], None] = lambda: None,
        release: Callable[[], bool] = lambda: False,
        log_bytes_ahead: int = 0,
    ) -> None:
        self.path = path
        self._log_space = SpaceAhead(path.with_name(path.name + "-wal"), log_bytes_ahead)
        self._space = SpaceAhead(path, log_bytes_ahead // 2)  # for a checkpoint, when the log has no room either
        self.damaged: set[str] = set()
        self.lost: tuple[int, int] | None = None
        self._admit, self._release = admit, release
        self._mark = HighWaterMark(path.with_name(path.name + MARK_SUFFIX))
        self._busy_seconds, self._now = busy_seconds, now
        self._cache = DeploymentCache(cache_characters)
        self._bell = Bell()
        self._announced = 0
        self._ownership: Ownership | None = None
        self._reader: sqlite3.Connection | None = None
        self._writer: Writer | None = None

    async def open(self) -> None:
        """Take the file into use; `StateInUse`, `StateFileRefused` and `StoreUnavailable` name the path."""
        with schema.explained(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._ownership = Ownership.take(self.path)
            try:
                schema.prepare(self.path, busy_seconds=self._busy_seconds)
                self._reader = schema.connect(self.path, busy_seconds=self._busy_seconds, query_only=True)
                await asyncio.to_thread(self._compare_with_mark)
                self._announced = tables.newest_version(self._reader)
                self._writer = Writer(
                    schema.connect(self.path, busy_seconds=self._busy_seconds),
                    explain=partial(schema.explain, path=self.path),
                    release=self._release,
                    kept=self._keep_mark,
                )
            except BaseException:
                await self.close()
                raise

    def _compare_with_mark(self) -> None:
        """Find lost commits. Versions continue above theirs: a client that has seen one must not see it again."""
        with closing(schema.connect(self.path, busy_seconds=self._busy_seconds)) as connection:
            found = tables.newest_version(connection)
            try:
                expected = self._mark.read()
            except ValueError:
                expected = found
            if expected > found:
                self.lost = (expected, found)
                tables.raise_version(connection, expected + 1)
            self._mark.open(max(expected, found))

    def _keep_mark(self, connection: sqlite3.Connection) -> None:
        self._mark.note(tables.newest_version(connection))
        self._log_space.keep()
        self._space.keep()

    async def close(self) -> None:
        """Finish all writes, end all iterations and waits, and release the file."""
        if self._writer is not None:
            await self._writer.close()
        self._mark.close()
        self._log_space.close()
        self._bell.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._space.close()  # after SQLite: closing any descriptor of the file drops the process's locks on it
        if self._ownership is not None:
            self._ownership.release()

    async def create(
        self,
        deployment: Deployment,
        events: Sequence[Event] = (),
        *,
        idempotency_key: str | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        def create(db: sqlite3.Connection) -> Deployment:
            self._admit()
            return tables.create(db, deployment, tuple(events), idempotency_key, limits)

        return await self._write(create, new=True)

    async def get(self, instance: str) -> Deployment:
        return self._load(instance)

    async def find(self, namespace: str, name: str) -> Deployment:
        for load in (self._load, partial(self._load_newest, namespace)):
            try:
                found = load(name)
            except DeploymentNotFound:
                continue
            except DeploymentDamaged as error:
                if error.run.namespace == namespace:
                    raise
                continue
            if found.namespace == namespace:
                return found
        raise DeploymentNotFound(name)

    async def deployments(self, namespace: str | None = None) -> list[Deployment]:
        return [found for found in await self.listed(namespace) if isinstance(found, Deployment)]

    async def listed(self, namespace: str | None = None) -> list[Deployment | DamagedRun]:
        with self._reading() as db:
            instances = tables.instances(db, namespace)
        found: list[Deployment | DamagedRun] = []
        pause_at = time.monotonic() + SLICE_SECONDS
        for instance in instances:
            if time.monotonic() > pause_at:
                await asyncio.sleep(0)
                pause_at = time.monotonic() + SLICE_SECONDS
            try:
                found.append(self._load(instance))
            except DeploymentNotFound:  # deleted since the names were read
                continue
            except DeploymentDamaged as error:
                found.append(error.run)
        return found

    async def instances(self) -> list[str]:
        """Return all instances that have a record, readable or not."""
        with self._reading() as db:
            return tables.instances(db, None)

    async def live(self) -> list[str]:
        with self._reading() as db:
            return tables.open_instances(db)

    async def change_spec(
        self,
        instance: str,
        change: Callable[[Deployment], DeploymentSpec],
        events: Sequence[Event] = (),
        *,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        """`change` runs in the writer's thread. With `limits`, more ranks than they allow are `QuotaExceeded`."""
        now = self._now()
        return await self._write(
            lambda db: tables.change_spec(db, instance, change, tuple(events), limits=limits, now=now),
        )

    async def save_status(
        self, before: Deployment, status: DeploymentStatus, events: Sequence[Event] = (), *, now: float
    ) -> Deployment:
        return await self._write(lambda db: tables.save_status(db, before, status, tuple(events), now))

    async def condemn(self, instance: str) -> Deployment:
        now = self._now()
        return await self._write(lambda db: tables.condemn(db, instance, Wanted.DELETE, now))

    async def delete(self, instance: str) -> None:
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        await self._writer.write(lambda db: tables.delete(db, instance), partial(self._announce_deletion, instance))

    async def prune(self, before: float) -> list[str]:
        """Return the settled runs that ended before that moment. The caller removes their files, then calls
        `delete`.
        """
        with self._reading() as db:
            return tables.ended_before(db, before)

    async def events(self, instance: str, *, limit: int | None = None, since: int = 0) -> list[RecordedEvent]:
        with self._reading() as db:
            return tables.events(db, instance, limit, since)

    async def usage(self, user: str, *, limit: int | None = None, offset: int = 0) -> list[UsageRow]:
        """Return the usage of the user's runs, deleted ones included, newest first."""
        with self._reading() as db:
            return usage.rows(db, user, limit, offset)

    def changes(self, since: int | None = None) -> AsyncGenerator[str, None]:
        if since is None:
            return self._bell.changes(())
        with self._reading() as db:
            return self._bell.changes(tables.changed_since(db, since))

    async def wait_change(self, instance: str, version: int, timeout: float | None = None) -> Deployment | None:
        """Return the run as soon as its version is above the given one, or None when the time is up."""
        return await self._bell.wait_change(self._load, instance, version, timeout)

    def _load(self, instance: str) -> Deployment:
        deployment = self._cache.get(instance)
        if deployment is None:
            with self._reading() as db:
                try:
                    deployment = tables.load(db, instance)
                except DeploymentDamaged:
                    self.damaged.add(instance)
                    raise
            self._cache.put(deployment)
        return deployment

    def _load_newest(self, namespace: str, name: str) -> Deployment:
        with self._reading() as db:
            return self._load(tables.newest_named(db, namespace, name))

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if self._reader is None:
            raise StoreUnavailable("the store is not open")
        with schema.explained(self.path):
            yield self._reader

    async def _write(self, work: Callable[[sqlite3.Connection], Deployment], *, new: bool = False) -> Deployment:
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        return await self._writer.write(work, self._announce, new=new)

    def _announce(self, deployment: Deployment) -> None:
        if deployment.version > self._announced:  # else nothing was written
            self._announced = deployment.version
            self._cache.put(deployment)
            self.damaged.discard(deployment.instance)
            self._bell.ring(deployment.instance)

    def _announce_deletion(self, instance: str, deleted: bool) -> None:
        if deleted:
            self._cache.drop(instance)
            self.damaged.discard(instance)
            self._bell.ring(instance)
