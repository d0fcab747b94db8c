"""Housekeeping of an all-reduce: old rounds are removed, and replicas announce themselves. Flows, as the rounds are.

No error of a request leaves this module: a round that is decided stays decided. What fails is recorded and tried again
after a later round.
"""

from collections import deque
from typing import Protocol

from basilica.diloco.documents import Place
from basilica.diloco.effects import Create, Delete, Flow, Found, List
from basilica.diloco.rounds import Outcome

MOST_AT_ONCE = 4
"""Rounds that are removed after one round, where earlier ones could not be."""
LONGEST_BREAK = 32
"""Rounds without a try, at most, where removing fails again and again, as it does for a role that may not delete."""


class TroubleLog(Protocol):
    """Where errors are recorded that nobody is to be stopped by."""

    def record(self, work: str, error: Exception) -> None: ...

    def resolve(self, work: str) -> None: ...


def remove_round(place: Place) -> Flow[int]:
    """Remove the parts and results of a round that no replica needs; return the number of objects.

    Manifests stay: they are the history of the run, and while one stands its round cannot be decided a second time by a
    replica that slept through it.
    """
    listing: tuple[Found, ...] = yield List(place.prefix)
    keys = tuple(found.key for found in listing if not found.key.startswith(f"{place.prefix}manifest-"))
    if keys:
        yield Delete(keys)
    return len(keys)


def announce(place: Place, round: int, rank: int) -> Flow[None]:
    """Ask to be expected in that round."""
    yield Create(f"{place.joining(round)}{rank:05d}", 0, iter(()))


class Housekeeper:
    """The housekeeping of one replica for one all-reduce, after each of its rounds."""

    def __init__(self, rank: int, retain: int, troubles: TroubleLog) -> None:
        self._rank, self._retain, self._troubles = rank, retain, troubles
        self._due: deque[int] = deque()
        """Rounds that this replica has to remove, the oldest first."""
        self._break = self._left = 0
        """How many rounds the present break from removing lasts, and how many of them are left."""

    def after(self, place: Place, outcome: Outcome) -> Flow[None]:
        """Once the round is decided; may be repeated."""
        if not outcome.counted:
            yield from self._announce(place)
        # Whoever was counted here has finished the round before; what is older and not retained is nobody's now.
        old = place.round - 1 - self._retain
        if old >= 0 and self._rank == min(outcome.weights) and (not self._due or self._due[-1] < old):
            self._due.append(old)
        if self._left:
            self._left -= 1
        elif self._due:
            yield from self._remove(place)

    def _announce(self, place: Place) -> Flow[None]:
        """The ranks of the next round are settled: the one after it is the first that can wait for us."""
        work = f"announcing rank {self._rank} for {place.name!r} in run {place.run!r}"
        try:
            yield from announce(place, place.round + 2, self._rank)
        except Exception as error:  # noqa: BLE001  whatever the store raises: the round is decided
            self._troubles.record(work, error)
        else:
            self._troubles.resolve(work)

    def _remove(self, place: Place) -> Flow[None]:
        work = f"removing old rounds of {place.name!r} in run {place.run!r}"
        try:
            for _ in range(min(MOST_AT_ONCE, len(self._due))):
                yield from remove_round(Place(place.run, place.name, self._due[0]))
                self._due.popleft()
        except Exception as error:  # noqa: BLE001  as above
            self._troubles.record(work, error)
            self._break = self._left = min(max(1, 2 * self._break), LONGEST_BREAK)
        else:
            self._troubles.resolve(work)
            self._break = 0
