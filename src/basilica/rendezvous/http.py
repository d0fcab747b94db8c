"""A small HTTP/1.1 server on asyncio's transports.

A request is answered inside the callback that read it: no task, no future, no thread. A long poll is a connection that
has sent its headers and waits for somebody to call `chunk`; ten thousand of them are ten thousand
sockets and small objects.
"""

import asyncio
import posixpath
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import quote

from basilica.rendezvous.request import unescape

MAX_HEAD = 64 << 10
MAX_BODY = 10 << 20  # what Go's form parser takes
MAX_UNSENT = 1 << 20  # a stream whose reader is this far behind is cut off

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `path` is decoded and clean."""

    method: str
    path: str
    query: bytes
    headers: dict[str, str]
    body: bytes

    @property
    def form_body(self) -> bytes:
        """The body if it is a form, for the methods that may have one."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_form = self.method in ("POST", "PUT", "PATCH") and kind == "application/x-www-form-urlencoded"
        return self.body if is_form else b""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes = b""
    headers: Headers = ()


class LongReply:
    """A reply whose body comes later, in pieces. `on_gone` is called if the client leaves first."""

    __slots__ = ("_connection", "_done", "_early", "headers", "on_gone")

    def __init__(self, headers: Headers, on_gone: Callable[[], None]) -> None:
        self.headers, self.on_gone = headers, on_gone
        self._connection: Connection | None = None
        self._early = b""
        self._done = False

    def attach(self, connection: "Connection") -> None:
        """The headers are out; so goes what was said before."""
        if self._early or self._done:
            connection.chunk(self._early, last=self._done)
        if not self._done:
            self._connection = connection

    def chunk(self, body: bytes, *, last: bool) -> None:
        """Send a piece of the body; after the last one the connection is free for other requests."""
        self._done = last
        if self._connection is None:
            self._early += body
            return
        connection = self._connection
        if last:
            self._connection = None
        connection.chunk(body, last=last)


Handler = Callable[[Call], Reply | LongReply | Awaitable[Reply]]


def text_error(status: int, text: str, *headers: tuple[str, str]) -> Reply:
    plain = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
    return Reply(status, text.encode() + b"\n", (*headers, *plain))


