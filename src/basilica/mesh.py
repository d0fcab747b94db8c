"""The mesh gate as a rank sees it: wait until the operator has released this host.

    basilica.mesh_wait(timeout=60)      # before torch.distributed.init_process_group()
    basilica.mesh_status()              # "ready" | "degraded" | "timeout", or None where there was nothing to wait for

Only a *look* at a key releases. The two keys are looked at independently, each on a connection of its own: a look that
gets no answer hides nothing of the other key. Ready wins, so a look that finds the degraded key leads to one more at
the ready key, and releases as degraded when that finds nothing, or gets no answer. A *watch* (a long poll) on each key
merely says when to look; it is opened after the first look and leads to another one as soon as it stands, so that a key
written in between is not missed. Looks come every two seconds all the same: a server may have no watches, and a watch
may die silently.

Nothing here blocks but the one wait for all sockets together, so no peer can hold it past its deadline. It runs inside
other people's images: standard library only, nothing else of this package, and no exception leaves it but those that
are meant to end the program (KeyboardInterrupt) or the task (cancellation).
"""

import base64
import contextlib
import errno
import json
import math
import os
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

__all__ = ["main", "mesh_status", "mesh_wait", "mesh_wait_async"]

Status = Literal["ready", "degraded", "timeout"]
Address = tuple[int, int, int, str, Any]
Say = Callable[[str], None]

NODE_ENVS = ("NODE_NAME", "KUBERNETES_NODE_NAME")
ENDPOINT_ENV = "BASILICA_RDZV_ENDPOINT"
DEFAULT_PORT = 2379
DEFAULT_SECONDS = 60.0

LOOK_EVERY = 2.0
LOOK_AGAIN = 0.25  # after a look that got no answer, a refused connection for instance: the rendezvous may be starting
LOOKS_AT_ONCE = 4  # at each key: a slow server has 4 x 2 s to answer before its oldest look is given up
CONFIRM = 0.5  # how long the ready key may take to answer once the degraded one is there
GRACE = 0.5  # for the last look, which starts at the deadline; with `timeout=0` it is the only one
NEXT_ADDRESS = 0.3  # a host with several addresses: how long each may take to connect before the next is tried
WATCH_AGAIN = 2.0  # after a watch that ended at once
WATCH_NEWS = 16  # a watch that talks more than this is no watch
REPLY_BYTES = 65536

READY, DEGRADED = "mesh-ready", "mesh-degraded"

_last: Status | None = None


def mesh_status() -> Status | None:
    """How this process's last wait ended; None before any wait, during one, and where there was nothing to wait for."""
    return _last


def mesh_wait(timeout: float | None = DEFAULT_SECONDS) -> None:
    """Block until this host is released, for `timeout` seconds at most; says on stderr how it went and never raises.

    There is no wait without limit: None, NaN, infinity and what is no number mean 60 s. Zero or less looks once.
    """
    try:
        if gate := _begin(timeout, _say):
            with contextlib.closing(gate):
                while gate.outcome is None:
                    gate.turn(gate.due())
            _end(gate, _say)
    except Exception as error:  # noqa: BLE001 - a defect here must not cost anybody's training
        _fail(error, _say)


async def mesh_wait_async(timeout: float | None = DEFAULT_SECONDS) -> None:
    """`mesh_wait` for an event loop: the same rules, and it can be cancelled at any time."""
    await wait_saying(_say, timeout)


