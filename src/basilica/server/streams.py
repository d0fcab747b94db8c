"""Answers that go on: a run's changes as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentNotFound
from basilica.ports import Store

KEEP_ALIVE_SECONDS = 15.0


async def watch(
    store: Store, first: Deployment, since: int, render: Callable[[Deployment], bytes], closing: asyncio.Event
) -> AsyncIterator[bytes]:
    """Every change of a run newer than `since`, until it is settled or deleted. States, not differences: a reader
    that was away misses no news, only steps in between."""
    deployment, version = first, since
    while not closing.is_set():
        if deployment.version > version:
            version = deployment.version
            yield sse("status", render(deployment), version)
            if deployment.status.settled:
                yield sse("end", b"{}", version)
                return
        try:
            changed = await next_change(store, deployment.instance, version, closing)
        except DeploymentNotFound:
            yield sse("deleted", b"{}", version)
            return
        if changed is None:
            yield b": still here\n\n"
        else:
            deployment = changed


async def next_change(store: Store, instance: str, version: int, closing: asyncio.Event) -> Deployment | None:
    """The next state, or None when nothing happened for a while or the server is closing."""
    change = asyncio.ensure_future(store.wait_change(instance, version, KEEP_ALIVE_SECONDS))
    closed = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait({change, closed}, return_when=asyncio.FIRST_COMPLETED)
        return change.result() if change.done() else None
    finally:
        await cancel(change, closed)


def sse(event: str, data: bytes, version: int) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (event.encode(), version, data)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
