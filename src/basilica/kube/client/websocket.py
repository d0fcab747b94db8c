"""The client's side of a WebSocket (RFC 6455), over a connection that an HTTP client has opened.

Only binary messages are spoken. A message is given in pieces as they arrive and a frame is never held as a whole, so no
length that a server claims can cost memory.
"""

import base64
import hashlib
import os
import struct
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpcore

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
NORMAL = 1000
READ_BYTES = 1 << 16
PING_EVERY_S = 15.0  # while nothing comes: whatever is in between takes a silent connection for a dead one
PINGS_UNANSWERED = 4
WRITE_S, GOODBYE_S = 10.0, 1.0
_CONTROL_BYTES_MAX = 125
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BROKEN = (httpcore.NetworkError, httpcore.TimeoutException, OSError)


class WebSocketError(Exception):
    """The connection broke, or what came over it is no WebSocket."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a message, perhaps none; `first` and `last` of it."""

    data: bytes
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Control:
    """A frame about the connection itself: `CLOSE`, `PING` or `PONG`."""

    opcode: int
    data: bytes


class Frames:
    """Takes bytes as they come and tells what they say. Pure; holds at most one header or control frame."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._left = 0  # bytes of the data frame that are still to come
        self._final = False  # that frame is the last of its message
        self._inside = False  # a message has begun and not ended
        self._first = False

    def feed(self, data: bytes) -> Iterator[Piece | Control]:
        self._waiting += data
        while True:
            if self._left:
                if not self._waiting:
                    return
                yield self._piece(min(self._left, len(self._waiting)))
                continue
            header = self._header()
            if header is None:
                return
            opcode, final, start, length = header
            if opcode >= CLOSE:
                if len(self._waiting) < start + length:
                    return
                control = Control(opcode, bytes(self._waiting[start : start + length]))
                del self._waiting[: start + length]
                yield control
                continue
            del self._waiting[:start]
            self._begin(opcode)
            self._left, self._final = length, final
            if not length:
                yield self._piece(0)

    def _header(self) -> tuple[int, bool, int, int] | None:
        """Opcode, whether it is final, where its data begins and how much that is; None if not all of it is here."""
        waiting = self._waiting
        if len(waiting) < 2:
            return None
        opcode, final, length, start = waiting[0] & 0x0F, bool(waiting[0] & 0x80), waiting[1] & 0x7F, 2
        if waiting[0] & 0x70:
            raise WebSocketError("the server used an extension that nobody asked for")
        if waiting[1] & 0x80:
            raise WebSocketError("the server masked a frame")
        if opcode not in (CONTINUATION, BINARY, CLOSE, PING, PONG):
            what = "a text message" if opcode == TEXT else f"a frame of the unknown kind {opcode}"
            raise WebSocketError(f"the server sent {what}")
        if opcode >= CLOSE and (length > _CONTROL_BYTES_MAX or not final):
            raise WebSocketError("the server sent a control frame that is too long or not whole")
        if length >= 126:
            layout = "!H" if length == 126 else "!Q"
            start += struct.calcsize(layout)
            if len(waiting) < start:
                return None
            (length,) = struct.unpack_from(layout, waiting, 2)
            if length >> 63:
                raise WebSocketError("the server sent a frame of an impossible length")
        return opcode, final, start, length

    def _begin(self, opcode: int) -> None:
        if (opcode == CONTINUATION) != self._inside:
            raise WebSocketError("the server began a message inside of another, or went on with none")
        if opcode != CONTINUATION:
            self._inside = self._first = True

    def _piece(self, size: int) -> Piece:
        data = bytes(self._waiting[:size])
        del self._waiting[:size]
        self._left -= size
        last = self._final and not self._left
        piece = Piece(data, self._first, last)
        self._first, self._inside = False, not last
        return piece


def frame(opcode: int, data: bytes, mask: bytes) -> bytes:
    """A control frame as a client sends it. `mask`: four random bytes, which keep proxies from reading it as HTTP."""
    if len(data) > _CONTROL_BYTES_MAX:
        raise ValueError(f"a control frame has at most {_CONTROL_BYTES_MAX} bytes")
    masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
    return bytes((0x80 | opcode, 0x80 | len(data))) + mask + masked


@dataclass(frozen=True, slots=True)
class Opening:
    """The question of a client that wants a WebSocket with one of these protocols, the first if it can be had."""

    protocols: Sequence[str]
    key: str = field(default_factory=lambda: base64.b64encode(os.urandom(16)).decode())

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
        expected = base64.b64encode(hashlib.sha1(self.key.encode() + _MAGIC).digest()).decode()
        if answered.get("Upgrade", "").lower() != "websocket" or answered.get("Sec-WebSocket-Accept") != expected:
            raise WebSocketError("the server's answer is not that of a WebSocket")
        chosen = answered.get("Sec-WebSocket-Protocol", "")
        if chosen not in self.protocols:
            raise WebSocketError(f"the server speaks {chosen or 'no protocol'}, and not {' or '.join(self.protocols)}")


class WebSocket:
    """An open connection. One task uses it: it answers pings while it reads."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self.farewell = ""  # what the server said when it closed

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What comes, until the server closes in order. `WebSocketError` if it goes without a word, or says nothing."""
        frames, silences = Frames(), 0
        while True:
            try:
                data = await self._stream.read(READ_BYTES, PING_EVERY_S)
            except httpcore.ReadTimeout:
                silences += 1
                if silences > PINGS_UNANSWERED:
                    raise WebSocketError(f"nothing came for {silences * PING_EVERY_S:g} s") from None
                await self._send(PING, b"")
                continue
            except _BROKEN as error:
                raise WebSocketError(_broken(error)) from error
            if not data:
                raise WebSocketError("the connection was cut")
            silences = 0
            for found in frames.feed(data):
                if isinstance(found, Piece):
                    yield found
                elif found.opcode == PING:
                    await self._send(PONG, found.data)
                elif found.opcode == CLOSE:
                    self.farewell = _farewell(found.data)
                    return

    async def say_goodbye(self) -> None:
        """Tell the server that we go, as far as it listens."""
        with suppress(WebSocketError):
            await self._send(CLOSE, struct.pack("!H", NORMAL), GOODBYE_S)

    async def _send(self, opcode: int, data: bytes, within: float = WRITE_S) -> None:
        try:
            await self._stream.write(frame(opcode, data, os.urandom(4)), within)
        except _BROKEN as error:
            raise WebSocketError(_broken(error)) from error


def _broken(error: Exception) -> str:
    return f"the connection broke: {error!s}" if str(error) else f"the connection broke ({type(error).__name__})"


def _farewell(data: bytes) -> str:
    if len(data) < 2:
        return "without a reason"
    (code,) = struct.unpack_from("!H", data)
    reason = data[2:].decode(errors="replace")
    return f"with code {code}" + (f": {reason}" if reason else "")
