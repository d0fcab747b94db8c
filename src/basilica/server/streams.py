"""Lasting responses: streams that end with their reader's access, and a run's changes as server-sent events."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from basilica.core.deployment import Deployment
from basilica.core.errors import BasilicaError, DeploymentNotFound, StoreUnavailable
from basilica.core.phase import RankPhase
from basilica.ports import Store
from basilica.server.reports import Fresh

log = logging.getLogger("basilica.server")

KEEP_ALIVE_SECONDS = 15.0
ASK_AGAIN_SECONDS = 5.0  # between two checks of the reader's access
COUNTDOWN_SECONDS = 2.0  # between two states of a run that counts down to the restart of a rank


class LastingResponse(StreamingResponse):
    """A streamed response that ends when its reader disconnects, and soon after the session or the key of its request
    ends; then `farewell` is its last chunk."""

    def __init__(self, content: AsyncGenerator[bytes, None], *, media_type: str, farewell: bytes = b"") -> None:
        super().__init__(content, media_type=media_type)
        self._chunks, self._farewell = content, farewell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        left = asyncio.ensure_future(_gone(receive))
        refused = asyncio.ensure_future(_until_refused(scope["state"]["allowed"]))
        try:
            await asyncio.wait({sending, left, refused}, return_when=asyncio.FIRST_COMPLETED)
            forbidden = not sending.done() and refused.done()
        finally:
            await cancel(sending, left, refused)
        if not sending.cancelled():
            sending.result()
        elif forbidden:
            await send({"type": "http.response.body", "body": self._farewell, "more_body": False})

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            try:
                await super().stream_response(send)
            except BasilicaError as error:  # the stream is not completed, so that no reader takes a part for the whole
                log.warning("an answer broke off: %s", error)


async def _until_refused(allowed: Callable[[], Awaitable[bool]]) -> Literal[True]:
    while True:
        await asyncio.sleep(ASK_AGAIN_SECONDS)
        with contextlib.suppress(StoreUnavailable):
            if not await allowed():
                return True


async def begun(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Await the first chunk and return all chunks: a refusal that the first one raises can still be answered."""
    first = await anext(chunks, b"")

    async def whole() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return whole()


async def watch(
    store: Store,
    first: Deployment,
    since: int,
    render: Callable[[Deployment], Awaitable[tuple[bytes, float]]],
    closing: asyncio.Event,
    *,
    fresh: Fresh | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield every change of a run newer than `since`, until it is settled or deleted. The events are states, not
    differences: a reader that reconnects misses only intermediate states. With `fresh`, also yield the state when ranks
    have reported (`render` returns up to when), and when time alone changes it: how long a rank has been silent."""
    deployment, version, told = first, since, b""
    while not closing.is_set():
        if deployment.version > version:
            version = deployment.version
            told, reported = await render(deployment)
            if fresh is not None:
                fresh.shown(reported)
            yield sse("status", told, version)
        if deployment.status.settled:  # also for a reader that had this state when its connection broke
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
    """Return the next state of a run; None after `seconds` without a change, or when the server is closing, the
    `reader` has disconnected, or `also` is done."""
    seconds = KEEP_ALIVE_SECONDS if seconds is None else seconds
    change = asyncio.ensure_future(store.wait_change(instance, version, seconds))
    ends = [asyncio.ensure_future(closing.wait())]
    if reader is not None:
        ends.append(asyncio.ensure_future(_gone(reader.receive)))
    if also is not None:
        ends.append(asyncio.ensure_future(_true(also)))
    try:
        await asyncio.wait({change, *ends}, return_when=asyncio.FIRST_COMPLETED)
        return change.result() if change.done() else None
    finally:
        await cancel(change, *ends)


async def wait_until_removed(store: Store, deployment: Deployment, seconds: float, closing: asyncio.Event) -> bool:
    """Return True once the run is removed; False after that time, or as soon as the server is closing."""
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


async def _gone(receive: Receive) -> Literal[True]:
    while (await receive())["type"] != "http.disconnect":
        pass
    return True


def sse(event: str, data: bytes, version: int) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (event.encode(), version, data)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
