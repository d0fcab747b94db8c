"""Answers that go on: a run's changes as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Literal

from starlette.requests import Request

from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentNotFound
from basilica.ports import Store
from basilica.server.reports import Fresh

KEEP_ALIVE_SECONDS = 15.0


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
    that was away misses no news, only steps in between. With `fresh`, also its state with what ranks reported since;
    `render` tells up to when."""
    deployment, version = first, since
    while not closing.is_set():
        if deployment.version > version:
            version = deployment.version
            body, reported = await render(deployment)
            if fresh is not None:
                fresh.shown(reported)
            yield sse("status", body, version)
        if deployment.status.settled:  # also for a reader that had seen this much when its connection broke
            yield sse("end", b"{}", version)
            return
        try:
            also = None if fresh is None else fresh.wait(deployment)
            changed = await next_change(store, deployment.instance, version, closing, also=also)
        except DeploymentNotFound:
            yield sse("deleted", b"{}", version)
            return
        body, reported = (b"", 0.0) if fresh is None or changed is not None else await render(deployment)
        if changed is not None:
            deployment = changed
        elif fresh is not None and reported > fresh.seen:
            fresh.shown(reported)
            yield sse("status", body, version)
        else:
            yield b": still here\n\n"


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