async def wait_saying(say: Say, timeout: float | None = DEFAULT_SECONDS) -> None:
    """`mesh_wait_async` for a caller who has a voice of its own: what there is to say goes to `say`."""
    import asyncio  # noqa: PLC0415 - importing this module stays cheap

    try:
        if gate := _begin(timeout, say):
            with contextlib.closing(gate):
                loop, stirred = asyncio.get_running_loop(), asyncio.Event()
                loop.add_reader(gate.fileno(), stirred.set)
                try:
                    while gate.outcome is None:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(gate.due()):
                                await stirred.wait()
                        stirred.clear()
                        gate.turn(0)
                finally:
                    loop.remove_reader(gate.fileno())
            _end(gate, say)
    except Exception as error:  # noqa: BLE001 - as above
        _fail(error, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """`basilica mesh-wait --timeout 60`: always 0, even for arguments nobody knows."""
    import argparse  # noqa: PLC0415 - importing this module stays cheap

    parser = argparse.ArgumentParser(prog="mesh-wait", description="Wait until this host's network is released.")
    parser.add_argument("--timeout", default=DEFAULT_SECONDS, help="seconds to wait at most (default 60)")
    timeout: Any = DEFAULT_SECONDS
    try:
        timeout = parser.parse_known_args(arguments)[0].timeout
    except SystemExit as done:
        if not done.code:
            return 0
    mesh_wait(timeout)
    return 0


# What is said, and what is remembered.


def _begin(timeout: object, say: Say) -> "_Gate | None":
    """The gate to wait at, or None if there is none or it cannot be asked; what it means is said and remembered."""
    global _last  # noqa: PLW0603 - `mesh_status()` is specified as a question to the module
    _last = None
    node = next(filter(None, map(os.environ.get, NODE_ENVS)), None)
    endpoint = os.environ.get(ENDPOINT_ENV, "").strip()
    if not node or not endpoint:
        say(f"SKIP {' and '.join(NODE_ENVS) if not node else ENDPOINT_ENV} not set: not a distributed pod")
        return None
    limit = _seconds(timeout)
    where = f"node={_shown(node)} endpoint={_shown(endpoint)}"
    say(f"BEGIN {where} timeout={limit:g}s")
    place = _parse_endpoint(endpoint)
    if place is None:
        _last = "timeout"
        say(f"TIMEOUT after=0s {where}: {ENDPOINT_ENV} is not host:port")
        return None
    return _Gate(node, *place, limit, where)


def _end(gate: "_Gate", say: Say) -> None:
    global _last  # noqa: PLW0603 - as above
    _last = gate.outcome
    after = f"after={int(time.monotonic() - gate.began)}s"
    if _last == "ready":
        say(f"OK {after}")
    elif _last == "degraded":
        say(f"DEGRADED {after} {gate.where}: not all hosts reach each other, the rank starts all the same")
    else:
        say(f"TIMEOUT {after} {gate.where}: {gate.note}")


def _fail(error: Exception, say: Say) -> None:
    global _last  # noqa: PLW0603 - as above
    _last = "timeout"
    say(f"TIMEOUT gave up: {_reason(error)}")


def _say(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, missing or somebody's object
        sys.stderr.write(f"mesh-wait: {text}\n")
        sys.stderr.flush()


def _shown(text: str) -> str:
    """Somebody's text for a log line: it stays one line and one word, of bearable length."""
    text = text if len(text) <= 253 else text[:250] + "..."
    return text if text.isprintable() and " " not in text else ascii(text)


def _reason(error: Exception) -> str:
    return _shown(getattr(error, "strerror", None) or str(error) or type(error).__name__).strip("'")


def _seconds(timeout: Any) -> float:
    try:
        seconds = float(timeout)
    except Exception:  # noqa: BLE001 - `__float__` is the caller's code
        return DEFAULT_SECONDS
    return max(seconds, 0.0) if math.isfinite(seconds) else DEFAULT_SECONDS


def _parse_endpoint(text: str) -> tuple[str, int] | None:
    """Host and port of `host`, `host:port`, `[v6]`, `[v6]:port` or a bare v6 address; None for anything else."""
    text = text.removeprefix("http://").rstrip("/")
    if text.count(":") > 1 and not text.startswith("["):
        host, port = text, ""
    elif match := re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{0,5}))?", text):
        host, port = match[1] or match[2], match[3] or ""
    else:
        return None
    number = int(port or DEFAULT_PORT)
    if not 0 < number < 65536 or not host.isprintable() or re.search(r"[\s/@?#\\]", host):
        return None
    return host, number


