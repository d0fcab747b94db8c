"""The server's connections: their ceilings, their owners, and the time limits of clients.

A connection is a stranger's until a request on it is authenticated, then a member's. Both kinds have a ceiling. At the
strangers' ceiling, the connection that has been quiet for longest is closed for the next, so that a client that sends
its request at once gets an answer, however many others are silent. At the members' ceiling, the request is answered
503. The two ceilings together are half of the descriptors that this process may open: the rest is for the controller,
the runtime and the store.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("basilica.server")

CONNECTIONS_MAX = 8192
CONNECTIONS_MIN = 8
WARN_EVERY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Ceilings and time limits. `head_seconds`: from the first byte of a request, or from the connection, to the end of
    its head. A body may take `body_seconds`, and a second more for each `body_rate` bytes received. `stall_seconds`:
    how long a client may read nothing of an answer."""

    members: int
    strangers: int
    head_seconds: float = 10.0
    body_seconds: float = 20.0
    body_rate: int = 8192
    stall_seconds: float = 60.0


def limits_for(descriptors: int | None) -> ConnectionLimits:
    """Return the limits of a process that may open so many descriptors (None: any number)."""
    connections = CONNECTIONS_MAX if descriptors is None else min(descriptors // 2, CONNECTIONS_MAX)
    connections = max(connections, CONNECTIONS_MIN)
    strangers = connections // 4
    return ConnectionLimits(members=connections - strangers, strangers=strangers)


def body_seconds_left(waited: float, received: int, limits: ConnectionLimits) -> float:
    """Return the seconds that are left for a body, after `waited` seconds in which `received` bytes came."""
    return limits.body_seconds + received / limits.body_rate - waited


class Connections:
    """All connections of a server, each with a `Place`."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._strangers: dict[Place, None] = {}  # in order: the first has been quiet for longest
        self._members: set[Place] = set()
        self._warned_at = -WARN_EVERY_SECONDS

    def admit(self, close: Callable[[], None]) -> "Place":
        """Return a place for a new connection, which `close` ends at once."""
        while len(self._strangers) >= self.limits.strangers:
            self.close_quietest()
            self._warn(f"{self.limits.strangers} connections without an API key are open: the quietest are closed")
        place = Place(self, close)
        self._strangers[place] = None
        return place

    def close_quietest(self) -> None:
        """Close the stranger that has been quiet for longest, if there is one."""
        quietest = next(iter(self._strangers), None)
        if quietest is not None:
            quietest.release()
            quietest.close()

    def _promote(self, place: "Place") -> bool:
        if place in self._members:
            return True
        if len(self._members) >= self.limits.members:
            self._warn(f"{self.limits.members} connections of users are open: more are refused")
            return False
        if place in self._strangers:  # else it is being closed
            del self._strangers[place]
            self._members.add(place)
        return True

    def _mark_active(self, place: "Place") -> None:
        if place in self._strangers:
            del self._strangers[place]
            self._strangers[place] = None

    def _release(self, place: "Place") -> None:
        self._strangers.pop(place, None)
        self._members.discard(place)

    def _warn(self, problem: str) -> None:
        if time.monotonic() - self._warned_at >= WARN_EVERY_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("%s", problem)


class Place:
    """The place of one connection among all of a server."""

    def __init__(self, connections: Connections, close: Callable[[], None]) -> None:
        self._connections, self.close = connections, close

    @property
    def limits(self) -> ConnectionLimits:
        return self._connections.limits

    def head_received(self) -> None:
        """Record that a whole request head was received."""
        self._connections._mark_active(self)

    def authenticated(self) -> bool:
        """Record that a request was authenticated. Return False if too many members are connected already."""
        return self._connections._promote(self)

    def release(self) -> None:
        self._connections._release(self)
