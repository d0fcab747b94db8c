"""Work directories from archives: ranks wait until theirs is unpacked, and fail if it cannot be.

A turn of the controller does not wait for that. Meanwhile the attempts are seen as queued, with the reason.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from basilica.core.actions import Launch
from basilica.core.ends import CANNOT_EXECUTE, START_ERROR
from basilica.core.errors import RuntimeUnavailable
from basilica.core.seen import Sight
from basilica.machine.layout import Key, Layout
from basilica.machine.pools import Pool
from basilica.ports import Run
from basilica.runtimes.local.archives import Archives, CannotUnpack
from basilica.runtimes.local.attempt_tracker import Tracking
from basilica.runtimes.local.attempts import Attempt
from basilica.runtimes.local.changes import Changes
from basilica.runtimes.local.launches import Launching, startable
from basilica.runtimes.local.records import Exit, bury
from basilica.runtimes.local.run_as import Access
from basilica.runtimes.local.table import Table

log = logging.getLogger("basilica.runtime")

NOTE = "its directory is being unpacked"


@dataclass(slots=True, kw_only=True)
class Unpacking:
    """Unpacks directories, then launches ranks. `prepare` does the rest that a run needs before its ranks start."""

    layout: Layout
    archives: Archives
    table: Table
    tracking: Tracking
    launching: Launching
    changes: Changes
    pool: Pool
    access: Access
    prepare: Callable[[Run], Awaitable[None]]
    _done: set[str] = field(default_factory=set)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        """Start the ranks once the directory is unpacked."""
        if run.instance in self._done:
            await self.prepare(run)
            await self.launching.launch(run, launches)
            return
        attempts = self.table.of(run.instance)
        keys = {Key(run.instance, launch.rank, launch.attempt): launch for launch in launches}
        waiting = {key: keys[key] for key in startable(attempts, keys)}
        for key in waiting:
            attempts[key] = Attempt(key=key, sight=Sight.QUEUED, note=NOTE)
        before = self._tasks.get(run.instance)
        if waiting:
            task = asyncio.get_running_loop().create_task(self._unpack_and_start(run, waiting, before))
            self._tasks[run.instance] = task

    async def forget(self, instance: str) -> None:
        """Stop unpacking for a run that is to be removed: no write to its directory comes after this."""
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._done.discard(instance)

    async def close(self) -> None:
        for instance in tuple(self._tasks):
            await self.forget(instance)

    async def _unpack_and_start(self, run: Run, waiting: dict[Key, Launch], before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait({before})
            assert run.spec.archive is not None
            target = self.layout.workdir(run.instance)
            await self.archives.unpack(run.user, run.spec.archive, target)
            await self.pool.run(self.access.give_tree, target)
        except CannotUnpack as error:
            await self._fail(self._still(waiting), str(error))
            return
        self._done.add(run.instance)
        left = self._still(waiting)
        try:
            await self.prepare(run)
            for key in left:
                self.tracking.forget(key)
            await self.launching.launch(run, [waiting[key] for key in left])
        except (RuntimeUnavailable, OSError) as error:
            log.warning("cannot start ranks of %s: %s", run.instance, error)
            for key in self._still(waiting):
                self.tracking.forget(key)  # the controller finds them missing and launches them again
        self.changes.notify(run.instance)

    def _still(self, waiting: dict[Key, Launch]) -> list[Key]:
        """Return the attempts that were not stopped meanwhile."""
        found = ((key, self.table.find(key)) for key in waiting)
        return [key for key, attempt in found if attempt is not None and attempt.sight is Sight.QUEUED]

    async def _fail(self, keys: list[Key], problem: str) -> None:
        exit = Exit(
            exit_code=CANNOT_EXECUTE, reason=START_ERROR, finished_at=self.tracking.clock.now(), start_error=problem
        )
        for key in keys:
            with suppress(OSError):  # no room for the record: the table's entry counts
                await self.pool.run(bury, self.layout.record(key), exit)
            self.tracking.end_unstarted(key, exit)
