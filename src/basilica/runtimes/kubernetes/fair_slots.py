"""A bound on the requests that are under way at once, shared fairly between runs."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """A semaphore whose waiters are served by run in turn: a large gang does not delay a small one."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the first run in it is the next to be served

    @asynccontextmanager
    async def hold(self, run: str) -> AsyncIterator[None]:
        await self._acquire(run)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, run: str) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the slot was granted just before the cancellation: pass it on
            raise

    def _release(self) -> None:
        while self._waiting:
            run = next(iter(self._waiting))
            turns = self._waiting.pop(run)
            turn = turns.popleft()
            if turns:
                self._waiting[run] = turns  # behind all the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
