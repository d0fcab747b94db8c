"""The agents that a rendezvous hears from: heartbeats are kept in memory, and only changes become keys. Pure.

A heartbeat costs one small request, without a journal entry, an index or a watcher: keys with a lifetime would write
all three for each, and push the events of other waiters out of the history. The rendezvous publishes

    /basilica/heard/<agent>   {"gap": 12.0}     heard from; before its first heartbeat here it had no answer for so long
                              {"silent": 15.2}  nothing has been heard for so long when this was published

and nothing while nothing changes. An agent is named by its pod: a rank that is replaced has two for a while. The key of
one that stays silent is removed after an hour. A rendezvous that starts begins without such keys: no agent was heard.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from basilica.rendezvous.names import HEARD

MISSED = 2.5  # heartbeats
AGENTS_MAX = 200_000
FORGET_AFTER_S = 3600.0
AGENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
EVERY_MIN_S, EVERY_MAX_S = 0.01, 600.0

Changes = dict[str, str | None]
"""Keys to write, and to remove where the value is None."""


@dataclass(slots=True)
class _Agent:
    at: float
    every: float
    silent: bool = False

    @property
    def due(self) -> float:
        return self.at + (FORGET_AFTER_S if self.silent else MISSED * self.every)


class Presence:
    """The last heartbeat of each agent, by the monotonic clock of this process."""

    def __init__(self) -> None:
        self._agents: dict[str, _Agent] = {}

    def heard(self, name: str, every: float, gap: float | None, now: float) -> Changes:
        """Record a heartbeat; return the changes to publish for it. `every`: when the next one is due."""
        every = min(max(every, EVERY_MIN_S), EVERY_MAX_S)
        known = self._agents.get(name)
        if known is not None and not known.silent:
            known.at, known.every = now, every
            return {}
        if known is None and len(self._agents) >= AGENTS_MAX:
            return {}
        self._agents[name] = _Agent(now, every)
        return {f"{HEARD}/{name}": json.dumps({"gap": gap})}

    def fallen_silent(self, now: float) -> Changes:
        """Return the changes to publish for missed heartbeats."""
        found: Changes = {}
        for name, agent in list(self._agents.items()):
            if now < agent.due:
                continue
            if agent.silent:
                del self._agents[name]
                found[f"{HEARD}/{name}"] = None
            else:
                agent.silent = True
                found[f"{HEARD}/{name}"] = json.dumps({"silent": round(now - agent.at, 3)})
        return found

    def next_due(self) -> float | None:
        """Return when `fallen_silent` has the next change, if no heartbeat comes until then."""
        return min((agent.due for agent in self._agents.values()), default=None)


@dataclass(frozen=True, slots=True)
class Heard:
    """One published entry. `silent`: None while the agent is heard from."""

    gap: float | None = None
    silent: float | None = None


def load_heard(text: str) -> Heard | None:
    """Parse an entry; None for any other text: ranks can write these keys as well."""
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
