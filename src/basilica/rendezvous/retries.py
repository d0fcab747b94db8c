"""Asking a keyspace that may not answer, again and again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from basilica.rendezvous.client import KeysClient

AGAIN_FIRST_S, AGAIN_MAX_S = 0.05, 1.0
GROWTH = 1.25  # who waits for something that takes its time notices it a fifth of that time late


def next_pause(pause: float) -> float:
    return min(GROWTH * pause, AGAIN_MAX_S)


class Try:
    """One try of several. `at_once`: it went well, and the next is not to wait."""

    at_once = False


async def tries() -> AsyncIterator[Try]:
    """For ever, with growing pauses; after one that says so, at once."""
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
