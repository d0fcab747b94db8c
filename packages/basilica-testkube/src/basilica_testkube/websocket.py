"""The server's side of a WebSocket: whole messages in, text or not, and whole binary messages out."""

import asyncio
import base64
import hashlib
import struct
from collections.abc import AsyncIterator

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MESSAGE_MAX = 32 << 20  # as the real server
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_NORMAL, _PROTOCOL_ERROR = 1000, 1002


def accepting(key: str, protocol: str) -> dict[str, str]:
    """The headers by which a server agrees to a client's question."""
    accepted = base64.b64encode(hashlib.sha1(key.encode() + _MAGIC).digest()).decode()
    return {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": accepted,
        "Sec-WebSocket-Protocol": protocol,
    }


class ServerSocket:
    """One connection. Whoever writes and whoever reads may be two tasks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: bytes) -> None:
        self._write(_BINARY, message)
        await self._writer.drain()

    async def close(self) -> None:
        self._write(_CLOSE, struct.pack("!H", _NORMAL))
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[bytes]:
        """Until the client has gone, in order or not."""
        message = b""
        try:
            while True:
                opcode, final, data = await self._frame()
                if opcode == _CLOSE:
                    self._write(_CLOSE, data[:2])
                    return
                if opcode == _PING:
                    self._write(_PONG, data)
                elif opcode in (_CONTINUATION, _TEXT, _BINARY):
                    message += data
                    if final:
                        yield message
                        message = b""
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        except ValueError:
            self._write(_CLOSE, struct.pack("!H", _PROTOCOL_ERROR))

    async def _frame(self) -> tuple[int, bool, bytes]:
        first, second = await self._reader.readexactly(2)
        length = second & 0x7F
        if length >= 126:
            layout = "!H" if length == 126 else "!Q"
            (length,) = struct.unpack(layout, await self._reader.readexactly(struct.calcsize(layout)))
        if not second & 0x80 or length > _MESSAGE_MAX:
            raise ValueError("a client masks its frames, and they are not that long")
        mask = await self._reader.readexactly(4)
        data = await self._reader.readexactly(length)
        return first & 0x0F, bool(first & 0x80), bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))

    def _write(self, opcode: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            length = bytes((size,))
        elif size < 1 << 16:
            length = b"\x7e" + struct.pack("!H", size)
        else:
            length = b"\x7f" + struct.pack("!Q", size)
        self._writer.write(bytes((0x80 | opcode,)) + length + data)
