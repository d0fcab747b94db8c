"""Retries of requests to a keyspace that may not answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from basilica.rendezvous.client import KeysClient

AGAIN_FIRST_S, AGAIN_MAX_S = 0.05, 1.0
GROWTH = 1.25  # a slow event is noticed late by a fifth of its duration at most


def next_pause(pause: float) -> float:
    return min(GROWTH * pause, AGAIN_MAX_S)


class Try:
    """One try of several. `at_once`: it succeeded, and the next is not to wait."""

    at_once = False


async def tries() -> AsyncIterator[Try]:
    """Yield tries for ever, with growing pauses; after one with `at_once`, without a pause."""
    pause = AGAIN_FIRST_S
    while True:
        again = Try()
        yield again
        if again.at_once:
            pause = AGAIN_FIRST_S
        else:
            await asyncio.sleep(pause)
            pause = next_pause(pause)


@contextlib.asynccontextmanager
async def opened(endpoint: str) -> AsyncIterator[KeysClient]:
    keys = KeysClient(endpoint)
    try:
        yield keys
    finally:
        await keys.close()
