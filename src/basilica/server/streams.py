"""Answers that go on: a run's changes as server-sent events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentNotFound
from basilica.core.phase import RankPhase
from basilica.ports import Store
from basilica.server.reports import Fresh

KEEP_ALIVE_SECONDS = 15.0
ASK_AGAIN_SECONDS = 5.0  # whether the reader may still read
COUNTDOWN_SECONDS = 2.0  # while the run says in how many seconds a rank starts again


class LastingResponse(StreamingResponse):
    """An answer that goes on. It ends soon after the session or the key that it was asked for with."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body_iterator = _while_allowed(self.body_iterator, scope["state"]["allowed"])
        await super().__call__(scope, receive, send)


async def _while_allowed(
    chunks: AsyncIterable[Any], allowed: Callable[[], Awaitable[bool]]
) -> AsyncGenerator[Any, None]:
    asked = time.monotonic()
    async with contextlib.aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            if time.monotonic() - asked >= ASK_AGAIN_SECONDS:
                asked = time.monotonic()
                if not await allowed():
                    return
            yield chunk


async def watch(
    store: Store,
    first: Deployment,
    since: int,
    render: Callable[[Deployment], Awaitable[tuple[bytes, float]]],
    closing: asyncio.Event,
    *,
    fresh: Fresh | None = None,
) -> AsyncIterator[bytes]:
    """Every change of a run newer than `since`, until it is settled or deleted. States, not differences: a reader
    that was away misses no news, only steps in between. With `fresh`, also its state with what ranks reported since
    (`render` tells up to when), and when time alone has changed what it says: how long a rank has been silent."""
    deployment, version, told = first, since, b""
    while not closing.is_set():
        if deployment.version > version:
            version = deployment.version
            told, reported = await render(deployment)
            if fresh is not None:
                fresh.shown(reported)
            yield sse("status", told, version)
        if deployment.status.settled:  # also for a reader that had seen this much when its connection broke
            yield sse("end", b"{}", version)
            return
        try:
            also = None if fresh is None else fresh.wait(deployment)
            seconds = COUNTDOWN_SECONDS if fresh is not None and _counts_down(deployment) else KEEP_ALIVE_SECONDS
            changed = await next_change(store, deployment.instance, version, closing, seconds=seconds, also=also)
        except DeploymentNotFound:
            yield sse("deleted", b"{}", version)
            return
        body, reported = (b"", 0.0) if fresh is None or changed is not None else await render(deployment)
        if changed is not None:
            deployment = changed
        elif fresh is not None and body != told:
            told = body
            fresh.shown(reported)
            yield sse("status", told, version)
        else:
            yield b": still here\n\n"


def _counts_down(deployment: Deployment) -> bool:
    return any(rank.phase is RankPhase.WAITING and rank.restart_at is not None for rank in deployment.status.ranks)


async def next_change(
    store: Store,
    instance: str,
    version: int,
    closing: asyncio.Event,
    *,
    seconds: float | None = None,
    reader: Request | None = None,
    also: Coroutine[Any, Any, None] | None = None,
) -> Deployment | None:
    """The next state; None when nothing happened for a while, the server is closing, the `reader` has gone, or `also`
    is done."""
    seconds = KEEP_ALIVE_SECONDS if seconds is None else seconds
    change = asyncio.ensure_future(store.wait_change(instance, version, seconds))
    ends = [asyncio.ensure_future(closing.wait())]
    if reader is not None:
        ends.append(asyncio.ensure_future(_gone(reader)))
    if also is not None:
        ends.append(asyncio.ensure_future(_true(also)))
    try:
        await asyncio.wait({change, *ends}, return_when=asyncio.FIRST_COMPLETED)
        return change.result() if change.done() else None
    finally:
        await cancel(change, *ends)


async def wait_until_removed(store: Store, deployment: Deployment, seconds: float, closing: asyncio.Event) -> bool:
    """True if the run is gone within that time; False as soon as the server is closing."""
    version = deployment.version
    try:
        async with asyncio.timeout(seconds):
            while not closing.is_set():
                changed = await next_change(store, deployment.instance, version, closing)
                version = version if changed is None else changed.version
    except DeploymentNotFound:
        return True
    except TimeoutError:
        pass
    return False


async def _true(also: Coroutine[Any, Any, None]) -> Literal[True]:
    await also
    return True


async def _gone(reader: Request) -> Literal[True]:
    while (await reader.receive())["type"] != "http.disconnect":
        pass
    return True


def sse(event: str, data: bytes, version: int) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (event.encode(), version, data)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
