"""The time of the cluster: as fast as the test wants it, and moved by hand if it wants that."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime


class Timer:
    """Something that will be done later, unless it is cancelled."""

    __slots__ = ("action", "cancelled")

    def __init__(self, action: Callable[[], None]) -> None:
        self.action, self.cancelled = action, False

    def cancel(self) -> None:
        self.cancelled = True


class ClusterClock:
    """Wall time that runs `speed` times as fast as ours; with speed 0 it moves only when it is `advance`d.

    Every delay of the cluster is a timer here: back-offs, deadlines and grace periods are seconds of this clock.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._base, self._mark = time.time(), time.monotonic()
        self._queue: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._alarm: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return self._base + (time.monotonic() - self._mark) * self.speed

    def stamp(self, moment: float | None = None) -> str:
        """A moment, or now, as Kubernetes writes it: whole seconds."""
        return as_stamp(self.now() if moment is None else moment)

    def micro_stamp(self) -> str:
        return datetime.fromtimestamp(self.now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def call_at(self, moment: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        heapq.heappush(self._queue, (moment, next(self._order), timer))
        if self._queue[0][2] is timer:
            self._arm()
        return timer

    def call_later(self, delay: float, action: Callable[[], None]) -> Timer:
        return self.call_at(self.now() + delay, action)

    def advance(self, seconds: float) -> None:
        """Let that much time pass at once; what was due on the way happens in its order, each at its own moment."""
        target = self.now() + seconds
        while self._queue and self._queue[0][0] <= target:
            self._base += max(0.0, self._queue[0][0] - self.now())
            self._run_next()
        self._base += max(0.0, target - self.now())
        self._arm()

    def close(self) -> None:
        self._queue.clear()
        if self._alarm is not None:
            self._alarm.cancel()

    def _run_next(self) -> None:
        timer = heapq.heappop(self._queue)[2]
        if not timer.cancelled:
            timer.action()

    def _run_due(self) -> None:
        try:
            while self._queue and self._queue[0][0] <= self.now():
                self._run_next()
        finally:
            self._arm()  # the loop logs what went wrong, and time goes on

    def _arm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._queue and self.speed > 0:
            delay = (self._queue[0][0] - self.now()) / self.speed
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, delay), self._run_due)


def as_stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
