"""Having ranks started: at once, or when it is their turn in the line in front of the GPUs."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from basilica.core.actions import Launch
from basilica.core.errors import RuntimeUnavailable
from basilica.core.seen import Sight
from basilica.ports import Run
from basilica.runtimes.local.attempts import Attempt
from basilica.runtimes.local.background import Background
from basilica.runtimes.local.changes import Changes
from basilica.runtimes.local.forkserver import ForkServer
from basilica.runtimes.local.gpus import runs_on_cpu
from basilica.runtimes.local.layout import Key
from basilica.runtimes.local.line import GpuLine, Turn
from basilica.runtimes.local.starting import Starting
from basilica.runtimes.local.table import Table
from basilica.runtimes.local.tracking import Tracking
from basilica.runtimes.local.unavailable import or_unavailable


@dataclass(slots=True, kw_only=True)
class Launching:
    """Nobody is served before `line_opens_at`, a time of the event loop."""

    starting: Starting
    fork_server: ForkServer
    table: Table
    tracking: Tracking
    line: GpuLine
    changes: Changes
    background: Background
    line_opens_at: float = 0.0

    def __post_init__(self) -> None:
        self.line.moved = self._serve_soon

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        """Start those that are not there yet, or have them wait. `RuntimeUnavailable` if they cannot be started."""
        attempts = self.table.of(run.instance)
        wanted = {_key(run, launch): launch for launch in launches}
        fresh = {key: wanted[key] for key in _startable(attempts, wanted)}
        if not fresh:
            return
        wish = run.spec.resources.gpus
        if wish.count == 0 or runs_on_cpu(self.line.inventory, wish):
            await self._start(run, dict.fromkeys(fresh.values(), ()))
            return
        for key in fresh:
            attempts[key] = Attempt(key=key, sight=Sight.QUEUED, note="waiting for GPUs")
        self.line.join(run, fresh)
        await self._serve(run.instance)

    def _serve_soon(self) -> None:
        self.background.spawn(self._serve())

    async def _serve(self, instance: str | None = None) -> None:
        """Start those whose turn it is. If ranks of `instance` cannot be started, that is raised."""
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
                self.changes.tell(key.instance)
        for turn in turns:
            if turn.run.instance != instance:
                self.background.spawn(self._start_or_forget(turn))
        for turn in turns:
            if turn.run.instance == instance:
                await self._start(turn.run, turn.granted)

    async def _start_or_forget(self, turn: Turn) -> None:
        try:
            await self._start(turn.run, turn.granted)
        except RuntimeUnavailable:
            self.changes.tell(turn.run.instance)  # the controller finds them missing and asks again

    async def _start(self, run: Run, granted: Mapping[Launch, tuple[str, ...]]) -> None:
        attempts = self.table.of(run.instance)
        keys = [_key(run, launch) for launch in granted]
        for key, uuids in zip(keys, granted.values(), strict=True):
            attempts[key] = Attempt(key=key, sight=Sight.STARTING, gpus=uuids)
        try:
            with or_unavailable(f"cannot start ranks of {run.instance}"):
                reply = await self.fork_server.start_ranks(self.starting.request(run, granted))
        except RuntimeUnavailable:
            for key in keys:
                self.tracking.forget(key)
            raise
        for key, pid in zip(keys, reply["pids"], strict=False):
            self.tracking.watch_new(key, pid)
        for key in keys[len(reply["pids"]) :]:
            self.tracking.forget(key)
        if reply["error"] is not None:
            raise RuntimeUnavailable(f"cannot start ranks of {run.instance}: {reply['error']}")


def _key(run: Run, launch: Launch) -> Key:
    return Key(run.instance, launch.rank, launch.attempt)


def _startable(attempts: Mapping[Key, Attempt], wanted: Iterable[Key]) -> list[Key]:
    """Those that are not there yet, with no newer attempt of their rank there, and none that has not ended."""
    newest: dict[int, int] = {}
    busy: set[int] = set()
    for key, attempt in attempts.items():
        newest[key.rank] = max(newest.get(key.rank, -1), key.attempt)
        if attempt.sight is not Sight.ENDED:
            busy.add(key.rank)
    return [key for key in wanted if key.rank not in busy and newest.get(key.rank, -1) < key.attempt]