# The two dialects, without any I/O.


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: Mapping[bytes, bytes]
    body: bytes
    complete: bool

    @property
    def reusable(self) -> bool:
        """Whether the connection is at the start of the next answer."""
        closes = b"close" in self.headers.get(b"connection", b"").lower()
        return self.complete and not closes and (b"content-length" in self.headers or b"chunked" in self.coding)

    @property
    def coding(self) -> bytes:
        return self.headers.get(b"transfer-encoding", b"").lower()

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def _parse_reply(data: bytes, *, ended: bool) -> _Reply | None:
    """The answer at the start of `data`, as far as it came; None before its headers are whole."""
    while True:
        if not data.startswith(b"HTTP/1.") and not b"HTTP/1.".startswith(data[:7]):
            raise ValueError("the answer is not HTTP")
        blank = re.search(rb"\r?\n\r?\n", data)
        if blank is None:
            if ended or len(data) > REPLY_BYTES:
                raise ValueError("the answer broke off" if ended else "the answer's headers do not end")
            return None
        first, *lines = data[: blank.start()].splitlines() or [b""]
        match = re.match(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: |$)", first)
        if match is None:
            raise ValueError("the answer is not HTTP")
        status, data = int(match[1]), data[blank.end() :]
        if status >= 200:
            break
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    reply = _Reply(status, headers, data, ended or status in (204, 304))
    length = headers.get(b"content-length", b"")
    if b"chunked" in reply.coding:
        body, complete = _dechunk(data)
        return _Reply(status, headers, body, complete)
    if re.fullmatch(rb"[0-9]{1,9}", length):
        return _Reply(status, headers, data[: int(length)], len(data) >= int(length))
    return reply


def _dechunk(data: bytes) -> tuple[bytes, bool]:
    body = b""
    while match := re.match(rb"([0-9a-fA-F]{1,8})[^\r\n]*\r\n", data):
        size, start = int(match[1], 16), match.end()
        if size == 0:
            return body, data.endswith(b"\r\n\r\n")
        body += data[start : start + size]
        data = data[start + size + 2 :]
    return body, False


@dataclass(frozen=True, slots=True)
class _Finding:
    """Whether the key is there, and which API the server turned out to have."""

    there: bool
    api: Literal["v2", "v3"] | None
    note: str


@dataclass(frozen=True, slots=True)
class _Requests:
    """Every question that is ever asked, as bytes."""

    node: str
    host: str
    port: int

    def get(self, key: str, *, wait: bool = False) -> bytes:
        path = f"/v2/keys/basilica/{key}/{quote(os.fsencode(self.node), safe='')}"
        return self._bytes("GET", path + ("?wait=true" if wait else ""), b"")

    def range(self, key: str) -> bytes:
        return self._bytes("POST", "/v3/kv/range", json.dumps({"key": self._v3(key)}).encode())

    def watch(self, key: str) -> bytes:
        return self._bytes("POST", "/v3/watch", json.dumps({"create_request": {"key": self._v3(key)}}).encode())

    def _v3(self, key: str) -> str:
        return base64.b64encode(f"/basilica/{key}/".encode() + os.fsencode(self.node)).decode()

    def _bytes(self, method: str, path: str, body: bytes) -> bytes:
        host = self.host.partition("%")[0]
        host = f"[{host}]" if ":" in host else host
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{self.port}\r\nAccept: application/json\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode("ascii", "replace") + body

    def look(self, key: str, api: str | None) -> Generator[bytes, _Reply, _Finding]:
        """Ask for a key: yields requests, is sent the answers, returns what they mean."""
        note = "neither key is there"
        if api != "v3":
            reply = yield self.get(key)
            if reply.status == 200:
                return _Finding(True, "v2", "")
            if b"x-etcd-index" in reply.headers or "errorCode" in reply.json():
                return _Finding(False, "v2", note if reply.status == 404 else f"the rendezvous answers {reply.status}")
            note = f"the rendezvous answers {reply.status} and has no keys API"
        reply = yield self.range(key)
        answer = reply.json()
        if reply.status != 200 or "header" not in answer:
            return _Finding(False, None, note)
        return _Finding(bool(answer.get("kvs")), "v3", "neither key is there")


# The sockets.


