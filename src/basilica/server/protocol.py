"""uvicorn's HTTP/1.1 protocol, with bounds on the memory and the time that a client can cost, and our own error body
for bytes that are not HTTP."""

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from basilica.server.connections import Place
from basilica.server.problems import plain
from basilica.server.timeouts import ClientTimeouts, Owed

MAX_HEAD = 256 << 10
MAX_PIPELINED = 64  # one packet holds thousands


class HttpProtocol(HttpToolsProtocol):
    """The protocol with bounds. The parser has none of its own: an endless head, or endless requests pipelined behind
    an unanswered one, would fill the memory."""

    _in_head = True
    _head_size = 0
    _in_body = False

    def __init__(self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], place: Place) -> None:
        super().__init__(config, state, app_state)
        self._place = place

    # ---- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._timeouts = ClientTimeouts(transport, self._place.limits, self._is_late)
        self._place.close = transport.abort
        self._timeouts.expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timeouts.end()
        self._place.release()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        self._timeouts.hurry()

    def _close(self) -> None:
        """Close once all is sent, or without sending it if the client does not read."""
        if not self.transport.is_closing():
            self.transport.close()
        self._timeouts.expect_reading()

    def _is_late(self, what: Owed) -> None:
        """Close the connection of a late client, with an answer if that cannot be taken for another request's."""
        free = not self._answering if what == "head" else not self.cycle.response_started
        if free and not self.pipeline:
            seconds = self._place.limits.head_seconds if what == "head" else self._place.limits.body_seconds
            self._refuse(408, f"the {what} of the request did not come within {seconds:g} s")
        else:
            self.transport.abort()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ---- requests ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        waited_for_next = self.timeout_keep_alive_task is not None
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._refuse(431, f"the request's line and headers are larger than {MAX_HEAD} bytes")
        elif waited_for_next and not self._in_body and not self._answering:  # an empty line came, not a request
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        self._in_head, self._head_size = True, 0
        if not self._answering:
            self._timeouts.expect_head()
        super().on_message_begin()
        self.scope["state"]["authenticated"] = self._place.authenticated

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._place.head_received()
        self._timeouts.expect_body()
        if len(self.pipeline) < MAX_PIPELINED:
            super().on_headers_complete()
        else:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._timeouts.body_received(len(body))
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._timeouts.expect_nothing()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._timeouts.expect_reading()
        elif self._in_head and not self.pipeline and not self._answering:
            self._timeouts.expect_head()  # a part of the next request is there already

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        response = plain(status, message)
        head = [b"HTTP/1.1 %d %s" % (status, _REASONS[status]), b"connection: close"]
        head += [b"%s: %s" % header for header in response.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self._close()


_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
