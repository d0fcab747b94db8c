"""The attempts of the runs that somebody asked for, in memory.

The records on disk are the truth, and this only mirrors them. A run that has ended takes room with its last lines: of
those only some stay, and the others are read again if somebody asks.
"""

from collections.abc import Iterator

from basilica.core.seen import Sight
from basilica.machine.layout import Key
from basilica.runtimes.local.attempts import Attempt

ENDED_RUNS_KEPT = 256
RUNS_REMEMBERED = 256


class Table:
    def __init__(self) -> None:
        self._runs: dict[str, dict[Key, Attempt]] = {}
        self._ended: dict[str, None] = {}  # runs all of whose attempts have ended, by when they were last looked at
        self._sweep_at = RUNS_REMEMBERED

    def __contains__(self, instance: str) -> bool:
        return instance in self._runs

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def add(self, instance: str) -> dict[Key, Attempt]:
        """The attempts of a run, none so far if it was not known."""
        return self._runs.setdefault(instance, {})

    def of(self, instance: str) -> dict[Key, Attempt]:
        """The attempts of a run that is known."""
        return self._runs[instance]

    def find(self, key: Key) -> Attempt | None:
        return self._runs.get(key.instance, {}).get(key)

    def entry(self, key: Key, sight: Sight) -> Attempt:
        """The attempt of a run that is known; one that was not, as seen like that."""
        return self._runs[key.instance].setdefault(key, Attempt(key=key, sight=sight))

    def attempts(self) -> list[Attempt]:
        """Of all runs."""
        return [attempt for attempts in self._runs.values() for attempt in attempts.values()]

    def remove(self, instance: str) -> None:
        self._runs.pop(instance, None)
        self._ended.pop(instance, None)

    def clear(self) -> None:
        for attempt in self.attempts():
            attempt.unwatch()
        self._runs.clear()

    # ---- what need not stay ----------------------------------------------------------------------------------------

    def looked_at(self, instance: str) -> None:
        """Somebody has just looked at this run: if it has ended, it is the latest of those."""
        if self._runs[instance] and self._has_ended(instance):
            self._keep_ended(instance)
        if len(self._runs) > self._sweep_at:
            self._sweep()

    def _keep_ended(self, instance: str) -> None:
        self._ended.pop(instance, None)
        self._ended[instance] = None
        while len(self._ended) > ENDED_RUNS_KEPT:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            if self._has_ended(oldest):
                self._runs.pop(oldest, None)

    def _sweep(self) -> None:
        """Those that have ended and that nobody has looked at since are many as well."""
        ended = [instance for instance in self._runs if self._has_ended(instance)]
        for instance in ended[: -RUNS_REMEMBERED // 2]:
            del self._runs[instance]
        self._sweep_at = len(self._runs) + RUNS_REMEMBERED

    def _has_ended(self, instance: str) -> bool:
        return all(attempt.sight is Sight.ENDED for attempt in self._runs.get(instance, {}).values())
