"""API servers that say what a test wants, byte by byte."""

import asyncio
import base64
import hashlib
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"


def unmasked(opcode: int, data: bytes, *, final: bool = True) -> bytes:
    """A frame as servers send it."""
    size = len(data)
    if size < 126:
        length = bytes((size,))
    else:
        length = b"\x7e" + struct.pack("!H", size) if size < 1 << 16 else b"\x7f" + struct.pack("!Q", size)
    return bytes((0x80 * final | opcode,)) + length + data


def message(channel: int, data: bytes) -> bytes:
    return unmasked(BINARY, bytes((channel,)) + data)


def closing(code: int, reason: str = "") -> bytes:
    return unmasked(CLOSE, struct.pack("!H", code) + reason.encode())


@dataclass
class Conversation:
    """One connection to the server, after the client's question."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    question: str
    headers: dict[str, str] = field(default_factory=dict)

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def agree(self, protocol: str = V5, *, more: bytes = b"") -> None:
        """Accept the WebSocket; `more` comes in the same packet."""
        accepted = base64.b64encode(hashlib.sha1(self.headers["sec-websocket-key"].encode() + MAGIC).digest()).decode()
        lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Accept: {accepted}", f"Sec-WebSocket-Protocol: {protocol}", "", ""]
        await self.say("\r\n".join(lines).encode() + more)

    async def hear(self) -> tuple[int, bytes]:
        """A frame of the client: what it is and what it says."""
        first, second = await self.reader.readexactly(2)
        assert second & 0x80, "a client masks its frames"
        mask = await self.reader.readexactly(4)
        data = await self.reader.readexactly(second & 0x7F)
        return first & 0x0F, bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))


Behaviour = Callable[[Conversation], Awaitable[None]]


@asynccontextmanager
async def api_server(behave: Behaviour, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The address of a server that behaves so, and then hangs up."""
    problems: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.partition(":") for line in lines if line)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            await behave(Conversation(reader, writer, question, headers))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client did not want to hear more
        except AssertionError as problem:
            problems.append(problem)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
    if problems:
        raise problems[0]
