"""Having attempts end: those that run, those that wait, and those that must never start."""

import asyncio
import signal
from dataclasses import dataclass

from basilica.clocks import SteadyClock
from basilica.core.seen import Sight
from basilica.runtimes.local.background import Background
from basilica.runtimes.local.layout import Key, Layout
from basilica.runtimes.local.line import GpuLine
from basilica.runtimes.local.orphans import kill_leftovers
from basilica.runtimes.local.records import Exit, bury, read_record, write_stop
from basilica.runtimes.local.table import Table
from basilica.runtimes.local.tracking import Tracking


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    layout: Layout
    table: Table
    tracking: Tracking
    line: GpuLine
    background: Background
    clock: SteadyClock

    def stop(self, key: Key, grace_seconds: float) -> None:
        """Ask for the end of an attempt of a known run. `OSError` if that can neither be written down nor signalled."""
        attempt = self.table.find(key)
        if attempt is not None and attempt.sight is Sight.ENDED:
            return
        self.line.leave(key)
        never_started = Exit(exit_code=None, reason="Cancelled", finished_at=self.clock.now(), stopped=True)
        try:
            write_stop(self.layout.stop(key), grace_seconds)
            buried = bury(self.layout.record(key), never_started)
        except OSError:
            if attempt is None or attempt.watch is None or attempt.orphaned:
                raise
            attempt.watch.signal(signal.SIGUSR1)  # no room for the file: then with the run's own grace
            return
        if buried:
            self.tracking.end(key, None, never_started)
            return
        self.tracking.look(key)
        attempt = self.table.of(key.instance)[key]
        if attempt.watch is None:
            return  # it has ended
        attempt.watch.signal(signal.SIGTERM)
        if attempt.orphaned:
            asyncio.get_running_loop().call_later(grace_seconds, self._kill_orphan, key)

    def _kill_orphan(self, key: Key) -> None:
        attempt = self.table.find(key)
        record = read_record(self.layout.record(key))
        if attempt is not None and attempt.sight is not Sight.ENDED and record is not None:
            self.background.spawn(asyncio.to_thread(kill_leftovers, self.layout, key, record.claim))
