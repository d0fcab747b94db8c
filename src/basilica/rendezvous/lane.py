"""The share of one keyspace's connections in the process.

All keyspaces of a service run on one event loop. A lane answers the requests of its own connections for `SLICE_S` in
each turn of the loop; the rest waits in the lane's queue for the next turn, unread beyond the bytes that came already,
and the other lanes have theirs in between. The bytes that wait, to be answered or to be sent, are bounded for all
connections together.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from basilica.rendezvous.keyspace import EtcdError

SLICE_S = 0.005
REFUSED_AT_ONCE = 64  # connections to which a refusal is being sent


class Served(Protocol):
    """The lane's view of a connection."""

    def answer_next(self) -> bool:
        """Answer a request that is complete; False if there is none, or it cannot be answered yet."""

    def hold_back(self, hold: bool) -> None:
        """Pause or resume reading."""

    def unsent(self) -> int: ...

    def abort(self) -> None: ...


Admission = Callable[[asyncio.BaseTransport, int], EtcdError | None]


class Lane:
    """`refusal` returns why a connection is refused, given how many there are; None if it is accepted."""

    def __init__(self, *, buffered_max: int, body_max: int, refusal: Admission = lambda _, __: None) -> None:
        self.connections: set[Served] = set()
        self.refused: set[Served] = set()
        self.clogged: set[Served] = set()  # connections whose peers read too slowly
        self.body_max = body_max
        self.buffered = 0
        self._buffered_max = buffered_max
        self._refusal = refusal
        self._line: deque[Served] = deque()
        self._in_line: set[Served] = set()
        self._spent = 0.0
        self._turn_due = False

    def refusal(self, transport: asyncio.BaseTransport) -> EtcdError | None:
        return self._refusal(transport, len(self.connections))

    def leave(self, connection: Served) -> None:
        for group in (self.connections, self.refused, self.clogged, self._in_line):
            group.discard(connection)

    def has_room(self, more: int = 0) -> bool:
        """Whether `more` bytes may wait to be answered or to be sent."""
        unsent = sum(connection.unsent() for connection in self.clogged)
        return self.buffered + unsent + more <= self._buffered_max

    def serve(self, connection: Served) -> None:
        """Answer the requests of the connection, now or in its turn."""
        if connection in self._in_line:
            return
        if self._line or self._spent >= SLICE_S or self._answer(connection):
            self._enqueue(connection)
        self._plan_turn()

    def _answer(self, connection: Served) -> bool:
        """Answer until nothing is left or the slice is spent; return whether requests may be left."""
        began = time.perf_counter()
        while more := connection.answer_next():
            if self._spent + time.perf_counter() - began >= SLICE_S:
                break
        self._spent += time.perf_counter() - began
        return more

    def _enqueue(self, connection: Served) -> None:
        self._line.append(connection)
        self._in_line.add(connection)
        connection.hold_back(True)

    def _plan_turn(self) -> None:
        if not self._turn_due and (self._line or self._spent):
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due, self._spent = False, 0.0
        while self._line and self._spent < SLICE_S:
            connection = self._line.popleft()
            if connection not in self._in_line:
                continue  # it has left meanwhile
            self._in_line.discard(connection)
            if self._answer(connection):
                self._enqueue(connection)
            else:
                connection.hold_back(False)
        self._plan_turn()
