"""What ranks wrote: read, merged and followed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from starlette.responses import Response

from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentNotFound, ValidationError
from basilica.ports import LogChunk, Run, Runtime, Store
from basilica.server.streams import LastingResponse, cancel, next_change

NDJSON = "application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """`ranks` None: all. `tail`: only the last lines of each. `cursors`: go on after these, by rank."""

    ranks: frozenset[int] | None
    tail: int | None
    follow: bool
    cursors: dict[int, str]
    as_json: bool


async def answer_logs(
    query: LogQuery, deployment: Deployment, store: Store, runtime: Runtime, closing: asyncio.Event
) -> Response:
    run = run_of(deployment)
    known = {r.rank for r in deployment.status.ranks}
    cursors = dict(query.cursors)
    for rank, cursor in cursors.items():
        await _check_cursor(runtime, run, rank, cursor)  # while a refusal can still be answered
    chunks: list[LogChunk] = []
    if query.tail is not None or not query.follow:
        for rank in sorted(known if query.ranks is None else known & query.ranks):
            if rank in query.cursors:
                chunks.extend(await _rest(runtime, run, rank, query.cursors[rank]))
            else:
                chunks.append(await runtime.tail(run, rank, query.tail))
        cursors.update((chunk.rank, chunk.cursor) for chunk in chunks)
    merged = deployment.spec.world.max > 1 if query.ranks is None else len(query.ranks) > 1
    style = LogFormat(as_json=query.as_json, prefix=merged)
    media = NDJSON if query.as_json else "text/plain; charset=utf-8"
    if not query.follow:
        return Response(b"".join(style.encode(c) for c in chunks), media_type=media)
    follower = LogFollower(store, runtime, closing, query.ranks, cursors)
    return LastingResponse(_stream(chunks, follower, deployment, style), media_type=media)


def parse_cursors(text: str | None) -> dict[int, str]:
    """`rank@cursor`, comma-separated: the cursors of an earlier answer."""
    cursors: dict[int, str] = {}
    for part in text.split(",") if text else ():
        rank, _, cursor = part.partition("@")
        if not (rank.isascii() and rank.isdigit() and len(rank) < 10 and cursor):
            raise ValidationError("since", part, "must be cursors of an earlier answer, such as '0@0:1234'")
        cursors[int(rank)] = cursor
    return cursors


async def _check_cursor(runtime: Runtime, run: Run, rank: int, cursor: str) -> None:
    """What a cursor looks like is the runtime's affair: it refuses one that it did not give out."""
    async with contextlib.aclosing(runtime.follow(run, rank, cursor)) as following:
        await anext(following, None)


async def _rest(runtime: Runtime, run: Run, rank: int, cursor: str) -> list[LogChunk]:
    """What a rank wrote after a cursor, up to now."""
    chunks: list[LogChunk] = []
    async with contextlib.aclosing(runtime.follow(run, rank, cursor)) as following:
        async for chunk in following:
            if not chunk.lines:
                break
            chunks.append(chunk)
    return chunks


async def _stream(
    first: list[LogChunk], follower: "LogFollower", deployment: Deployment, style: "LogFormat"
) -> AsyncIterator[bytes]:
    for chunk in first:
        yield style.encode(chunk)
    async with contextlib.aclosing(follower.follow(deployment)) as chunks:
        async for chunk in chunks:
            yield style.encode(chunk)


@dataclass(slots=True)
class LogFormat:
    """Plain text, with `rank| ` before each line where several ranks are merged; or one JSON object per line.

    A chunk's last line carries the cursor: a reader that got only a part of a chunk has to ask for all of it again.
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
    """Merges the live logs of a run's ranks until the run is settled and every line has been read."""

    store: Store
    runtime: Runtime
    closing: asyncio.Event
    only: frozenset[int] | None
    cursors: dict[int, str]
    _chunks: asyncio.Queue[LogChunk] = field(default_factory=lambda: asyncio.Queue(maxsize=64))
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
                    keeper.result()  # raises what ended it early
                    return
        finally:
            await cancel(keeper, chunk, *self._readers.values())

    async def _keep_readers(self, deployment: Deployment) -> None:
        """A reader for each rank there is or comes to be; at the end, what they had not read yet."""
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

    def _ranks(self, deployment: Deployment) -> list[int]:
        ranks = [r.rank for r in deployment.status.ranks]
        return ranks if self.only is None else [r for r in ranks if r in self.only]

    async def _read(self, run: Run, rank: int, *, to_the_end: bool) -> None:
        """Pass on a rank's lines from its cursor; the cursor moves only with what was passed on."""
        async with contextlib.aclosing(self.runtime.follow(run, rank, self.cursors.get(rank))) as chunks:
            async for chunk in chunks:
                if chunk.lines:
                    await self._chunks.put(chunk)
                    self.cursors[rank] = chunk.cursor
                elif to_the_end:
                    return
