"""A runtime without processes: honest to the port, instant, and moved by the test that holds it."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import time
from typing import Any

from basilica.core.actions import Launch, Probe, Stop
from basilica.core.checkpoints import Checkpoint
from basilica.core.errors import BadResult, Conflict, RuntimeUnavailable
from basilica.core.mesh import Announcement
from basilica.core.reports import Report, Series, SeriesPoint, SeriesQuery
from basilica.core.seen import Ended, SeenRank, Sight, Sighting, Stalled
from basilica.ports import Exited, InUse, LogChunk, Output, Run, StoredArchive


class FakeRuntime:
    """Ranks are up as soon as they are launched. With `finish`, they exit 0 at once."""

    name = "fake"
    runs_images = True

    def __init__(self, *, finish: bool = False, now: Callable[[], float] = time) -> None:
        self._finish, self._now = finish, now
        self._runs: dict[str, dict[tuple[int, int], SeenRank]] = {}
        self._wake: Callable[[str], None] = lambda _: None
        self.launches: list[tuple[str, int, int]] = []
        self.broken = False
        self.result_files: dict[str, dict[int, bytes | BadResult]] = {}
        self.archives: dict[tuple[str, str], float] = {}
        self.in_memory: set[str] = set()
        self.kept_checkpoints: dict[str, tuple[Checkpoint, ...] | None] = {}
        self._reported: dict[str, dict[int, list[Report]]] = {}
        self._news = asyncio.Event()

    async def start(self, wake: Callable[[str], None]) -> None:
        self._wake = wake

    async def close(self) -> None:
        pass

    async def observe(self, run: Run) -> Sighting:
        if self.broken:
            raise RuntimeUnavailable("the fake runtime was told to fail")
        ranks = tuple(self._runs.get(run.instance, {}).values())
        return Sighting(ranks=ranks, in_memory=run.instance in self.in_memory)

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        ranks = self._runs.setdefault(run.instance, {})
        for action in launches:
            key = (action.rank, action.attempt)
            older = any(r.rank == action.rank and r.sight is not Sight.ENDED for r in ranks.values())
            if key in ranks or older:
                continue
            self.launches.append((run.instance, *key))
            ranks[key] = SeenRank(
                rank=action.rank, attempt=action.attempt, sight=Sight.RUNNING, node="fake", started_at=self._now()
            )
            if self._finish:
                self._end(ranks, key, Ended(exit_code=0, reason="Completed", finished_at=self._now()))
        self._wake(run.instance)

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None:
        ranks = self._runs.setdefault(run.instance, {})
        for action in stops:
            key = (action.rank, action.attempt)
            if key not in ranks or ranks[key].sight is not Sight.ENDED:
                code = 143 if key in ranks else None
                ended = Ended(exit_code=code, reason="Cancelled", finished_at=self._now(), stopped=True)
                self._end(ranks, key, ended)
        self._wake(run.instance)

    async def announce(self, run: Run, announcement: Announcement) -> None:
        pass

    async def end_rendezvous(self, run: Run) -> None:
        pass

    async def probe(self, run: Run, probe: Probe) -> None:
        pass

    async def end_probe(self, run: Run) -> None:
        pass

    async def persist_snapshots(self, run: Run) -> None:
        self.in_memory.discard(run.instance)

    async def checkpoints(self, run: Run) -> tuple[Checkpoint, ...] | None:
        return self.kept_checkpoints.get(run.instance, ())

    async def remove(self, run: Run) -> None:
        self._runs.pop(run.instance, None)

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        return LogChunk(rank, (), "0:0")

    async def tail_cursor(self, run: Run, rank: int, lines: int) -> str:
        return "0:0"

    async def read(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        async with aclosing(self.follow(run, rank, cursor)) as chunks:
            async for chunk in chunks:
                if not chunk.lines:
                    return
                yield chunk

    async def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        yield LogChunk(rank, (), "0:0")

    async def reports(self, run: Run) -> dict[int, Report]:
        return {rank: told[-1] for rank, told in self._reported.get(run.instance, {}).items()}

    async def series(self, run: Run, query: SeriesQuery) -> list[Series]:
        """One point for each report."""
        found: dict[tuple[int, str], list[SeriesPoint]] = {}
        for rank, reports in self._reported.get(run.instance, {}).items():
            if query.ranks is not None and rank not in query.ranks:
                continue
            for told in reports:
                for name, value in told.values.items():
                    if (query.metrics is None or name in query.metrics) and told.at >= query.since:
                        point = SeriesPoint(told.step, told.at, value, value, value)
                        found.setdefault((rank, name), []).append(point)
        return [
            Series(rank=rank, worker=0, metric=name, points=tuple(points[-query.points :]))
            for (rank, name), points in sorted(found.items())
        ]

    async def next_report(self, run: Run, after: float) -> None:
        while max((told.at for told in (await self.reports(run)).values()), default=0.0) <= after:
            await self._news.wait()

    async def results(self, run: Run) -> dict[int, bytes | BadResult]:
        return dict(self.result_files.get(run.instance, {}))

    async def execute(self, run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        """Echoes the command."""
        if not any(key[0] == rank for key in self._runs.get(run.instance, {})):
            raise Conflict(f"rank {rank} of {run.instance} was never launched")
        yield Output("stdout", "")
        yield Output("stdout", " ".join(argv) + "\n")
        yield Exited(0)

    async def store_archive(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        digest, size = hashlib.sha256(), 0
        async for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
        self.archives[user, digest.hexdigest()] = self._now()
        return StoredArchive(digest.hexdigest(), size)

    async def has_archive(self, user: str, digest: str) -> bool:
        return (user, digest) in self.archives

    async def forget_archives(self, in_use: InUse, before: float) -> list[str]:
        used = await in_use()
        old = [key for key, at in self.archives.items() if at < before and key not in used]
        for key in old:
            del self.archives[key]
        return [digest for _, digest in old]

    # ---- for the test that holds it --------------------------------------------------------------------------------

    def exit(self, instance: str, rank: int, code: int, reason: str | None = None) -> None:
        """End the rank's newest attempt with this exit code."""
        ranks = self._runs[instance]
        key = max(k for k in ranks if k[0] == rank)
        why = reason or ("Completed" if code == 0 else "Error")
        self._end(ranks, key, Ended(exit_code=code, reason=why, finished_at=self._now()))
        self._wake(instance)

    def report(self, instance: str, rank: int, step: int, **values: float) -> None:
        """As if the rank had called `basilica.report`."""
        told = Report(at=round(self._now(), 3), step=step, step_seconds=0.5, values=values)
        self._reported.setdefault(instance, {}).setdefault(rank, []).append(told)
        self._news.set()
        self._news = asyncio.Event()

    def stall(self, instance: str, rank: int, stalled: Stalled | None) -> None:
        """The rank has fallen silent, or with None reports again."""
        self.change(instance, rank, stalled=stalled)

    def change(self, instance: str, rank: int, **facts: Any) -> None:
        """Change what a look shows of the rank's newest attempt: its `agent`, `progress`, `answer`, `leaving` …"""
        ranks = self._runs[instance]
        key = max(k for k in ranks if k[0] == rank)
        ranks[key] = replace(ranks[key], **facts)
        self._wake(instance)

    def running(self, instance: str) -> list[int]:
        return sorted(r.rank for r in self._runs.get(instance, {}).values() if r.sight is Sight.RUNNING)

    def _end(self, ranks: dict[tuple[int, int], SeenRank], key: tuple[int, int], ended: Ended) -> None:
        seen = ranks.get(key) or SeenRank(rank=key[0], attempt=key[1], sight=Sight.ENDED)
        ranks[key] = replace(seen, sight=Sight.ENDED, ended=ended)
