"""The attempt tracker follows attempts from claim to end: by their records, wake messages and watched processes.

Threads read the files and the event loop applies the results, so that a slow disk or an unusable file blocks no other
run. Each attempt is refreshed by one task at a time; an event during a refresh causes one more.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from basilica.core.seen import Ended, Sight
from basilica.machine.clocks import SteadyClock
from basilica.machine.layout import Key, Layout
from basilica.machine.pools import Pool
from basilica.machine.proc import boot, start_time
from basilica.machine.processes import Watch, supervisor_of
from basilica.reports.wakeups import Wakeup
from basilica.runtimes.local.attempts import Attempt, OnDisk, ended_of, read_attempt, with_output, write_end
from basilica.runtimes.local.background import Background
from basilica.runtimes.local.changes import Changes
from basilica.runtimes.local.gpu_queue import GpuLine
from basilica.runtimes.local.orphans import bury_orphan, is_alive
from basilica.runtimes.local.records import NOBODY, Exit, Record, Running
from basilica.runtimes.local.reports import Reports
from basilica.runtimes.local.run_files import read_run
from basilica.runtimes.local.table import Table
from basilica.runtimes.local.unavailable import or_unavailable

log = logging.getLogger("basilica.runtime")

NOTE_MAX = 200


@dataclass(slots=True, kw_only=True)
class Tracking:
    """Updates the table from the files on disk, and notifies about changes."""

    layout: Layout
    table: Table
    line: GpuLine
    reports: Reports
    changes: Changes
    background: Background
    pool: Pool
    clock: SteadyClock
    _refreshing: dict[Key, bool] = field(default_factory=dict)  # attempts being refreshed, and whether once more
    _boot: str = field(default_factory=boot)
    _unclaimable: dict[Key, str] = field(default_factory=dict)  # attempts that could not even be claimed, and why

    async def attempts(self, instance: str) -> dict[Key, Attempt]:
        """Return the known attempts of a run; the first call reads them from disk."""
        if instance not in self.table:
            with or_unavailable(f"cannot read the state of {instance}"):
                found = await self.pool.run(read_run, self.layout, instance, self._boot, self.clock.now())
            if instance in self.table:  # a concurrent call was faster
                return self.table.of(instance)
            known = self.table.add(instance)
            for key, on_disk in found.items():
                if on_disk.record is not None and on_disk.ended is not None:
                    self._mark_ended(key, on_disk.record.running, on_disk.ended, on_disk)
                else:
                    self._apply(key, on_disk)
            running = [key for key in found if key in known and known[key].sight is Sight.RUNNING]
            await self.reports.adopt(instance, running)
        return self.table.of(instance)

    # ---- triggers of a refresh ---------------------------------------------------------------------------------------

    def handle(self, wakeup: Wakeup) -> None:
        """Handle the message of a supervisor."""
        if wakeup.what == "failed":
            self._unclaimable[wakeup.key] = wakeup.detail
        elif wakeup.what == "short":
            self._cannot_start_yet(wakeup)
        elif wakeup.key.instance in self.table:
            self.refresh_soon(wakeup.key)
        else:  # a supervisor of an earlier control plane that claimed its attempt after `start` had read the files
            self.background.spawn(self._adopt(wakeup.key.instance))

    def _cannot_start_yet(self, wakeup: Wakeup) -> None:
        """Note that the supervisor retries the start, since the shortage may pass."""
        attempt = self.table.find(wakeup.key)
        if attempt is not None and attempt.sight is Sight.STARTING:
            attempt.note = f"it cannot be started now, and is tried again: {wakeup.detail[:NOTE_MAX]}"
            self.changes.notify(wakeup.key.instance)

    async def _adopt(self, instance: str) -> None:
        if self.changes.is_open and await self.pool.run(self.layout.run(instance).exists):
            await self.attempts(instance)
            self.changes.notify(instance)

    def refresh_all(self) -> None:
        """Schedule a refresh of every attempt that has not ended: wake-ups may have been lost."""
        for attempt in self.table.attempts():
            if attempt.sight in (Sight.STARTING, Sight.RUNNING):
                self.refresh_soon(attempt.key)

    def refresh_soon(self, key: Key) -> None:
        """Schedule a refresh of the attempt."""
        if key in self._refreshing:
            self._refreshing[key] = True
        else:
            self._refreshing[key] = False
            self.background.spawn(self._refresh_until_current(key))

    async def _refresh_until_current(self, key: Key) -> None:
        """Refresh the attempt, and again for each event during a refresh."""
        try:
            while True:
                self._refreshing[key] = False
                await self.refresh_now(key)
                if not self._refreshing[key]:
                    return
        except Exception:
            log.exception("cannot refresh %s", key)
        finally:
            del self._refreshing[key]

    async def refresh_now(self, key: Key) -> OnDisk:
        """Read the attempt's files and apply them to the table."""
        on_disk = await self._read(key)
        if key.instance in self.table:
            self._apply(key, on_disk)
        return on_disk

    async def _read(self, key: Key) -> OnDisk:
        return await self.pool.run(read_attempt, self.layout, key, self._boot, self.clock.now())

    def watch_new(self, key: Key, pid: int) -> None:
        """Watch the supervisor that was started with that pid, and has perhaps not claimed the attempt yet."""
        attempt = self.table.find(key)
        if attempt is None or attempt.watch is not None or attempt.sight is Sight.ENDED:
            return  # a wake message was faster
        try:
            attempt.watch = Watch(pid, None, lambda: self._gone(key))
        except ProcessLookupError:
            self.refresh_soon(key)

    def _gone(self, key: Key) -> None:
        """Handle the end of a watched process: the supervisor, or an orphaned rank."""
        attempt = self.table.of(key.instance)[key]
        attempt.unwatch()
        if attempt.orphaned:
            self.background.spawn(self._bury(key))
        else:
            self.refresh_soon(key)

    # ---- records -----------------------------------------------------------------------------------------------------

    def _apply(self, key: Key, on_disk: OnDisk) -> None:
        """Apply the attempt's files to its entry of the table; an ended attempt does not change."""
        known, record = self.table.of(key.instance).get(key), on_disk.record
        if known is not None and known.sight is Sight.ENDED:
            return
        if on_disk.problem and record is None:
            self._unclear(key, on_disk.problem)
        elif record is None:
            self._unclaimed(key, known)
        elif on_disk.ended is not None:
            self._end(key, record.running, on_disk.ended, on_disk)
        elif record.claim_lost:
            self._apply_damaged(key, record)
        else:
            self._claimed(key, record)

    def _unclear(self, key: Key, problem: str) -> None:
        """Handle a record that was replaced by something else. The supervisor restores it at the end of the attempt;
        without a supervisor, the end stays unknown."""
        attempt = self.table.entry(key, Sight.UNKNOWN)
        if attempt.problem != problem:
            attempt.problem = problem
            self.changes.notify(key.instance)
        if attempt.watch is None:
            self.background.spawn(self._bury_if_dead(key))

    async def _bury_if_dead(self, key: Key) -> None:
        attempt = self.table.find(key)
        if not await self.pool.run(is_alive, self.layout, key) and self.table.find(key) is attempt:
            await self._bury(key)

    def _apply_damaged(self, key: Key, record: Record) -> None:
        """Handle a record with an unreadable claim: the process that locks the rank has it; without one, it ended."""
        log.warning("the record of %s is damaged: %s", key, record.damage)
        self.table.entry(key, Sight.STARTING)
        holder = supervisor_of(os.path.dirname(self.layout.record(key)))
        if holder is None:
            self.background.spawn(self._bury(key))
            return
        claim = replace(record.claim, pid=holder, start=start_time(holder), boot=self._boot)
        self._claimed(key, replace(record, claim=claim))

    def _unclaimed(self, key: Key, known: Attempt | None) -> None:
        if known is None or known.watch is not None or known.sight is Sight.QUEUED:
            return
        if known.started_at is not None:  # it ran, and its record was removed
            known.problem = f"the record of rank {key.rank} was removed"
            self.background.spawn(self._bury(key))
            return
        # The supervisor ended before claiming: it could not write, or another attempt of the rank is alive.
        self.forget(key)
        self.background.spawn(self._refresh_others(key))

    async def _refresh_others(self, key: Key) -> None:
        with suppress(OSError):
            for attempt in await self.pool.run(self.layout.attempts, key.instance, key.rank):
                self.refresh_soon(Key(key.instance, key.rank, attempt))
        self.changes.notify(key.instance)

    def _claimed(self, key: Key, record: Record) -> None:
        attempt = self.table.entry(key, Sight.STARTING)
        before = attempt.sight
        if record.running is not None:
            attempt.sight, attempt.started_at, attempt.note = Sight.RUNNING, record.running.started_at, ""
        claim, attempt.claim = record.claim, record.claim
        attempt.gpus = claim.gpus
        self.line.assign(key, claim.gpus)
        if not attempt.orphaned and (attempt.watch is None or attempt.watch.pid != claim.pid):
            attempt.unwatch()
            try:
                attempt.watch = Watch(claim.pid, claim.start, lambda: self._gone(key))
            except ProcessLookupError:
                self.background.spawn(self._without_supervisor(attempt))
        if attempt.sight is not before:
            self.changes.notify(key.instance)

    async def _without_supervisor(self, attempt: Attempt) -> None:
        """Handle a missing supervisor: it was killed, or has just ended and the record now has the end."""
        key = attempt.key
        on_disk = await self._read(key)
        if self.table.find(key) is not attempt or attempt.orphaned:
            return
        record = on_disk.record
        if record is None or on_disk.ended is not None or record.claim_lost:
            self._apply(key, on_disk)
            return
        attempt.orphaned = True
        if record.running is not None:
            try:
                attempt.watch = Watch(record.running.pid, record.running.start, lambda: self._gone(key))
                return
            except ProcessLookupError:
                pass
        await self._bury(key)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _bury(self, key: Key) -> None:
        """End the leftovers of an attempt whose supervisor and rank are gone, and record that its end is unknown."""
        known, on_disk = self.table.find(key), await self._read(key)
        if on_disk.ended is not None:  # the supervisor recorded the end itself
            self._apply(key, on_disk)
            return
        claim = known.claim if known is not None and known.claim is not None else NOBODY
        record = on_disk.record or Record(claim=claim)
        if record.running is None and known is not None and known.started_at is not None:
            record = replace(record, running=Running(pid=0, start=0, started_at=known.started_at))
        exit = await bury_orphan(self.layout, key, record.claim, self.pool, self.clock)
        record = await self.pool.run(write_end, self.layout, key, record, exit)
        found = await self.pool.run(with_output, self.layout, key, record, exit)
        if found.ended is not None:
            self._end(key, record.running, found.ended, found)

    def end_unstarted(self, key: Key, exit: Exit) -> None:
        """Mark an attempt as ended that never started, and never will."""
        self._end(key, None, ended_of(exit), OnDisk())

    def _end(self, key: Key, running: Running | None, ended: Ended, on_disk: OnDisk) -> None:
        if key.instance in self.table:  # else the run was removed meanwhile
            self._mark_ended(key, running, ended, on_disk)
            self.line.free(key)
            self.changes.notify(key.instance)

    def _mark_ended(self, key: Key, running: Running | None, ended: Ended, on_disk: OnDisk) -> None:
        self.reports.forget(key)
        attempt = self.table.entry(key, Sight.ENDED)
        attempt.unwatch()
        attempt.sight, attempt.note, attempt.stalled = Sight.ENDED, "", None
        attempt.started_at = None if running is None else running.started_at
        attempt.damage = "" if on_disk.record is None else on_disk.record.damage
        attempt.ended, attempt.problem = ended, on_disk.problem or attempt.problem
        attempt.memory_kill = on_disk.memory_kill

    def forget(self, key: Key) -> None:
        """Drop an attempt that was never claimed, and free its GPUs."""
        self.reports.forget(key)
        attempt = self.table.of(key.instance).pop(key, None)
        if attempt is not None:
            attempt.unwatch()
        self.line.free(key)

    def take_unclaimable(self, keys: Iterable[Key]) -> dict[Key, str]:
        """Return, once, why these attempts could not be claimed at their last start."""
        return {key: why for key in keys if (why := self._unclaimable.pop(key, None)) is not None}
