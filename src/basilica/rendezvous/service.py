"""The rendezvous service: one process, many keyspaces, a port for each.

It stands beside the control plane and outlives it. What is open, on which port and with which keys is in the data
folder: a service that was killed comes back with all of it.

    DATA/lock                        held while a service runs, with its pid
    DATA/control.sock                open, close and list keyspaces, and hold the service (HTTP)
    DATA/keyspaces/NAME/about        name and port
    DATA/keyspaces/NAME/snapshot, journal
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from basilica.rendezvous.client import HEARTBEATS
from basilica.rendezvous.http import Call, Connection, LongReply, Reply, text_error
from basilica.rendezvous.journal import FSYNC_EVERY_S, Journal, JournalDamaged, replace_file, sync_folder
from basilica.rendezvous.keyspace import INTERNAL, SECOND, EtcdError, Event, Request
from basilica.rendezvous.names import HEARD
from basilica.rendezvous.presence import AGENT, Changes, Presence
from basilica.rendezvous.request import parse_form, parse_request, unescape
from basilica.rendezvous.standby import Standby

log = logging.getLogger(__name__)

PORTS = range(20000, 29000)  # below the kernel's own choice, so that nobody takes one while the service is away
BIND_AGAIN_S = 0.2
LET_GO_WITHIN_S = 1.0
LOCKED_WITHIN_S = 1.0
CONTROL = "control"
KEYS = "/v2/keys"
METHODS = ("HEAD", "GET", "PUT", "POST", "DELETE")
VERSION = {"etcdserver": "3.4.23", "etcdcluster": "3.4.0"}  # what clients may expect of us
RAFT_TERM = "2"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
JSON = ("Content-Type", "application/json")


class RendezvousError(Exception):
    """An order to the service that it cannot follow."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status, self.why = status, why

    def __str__(self) -> str:
        return self.why


