"""Throttled wake-ups: each pod of a gang changes several times while it starts, and each turn may write the status.

A change after a quiet time wakes the run at once. While changes keep coming, the pauses between wake-ups grow with the
time since the first: so a look is late by a fifth of that at most, and the number of looks depends on the duration and
not on the number of ranks. A change that decides the run (`Tally.turned_since`) wakes it at once all the same.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 3.0
SHARE = 0.2
QUIET_S = 1.0
SWEEP_FROM = 64


@dataclass(frozen=True, slots=True)
class ActivityTally:
    """Counts of what the programs of a gang's live ranks do.

    `notice`: the number of the published notice, 0 for none; `unready` of the `listening` ranks are not ready for it,
    and `late` ones have missed its step. `leaving`: the platform takes their places away. `worker_failures`: of the
    workers of their torchrun agents.
    """

    notice: int = 0
    listening: int = 0
    unready: int = 0
    late: int = 0
    leaving: int = 0
    worker_failures: int = 0

    def turned_since(self, before: "ActivityTally") -> bool:
        """Whether somebody waits for the change since `before`."""
        is_ready = self.notice > 0 and self.listening > 0 and self.unready == 0
        was_ready = before.notice == self.notice and before.listening > 0 and before.unready == 0
        return (
            (is_ready and not was_ready)
            or (self.late > before.late)
            or (self.leaving > before.leaving)
            or (self.worker_failures > 0 and before.worker_failures == 0)
        )


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a gang's ranks. `marks`: the numbers of ranks up that make a difference."""

    answers: bool = False  # the run's rendezvous does
    up: int = 0
    ended: int = 0
    failed: int = 0
    marks: Sequence[int] = ()
    activity: ActivityTally = ActivityTally()

    def turned_since(self, before: "Tally") -> bool:
        """Whether a change since `before` should not wait."""
        return (
            (self.answers and not before.answers)
            or (self.failed > 0 and before.failed == 0)
            or self.activity.turned_since(before.activity)
            or any(before.up < mark <= self.up or before.ended < mark <= self.ended for mark in self.marks)
        )


@dataclass(slots=True)
class _Burst:
    began: float
    next_at: float
    tally: Tally


class Wakes:
    """Calls `wake`; `tally` returns a run's counts."""

    def __init__(self, wake: Callable[[str], None], tally: Callable[[str], Tally]) -> None:
        self._wake, self._tally = wake, tally
        self._bursts: dict[str, _Burst] = {}
        self._sweep_at = SWEEP_FROM
        self._later: dict[str, asyncio.TimerHandle] = {}

    def changed(self, instance: str) -> None:
        loop = asyncio.get_running_loop()
        now, burst = loop.time(), self._bursts.get(instance)
        if burst is None or _is_over(burst, now):
            self._sweep(now)
            self._bursts[instance] = _Burst(now, now, Tally())
            self._wake_now(instance)
        elif now >= burst.next_at or self._tally(instance).turned_since(burst.tally):
            self._wake_now(instance)
        elif instance not in self._later:
            self._later[instance] = loop.call_at(burst.next_at, self._wake_now, instance)

    def _wake_now(self, instance: str) -> None:
        timer = self._later.pop(instance, None)
        if timer is not None:
            timer.cancel()
        now, burst = asyncio.get_running_loop().time(), self._bursts[instance]
        burst.next_at = now + min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, (now - burst.began) * SHARE))
        burst.tally = self._tally(instance)
        self._wake(instance)

    def _sweep(self, now: float) -> None:
        """Drop bursts that are over, whenever their number has doubled: they have no effect any more."""
        if len(self._bursts) >= self._sweep_at:
            self._bursts = {name: burst for name, burst in self._bursts.items() if not _is_over(burst, now)}
            self._sweep_at = max(SWEEP_FROM, 2 * len(self._bursts))

    def forget(self, instance: str) -> None:
        self._bursts.pop(instance, None)
        timer = self._later.pop(instance, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._later.values():
            timer.cancel()
        self._later.clear()


def _is_over(burst: _Burst, now: float) -> bool:
    return now >= burst.next_at + QUIET_S
