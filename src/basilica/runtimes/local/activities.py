"""The activities of running ranks, read from their files when a process has rung: journals of agents, steps, answers.

A look reads the files of attempts that have rung since the last look, and of those whose steps it has to know as they
are now; an attempt that has ended is read one last time. A run none of whose processes ever rings costs nothing.
"""

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from basilica.core.seen import SeenRank, SeenWorkerExit, Sight
from basilica.machine.clocks import SteadyClock, counted
from basilica.machine.files import UnusableFile
from basilica.machine.layout import Key, Layout
from basilica.machine.pools import Pool
from basilica.machine.proc import descendants
from basilica.progress.activity import NOTHING, Activity, read_activities
from basilica.runtimes.local.logs import read_tail
from basilica.runtimes.local.records import read_record
from basilica.runtimes.rules import TAIL_LINES, tail_of

RINGS = ("agent", "answer", "progress", "reporting")
TAIL_BYTES_MAX = 1 << 16


@dataclass(slots=True)
class _Run:
    """The activities of one run. `rung`: attempts that are to be read again; `closed`: those that were read last."""

    known: dict[Key, Activity] = field(default_factory=dict)
    rung: set[Key] = field(default_factory=set)
    closed: set[Key] = field(default_factory=set)


@dataclass(slots=True)
class Activities:
    layout: Layout
    pool: Pool
    clock: SteadyClock
    _runs: dict[str, _Run] = field(default_factory=dict)

    def ring(self, key: Key) -> None:
        """Take note that a process of the attempt has written something."""
        self._runs.setdefault(key.instance, _Run()).rung.add(key)

    def adopt(self, instance: str) -> None:
        """Take note of a run from before this server: any of its processes may have rung meanwhile."""
        self._runs.setdefault(instance, _Run())

    def forget(self, instance: str) -> None:
        self._runs.pop(instance, None)

    async def complete(self, instance: str, ranks: list[SeenRank], fresh: frozenset[int]) -> tuple[SeenRank, ...]:
        """Return the observed attempts of a run with their activities."""
        run = self._runs.get(instance)
        if run is None:
            return tuple(ranks)
        rung, run.rung = run.rung, set()
        due: dict[Key, Activity] = {}
        for seen in ranks:
            key = Key(instance, seen.rank, seen.attempt)
            ended = seen.sight is Sight.ENDED
            again = key in rung or seen.rank in fresh or key not in run.known
            if (ended and key not in run.closed) or (seen.sight is Sight.RUNNING and again):
                due[key] = run.known.get(key, NOTHING)
            if ended:
                run.closed.add(key)
        if due:
            try:
                run.known |= await self.pool.run(self._read, instance, due)
            except BaseException:
                run.rung |= rung
                run.closed -= due.keys()
                raise
        shown = {Key(instance, seen.rank, seen.attempt) for seen in ranks}
        run.known = {key: known for key, known in run.known.items() if key in shown}
        run.closed &= shown
        return tuple(self._completed(seen, run.known.get(Key(instance, seen.rank, seen.attempt))) for seen in ranks)

    def _completed(self, seen: SeenRank, activity: Activity | None) -> SeenRank:
        if activity is None or activity is NOTHING:
            return seen
        answer = activity.answer if seen.sight is Sight.RUNNING else None
        return replace(seen, agent=activity.agent, progress=activity.progress, answer=answer, saving=activity.saving)

    def _read(self, instance: str, due: Mapping[Key, Activity]) -> dict[Key, Activity]:
        found = read_activities(self.layout, instance, due, self._moment())
        return {key: self._with_output(key, activity, due[key]) for key, activity in found.items()}

    def _moment(self) -> "_Moment":
        """Return the converter of monotonic times, to which the same time gives the same moment in every look."""
        return _Moment(self.clock.zero + round(counted() - time.monotonic()))

    def _with_output(self, key: Key, activity: Activity, before: Activity) -> Activity:
        """Add the last lines of the rank to workers' exits that are new; keep those of the others."""
        if activity.agent is None or not activity.agent.exits:
            return activity
        tails = {} if before.agent is None else {exit.number: exit.log_tail for exit in before.agent.exits}
        exits = tuple(
            replace(exit, log_tail=tails[exit.number] if exit.number in tails else self._tail(key, exit))
            for exit in activity.agent.exits
        )
        return replace(activity, agent=replace(activity.agent, exits=exits))

    def _tail(self, key: Key, exit: SeenWorkerExit) -> tuple[str, ...]:
        if exit.exit_code == 0 or exit.echo:
            return ()
        try:
            return tail_of(read_tail(self.layout.log(key), TAIL_LINES, ended=True, at_most=TAIL_BYTES_MAX).lines)
        except (UnusableFile, OSError):
            return ()

    # ---- signals -----------------------------------------------------------------------------------------------------

    async def signal(self, instance: str, keys: Iterable[Key], name: str) -> None:
        """Send the signal to the programs of these attempts: to the workers of an agent, else to the rank itself."""
        run = self._runs.get(instance, _Run())
        agents = {key: activity.agent for key, activity in run.known.items() if activity.agent is not None}
        workers = {key: agents[key].pids if key in agents else () for key in keys}
        await self.pool.run(_send, self.layout, workers, signal.Signals[name])


@dataclass(frozen=True, slots=True)
class _Moment:
    zero: float

    def __call__(self, mono: float) -> float:
        return round(self.zero + mono, 3)


def _send(layout: Layout, workers: Mapping[Key, tuple[int, ...]], number: signal.Signals) -> None:
    """Send the signal. Journals are written by ranks: a pid counts only if the process descends from the rank's own."""
    for key, pids in workers.items():
        with suppress(UnusableFile, OSError):
            record = read_record(layout.record(key))
            if record is None or record.running is None or record.exit is not None:
                continue
            own = record.running.pid
            mine = set(descendants(own)).intersection(pids) if pids else {own}
            for pid in mine:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
