"""The client's side of a WebSocket (RFC 6455), over a connection that an HTTP client has opened.

wsproto reads and writes the frames. Only binary messages are spoken. A message is given in pieces as they arrive and a
frame is never held as a whole, so no length that a server claims can cost memory.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpcore2
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, generate_accept_token, generate_nonce

READ_BYTES = 1 << 16
PING_EVERY_S = 15.0  # while nothing comes: whatever is in between takes a silent connection for a dead one
PINGS_UNANSWERED = 4
WRITE_S, GOODBYE_S = 10.0, 1.0
_BROKEN = (httpcore2.NetworkError, httpcore2.TimeoutException, OSError)


class WebSocketError(Exception):
    """The connection broke, or what came over it is no WebSocket."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a message, perhaps none; `first` and `last` of it."""

    data: bytes
    first: bool
    last: bool


class Frames:
    """The frames of one connection: bytes that came in, what they say out; events in, bytes to send out. Pure."""

    def __init__(self) -> None:
        self._connection = Connection(ConnectionType.CLIENT)
        self._inside = False  # a message has begun and not ended

    def feed(self, data: bytes) -> Iterator[Piece | Event]:
        """Pieces of messages, and wsproto's events about the connection itself."""
        self._connection.receive_data(data)
        for event in self._connection.events():
            if isinstance(event, BytesMessage):
                first, self._inside = not self._inside, not event.message_finished
                yield Piece(bytes(event.data), first, event.message_finished)
            elif isinstance(event, TextMessage):
                raise WebSocketError("the server sent a text message")
            elif isinstance(event, CloseConnection) and self._connection.state is ConnectionState.OPEN:
                # Not the server's close: wsproto's, of a connection on which no frame can be read any more.
                raise WebSocketError(f"the server sent what is no WebSocket frame: {event.reason}")
            else:
                yield event

    def packed(self, event: Event) -> bytes:
        """The frame to send; `WebSocketError` if the connection is closed already."""
        try:
            return self._connection.send(event)
        except LocalProtocolError as error:
            raise WebSocketError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Opening:
    """The question of a client that wants a WebSocket with one of these protocols, the first if it can be had."""

    protocols: Sequence[str]
    key: str = field(default_factory=lambda: generate_nonce().decode())

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": self.key,
            "Sec-WebSocket-Protocol": ", ".join(self.protocols),
        }

    def check(self, answered: Mapping[str, str]) -> None:
        """Whether the headers of an answer with status 101 are those of a WebSocket with one of the protocols."""
        expected = generate_accept_token(self.key.encode()).decode()
        if answered.get("Upgrade", "").lower() != "websocket" or answered.get("Sec-WebSocket-Accept") != expected:
            raise WebSocketError("the server's answer is not that of a WebSocket")
        chosen = answered.get("Sec-WebSocket-Protocol", "")
        if chosen not in self.protocols:
            raise WebSocketError(f"the server speaks {chosen or 'no protocol'}, and not {' or '.join(self.protocols)}")


class WebSocket:
    """An open connection. One task uses it: it answers pings while it reads."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream, self._frames = stream, Frames()
        self.farewell = ""  # what the server said when it closed

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What comes, until the server closes in order. `WebSocketError` if it goes without a word, or says nothing."""
        silences = 0
        while True:
            try:
                data = await self._stream.read(READ_BYTES, PING_EVERY_S)
            except httpcore2.ReadTimeout:
                silences += 1
                if silences > PINGS_UNANSWERED:
                    raise WebSocketError(f"nothing came for {silences * PING_EVERY_S:g} s") from None
                await self._send(Ping())
                continue
            except _BROKEN as error:
                raise WebSocketError(_broken(error)) from error
            if not data:
                raise WebSocketError("the connection was cut")
            silences = 0
            for found in self._frames.feed(data):
                if isinstance(found, Piece):
                    yield found
                elif isinstance(found, Ping):
                    await self._send(found.response())
                elif isinstance(found, CloseConnection):
                    self.farewell = _farewell(found)
                    return

    async def say_goodbye(self) -> None:
        """Tell the server that we go, as far as it listens."""
        with suppress(WebSocketError):
            await self._send(CloseConnection(code=CloseReason.NORMAL_CLOSURE), GOODBYE_S)

    async def _send(self, event: Event, within: float = WRITE_S) -> None:
        try:
            await self._stream.write(self._frames.packed(event), within)
        except _BROKEN as error:
            raise WebSocketError(_broken(error)) from error


def _broken(error: Exception) -> str:
    return f"the connection broke: {error!s}" if str(error) else f"the connection broke ({type(error).__name__})"


def _farewell(close: CloseConnection) -> str:
    if close.code == CloseReason.NO_STATUS_RCVD:
        return "without a reason"
    return f"with code {close.code:d}" + (f": {close.reason}" if close.reason else "")