class KeyspaceServer:
    """The keys API of one keyspace. Everything but the socket."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        clock: Callable[[], int] = time.time_ns,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """`written` is called after each write, which is then in the journal and not yet on the disk."""
        self.journal = journal
        self._written = written
        self.keyspace = journal.keyspace
        self._clock = clock
        self._cluster = ("X-Etcd-Cluster-Id", f"{int(hashlib.sha256(name.encode()).hexdigest()[:16], 16):x}")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for = 0
        self._presence = Presence()
        self._presence_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Let keys expire from now on, and those first that did while nobody looked."""
        self._expire(self._clock())
        with contextlib.suppress(EtcdError):  # no such key: nobody was heard from before
            self.keyspace.get(Request(method="GET", path=HEARD), self._clock())
            self._write(Request(method="DELETE", path=HEARD, recursive=True, dir=True))
        self._arm()

    def stop(self) -> None:
        for timer in (self._timer, self._presence_timer):
            if timer is not None:
                timer.cancel()
        self.journal.close()

    def handle(self, call: Call) -> Reply | LongReply:
        path = call.path
        if path == KEYS or path.startswith(KEYS + "/"):
            if call.method not in METHODS:
                return _not_allowed(*METHODS)
            try:
                return self._keys(call)
            except EtcdError as error:
                headers = (self._cluster, JSON, ("X-Etcd-Index", str(error.index)))
                return Reply(error.status, _json(error.body()), headers)
        if path.startswith(HEARTBEATS + "/"):
            return self._heartbeat(call) if call.method == "PUT" else _not_allowed("PUT")
        if path == "/v2/machines":
            if call.method not in ("GET", "HEAD"):
                return _not_allowed("GET", "HEAD")
            # The address that the client used is one that it can reach.
            return _text(f"http://{call.headers.get('host', '127.0.0.1')}")
        if path in ("/version", "/health"):
            if call.method != "GET":
                return _not_allowed("GET")
            if path == "/health":
                return _text('{"health":"true"}')
            return Reply(200, _json(VERSION)[:-1], (JSON,))
        return text_error(404, "404 page not found")

    def _keys(self, call: Call) -> Reply | LongReply:
        now = self._clock()
        form = parse_form(call.query, call.form_body)
        request = parse_request(call.method, "/" + call.path[len(KEYS) :].strip("/"), form, now)
        self._expire(now)
        if call.method in ("GET", "HEAD"):
            if request.wait and not request.quorum:
                return self._watch(request)
            event = self.keyspace.get(request, now)
        else:
            event = self._write(request, now)
        short = request.no_value and event.action in ("set", "compareAndSwap", "create", "update")
        body = {"action": event.action} if short else event.body()
        return Reply(201 if event.created else 200, _json(body), self._headers(event.etcd_index))

    def _write(self, request: Request, now: int | None = None) -> Event:
        now = self._clock() if now is None else now
        try:
            self.journal.record(request, now)
        except OSError as error:
            raise EtcdError(INTERNAL, f"the journal cannot be written: {error}") from error
        self._written()
        event = self.keyspace.write(request, now)
        self._arm()
        return event

    # -- heartbeats

    def _heartbeat(self, call: Call) -> Reply:
        agent, form = call.path.removeprefix(HEARTBEATS + "/"), parse_form(call.query, call.form_body)
        try:
            every = float(form["every"][0])
            gap = float(form["gap"][0]) if "gap" in form else None
            if not (AGENT.fullmatch(agent) and every > 0 and (gap is None or 0 <= gap < math.inf)):
                raise ValueError
        except (KeyError, ValueError):
            return text_error(400, "a heartbeat names an agent, and after how many seconds the next one comes")
        self._publish(self._presence.heard(agent, every, gap, time.monotonic()))
        return Reply(204)

    def _publish(self, changes: Changes) -> None:
        """Write what changed. What the journal does not take is lost: who reads it waits longer, and nothing worse."""
        for key, value in changes.items():
            try:
                if value is None:
                    self._write(Request(method="DELETE", path=key))
                else:
                    self._write(Request(method="PUT", path=key, value=value))
            except EtcdError as error:
                log.error("%s is not published: %s", key, error)
        moment = self._presence.look_at()
        if moment is not None and (self._presence_timer is None or moment < self._presence_timer.when()):
            if self._presence_timer is not None:
                self._presence_timer.cancel()
            wait = max(moment - time.monotonic(), 0.0) + 0.001
            self._presence_timer = asyncio.get_running_loop().call_later(wait, self._look_for_the_silent)

    def _look_for_the_silent(self) -> None:
        self._presence_timer = None
        self._publish(self._presence.fallen_silent(time.monotonic()))

    # -- waiting

    def _watch(self, request: Request) -> LongReply:
        def deliver(event: Event) -> None:
            reply.chunk(_json(event.body()), last=not request.stream)

        watcher, past = self.keyspace.watch(
            request.path, deliver, recursive=request.recursive, stream=request.stream, since=request.wait_index
        )
        reply = LongReply(self._headers(watcher.start_index), lambda: self.keyspace.unwatch(watcher))
        if past is not None:
            deliver(past)
        return reply

    def _headers(self, index: int) -> tuple[tuple[str, str], ...]:
        raft = ("X-Raft-Index", str(self.keyspace.raft_index))
        return (self._cluster, JSON, ("X-Etcd-Index", str(index)), raft, ("X-Raft-Term", RAFT_TERM))

    def _expire(self, now: int) -> None:
        deadline = self.keyspace.next_deadline()
        if deadline is None or deadline > now:
            return
        try:
            self.journal.record_sync(now)
            self._written()
        except OSError:
            log.exception("expired keys stay: the journal in %s cannot be written", self.journal.folder)
            return
        self.keyspace.sync(now)

    def _arm(self) -> None:
        """Wake up at the next deadline; a later one than was planned for is found out then."""
        deadline = self.keyspace.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_for <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        wait = min(max(deadline - self._clock(), 0) / SECOND + 0.001, 60.0)
        self._timer_for = deadline
        self._timer = asyncio.get_running_loop().call_later(wait, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._expire(self._clock())
        self._arm()


@dataclass(slots=True)
class Hosted:
    """An open keyspace: `server` is None while its files cannot be read, `listener` while its port cannot be had."""

    name: str
    port: int
    folder: Path
    server: KeyspaceServer | None = None
    listening: socket.socket | None = None
    listener: asyncio.Server | None = None
    fault: str | None = None
    connections: set[Connection] = field(default_factory=set)

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "port": self.port, "serving": self.listener is not None, "fault": self.fault}


