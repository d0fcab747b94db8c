"""Stops of attempts: of those that run, those that wait, and those that must never start.

A supervisor that is asked to stop ends its rank within the grace, and records the end. The runtime does not wait for a
supervisor that is suspended or hangs: it kills the rank's processes, then the supervisor, and records the end itself.
"""

import asyncio
import logging
import signal
import time
from dataclasses import dataclass, field
from functools import partial

from basilica.core.ends import CANCELLED
from basilica.core.seen import Sight
from basilica.machine.clocks import SteadyClock
from basilica.machine.layout import Key, Layout
from basilica.machine.pools import Pool
from basilica.machine.processes import is_stopped
from basilica.machine.reserve import Reserve
from basilica.runtimes.local.attempt_tracker import Tracking
from basilica.runtimes.local.attempts import Attempt
from basilica.runtimes.local.background import Background
from basilica.runtimes.local.gpu_queue import GpuLine
from basilica.runtimes.local.orphans import kill_leftovers, terminate_strays
from basilica.runtimes.local.records import NOBODY, Exit, bury, write_stop
from basilica.runtimes.local.table import Table

log = logging.getLogger("basilica.runtime")

OVERDUE_S = 1.0  # after the grace; a supervisor needs milliseconds
TRY_AGAIN_S = 0.5
TRY_AGAIN_AT_MOST_S = 30.0
HANGS_AFTER_S = 30.0  # after the grace: a supervisor may wait for a disk, or for a process that is stuck in the kernel


@dataclass(slots=True, kw_only=True)
class Stopping:
    layout: Layout
    table: Table
    tracking: Tracking
    line: GpuLine
    background: Background
    pool: Pool
    clock: SteadyClock
    reserve: Reserve
    _due: dict[Key, float] = field(default_factory=dict)  # when attempts that were asked to stop are overdue

    async def stop(self, key: Key, grace_seconds: float) -> None:
        """Request the stop of an attempt of a known run. `OSError` if it can neither be written nor signalled."""
        attempt = self.table.find(key)
        if attempt is not None and attempt.sight is Sight.ENDED:
            return
        self.line.withdraw(key)
        never_started = Exit(exit_code=None, reason=CANCELLED, finished_at=self.clock.now(), stopped=True)
        request = signal.SIGTERM
        try:
            if await self.pool.run(self._request_stop, key, grace_seconds, never_started):
                self.tracking.end_unstarted(key, never_started)
                return
        except OSError:
            if attempt is None or attempt.watch is None or attempt.orphaned:
                raise
            request = signal.SIGUSR1  # no room for the stop file: the run's own grace applies
        await self.tracking.refresh_now(key)
        attempt = self.table.find(key)
        if attempt is None or attempt.sight is Sight.ENDED:
            return
        if attempt.watch is not None:
            attempt.watch.signal(request)
            attempt.watch.signal(signal.SIGCONT)  # a suspended supervisor would not receive the first
        elif attempt.sight is Sight.UNKNOWN:  # without a usable record, only its processes are known
            await self.pool.run(terminate_strays, self.layout, key)
        else:
            return  # it has ended, and is being refreshed
        due = time.monotonic() + grace_seconds + (0.0 if attempt.orphaned else OVERDUE_S)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self.background.spawn(self._kill_when_due(key, due))

    def _request_stop(self, key: Key, grace_seconds: float, never_started: Exit) -> bool:
        """Write the stop request. Return True if it came in time to keep the attempt from ever starting."""
        self.reserve.spend(partial(write_stop, self.layout.stop(key), grace_seconds))
        return self.reserve.spend(partial(bury, self.layout.record(key), never_started))

    async def _kill_when_due(self, key: Key, due: float) -> None:
        """Kill an attempt that has not ended when its stop is due, repeatedly until it has."""
        try:
            await asyncio.sleep(due - time.monotonic())
            pause = TRY_AGAIN_S
            while (attempt := self._unended(key)) is not None and self._due.get(key) == due:
                if not attempt.orphaned:
                    log.warning("%s should have ended by now; killing what it started", key)
                if attempt.watch is not None:
                    attempt.watch.signal(signal.SIGCONT)
                claim = attempt.claim or NOBODY
                left = await self.pool.run(kill_leftovers, self.layout, key, claim)
                self.tracking.refresh_soon(key)  # without a usable record, no other event reveals its end
                await asyncio.sleep(pause)
                pause = min(2 * pause, TRY_AGAIN_AT_MOST_S)
                attempt = self._unended(key)
                if attempt is not None and not left:
                    self._kill_supervisor(attempt, overdue=time.monotonic() - due)
        finally:
            if self._due.get(key) == due:
                del self._due[key]

    def _unended(self, key: Key) -> Attempt | None:
        """Return the attempt, if it has not ended."""
        attempt = self.table.find(key)
        return None if attempt is None or attempt.sight is Sight.ENDED else attempt

    def _kill_supervisor(self, attempt: Attempt, *, overdue: float) -> None:
        """Kill a supervisor that is suspended or hangs though its rank is gone. Its watch then records the end."""
        if attempt.watch is None or attempt.orphaned:
            return
        if is_stopped(attempt.watch.pid) or overdue > HANGS_AFTER_S:
            log.warning("the supervisor of %s does not end (pid %d); killing it", attempt.key, attempt.watch.pid)
            attempt.watch.signal(signal.SIGKILL)
