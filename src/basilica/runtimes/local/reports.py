"""The reports of ranks as the runtime follows them: reporting processes, stalls, and the readers of reports.

A process rings when it first reports, and once its usual step time is known. From then on it has one timer, which reads
the end of its report file when the process would have been silent for too long; a newer report sets the timer anew. A
silent process has no timer: the kernel notifies of its next write. Ranks that never report cost nothing.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from basilica.core import stalls
from basilica.core.reports import Report, Series, SeriesQuery
from basilica.core.seen import Stalled
from basilica.machine.clocks import SteadyClock, counted
from basilica.machine.inotify import FileWatcher
from basilica.machine.layout import Key, Layout
from basilica.machine.pools import Pool
from basilica.machine.processes import lives
from basilica.reports.files import (
    LastReport,
    ReportFile,
    read_last,
    read_reports,
    read_series,
    report_file,
    report_files,
)
from basilica.reports.writer import BELL_ENV, FILE_ENV
from basilica.runtimes.local import stacks
from basilica.runtimes.local.background import Spawn
from basilica.runtimes.local.changes import Readers

STACKS_AT_ONCE = 2
SOON = 0.05  # the shortest timer: stalls are measured in seconds


@dataclass(slots=True)
class _Process:
    """A watched process that reports: watched by a timer while it reports, by its file while it is silent."""

    file: ReportFile
    timer: asyncio.TimerHandle | None = None
    unwatch: Callable[[], None] | None = None
    stalled: Stalled | None = None
    asked: int = 0  # the number of the report after which its stacks were taken

    def let_go(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.unwatch is not None:
            self.unwatch()
        self.timer = self.unwatch = None


@dataclass(slots=True)
class Reports:
    """Follows the reports of all ranks. `stalled` is called when a rank stalls, or stalls no more."""

    layout: Layout
    files: FileWatcher
    spawn: Spawn
    pool: Pool
    stalled: Callable[[Key, Stalled | None], None]
    clock: SteadyClock
    _watched: dict[Key, dict[int, _Process]] = field(default_factory=dict)
    _readers: Readers = field(default_factory=Readers)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STACKS_AT_ONCE))

    def environment(self, key: Key) -> dict[str, str]:
        """Return the variables that name the attempt's report file and the pipe where its processes ring."""
        return {FILE_ENV: self.layout.report(key), BELL_ENV: str(self.layout.wake)}

    # ---- reporting processes ---------------------------------------------------------------------------------------

    def rung(self, key: Key, pid: int) -> None:
        """Handle the ring of a process that has begun to report, or whose usual step time is known."""
        self.spawn(self._watch(report_file(self.layout, key, pid), adopted=False))
        self._readers.notify(key.instance)

    async def adopt(self, instance: str, running: Iterable[Key]) -> None:
        """Watch processes that began to report under an earlier control plane, and publish stalls before this returns:
        a restart of the control plane does not mean that the rank has recovered."""
        wanted = set(running)
        for file in await self.pool.run(report_files, self.layout, instance) if wanted else ():
            if file.key in wanted:
                await self._watch(file, adopted=True)

    def forget(self, key: Key) -> None:
        """Stop watching the processes of an attempt that has ended."""
        for process in self._watched.pop(key, {}).values():
            process.let_go()

    def close(self) -> None:
        for key in tuple(self._watched):
            self.forget(key)

    # ---- stalls ----------------------------------------------------------------------------------------------------

    async def _watch(self, file: ReportFile, *, adopted: bool) -> None:
        processes = self._watched.setdefault(file.key, {})
        process = processes.setdefault(file.pid, _Process(file))
        if process.stalled is None:
            await self._look(process, adopted=adopted)

    def _look_soon(self, process: _Process) -> None:
        self.spawn(self._look(process))

    def _is_watched(self, process: _Process) -> bool:
        """Return False once the attempt of the process has ended."""
        return self._watched.get(process.file.key, {}).get(process.file.pid) is process

    async def _look(self, process: _Process, *, adopted: bool = False) -> None:
        """Read the newest report, and set the timer by it or find the process silent for too long."""
        report = await self.pool.run(read_last, process.file)
        if self._is_watched(process):
            self._judge(process, report, adopted=adopted)

    def _judge(self, process: _Process, report: LastReport | None, *, adopted: bool = False) -> None:
        process.let_go()
        file = process.file
        if report is None or report.last.usual is None or not lives(file.pid, report.start):
            self._drop(process)
            return
        left = report.last.mono + stalls.limit(report.last.usual) - time.monotonic()
        if left > 0:
            self._tell(process, None)
            loop = asyncio.get_running_loop()
            process.timer = loop.call_later(max(left, SOON), self._look_soon, process)
            return
        if adopted:
            self._tell(process, self._stall(report, stacks.NOTHING))
        if process.asked != report.last.n:
            process.asked = report.last.n
            self.spawn(self._found_silent(process, report))

    def _drop(self, process: _Process) -> None:
        """Stop watching a process that is gone or cannot be judged yet; the latter rings once it can."""
        key = process.file.key
        self._tell(process, None)
        self._watched.get(key, {}).pop(process.file.pid, None)
        if not self._watched.get(key, True):
            del self._watched[key]

    async def _found_silent(self, process: _Process, report: LastReport) -> None:
        file, loop = process.file, asyncio.get_running_loop()
        async with self._room:
            taken = await stacks.take_stacks(file.pid, report.start, file.stacks, self.pool)
        if not self._is_watched(process):
            return  # the attempt has ended meanwhile
        process.let_go()

        def changed() -> None:
            loop.call_soon(self._written_soon, process)

        process.unwatch = self.files.watch(file.path, changed)
        if not await self._written(process) and self._is_watched(process):  # else the process was only slow
            self._tell(process, self._stall(report, taken))

    def _written_soon(self, process: _Process) -> None:
        self.spawn(self._written(process))

    async def _written(self, process: _Process) -> bool:
        """Handle a write by a silent process; return True if it was a report."""
        report = await self.pool.run(read_last, process.file)
        if process.unwatch is None or (report is not None and report.last.n == process.asked):
            return False
        if self._is_watched(process):
            self._judge(process, report)
        return True

    def _tell(self, process: _Process, stalled: Stalled | None) -> None:
        if process.stalled == stalled:
            return
        process.stalled = stalled
        key = process.file.key
        found = [p.stalled for p in self._watched.get(key, {}).values() if p.stalled is not None]
        self.stalled(key, min(found, key=lambda s: s.since, default=None))

    # ---- readers ---------------------------------------------------------------------------------------------------

    async def last(self, instance: str) -> dict[int, Report]:
        return await self.pool.run(read_reports, self.layout, instance)

    async def series(self, instance: str, query: SeriesQuery) -> list[Series]:
        return await self.pool.run(read_series, self.layout, instance, query)

    async def next(self, instance: str, after: float) -> None:
        """Return once the run has a report newer than `after`."""
        with self._readers.reading(instance) as changed:
            while True:
                changed.clear()
                files = await self.pool.run(report_files, self.layout, instance)
                forget = [self.files.watch(file.path, changed.set) for file in files]
                try:
                    newest = max((report.at for report in (await self.last(instance)).values()), default=0.0)
                    if newest > after:
                        return
                    await changed.wait()
                finally:
                    for each in forget:
                        each()

    def _stall(self, report: LastReport, taken: stacks.Stacks) -> Stalled:
        """Return the stall, dated by the monotonic clock of the last report: the wall clock may have been set since."""
        suspended = round(counted() - time.monotonic())  # whole seconds: the same report gives the same moment
        since = round(self.clock.zero + suspended + report.last.mono, 3)
        return Stalled(since=since, usual_step_seconds=report.last.usual or 0.0, where=taken.where, stack=taken.text)
