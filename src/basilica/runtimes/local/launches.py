"""Launches of ranks: at once, or when their turn in the GPU queue comes.

A passing shortage (of processes, memory or disk space) is no failure of a rank: the start is retried after growing
pauses, and meanwhile the attempt is seen as queued, with the reason.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from basilica.core.actions import Launch
from basilica.core.errors import RuntimeUnavailable
from basilica.core.seen import Sight
from basilica.machine.layout import Key
from basilica.machine.pools import Pool
from basilica.ports import Run
from basilica.runtimes.local.attempt_tracker import Tracking
from basilica.runtimes.local.attempts import Attempt
from basilica.runtimes.local.background import Background
from basilica.runtimes.local.changes import Changes
from basilica.runtimes.local.forkserver import ForkServer
from basilica.runtimes.local.gpu_queue import GpuLine
from basilica.runtimes.local.gpus import runs_on_cpu
from basilica.runtimes.local.start_requests import Starting
from basilica.runtimes.local.table import Table
from basilica.runtimes.local.unavailable import or_unavailable

log = logging.getLogger("basilica.runtime")

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True, kw_only=True)
class Launching:
    """Starts ranks and retries starts. The GPU queue is not served before `line_opens_at`, an event loop time."""

    starting: Starting
    fork_server: ForkServer
    table: Table
    tracking: Tracking
    line: GpuLine
    changes: Changes
    background: Background
    pool: Pool
    line_opens_at: float = 0.0
    _pauses: dict[Key, float] = field(default_factory=dict)  # the last pause of each attempt that is retried

    def __post_init__(self) -> None:
        self.line.moved = self._serve_soon

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        """Start the launches whose attempts do not exist yet, or enqueue them for GPUs."""
        attempts = self.table.of(run.instance)
        wanted = {_key(run, launch): launch for launch in launches}
        fresh = {key: wanted[key] for key in startable(attempts, wanted)}
        if not fresh:
            return
        wish = run.spec.resources.gpus
        if wish.count == 0 or runs_on_cpu(self.line.inventory, wish):
            await self._start(run, dict.fromkeys(fresh.values(), ()))
            return
        for key in fresh:
            attempts[key] = Attempt(key=key, sight=Sight.QUEUED, note="waiting for GPUs")
        self.line.enqueue(run, fresh)
        await self._serve(run.instance)

    def _serve_soon(self) -> None:
        self.background.spawn(self._serve())

    async def _serve(self, instance: str | None = None) -> None:
        """Start the launches whose turn has come; those of `instance` before this returns."""
        loop = asyncio.get_running_loop()
        if not self.changes.is_open:
            return
        if loop.time() < self.line_opens_at:
            loop.call_at(self.line_opens_at, self._serve_soon)
            return
        turns, notes = self.line.serve()
        for key, note in notes.items():
            attempt = self.table.of(key.instance)[key]
            if attempt.note != note:
                attempt.note = note
                self.changes.notify(key.instance)
        for turn in turns:
            if turn.run.instance != instance:
                self.background.spawn(self._start(turn.run, turn.granted))
        for turn in turns:
            if turn.run.instance == instance:
                await self._start(turn.run, turn.granted)

    async def _start(self, run: Run, granted: Mapping[Launch, tuple[str, ...]]) -> None:
        attempts = self.table.of(run.instance)
        keys = [_key(run, launch) for launch in granted]
        for key, uuids in zip(keys, granted.values(), strict=True):
            attempts[key] = Attempt(key=key, sight=Sight.STARTING, gpus=uuids)
        mine = {key: attempts[key] for key in keys}
        started: list[int] = []
        try:
            with or_unavailable("the machine does not let us"):
                request = await self.pool.run(self.starting.request, run, granted)
                reply = await self.fork_server.start_ranks(request)
            started, problem = reply["pids"], reply["error"]
        except RuntimeUnavailable as error:
            problem = str(error)
        for key, pid in zip(keys, started, strict=False):
            self._pauses.pop(key, None)
            self.tracking.watch_new(key, pid)
        late = zip(keys[len(started) :], list(granted.items())[len(started) :], strict=True)
        left = dict(entry for key, entry in late if self._is(key, mine[key], Sight.STARTING))
        if left:
            self.postpone(run, left, problem or "the fork server does not say why")

    def postpone(self, run: Run, granted: Mapping[Launch, tuple[str, ...]], problem: str) -> None:
        """Retry these launches after a pause; they keep their GPUs."""
        keys = [_key(run, launch) for launch in granted]
        pause = max(self._pauses.get(key, FIRST_PAUSE_S / 2) for key in keys) * 2
        pause = min(pause, LONGEST_PAUSE_S)
        note = f"it cannot be started now, and is tried again in {pause:.1f} s: {problem}"
        attempts = self.table.of(run.instance)
        for key, uuids in zip(keys, granted.values(), strict=True):
            self._pauses[key] = pause
            attempts[key] = Attempt(key=key, sight=Sight.QUEUED, note=note, gpus=uuids)
        log.warning("cannot start %d ranks of %s, again in %.1f s: %s", len(keys), run.instance, pause, problem)
        self.changes.notify(run.instance)
        waiting = {key: attempts[key] for key in keys}
        asyncio.get_running_loop().call_later(pause, self._try_again, run, dict(granted), waiting)

    def _try_again(self, run: Run, granted: Mapping[Launch, tuple[str, ...]], waiting: Mapping[Key, Attempt]) -> None:
        """Start the launches that still wait; the others were stopped meanwhile, or their run was removed."""
        keys = {launch: _key(run, launch) for launch in granted}
        left = {
            launch: uuids
            for launch, uuids in granted.items()
            if self._is(keys[launch], waiting[keys[launch]], Sight.QUEUED)
        }
        for key in waiting.keys() - {keys[launch] for launch in left}:
            self._pauses.pop(key, None)
        if left and self.changes.is_open:
            self.background.spawn(self._start(run, left))

    def _is(self, key: Key, attempt: Attempt, sight: Sight) -> bool:
        """Return False if the attempt was stopped meanwhile, or its run was removed."""
        return self.table.find(key) is attempt and attempt.sight is sight


def _key(run: Run, launch: Launch) -> Key:
    return Key(run.instance, launch.rank, launch.attempt)


def startable(attempts: Mapping[Key, Attempt], wanted: Iterable[Key]) -> list[Key]:
    """Return the attempts that do not exist yet, whose rank has no newer attempt and none that has not ended."""
    newest: dict[int, int] = {}
    busy: set[int] = set()
    for key, attempt in attempts.items():
        newest[key.rank] = max(newest.get(key.rank, -1), key.attempt)
        if attempt.sight is not Sight.ENDED:
            busy.add(key.rank)
    return [key for key in wanted if key.rank not in busy and newest.get(key.rank, -1) < key.attempt]
