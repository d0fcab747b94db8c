"""Wake-ups, gathered: a look at a large gang takes time, and each of its pods changes several times."""

import asyncio
from collections.abc import Callable

PAUSE_FOR_EACH_S = 0.0002  # a rank makes a look about a tenth of this longer
LONGEST_PAUSE_S = 0.25


class Wakes:
    """Calls `wake` at once, and then again only after a pause that fits the size of the run."""

    def __init__(self, wake: Callable[[str], None], size: Callable[[str], int]) -> None:
        self._wake, self._size = wake, size
        self._next_at: dict[str, float] = {}
        self._later: dict[str, asyncio.TimerHandle] = {}

    def changed(self, instance: str) -> None:
        if instance in self._later:
            return
        loop = asyncio.get_running_loop()
        due = self._next_at.get(instance, 0.0)
        if due <= loop.time():
            self._ring(instance)
        else:
            self._later[instance] = loop.call_at(due, self._ring, instance)

    def _ring(self, instance: str) -> None:
        self._later.pop(instance, None)
        pause = min(LONGEST_PAUSE_S, PAUSE_FOR_EACH_S * self._size(instance))
        self._next_at[instance] = asyncio.get_running_loop().time() + pause
        self._wake(instance)

    def forget(self, instance: str) -> None:
        self._next_at.pop(instance, None)

    def close(self) -> None:
        for timer in self._later.values():
            timer.cancel()
        self._later.clear()
