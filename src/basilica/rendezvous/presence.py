"""The agents that a rendezvous hears from: heartbeats are kept in memory, and only changes become keys. Pure.

A heartbeat costs one small request, without a journal entry, an index or a watcher: keys with a lifetime would write
all three for each, and push what others wait for out of the history. The rendezvous publishes

    /basilica/heard/<rank>   {"gap": 12.0}     heard from; before its first heartbeat here it had no answer for so long
                             {"silent": 15.2}  nothing has been heard for so long when this was published

and nothing while nothing changes. A rendezvous that starts begins with no such keys: it has heard nobody yet.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from basilica.rendezvous.names import HEARD

MISSED = 2.5  # heartbeats
RANKS_MAX = 100_000
EVERY_MIN_S, EVERY_MAX_S = 0.01, 600.0

Changes = dict[str, str]
"""Keys to write."""


@dataclass(slots=True)
class _Agent:
    at: float
    every: float
    silent: bool = False


class Presence:
    """Who was heard from when, by the monotonic clock of this process."""

    def __init__(self) -> None:
        self._agents: dict[int, _Agent] = {}

    def heard(self, rank: int, every: float, gap: float | None, now: float) -> Changes:
        """Take in a heartbeat; what is to be published for it. `every`: when the next one is due."""
        every = min(max(every, EVERY_MIN_S), EVERY_MAX_S)
        known = self._agents.get(rank)
        if known is not None and not known.silent:
            known.at, known.every = now, every
            return {}
        if known is None and len(self._agents) >= RANKS_MAX:
            return {}
        self._agents[rank] = _Agent(now, every)
        return {f"{HEARD}/{rank}": json.dumps({"gap": gap})}

    def fallen_silent(self, now: float) -> Changes:
        """What is to be published because nothing came."""
        found: Changes = {}
        for rank, agent in self._agents.items():
            if not agent.silent and now >= agent.at + MISSED * agent.every:
                agent.silent = True
                found[f"{HEARD}/{rank}"] = json.dumps({"silent": round(now - agent.at, 3)})
        return found

    def look_at(self) -> float | None:
        """When the next agent counts as silent, if it says nothing until then."""
        return min((a.at + MISSED * a.every for a in self._agents.values() if not a.silent), default=None)


@dataclass(frozen=True, slots=True)
class Heard:
    """One published entry. `silent`: None while the rank's agent is heard from."""

    gap: float | None = None
    silent: float | None = None


def load_heard(text: str) -> Heard | None:
    """What is not understood is nothing: ranks can write these keys as well."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping):
        return None
    gap, silent = found.get("gap"), found.get("silent")
    if not all(each is None or (isinstance(each, int | float) and each >= 0) for each in (gap, silent)):
        return None
    return Heard(gap, silent)
