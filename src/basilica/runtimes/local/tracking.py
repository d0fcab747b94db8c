"""Following attempts from their claim to their end: by their records, by what is rung, and by watching processes."""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from basilica.core.seen import Sight
from basilica.runtimes.local import supervisor
from basilica.runtimes.local.attempts import Attempt, ended_of
from basilica.runtimes.local.background import Background
from basilica.runtimes.local.changes import Changes
from basilica.runtimes.local.layout import Key, Layout
from basilica.runtimes.local.line import GpuLine
from basilica.runtimes.local.orphans import bury_orphan
from basilica.runtimes.local.processes import Watch, supervisor_of
from basilica.runtimes.local.records import Exit, Record, Running, append_exit, read_record
from basilica.runtimes.local.reports import Reports
from basilica.runtimes.local.run_files import read_run
from basilica.runtimes.local.table import Table
from basilica.runtimes.local.unavailable import or_unavailable
from basilica.runtimes.local.wakeups import Told

log = logging.getLogger("basilica.runtime")


@dataclass(slots=True, kw_only=True)
class Tracking:
    """Brings the table in line with what is on disk, and says so."""

    layout: Layout
    table: Table
    line: GpuLine
    reports: Reports
    changes: Changes
    background: Background
    _boot: str = field(default_factory=supervisor.boot)
    _unclaimable: dict[Key, str] = field(default_factory=dict)  # attempts that could not even be claimed, and why

    async def attempts(self, instance: str) -> dict[Key, Attempt]:
        """Those of a run as they are known; read from disk the first time."""
        if instance not in self.table:
            with or_unavailable(f"cannot read the state of {instance}"):
                found = await asyncio.to_thread(read_run, self.layout, instance)
            known = self.table.add(instance)
            for key, record in found.items():
                if record is not None and record.exit is not None:
                    self._mark_ended(key, record.running, record.exit, record.damage)
                else:
                    self._take_in(key, record)
            self.reports.adopt(instance, [key for key in found if key in known and known[key].sight is Sight.RUNNING])
        return self.table.of(instance)

    # ---- what makes it look ------------------------------------------------------------------------------------------

    def told(self, told: Told) -> None:
        """A supervisor has rung."""
        if told.what == "failed":
            self._unclaimable[told.key] = told.detail
        elif told.key.instance in self.table:
            self.look(told.key)
        else:  # a supervisor of an earlier control plane that claimed its attempt after we had looked
            self.background.spawn(self._adopt(told.key.instance))

    async def _adopt(self, instance: str) -> None:
        if self.changes.is_open and self.layout.run(instance).exists():
            await self.attempts(instance)
            self.changes.tell(instance)

    def look_at_all(self) -> None:
        for attempt in self.table.attempts():
            if attempt.sight in (Sight.STARTING, Sight.RUNNING):
                self.look(attempt.key)

    def look(self, key: Key) -> None:
        self._take_in(key, read_record(self.layout.record(key)))

    def watch_new(self, key: Key, pid: int) -> None:
        """Its supervisor was started with that pid, and has perhaps not claimed it yet."""
        attempt = self.table.find(key)
        if attempt is None or attempt.watch is not None or attempt.sight is Sight.ENDED:
            return  # it was told of already
        try:
            attempt.watch = Watch(pid, None, lambda: self._gone(key))
        except ProcessLookupError:
            self.look(key)

    def _gone(self, key: Key) -> None:
        """A watched process, supervisor or orphaned rank, has ended."""
        attempt = self.table.of(key.instance)[key]
        attempt.unwatch()
        record = read_record(self.layout.record(key))
        if attempt.orphaned and record is not None:
            self.background.spawn(self._bury(key, record))
        else:
            self._take_in(key, record)

    # ---- what a record says ------------------------------------------------------------------------------------------

    def _take_in(self, key: Key, record: Record | None) -> None:
        known = self.table.of(key.instance).get(key)
        if known is not None and known.sight is Sight.ENDED:
            return
        if record is None:
            self._unclaimed(key, known)
        elif record.exit is not None:
            self.end(key, record.running, record.exit, record.damage)
        elif record.damage and not record.claim.boot:
            self._take_in_damaged(key, record)
        elif record.claim.boot != self._boot:
            lost = Exit(exit_code=None, reason="Unknown", finished_at=time.time(), by_platform=True)
            self._write_end(key, record, lost)
        else:
            self._claimed(key, record)

    def _take_in_damaged(self, key: Key, record: Record) -> None:
        """Who has the attempt cannot be read. The lock on its rank tells whether somebody does; if nobody, it ended."""
        log.warning("the record of %s is damaged: %s", key, record.damage)
        self.table.entry(key, Sight.STARTING)
        holder = supervisor_of(os.path.dirname(self.layout.record(key)))
        if holder is None:
            self.background.spawn(self._bury(key, record))
            return
        claim = replace(record.claim, pid=holder, start=supervisor.start_time(holder), boot=self._boot)
        self._claimed(key, replace(record, claim=claim))

    def _unclaimed(self, key: Key, known: Attempt | None) -> None:
        if known is None or known.watch is not None or known.sight is Sight.QUEUED:
            return
        # Its supervisor ended before it had claimed: it could not write, or another attempt of the rank is alive.
        self.forget(key)
        for attempt in self.layout.attempts(key.instance, key.rank):
            self.look(Key(key.instance, key.rank, attempt))
        self.changes.tell(key.instance)

    def _claimed(self, key: Key, record: Record) -> None:
        attempt = self.table.entry(key, Sight.STARTING)
        before = attempt.sight
        if record.running is not None:
            attempt.sight, attempt.started_at = Sight.RUNNING, record.running.started_at
        claim = record.claim
        attempt.gpus = claim.gpus
        self.line.hold(key, claim.gpus)
        if not attempt.orphaned and (attempt.watch is None or attempt.watch.pid != claim.pid):
            attempt.unwatch()
            try:
                attempt.watch = Watch(claim.pid, claim.start, lambda: self._gone(key))
            except ProcessLookupError:
                self._without_supervisor(attempt)
        if attempt.sight is not before:
            self.changes.tell(key.instance)

    def _without_supervisor(self, attempt: Attempt) -> None:
        """The supervisor was killed, or has just ended: then the record says so by now."""
        record = read_record(self.layout.record(attempt.key))
        if record is None or record.exit is not None or (record.damage and not record.claim.boot):
            self._take_in(attempt.key, record)
            return
        attempt.orphaned = True
        if record.running is not None:
            try:
                attempt.watch = Watch(record.running.pid, record.running.start, lambda: self._gone(attempt.key))
                return
            except ProcessLookupError:
                pass
        self.background.spawn(self._bury(attempt.key, record))

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _bury(self, key: Key, record: Record) -> None:
        exit = await bury_orphan(self.layout, key, record.claim)
        self._write_end(key, record, exit)

    def _write_end(self, key: Key, record: Record, exit: Exit) -> None:
        with suppress(OSError):  # if it cannot be written down, the next control plane comes to the same conclusion
            append_exit(self.layout.record(key), exit)
        self.end(key, record.running, exit, record.damage)

    def end(self, key: Key, running: Running | None, exit: Exit, damage: str = "") -> None:
        """Its record says how it ended."""
        if key.instance in self.table:  # else it was removed meanwhile
            self._mark_ended(key, running, exit, damage)
            self.line.free(key)
            self.changes.tell(key.instance)

    def _mark_ended(self, key: Key, running: Running | None, exit: Exit, damage: str = "") -> None:
        self.reports.forget(key)
        attempt = self.table.entry(key, Sight.ENDED)
        attempt.unwatch()
        attempt.sight, attempt.note, attempt.stalled = Sight.ENDED, "", None
        attempt.started_at = None if running is None else running.started_at
        attempt.damage = damage
        attempt.ended = ended_of(exit, self.layout, key)

    def forget(self, key: Key) -> None:
        """It has not come to be."""
        self.reports.forget(key)
        attempt = self.table.of(key.instance).pop(key, None)
        if attempt is not None:
            attempt.unwatch()
        self.line.free(key)

    def take_unclaimable(self, keys: Iterable[Key]) -> list[str]:
        """Why these could not be claimed when they were last started, told once."""
        return [why for key in keys if (why := self._unclaimable.pop(key, None)) is not None]
