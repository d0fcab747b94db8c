"""HTTP client for the control plane's own calls: one connection, one request after the other, no dependencies.

A general client would cost more for each call than the call itself.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

MAX_HEAD = 64 << 10
MAX_BODY = 32 << 20

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NoAnswer(Exception):
    """The peer does not answer, or not as it should: the outcome of the request is unknown."""


@dataclass(frozen=True, slots=True)
class Message:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """Keeps a connection from one request to the next, and opens a new one after a failure."""

    def __init__(self, connect: Callable[[], Awaitable[Streams]], host: str) -> None:
        self._connect, self._host = connect, host
        self._connection: Streams | None = None
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        if self._connection is not None:
            _, writer = self._connection
            self._connection = None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(
        self, method: str, target: str, form: str | None = None, *, within: float | None, repeatable: bool = True
    ) -> Message:
        """Send one request and return its answer. `NoAnswer` after `within` seconds, or if the connection fails.

        A kept connection may have ended meanwhile: a `repeatable` request is then sent once more on a new one.
        """
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._host}"]
        body = b""
        if form is not None:
            body = form.encode()
            lines += ["Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(body)}"]
        request = "\r\n".join((*lines, "", "")).encode() + body
        async with self._turn:
            kept = self._connection is not None
            try:
                async with asyncio.timeout(within):
                    try:
                        return await self._exchange(request)
                    except (OSError, EOFError):
                        if not (kept and repeatable):
                            raise
                        self._drop()
                        return await self._exchange(request)
            except (OSError, EOFError, ValueError, IndexError, TimeoutError, asyncio.LimitOverrunError) as error:
                self._drop()
                raise NoAnswer(f"{method} {target} at {self._host}: {error or type(error).__name__}") from error
            except BaseException:
                self._drop()  # half an answer may be on its way
                raise

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _exchange(self, request: bytes) -> Message:
        if self._connection is None:
            self._connection = await self._connect()
        reader, writer = self._connection
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ", 2)[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = b"" if status == 204 else await _body(reader, headers)
        if headers.get("connection", "").lower() == "close":
            self._drop()
        return Message(status, headers, body)


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        size = int(headers.get("content-length", "0"))
        _check_size(size)
        return await reader.readexactly(size)
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        _check_size(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return body


def _check_size(size: int) -> None:
    if not 0 <= size <= MAX_BODY:
        raise ValueError(f"an answer of {size} bytes")