class Service:
    """All keyspaces of one data folder. `start` before, `stop` after."""

    def __init__(
        self,
        data_dir: Path,
        host: str = "127.0.0.1",
        *,
        linger: float | None = None,
        is_used: Callable[[str], bool] = lambda _: True,
        standby: Standby | None = None,
    ) -> None:
        """`unused` is set when nobody has held the service for `linger` seconds and no keyspace `is_used`."""
        self.data_dir, self.host = data_dir, host
        self._standby = standby
        self.unused = asyncio.Event()
        self._linger, self._is_used = linger, is_used
        self._leaving: asyncio.TimerHandle | None = None
        self._holders = 0
        self._written = asyncio.Event()
        self._let_go_of = asyncio.Event()
        self._let_go_of.set()
        self._folder = data_dir / "keyspaces"
        self._hosted: dict[str, Hosted] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._control: asyncio.Server | None = None
        self._control_connections: set[Connection] = set()
        self._changing = asyncio.Lock()
        self._lock = -1

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + LOCKED_WITHIN_S
        while not _locked(self._lock):  # by one that is just leaving, perhaps
            if time.monotonic() > until:
                os.close(self._lock)
                raise RendezvousError(409, f"a rendezvous service runs in {self.data_dir} already")
            await asyncio.sleep(0.01)
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        for folder in sorted(self._folder.iterdir()):
            if folder.name.startswith("."):
                shutil.rmtree(folder)
            elif (folder / "about").exists():
                await self._revive(folder)
            else:  # `open` was cut off before it answered
                shutil.rmtree(folder)
        self._tasks.append(asyncio.create_task(self._keep_on_disk()))
        self._control = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(self._handle_control, self._control_connections), sock=self._bind_control()
        )
        if self._standby is not None:
            self._standby.up()
        self._leave_if_unused()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control is not None:
            self._control.close()
            for connection in list(self._control_connections):
                connection.abort()
        for hosted in self._hosted.values():
            self._silence(hosted)
        self._hosted.clear()
        if self._lock >= 0:
            os.close(self._lock)

    async def open(self, name: str, port: int | None = None) -> int:
        """The port of the keyspace `name`, which is made if it is not there; on disk when this returns."""
        async with self._changing:
            hosted = self._hosted.get(name)
            if hosted is not None:
                if hosted.fault is not None:
                    raise RendezvousError(500, hosted.fault)
                if port not in (None, hosted.port):
                    raise RendezvousError(409, f"keyspace {name!r} is open on port {hosted.port}, not {port}")
                return hosted.port
            if not NAME.fullmatch(name):
                raise RendezvousError(400, f"{name!r} cannot name a keyspace: {NAME.pattern}")
            folder = self._folder / name
            listening = self._bind(name, port)
            try:
                folder.mkdir()
                hosted = Hosted(name, listening.getsockname()[1], folder)
                hosted.server = KeyspaceServer(name, Journal(folder), written=self._written.set)
                about = {"name": name, "port": hosted.port}
                replace_file(folder / "about", json.dumps(about).encode())
                sync_folder(self._folder)
            except BaseException:
                listening.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._hosted[name] = hosted
            hosted.server.start()
            await self._listen(hosted, listening)
            return hosted.port

    async def close(self, name: str) -> bool:
        """End a keyspace, its waits and its files; False if there is none."""
        async with self._changing:
            hosted = self._hosted.pop(name, None)
            if hosted is None:
                return False
            if self._standby is not None and hosted.listening is not None:
                self._standby.let_go(str(hosted.port), hosted.listening)
            self._silence(hosted)
            gone = self._folder / f".{hosted.folder.name}"
            shutil.rmtree(gone, ignore_errors=True)
            hosted.folder.rename(gone)
            sync_folder(self._folder)
            shutil.rmtree(gone)
            self._leave_if_unused()
            return True

    def list(self) -> "list[dict[str, Any]]":
        return [hosted.about() for hosted in self._hosted.values()]

    async def _revive(self, folder: Path) -> None:
        about = json.loads((folder / "about").read_text())
        hosted = self._hosted[about["name"]] = Hosted(about["name"], about["port"], folder)
        try:
            hosted.server = KeyspaceServer(hosted.name, Journal(folder), written=self._written.set)
        except (JournalDamaged, OSError) as error:
            hosted.fault = str(error)
            log.error("keyspace %s cannot be read: %s", hosted.name, error)
            return
        hosted.server.start()
        try:
            await self._listen(hosted, self._bind(hosted.name, hosted.port))
        except RendezvousError as error:
            log.warning("%s; trying again", error)
            self._tasks.append(asyncio.create_task(self._bind_until_it_works(hosted)))

    async def _bind_until_it_works(self, hosted: Hosted) -> None:
        while self._hosted.get(hosted.name) is hosted:
            await asyncio.sleep(BIND_AGAIN_S)
            with contextlib.suppress(RendezvousError):
                await self._listen(hosted, self._bind(hosted.name, hosted.port))
                return

    def _bind(self, name: str, port: int | None) -> socket.socket:
        # Services of one machine begin at different ports: one must not take what another has only just let go.
        start = zlib.crc32(f"{self.data_dir}/{name}".encode(errors="surrogatepass")) % len(PORTS)
        taken = {hosted.port for hosted in self._hosted.values() if hosted.name != name}
        wished = [port] if port is not None else [p for p in (*PORTS[start:], *PORTS[:start]) if p not in taken]
        why: OSError | None = None
        for candidate in wished:
            if self._standby is not None and (held := self._standby.take(str(candidate))) is not None:
                return held
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            # asyncio turns Nagle's algorithm off only where the protocol is named; a wait would be 40 ms late with it
            listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((self.host, candidate))
                listening.listen(1024)
            except OSError as error:
                listening.close()
                why = error
            else:
                return listening
        shown = f"{self.host}:{port}" if port is not None else f"any port of {self.host}"
        raise RendezvousError(409, f"cannot listen on {shown} for keyspace {name!r}: {why}")

    def _bind_control(self) -> socket.socket:
        held = None if self._standby is None else self._standby.take(CONTROL)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with control_path(self.data_dir) as path:
            if held is not None and os.path.exists(path):
                listening.close()
                return held
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listening.bind(path)
            os.chmod(path, 0o600)
        listening.listen(1024)
        if self._standby is not None:
            self._standby.hold(CONTROL, listening)
        return listening

    async def _listen(self, hosted: Hosted, listening: socket.socket) -> None:
        assert hosted.server is not None
        handle = hosted.server.handle
        hosted.listening = listening
        if self._standby is not None:
            self._standby.hold(str(hosted.port), listening)
        hosted.listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(handle, hosted.connections), sock=listening, backlog=1024
        )

    def _silence(self, hosted: Hosted) -> None:
        if hosted.listener is not None:
            hosted.listener.close()
        for connection in list(hosted.connections):
            connection.abort()
        if hosted.server is not None:
            hosted.server.stop()

    async def _keep_on_disk(self) -> None:
        """Sync what was written, many writes at a time, and shorten long journals."""
        while True:
            await self._written.wait()
            await asyncio.sleep(FSYNC_EVERY_S)
            self._written.clear()
            for hosted in [h for h in self._hosted.values() if h.server is not None and h.server.journal.dirty]:
                if hosted.server is None or self._hosted.get(hosted.name) is not hosted:
                    continue
                try:
                    fd = hosted.server.journal.dup()
                    try:
                        await asyncio.to_thread(os.fdatasync, fd)
                    finally:
                        os.close(fd)
                    if self._hosted.get(hosted.name) is hosted:
                        hosted.server.journal.compact()
                except OSError:
                    log.exception("the journal in %s cannot be put on disk", hosted.folder)

    # -- control

    def _hold(self) -> LongReply:
        self._holders += 1
        self._let_go_of.clear()
        if self._leaving is not None:
            self._leaving.cancel()
        return LongReply((JSON,), self._let_go)

    def _let_go(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._let_go_of.set()
        self._leave_if_unused()

    def _leave_if_unused(self) -> None:
        if self._linger is not None and not self._holders:
            if self._leaving is not None:
                self._leaving.cancel()
            self._leaving = asyncio.get_running_loop().call_later(self._linger, self._leave)

    def _leave(self) -> None:
        """Nothing is lost by leaving: the next service comes back with all that is open."""
        if self._holders or self._linger is None:
            return
        if self._changing.locked() or any(self._is_used(name) for name in self._hosted):
            self._leave_if_unused()
        else:
            self.unused.set()

    def _handle_control(self, call: Call) -> Reply | LongReply | Awaitable[Reply]:
        match call.method, call.path:
            case "GET", "/hold":
                return self._hold()
            case "POST", "/leave":
                return self._control_leave()
            case "GET", "/keyspaces":
                return Reply(200, _json(self.list()), (JSON,))
            case "PUT", path if path.startswith("/keyspaces/"):
                return self._control_open(path.removeprefix("/keyspaces/"), call)
            case "DELETE", path if path.startswith("/keyspaces/"):
                return self._control_close(path.removeprefix("/keyspaces/"))
            case _:
                return text_error(404, "404 page not found")

    async def _control_leave(self) -> Reply:
        """Leave now if nobody needs us, without an answer; else say that we stay."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LET_GO_WITHIN_S):
                await self._let_go_of.wait()  # whoever asks has just let go
        self._leave()
        if self.unused.is_set():
            await asyncio.Event().wait()
        return Reply(200)

    async def _control_open(self, name: str, call: Call) -> Reply:
        port = call.query.removeprefix(b"port=")
        if port and not (port.isdigit() and 0 < int(port) < 1 << 16):
            return text_error(400, f"{unescape(port, plus=False)!r} is no port")
        try:
            return Reply(
                200, _json({"name": name, "port": await self.open(name, int(port) if port else None)}), (JSON,)
            )
        except RendezvousError as error:
            return text_error(error.status, error.why)
        except OSError as error:
            return text_error(500, str(error))

    async def _control_close(self, name: str) -> Reply:
        try:
            closed = await self.close(name)
        except OSError as error:
            return text_error(500, str(error))
        return Reply(204) if closed else text_error(404, f"there is no keyspace {name!r}")


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def control_path(data_dir: Path) -> Iterator[str]:
    """A path of the control socket that is short enough for the kernel (107 bytes) however deep the folder lies."""
    if sys.platform != "linux":
        yield str(data_dir / "control.sock")
        return
    folder = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/control.sock"
    finally:
        os.close(folder)


def _not_allowed(*methods: str) -> Reply:
    return text_error(405, "Method Not Allowed", ("Allow", ",".join(methods)))


def _text(text: str) -> Reply:
    return Reply(200, text.encode(), (("Content-Type", "text/plain; charset=utf-8"),))


_LONE = re.compile("[\ud800-\udfff]")


def _json(value: object) -> bytes:
    """A line of JSON. Bytes that were no UTF-8 are shown as U+FFFD, one for each, as Go does."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _LONE.sub("\ufffd", text).encode()
