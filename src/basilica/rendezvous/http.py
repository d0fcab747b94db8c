"""A small HTTP/1.1 server on asyncio's transports.

A request is answered inside the callback that read it, no task, no future, no thread, unless its lane has had its part
of this turn of the loop (see `lane`). A long poll is a connection that
has sent its headers and waits for somebody to call `chunk`; ten thousand of them are ten thousand
sockets and small objects.
"""

import asyncio
import json
import posixpath
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import quote

from basilica.rendezvous.keyspace import EtcdError
from basilica.rendezvous.lane import REFUSED_AT_ONCE, Lane
from basilica.rendezvous.request import unescape

MAX_HEAD = 64 << 10
MAX_BODY = 10 << 20  # what Go's form parser takes
REFUSAL_READ_WITHIN_S = 2.0
LARGE_REPLY = 64 << 10
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
    """One client. Requests are answered one after the other, pipelined ones as well.

    `within`: the connection is for one request, and ends after so many seconds in any case.
    """

    def __init__(self, handler: Handler, lane: Lane, *, within: float | None = None) -> None:
        self._handler = handler
        self._lane = lane
        self._within = within
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._long: LongReply | None = None
        self._task: asyncio.Task[None] | None = None
        self._chunked = True
        self._full = False
        self._counted = 0  # bytes of ours that the lane counts as waiting
        self._chunk_body = bytearray()  # of a chunked body, as far as it came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._within is not None:
            asyncio.get_running_loop().call_later(self._within, transport.abort)
        refusal = self._lane.refusal(transport)
        if refusal is None:
            self._lane.connections.add(self)
        else:
            self._refuse(refusal)

    def _refuse(self, refusal: EtcdError) -> None:
        """Say why without waiting for a request, then end; the few that are being told are all that may be open."""
        if len(self._lane.refused) >= REFUSED_AT_ONCE:
            self._transport.abort()
            return
        self._lane.refused.add(self)
        body = (json.dumps(refusal.body()) + "\n").encode()
        kind = (("Content-Type", "application/json"),)
        self._send(Reply(refusal.status, body, kind), head_only=False, keep_alive=True, closing=True)
        # To close while a request is on its way would take the answer back.
        asyncio.get_running_loop().call_later(REFUSAL_READ_WITHIN_S, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lane.leave(self)
        self._buffer.clear()
        self._chunk_body.clear()
        self._count()
        if self._long is not None:
            long, self._long = self._long, None
            long.on_gone()

    def abort(self) -> None:
        self._transport.abort()

    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def hold_back(self, hold: bool) -> None:
        if not self._transport.is_closing():
            if hold:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._full = True
        self._lane.clogged.add(self)
        if not self._lane.has_room():
            self._transport.abort()

    def resume_writing(self) -> None:
        self._full = False
        self._lane.clogged.discard(self)
        self._lane.serve(self)

    def data_received(self, data: bytes) -> None:
        if self in self._lane.refused:
            self._transport.close()
            return
        self._buffer += data
        self._count()
        if len(self._buffer) > MAX_HEAD + 2 * self._lane.body_max:
            self._transport.abort()
        elif not self._lane.has_room():
            self._give_up("too much is waiting for an answer on the connections of this keyspace")
        else:
            self._lane.serve(self)

    def _count(self) -> None:
        """Let the lane know how many bytes wait here."""
        now = len(self._buffer) + len(self._chunk_body)
        self._lane.buffered += now - self._counted
        self._counted = now

    def _give_up(self, why: str) -> None:
        self._send(text_error(503, why), head_only=False, keep_alive=False)

    # -- answering

    def answer_next(self) -> bool:
        """Answer a request that has come whole; False if there is none, or it cannot be answered yet."""
        if self._long is not None or self._task is not None or self._full or self._transport.is_closing():
            return False
        try:
            call = self._next_call()
        except BadRequest as bad:
            self._send(text_error(bad.status, bad.why), head_only=False, keep_alive=False)
            return False
        self._count()
        if call is None:
            return False
        head, self._head = self._head, None
        assert head is not None
        self._answer(head, call)
        return True

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
        self._lane.serve(self)

    def _send(self, reply: Reply, *, head_only: bool, keep_alive: bool, closing: bool = False) -> None:
        """`closing`: say that the connection ends, and leave it to the caller to end it."""
        keep_alive = keep_alive and (self._within is None or closing)
        if len(reply.body) > LARGE_REPLY and not self._lane.has_room(len(reply.body)):
            self._transport.abort()  # its readers are that far behind: this answer would only wait with the others
            return
        last = () if keep_alive and not closing else (("Connection", "close"),)
        head = _render_head(reply.status, (*reply.headers, *last, ("Content-Length", str(len(reply.body)))))
        self._transport.write(head if head_only else head + reply.body)
        if not keep_alive:
            self._transport.close()

    def chunk(self, body: bytes, *, last: bool) -> None:
        if self._chunked:
            body = b"%x\r\n%s\r\n%s" % (len(body), body, b"0\r\n\r\n" if last else b"")
        self._transport.write(body)
        if not last:
            if self.unsent() > MAX_UNSENT or (self._full and not self._lane.has_room()):
                self._transport.abort()
            return
        self._long = None
        if not self._chunked:
            self._transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._lane.serve, self)

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
        if size > self._lane.body_max:
            raise BadRequest(413, "http: request body too large")
        if len(self._buffer) < size:
            return None
        body = bytes(self._buffer[:size])
        del self._buffer[:size]
        return body

    def _take_chunks(self) -> bytes | None:
        """The body once it is whole; what came is taken out of the buffer piece by piece, and looked at once."""
        while True:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD:
                    raise BadRequest(400, "400 Bad Request")
                return None
            try:
                size = int(self._buffer[:end].partition(b";")[0], 16)
            except ValueError:
                raise BadRequest(400, "400 Bad Request") from None
            if size < 0 or len(self._chunk_body) + size > self._lane.body_max:
                raise BadRequest(413, "http: request body too large")
            if size == 0:
                return self._take_trailers(end + 2)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunk_body += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]

    def _take_trailers(self, at: int) -> bytes | None:
        while True:
            end = self._buffer.find(b"\r\n", at)
            if end < 0:
                if len(self._buffer) > MAX_HEAD:
                    raise BadRequest(431, "431 Request Header Fields Too Large")
                return None
            if end == at:
                del self._buffer[: end + 2]
                body, self._chunk_body = bytes(self._chunk_body), bytearray()
                return body
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
