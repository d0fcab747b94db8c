"""Timeouts of a client's connection: for the head and the body of a request, and for the reading of the answer.

The class is uvicorn's flow control with a clock. Time in which the server does not read, since it still works on
earlier bytes, does not count against the client.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from uvicorn.protocols.http.flow_control import FlowControl

from basilica.server.connections import ConnectionLimits, body_seconds_left

HURRIED_SECONDS = 1.0

Owed = Literal["head", "body"]


class ClientTimeouts(FlowControl):
    """Flow control with timeouts. It calls `late` with the part that a client has not sent in time. A client that does
    not read is disconnected at once."""

    def __init__(self, transport: asyncio.Transport, limits: ConnectionLimits, late: Callable[[Owed], None]) -> None:
        super().__init__(transport)
        self._limits, self._late = limits, late
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.TimerHandle | None = None  # for bytes that the client has to send
        self._reading: asyncio.TimerHandle | None = None  # for bytes that the client has to read
        self._waited, self._since, self._received = 0.0, 0.0, 0
        self._in_body = False
        self._stall_seconds = limits.stall_seconds

    def end(self) -> None:
        self.expect_nothing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    # ---- requests that the client sends --------------------------------------------------------------------------

    def expect_head(self) -> None:
        self.expect_nothing()
        self._sending = self._loop.call_later(self._limits.head_seconds, self._late, "head")

    def expect_body(self) -> None:
        self.expect_nothing()
        self._in_body, self._waited, self._received = True, 0.0, 0
        if not self.read_paused:
            self._await_body()

    def body_received(self, size: int) -> None:
        self._received += size

    def expect_nothing(self) -> None:
        self._in_body = False
        self._stop_waiting()

    def pause_reading(self) -> None:
        if self._in_body and self._sending is not None:
            self._waited += self._loop.time() - self._since
            self._stop_waiting()
        super().pause_reading()

    def resume_reading(self) -> None:
        super().resume_reading()
        if self._in_body and self._sending is None:
            self._await_body()

    def _await_body(self) -> None:
        self._since = self._loop.time()
        self._sending = self._loop.call_later(self._left(), self._check_body)

    def _check_body(self) -> None:
        self._waited += self._loop.time() - self._since
        if self._left() > 0:
            self._await_body()
        else:
            self._sending = None
            self._late("body")

    def _left(self) -> float:
        return body_seconds_left(self._waited, self._received, self._limits)

    def _stop_waiting(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    # ---- answers that the client reads ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None and not self._transport.is_closing():
            self._reading.cancel()
            self._reading = None

    def hurry(self) -> None:
        """Shorten the timeout of reading to the time that a closing server has."""
        self._stall_seconds = min(self._stall_seconds, HURRIED_SECONDS)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self.expect_reading()

    def expect_reading(self) -> None:
        """Disconnect the client if it does not read the bytes that are buffered for it."""
        if self._reading is None and (waiting := self._transport.get_write_buffer_size()):
            self._reading = self._loop.call_later(self._stall_seconds, self._check_reading, waiting)

    def _check_reading(self, before: int) -> None:
        self._reading = None
        if self._transport.get_write_buffer_size() >= before:
            self._transport.abort()
        else:
            self.expect_reading()
