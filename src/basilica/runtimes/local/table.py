"""The in-memory table of the attempts of requested runs.

The records on disk are the source of truth; the table mirrors them. Ended runs take memory with their last lines of
output, so only some stay in the table; the others are read again on request.
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
        self._ended: dict[str, None] = {}  # runs whose attempts have all ended, least recently observed first
        self._sweep_at = RUNS_REMEMBERED

    def __contains__(self, instance: str) -> bool:
        return instance in self._runs

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def add(self, instance: str) -> dict[Key, Attempt]:
        """Return the attempts of a run, added without attempts if it was not known."""
        return self._runs.setdefault(instance, {})

    def of(self, instance: str) -> dict[Key, Attempt]:
        """Return the attempts of a known run."""
        return self._runs[instance]

    def find(self, key: Key) -> Attempt | None:
        return self._runs.get(key.instance, {}).get(key)

    def entry(self, key: Key, sight: Sight) -> Attempt:
        """Return the attempt of a known run; a new attempt is added with this sight."""
        return self._runs[key.instance].setdefault(key, Attempt(key=key, sight=sight))

    def attempts(self) -> list[Attempt]:
        """Return the attempts of all runs."""
        return [attempt for attempts in self._runs.values() for attempt in attempts.values()]

    def remove(self, instance: str) -> None:
        self._runs.pop(instance, None)
        self._ended.pop(instance, None)

    def clear(self) -> None:
        for attempt in self.attempts():
            attempt.unwatch()
        self._runs.clear()

    # ---- eviction --------------------------------------------------------------------------------------------------

    def mark_observed(self, instance: str) -> None:
        """Mark the run as just observed; if it has ended, it becomes the last ended run to be evicted."""
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
        """Evict ended runs by age, since those that were never observed after their end also pile up."""
        ended = [instance for instance in self._runs if self._has_ended(instance)]
        for instance in ended[: -RUNS_REMEMBERED // 2]:
            del self._runs[instance]
        self._sweep_at = len(self._runs) + RUNS_REMEMBERED

    def _has_ended(self, instance: str) -> bool:
        return all(attempt.sight is Sight.ENDED for attempt in self._runs.get(instance, {}).values())
