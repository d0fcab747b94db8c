"""Group commit: all waiting writes are made in one transaction, and one fsync serves them all."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from basilica.core.errors import DiskFull, StoreUnavailable

BATCH_MAX = 256
"""Bounds how many writes a failing commit fails, and how long the first of a batch waits for the last."""

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Write:
    """`work` runs in the writer's thread, `committed` and `done` in the loop's. Its outcome is a result or an error.

    `new`: it creates a run, so it may not use the space that is held back for ending things.
    """

    work: Callable[[sqlite3.Connection], Any]
    committed: Callable[[Any], None]
    done: asyncio.Future[Any]
    new: bool = False
    result: Any = None
    error: Exception | None = None


class Writer:
    """The one thread that writes. It owns the connection, and closes it.

    A write that raises is undone by itself and fails alone. When SQLite cannot go on (full disk, I/O error, lock),
    the whole batch is undone and each of its writes fails with `StoreUnavailable`. On a full disk, new runs fail and
    the rest is tried again as often as `release` finds space for it, and once more with the space of the
    write-ahead log itself. `kept` is called after each commit, here.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        explain: Callable[[sqlite3.Error], str],
        *,
        release: Callable[[], bool] = lambda: False,
        kept: Callable[[sqlite3.Connection], None] = lambda _: None,
    ) -> None:
        self._connection, self._explain = connection, explain
        self._release, self._kept = release, kept
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Write | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="basilica-writer", daemon=True)
        self._thread.start()

    async def write(
        self, work: Callable[[sqlite3.Connection], Result], committed: Callable[[Result], None], *, new: bool = False
    ) -> Result:
        """Run `work` in a transaction. `committed` is called after the commit even if the caller has gone by then."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        done: asyncio.Future[Result] = self._loop.create_future()
        self._queue.put(_Write(work, committed, done, new))
        return await done

    async def close(self) -> None:
        """Finish the queued writes."""
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch, stopping = self._take()
            self._commit(batch)
            try:
                self._loop.call_soon_threadsafe(self._notify, batch)
            except RuntimeError:  # the loop is closed, and no caller is left
                stopping = True
        self._connection.close()

    def _take(self) -> tuple[list[_Write], bool]:
        """Wait for the first write; return all queued ones, and whether the end was among them."""
        batch: list[_Write] = []
        with suppress(Empty):
            write = self._queue.get()
            while write is not None:
                batch.append(write)
                if len(batch) == BATCH_MAX:
                    return batch, False
                write = self._queue.get_nowait()
            return batch, True
        return batch, False

    def _commit(self, batch: Sequence[_Write]) -> None:
        left, log_reused = list(batch), False
        while left:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                for write in left:
                    self._attempt(write)
                self._connection.execute("COMMIT")
                break
            except sqlite3.Error as error:
                if self._connection.in_transaction:
                    with suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                full = disk_is_full(error)
                problem = (DiskFull if full else StoreUnavailable)(self._explain(error))
                more = full and self._release()
                if full and not more and not log_reused:
                    more = log_reused = self._reuse_log()
                failed = [write for write in left if write.new] if more else left
            for write in failed:
                write.error = problem
            left = [write for write in left if write not in failed]
        if left:
            with suppress(sqlite3.Error):  # the writes are committed, even if this fails
                self._kept(self._connection)

    def _reuse_log(self) -> bool:
        """Checkpoint the write-ahead log, so that it begins anew in the space that it has."""
        try:
            busy, logged, moved = self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        except sqlite3.Error:
            return False
        return not busy and logged == moved

    def _attempt(self, write: _Write) -> None:
        self._connection.execute("SAVEPOINT write")
        write.error = None
        try:
            write.result = write.work(self._connection)
        except Exception as error:
            if isinstance(error, sqlite3.Error) and not isinstance(error, _OWN_FAULTS):
                raise
            write.error = error
            self._connection.execute("ROLLBACK TO write")
        self._connection.execute("RELEASE write")

    def _notify(self, batch: Sequence[_Write]) -> None:
        for write in batch:
            if write.error is None:
                write.committed(write.result)
            if write.done.done():  # its caller was cancelled
                continue
            if write.error is None:
                write.done.set_result(write.result)
            else:
                write.done.set_exception(write.error)


def disk_is_full(error: sqlite3.Error) -> bool:
    """Whether the disk is full, also where SQLite found no space for its index of the write-ahead log."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE


_OWN_FAULTS = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
"""Errors of one statement and its values; all others mean that the file cannot be written now."""