class _Line:
    """One connection that never blocks; `stirred` is called whenever something happened on it."""

    def __init__(self, selector: selectors.BaseSelector, address: Address, stirred: Callable[[], None]) -> None:
        family, _, protocol, _, self.peer = address
        self.selector, self.stirred = selector, stirred
        self.outgoing, self.incoming = b"", b""
        self.connected = self.ended = False
        self.sock = socket.socket(family, socket.SOCK_STREAM, protocol)
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self.sock.connect_ex(self.peer)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            selector.register(self.sock, selectors.EVENT_WRITE, self)
        except BaseException:
            self.sock.close()
            raise

    def send(self, data: bytes) -> None:
        self.incoming, self.outgoing = b"", data
        self.selector.modify(self.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def pump(self) -> bool:
        """Move what can be moved; whether anything was received. OSError: the connection is gone."""
        if not self.connected:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if self.sock.getsockname() == self.sock.getpeername():  # nobody listens, and TCP met itself
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            self.connected = True
        with contextlib.suppress(BlockingIOError):
            if self.outgoing:
                self.outgoing = self.outgoing[self.sock.send(self.outgoing) :]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)
        self.selector.modify(self.sock, wanted, self)
        try:
            data = self.sock.recv(REPLY_BYTES)
        except BlockingIOError:
            return False
        self.ended = not data
        self.incoming += data
        return True

    def close(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.sock)
        self.sock.close()


@dataclass(slots=True, eq=False)
class _Look:
    key: str
    script: Generator[bytes, _Reply, _Finding]
    request: bytes
    addresses: list[Address]
    line: _Line | None = None
    reused: bool = False
    give_up_connecting: float = math.inf


@dataclass(slots=True, eq=False)
class _Watch:
    key: str
    line: _Line
    began: float
    news: int = 0


@dataclass(slots=True, eq=False)
class _Names:
    """The host's addresses, asked for in a thread of its own because the resolver may hang."""

    wake: socket.socket
    found: list[Address] = field(default_factory=list)
    error: Exception | None = None
    done: bool = False

    def ask(self, host: str, port: int) -> None:
        try:
            self.found = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001 - UnicodeError and others beside OSError; all are told
            self.error = error
        self.done = True
        with contextlib.suppress(OSError):  # nobody waits any more
            self.wake.send(b".")