class BadRequest(Exception):
    """What came is no HTTP that we take; the connection ends with `status`."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status, self.why = status, why


@dataclass(slots=True)
class _Head:
    method: str
    target: bytes
    version: bytes
    headers: dict[str, str]
    expects: bool = field(init=False)

    def __post_init__(self) -> None:
        self.expects = self.headers.get("expect", "").lower() == "100-continue"

    @property
    def keep_alive(self) -> bool:
        wish = self.headers.get("connection", "").lower()
        return "close" not in wish if self.version == b"HTTP/1.1" else "keep-alive" in wish


class Connection(asyncio.Protocol):
    """One client. Requests are answered one after the other, pipelined ones as well."""

    def __init__(self, handler: Handler, connections: "set[Connection]") -> None:
        self._handler = handler
        self._connections = connections
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._long: LongReply | None = None
        self._task: asyncio.Task[None] | None = None
        self._chunked = True
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._long is not None:
            long, self._long = self._long, None
            long.on_gone()

    def abort(self) -> None:
        self._transport.abort()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._work()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > MAX_HEAD + 2 * MAX_BODY:
            self._transport.abort()
            return
        self._work()

    # -- answering

    def _work(self) -> None:
        while self._long is None and self._task is None and not self._full and not self._transport.is_closing():
            try:
                call = self._next_call()
            except BadRequest as bad:
                self._send(text_error(bad.status, bad.why), head_only=False, keep_alive=False)
                return
            if call is None:
                return
            head, self._head = self._head, None
            assert head is not None
            self._answer(head, call)

    def _answer(self, head: _Head, call: Call) -> None:
        answer = _redirect(call) or self._handler(call)
        if isinstance(answer, Reply):
            self._send(answer, head_only=call.method == "HEAD", keep_alive=head.keep_alive)
        elif isinstance(answer, LongReply):
            self._chunked = head.version == b"HTTP/1.1"
            self._long = answer
            framing = (("Transfer-Encoding", "chunked"),) if self._chunked else (("Connection", "close"),)
            self._transport.write(_render_head(200, (*answer.headers, *framing)))
            answer.attach(self)
        else:
            self._task = asyncio.ensure_future(self._answer_later(answer, head, call))

    async def _answer_later(self, answer: Awaitable[Reply], head: _Head, call: Call) -> None:
        try:
            reply = await answer
        finally:
            self._task = None
        self._send(reply, head_only=call.method == "HEAD", keep_alive=head.keep_alive)
        self._work()

    def _send(self, reply: Reply, *, head_only: bool, keep_alive: bool) -> None:
        closing = () if keep_alive else (("Connection", "close"),)
        head = _render_head(reply.status, (*reply.headers, *closing, ("Content-Length", str(len(reply.body)))))
        self._transport.write(head if head_only else head + reply.body)
        if not keep_alive:
            self._transport.close()

    def chunk(self, body: bytes, *, last: bool) -> None:
        if self._chunked:
            body = b"%x\r\n%s\r\n%s" % (len(body), body, b"0\r\n\r\n" if last else b"")
        self._transport.write(body)
        if not last:
            if self._transport.get_write_buffer_size() > MAX_UNSENT:
                self._transport.abort()
            return
        self._long = None
        if not self._chunked:
            self._transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._work)

    # -- reading

    def _next_call(self) -> Call | None:
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD:
                    raise BadRequest(431, "431 Request Header Fields Too Large")
                return None
            self._head = _parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
            if self._head.expects:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._take_body(self._head.headers)
        if body is None:
            return None
        raw, _, query = self._head.target.partition(b"?")
        try:
            path = unescape(raw, plus=False)
        except ValueError:
            raise BadRequest(400, "400 Bad Request") from None
        return Call(self._head.method, path, query, self._head.headers, body)

    def _take_body(self, headers: dict[str, str]) -> bytes | None:
        coding = headers.get("transfer-encoding", "").lower()
        if coding:
            if coding != "chunked" or "content-length" in headers:
                raise BadRequest(501, "Unsupported transfer encoding")
            return self._take_chunks()
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise BadRequest(400, "400 Bad Request")
        size = int(length)
        if size > MAX_BODY:
            raise BadRequest(413, "http: request body too large")
        if len(self._buffer) < size:
            return None
        body = bytes(self._buffer[:size])
        del self._buffer[:size]
        return body

    def _take_chunks(self) -> bytes | None:
        at, body = 0, bytearray()
        while True:
            end = self._buffer.find(b"\r\n", at)
            if end < 0:
                return None
            try:
                size = int(self._buffer[at:end].partition(b";")[0], 16)
            except ValueError:
                raise BadRequest(400, "400 Bad Request") from None
            if size < 0 or len(body) + size > MAX_BODY:
                raise BadRequest(413, "http: request body too large")
            at = end + 2
            if size == 0:
                break
            if len(self._buffer) < at + size + 2:
                return None
            body += self._buffer[at : at + size]
            at += size + 2
        while True:  # trailers
            end = self._buffer.find(b"\r\n", at)
            if end < 0:
                return None
            if end == at:
                del self._buffer[: end + 2]
                return bytes(body)
            at = end + 2


def _parse_head(raw: bytes) -> _Head:
    first, *lines = raw.lstrip(b"\r\n").split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest(400, "400 Bad Request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise BadRequest(400, "400 Bad Request")
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    target = parts[1]
    if target.startswith((b"http://", b"https://")):
        target = b"/" + target.split(b"/", 3)[3] if target.count(b"/") > 2 else b"/"
    if not target.startswith(b"/"):
        raise BadRequest(400, "400 Bad Request")
    return _Head(parts[0].decode("latin-1"), target, parts[2], headers)


def clean_path(path: str) -> str:
    """`path` without `.`, `..` and doubled slashes; a slash at its end stays."""
    clean = posixpath.normpath("/" + path.lstrip("/"))
    return clean + "/" if path.endswith("/") and clean != "/" else clean


def _redirect(call: Call) -> Reply | None:
    clean = clean_path(call.path)
    if clean == call.path:
        return None
    place = quote(clean, safe="/$&+,:;=@", errors="surrogateescape")
    query = b"?" + call.query if call.query else b""
    target = place + query.decode("latin-1")
    if call.method not in ("GET", "HEAD"):
        return Reply(301, b"", (("Location", target),))
    page = f'<a href="{target.replace("&", "&amp;")}">Moved Permanently</a>.\n\n'.encode()
    return Reply(301, page, (("Content-Type", "text/html; charset=utf-8"), ("Location", target)))


_date: tuple[int, str] = (0, "")


def _render_head(status: int, headers: Headers) -> bytes:
    global _date  # noqa: PLW0603 - one formatted date for each second
    second = int(time.time())
    if _date[0] != second:
        _date = (second, formatdate(second, usegmt=True))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}Date: {_date[1]}\r\n\r\n".encode("latin-1")
