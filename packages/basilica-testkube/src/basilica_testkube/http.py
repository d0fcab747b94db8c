"""A small HTTP/1.1 server on asyncio streams: a coroutine for each connection, so that a watch is a loop that writes.

A slow reader slows its own stream down and nobody else's.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote

MAX_BODY = 3 << 20  # as the real server


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    repeated: dict[str, list[str]] = field(default_factory=dict)  # the query, with all values of each name

    @property
    def media(self) -> str:
        return self.headers.get("content-type", "application/json").partition(";")[0].strip()

    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, or a stream of pieces. A stream that raises `Hangup` ends without a word."""

    status: int
    body: bytes | AsyncIterator[bytes]
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Upgrade:
    """An answer after which the connection is no HTTP any more, and `serve` has it."""

    headers: dict[str, str]
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Hangup(Exception):
    """The connection is to be cut, as by a load balancer that was restarted."""


Handler = Callable[[Request], Awaitable[Reply | Upgrade]]


class HttpServer:
    """Listens on the loopback address; knows its connections, so that all of them can be cut."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.port = 0

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._connections)
        for task, writer in self._connections.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while (request := await _read(reader, writer)) is not None:
                reply = await self._handler(request)
                if isinstance(reply, Upgrade):
                    writer.write(_head(101, reply.headers))
                    await reply.serve(reader, writer)
                    break
                if not await _write(reader, writer, reply):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, Hangup, ValueError):
            writer.transport.abort()
        except asyncio.CancelledError:
            pass  # the server is closing
        finally:
            del self._connections[task]
            writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    path, _, query = target.partition("?")
    body = await _read_body(reader, headers)
    pairs = parse_qsl(query, keep_blank_values=True)
    repeated: dict[str, list[str]] = {}
    for name, value in pairs:
        repeated.setdefault(name, []).append(value)
    return Request(method, unquote(path), dict(pairs), headers, body, repeated)


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


async def _write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> bool:
    """Send an answer; False when the connection is of no more use."""
    head = {"Content-Type": "application/json", **reply.headers}
    if isinstance(reply.body, bytes):
        head["Content-Length"] = str(len(reply.body))
        writer.write(_head(reply.status, head) + reply.body)
        await writer.drain()
        return True
    head |= {"Transfer-Encoding": "chunked", "Connection": "close"}
    writer.write(_head(reply.status, head))
    stream = asyncio.ensure_future(_stream(writer, reply.body))
    gone = asyncio.ensure_future(reader.read(1))  # a client says nothing during a stream; it can only leave
    try:
        await asyncio.wait((stream, gone), return_when=asyncio.FIRST_COMPLETED)
        if stream.done():
            stream.result()
        return False
    finally:
        for task in (stream, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Hangup, ConnectionError):
                await task


async def _stream(writer: asyncio.StreamWriter, pieces: AsyncIterator[bytes]) -> None:
    async for piece in pieces:
        if not piece:
            continue  # an empty chunk would be the end
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode("latin-1")