class _Gate:
    """One wait. `turn` does whatever can be done now; `outcome` is set when it is over."""

    def __init__(self, node: str, host: str, port: int, limit: float, where: str) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + limit
        self.where, self.host, self.port = where, host, port
        self.note = "no answer"
        self.outcome: Status | None = None
        self.requests = _Requests(node, host, port)
        self.api: Literal["v2", "v3"] | None = None
        self.addresses: list[Address] = []
        self.literal = False
        self.names: _Names | None = None
        self.next_look = self.began
        self.closing = False  # the deadline has passed, and the last look was asked for
        self.last_looks: list[_Look] = []
        self.degraded_at = math.inf  # when the degraded key was found
        self.confirming: _Look | None = None  # the look at the ready key after that
        self.looks: list[_Look] = []
        self.spares: dict[str, _Line] = {}
        self.watches: dict[str, _Watch] = {}
        self.watch_after = {READY: 0.0, DEGRADED: 0.0}
        self.selector = selectors.DefaultSelector()
        self.wake, self.waker = socket.socketpair()
        self.wake.setblocking(False)
        self.waker.setblocking(False)
        self.selector.register(self.wake, selectors.EVENT_READ)
        with contextlib.suppress(OSError, ValueError):
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            self.addresses = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
            self.literal = True

    def fileno(self) -> int:
        """Readable when `turn` has something to do (the selector is an epoll, which can itself be waited for)."""
        return self.selector.fileno()

    def close(self) -> None:
        watching = [watch.line for watch in self.watches.values()]
        for line in (*(look.line for look in self.looks), *watching, *self.spares.values()):
            if line is not None:
                line.close()
        self.selector.close()
        self.wake.close()
        self.waker.close()

    def due(self) -> float:
        """Seconds until `turn` must be called even if nothing stirs."""
        now = time.monotonic()
        next_step = self.deadline + GRACE if self.closing else min(self.deadline, self.next_look)
        connecting = (look.give_up_connecting for look in self.looks)
        return max(0.0, min(next_step, self.degraded_at + CONFIRM, *connecting) - now)

    def turn(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            if isinstance(key.data, _Line):
                key.data.stirred()
            else:
                self._named()
            if self.outcome:
                return
        now = time.monotonic()
        for look in [look for look in self.looks if look.give_up_connecting <= now]:
            self._lost(look, TimeoutError("no connection in time"))
        if now >= min(self.degraded_at + CONFIRM, self.deadline + GRACE):
            self._give_up()
        elif now >= self.deadline:
            self.closing = True
            if not self.last_looks and self.confirming is None:
                self._start_looks()
        elif now >= self.next_look:
            self._start_looks()

    def _give_up(self) -> None:
        """No more looks: what was found decides."""
        if self.outcome is None:
            self.outcome = "timeout" if self.degraded_at == math.inf else "degraded"

    def _resolve(self) -> None:
        if self.names is None:
            names = _Names(self.waker)
            self.note = f"{_shown(self.host)}: no answer from the resolver"
            with contextlib.suppress(RuntimeError):  # no more threads: perhaps at the next look
                threading.Thread(target=names.ask, args=(self.host, self.port), daemon=True).start()
                self.names = names

    def _forget_addresses(self) -> None:
        """The name may stand for another address by now."""
        if not self.literal:
            self.addresses = []

    def _named(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.wake.recv(64)
        if self.names and self.names.done:
            self.addresses, error = self.names.found, self.names.error
            self.names = None
            if self.addresses:
                self.next_look = 0.0
            else:
                self.note = f"{_shown(self.host)}: {_reason(error or OSError('no address'))}"
                self.next_look = time.monotonic() + LOOK_AGAIN
                if self.closing:
                    self._give_up()

    def _start_looks(self) -> None:
        self.next_look = time.monotonic() + LOOK_EVERY
        started = [self._start_look(key) for key in (READY, DEGRADED)]
        if self.closing:
            self.last_looks = [look for look in started if look in self.looks]

    def _start_look(self, key: str) -> _Look | None:
        before = [look for look in self.looks if look.key == key]
        if len(before) >= LOOKS_AT_ONCE:
            self.note = "no answer"
            self._forget_addresses()
            self._drop(before[0])
        if not self.addresses:
            self._resolve()
            return None
        script = self.requests.look(key, self.api)
        look = _Look(key, script, next(script), list(self.addresses))
        self.looks.append(look)
        spare = self.spares.pop(key, None)
        if spare is not None:
            look.line, look.reused = spare, True
            spare.stirred = lambda: self._look_stirred(look)
            spare.send(look.request)
            self._look_stirred(look)
        else:
            self._connect(look, None)
        return look

    def _connect(self, look: _Look, error: Exception | None) -> None:
        """Open the look's next connection; without another address the look has failed."""
        while look.addresses:
            address = look.addresses.pop(0)
            try:
                look.line = _Line(self.selector, address, lambda: self._look_stirred(look))
            except OSError as failed:
                error = failed
                continue
            look.line.outgoing = look.request
            look.give_up_connecting = time.monotonic() + NEXT_ADDRESS if look.addresses else math.inf
            return
        self._drop(look)
        self._forget_addresses()
        self._unanswered(look, error)

    def _lost(self, look: _Look, error: Exception) -> None:
        """The look's connection failed: an idle one had been closed meanwhile, or this address does not answer."""
        connected = look.line is not None and look.line.connected
        if look.line:
            look.line.close()
            look.line = None
        look.give_up_connecting = math.inf
        if look.reused:
            look.reused, look.addresses = False, list(self.addresses)
        elif connected:  # it is the right place, and what it says is no answer
            self._drop(look)
            self._unanswered(look, error)
            return
        self._connect(look, error)

    def _unanswered(self, look: _Look, error: Exception | None) -> None:
        self.api = None
        if error:
            self.note = _reason(error)
        self._over(look)
        self.next_look = min(self.next_look, time.monotonic() + LOOK_AGAIN)

    def _drop(self, look: _Look) -> None:
        if look in self.looks:
            self.looks.remove(look)
        if look.line:
            look.line.close()
            look.line = None

    def _look_stirred(self, look: _Look) -> None:
        line = look.line
        if line is None or look not in self.looks:
            return
        try:
            received = line.pump()
            look.give_up_connecting = math.inf
            reply = _parse_reply(line.incoming, ended=line.ended) if received else None
        except (OSError, ValueError) as error:
            self._lost(look, error)
            return
        if reply is None or not (
            reply.complete
            or line.ended
            or len(line.incoming) > REPLY_BYTES
            or (reply.status == 200 and look.request.startswith(b"GET"))  # that is all a key has to say
        ):
            return
        look.reused = False
        try:
            look.request = look.script.send(reply)
        except StopIteration as finished:
            self._answered(look, finished.value, line if reply.reusable else None)
            return
        if reply.reusable:
            look.reused = True  # a server may close after an answer without having said so
            line.send(look.request)
            return
        line.close()
        look.addresses = [address for address in self.addresses if address[4] == line.peer] or list(self.addresses)
        self._connect(look, None)

    def _answered(self, look: _Look, finding: _Finding, line: _Line | None) -> None:
        peer = look.line.peer if look.line else None
        self.addresses.sort(key=lambda address: address[4] != peer)  # the one that answers comes first
        if line and look.key not in self.spares:
            look.line = None
            line.incoming, line.stirred = b"", lambda: self._spare_stirred(look.key)
            self.spares[look.key] = line
        self._drop(look)
        self.api, self.note = finding.api, finding.note
        if finding.there and look.key == READY:
            self.outcome = "ready"
        elif finding.there and self.degraded_at == math.inf:
            self.degraded_at = time.monotonic()
            self.confirming = self._start_look(READY)
        self._over(look)
        if self.outcome is None and finding.api is not None:
            self._watch_again(finding.api)

    def _over(self, look: _Look) -> None:
        """The look releases nobody as ready. Whether it was the last that could."""
        if look in self.last_looks:
            self.last_looks.remove(look)
            if not self.last_looks and (self.degraded_at == math.inf or self.confirming is None):
                self._give_up()
        if look is self.confirming:
            self._give_up()

    def _spare_stirred(self, key: str) -> None:
        """An idle connection has nothing to say, so it was closed."""
        spare = self.spares.pop(key, None)
        if spare is not None:
            spare.close()

    def _watch_again(self, api: Literal["v2", "v3"]) -> None:
        now = time.monotonic()
        for key in (READY, DEGRADED):
            if key in self.watches or now < self.watch_after[key] or not self.addresses:
                continue
            with contextlib.suppress(OSError):
                line = _Line(self.selector, self.addresses[0], lambda: None)
                line.outgoing = self.requests.get(key, wait=True) if api == "v2" else self.requests.watch(key)
                watch = self.watches[key] = _Watch(key, line, now)
                line.stirred = lambda watch=watch: self._watch_stirred(watch)  # type: ignore[misc]

    def _watch_stirred(self, watch: _Watch) -> None:
        line = watch.line
        try:
            received = line.pump()
            reply = _parse_reply(line.incoming, ended=line.ended) if received else None
        except (OSError, ValueError):
            self._watch_over(watch)
            return
        if reply is None:
            return
        watch.news += 1
        if reply.status == 200:
            self.next_look = 0.0
        over = reply.complete or line.ended or len(line.incoming) > REPLY_BYTES or watch.news > WATCH_NEWS
        if over or reply.status != 200:
            self._watch_over(watch)

    def _watch_over(self, watch: _Watch) -> None:
        now = time.monotonic()
        watch.line.close()
        del self.watches[watch.key]
        quick = now - watch.began < LOOK_AGAIN
        self.watch_after[watch.key] = now + WATCH_AGAIN if quick else 0.0
        if not quick:
            self.next_look = 0.0


if __name__ == "__main__":
    sys.exit(main())
