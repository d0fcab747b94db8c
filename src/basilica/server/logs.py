"""Logs of ranks as responses: read, merged and followed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from starlette.responses import Response

from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentNotFound, RuntimeUnavailable, ValidationError
from basilica.ports import LogChunk, Run, Runtime, Store
from basilica.server.streams import LastingResponse, begun, cancel, next_change

NDJSON = "application/x-ndjson"
TURNS = 2
GOING_AWAY = "the server is going away in the middle of a log"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """A request for logs. `ranks`: None for all. `tail`: only the last lines of each. `cursors`, by rank: the places to
    continue after."""

    ranks: frozenset[int] | None
    tail: int | None
    follow: bool
    cursors: dict[int, str]
    as_json: bool


async def answer_logs(
    query: LogQuery, deployment: Deployment, store: Store, runtime: Runtime, closing: asyncio.Event
) -> Response:
    """Stream the lines so far and, if followed, those to come. Memory holds no more than the chunk being sent."""
    run = run_of(deployment)
    for rank, cursor in query.cursors.items():
        await _check_cursor(runtime, run, rank, cursor)  # before the first byte: a refusal can still be answered
    merged = deployment.spec.world.max > 1 if query.ranks is None else len(query.ranks) > 1
    style = LogFormat(as_json=query.as_json, prefix=merged)
    media = NDJSON if query.as_json else "text/plain; charset=utf-8"
    body = _encoded(_read(query, deployment, store, runtime, closing), style)
    if not query.follow:
        body = await begun(body)
    return LastingResponse(body, media_type=media)


async def _read(
    query: LogQuery, deployment: Deployment, store: Store, runtime: Runtime, closing: asyncio.Event
) -> AsyncGenerator[LogChunk, None]:
    run = run_of(deployment)
    cursors = dict(query.cursors)
    if query.tail is not None or not query.follow:
        known = {r.rank for r in deployment.status.ranks}
        for rank in sorted(known if query.ranks is None else known & query.ranks):
            cursor = cursors.get(rank)
            if cursor is None and query.tail is not None:
                cursor = cursors[rank] = await runtime.tail_cursor(run, rank, query.tail)
            async with contextlib.aclosing(runtime.read(run, rank, cursor)) as chunks:
                async for chunk in chunks:
                    if closing.is_set():
                        raise RuntimeUnavailable(GOING_AWAY)
                    cursors[rank] = chunk.cursor
                    yield chunk
    if query.follow:
        follower = LogFollower(store, runtime, closing, query.ranks, cursors)
        async with contextlib.aclosing(follower.follow(deployment)) as chunks:
            async for chunk in chunks:
                yield chunk
        if not follower.complete:
            raise RuntimeUnavailable(GOING_AWAY)


async def _encoded(chunks: AsyncGenerator[LogChunk, None], style: "LogFormat") -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield style.encode(chunk)


def parse_cursors(text: str | None) -> dict[int, str]:
    """Parse `rank@cursor`, comma-separated: the cursors of an earlier answer."""
    cursors: dict[int, str] = {}
    for part in text.split(",") if text else ():
        rank, _, cursor = part.partition("@")
        if not (rank.isascii() and rank.isdigit() and len(rank) < 10 and cursor):
            raise ValidationError("since", part, "must be cursors of an earlier answer, such as '0@0:1234'")
        cursors[int(rank)] = cursor
    return cursors


async def _check_cursor(runtime: Runtime, run: Run, rank: int, cursor: str) -> None:
    """Have the runtime validate a cursor: only the runtime knows their form, and refuses one that is not its own."""
    async with contextlib.aclosing(runtime.follow(run, rank, cursor)) as following:
        await anext(following, None)


@dataclass(slots=True)
class LogFormat:
    """Plain text, with `rank| ` before each line where several ranks are merged; or one JSON object per line.

    A chunk's last line carries the cursor: a reader of only a part of a chunk has to request the whole chunk again.
    """

    as_json: bool
    prefix: bool

    def encode(self, chunk: LogChunk) -> bytes:
        if self.as_json:
            entries: list[dict[str, object]] = [{"rank": chunk.rank, "line": line} for line in chunk.lines]
            if entries:
                entries[-1]["cursor"] = f"{chunk.rank}@{chunk.cursor}"
            lines = [json.dumps(entry) for entry in entries]
        elif self.prefix:
            lines = [f"{chunk.rank}| {line}" for line in chunk.lines]
        else:
            lines = list(chunk.lines)
        return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


@dataclass(slots=True)
class LogFollower:
    """Merges the live logs of a run's ranks until the run is settled and every line has been read.

    Ranks with unread lines take turns, so that a reader that does not read costs a few chunks of memory, for any number
    of ranks. A rank that was read to its end waits for more without a turn, and keeps the chunk that woke it.
    `complete` is true at the end unless the server closed before.
    """

    store: Store
    runtime: Runtime
    closing: asyncio.Event
    only: frozenset[int] | None
    cursors: dict[int, str]
    complete: bool = False
    _chunks: asyncio.Queue[LogChunk] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TURNS))
    _readers: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def follow(self, first: Deployment) -> AsyncGenerator[LogChunk, None]:
        keeper = asyncio.create_task(self._keep_readers(first))
        chunk = asyncio.create_task(self._chunks.get())
        try:
            while True:
                await asyncio.wait({keeper, chunk}, return_when=asyncio.FIRST_COMPLETED)
                if chunk.done():
                    yield chunk.result()
                    chunk = asyncio.create_task(self._chunks.get())
                elif self._chunks.empty():
                    keeper.result()  # raises the error that ended it early
                    return
        finally:
            await cancel(keeper, chunk, *self._readers.values())

    async def _keep_readers(self, deployment: Deployment) -> None:
        """Keep one reader for each rank, also for ranks that come later; at the end, read the lines that are left."""
        instance, version = deployment.instance, -1
        with contextlib.suppress(DeploymentNotFound):
            while not self.closing.is_set():
                if deployment.version > version:
                    version = deployment.version
                    run = run_of(deployment)
                    for rank in self._ranks(deployment):
                        if rank not in self._readers:
                            self._readers[rank] = asyncio.create_task(self._read(run, rank, to_the_end=False))
                    if deployment.status.settled:
                        await cancel(*self._readers.values())
                        for rank in sorted(self._readers):
                            await self._read(run, rank, to_the_end=True)
                        break
                deployment = await next_change(self.store, instance, version, self.closing) or deployment
        self.complete = not self.closing.is_set()

    def _ranks(self, deployment: Deployment) -> list[int]:
        ranks = [r.rank for r in deployment.status.ranks]
        return ranks if self.only is None else [r for r in ranks if r in self.only]

    async def _read(self, run: Run, rank: int, *, to_the_end: bool) -> None:
        """Relay a rank's lines from its cursor; the cursor moves only past lines that were relayed."""
        async with contextlib.aclosing(self.runtime.follow(run, rank, self.cursors.get(rank))) as chunks:
            woken_by: LogChunk | None = None
            while not self.closing.is_set():
                async with self._turns:
                    chunk = await anext(chunks) if woken_by is None else woken_by
                    woken_by = None
                    if chunk.lines:
                        await self._chunks.put(chunk)
                        self.cursors[rank] = chunk.cursor
                        continue
                if to_the_end:
                    return
                woken_by = await anext(chunks)  # without a turn: it may be long in coming
