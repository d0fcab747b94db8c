"""The rendezvous service: one process, many keyspaces, a port for each.

It runs beside the control plane and outlives it. The open keyspaces, their ports and their keys are in the data
folder: a service that was killed comes back with all of it.

    DATA/lock                        held while a service runs, with its pid
    DATA/control.sock                open, close and list keyspaces, and hold the service (HTTP)
    DATA/keyspaces/NAME/about        name and port
    DATA/keyspaces/NAME/snapshot, journal
    DATA/damaged/NAME                the files of a keyspace that could not be read

One keyspace's damage is its own: unreadable files are set aside, the keyspace begins anew on its port, and the loss
is its `fault` until it is acknowledged. One keyspace's load is its own as well: see `quota` and `lane`.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import stat
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basilica.rendezvous.files import (
    discard,
    is_shortage,
    open_regular,
    read_regular,
    replace_file,
    set_aside,
    sync_folder,
)
from basilica.rendezvous.http import Call, Connection, LongReply, Reply, text_error
from basilica.rendezvous.journal import FSYNC_EVERY_S, Journal
from basilica.rendezvous.keyserver import JSON, KeyspaceServer, json_line
from basilica.rendezvous.keyspace import OVER_QUOTA, UNAUTHORIZED, EtcdError
from basilica.rendezvous.lane import Lane
from basilica.rendezvous.peers import UnknownPeer, uid_of
from basilica.rendezvous.quota import UNSHARED, Quota
from basilica.rendezvous.request import unescape
from basilica.rendezvous.standby import Standby

log = logging.getLogger(__name__)

PORTS = range(20000, 29000)  # below the kernel's ephemeral ports, so that none is taken while the service is away
BIND_AGAIN_S = 0.2
RELEASED_WITHIN_S = 1.0
LOCKED_WITHIN_S = 1.0
CONTROL = "control"
ABOUT_BYTES_MAX = 4096
ORDER_BYTES_MAX = 64 << 10
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class RendezvousError(Exception):
    """A refusal of a request to the service."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status, self.why = status, why

    def __str__(self) -> str:
        return self.why


@dataclass(slots=True)
class Hosted:
    """An open keyspace: `listener` is None while its port is taken. `fault`: how its keys were lost."""

    name: str
    port: int
    folder: Path
    server: KeyspaceServer
    lane: Lane
    listening: socket.socket | None = None
    listener: asyncio.Server | None = None
    fault: str | None = None

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
        quota: Quota = UNSHARED,
        users: Collection[int] | None = None,
    ) -> None:
        """`unused` is set when nobody has held the service for `linger` seconds and no keyspace `is_used`.

        `users`: whose processes are answered, by their numbers; None for everybody's.
        """
        self.data_dir, self.host = data_dir, host
        self._standby = standby
        self._quota, self._users = quota, None if users is None else set(users)
        self._lost: dict[str, str] = {}  # the faults of keyspaces that are not open, by name
        self.unused = asyncio.Event()
        self._linger, self._is_used = linger, is_used
        self._leaving: asyncio.TimerHandle | None = None
        self._holders = 0
        self._written = asyncio.Event()
        self._unheld = asyncio.Event()
        self._unheld.set()
        self._folder = data_dir / "keyspaces"
        self._hosted: dict[str, Hosted] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._control: asyncio.Server | None = None
        self._control_lane = Lane(buffered_max=quota.buffered, body_max=ORDER_BYTES_MAX)
        self._changing = asyncio.Lock()
        self._lock = -1

    async def start(self) -> None:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = self._open_lock()
        until = time.monotonic() + LOCKED_WITHIN_S
        while not _locked(self._lock):  # perhaps by a service that is just leaving
            if time.monotonic() > until:
                os.close(self._lock)
                raise RendezvousError(409, f"a rendezvous service runs in {self.data_dir} already")
            await asyncio.sleep(0.01)
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        if not stat.S_ISDIR(_kind(self._folder)):
            self._shelve(self._folder, "no folder")
            self._folder.mkdir(mode=0o700)
        for folder in sorted(self._folder.iterdir()):
            if folder.name.startswith(".") or _is_unfinished(folder):
                discard(folder)
            else:
                await self._revive(folder)
        self._tasks.append(asyncio.create_task(self._keep_on_disk()))
        self._control = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(self._handle_control, self._control_lane), sock=self._bind_control()
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
            for connection in list(self._control_lane.connections):
                connection.abort()
        for hosted in self._hosted.values():
            self._silence(hosted)
        self._hosted.clear()
        if self._lock >= 0:
            os.close(self._lock)

    async def open(self, name: str, port: int | None = None) -> int:
        """Return the port of the keyspace `name`, which is created if need be; on disk when this returns."""
        async with self._changing:
            hosted = self._hosted.get(name)
            if hosted is not None:
                if port not in (None, hosted.port):
                    raise RendezvousError(409, f"keyspace {name!r} is open on port {hosted.port}, not {port}")
                return hosted.port
            if not NAME.fullmatch(name):
                raise RendezvousError(400, f"{name!r} cannot name a keyspace: {NAME.pattern}")
            folder = self._folder / name
            listening = self._bind(name, port)
            try:
                self._shelve(folder, "it was in the way")  # if another process put an entry there while we ran
                hosted = self._made(name, listening.getsockname()[1])
            except BaseException:
                listening.close()
                with contextlib.suppress(OSError):
                    discard(folder)
                raise
            await self._host(hosted, listening)
            return hosted.port

    def _made(self, name: str, port: int) -> Hosted:
        """Create a keyspace without keys, on disk."""
        folder = self._folder / name
        folder.mkdir(mode=0o700)
        hosted = self._hosting(name, port)
        replace_file(folder / "about", json.dumps({"name": name, "port": port}).encode())
        sync_folder(self._folder)
        return hosted

    def _hosting(self, name: str, port: int) -> Hosted:
        folder = self._folder / name
        server = KeyspaceServer(name, Journal(folder), written=self._written.set, quota=self._quota)
        lane = Lane(buffered_max=self._quota.buffered, body_max=self._quota.body_bytes, refusal=self._refusal)
        return Hosted(name, port, folder, server, lane, fault=self._lost.pop(name, None))

    async def _host(self, hosted: Hosted, listening: socket.socket) -> None:
        self._hosted[hosted.name] = hosted
        hosted.server.start()
        await self._listen(hosted, listening)

    async def close(self, name: str) -> bool:
        """Delete a keyspace with its waits and its files; False if there is none."""
        async with self._changing:
            hosted = self._hosted.pop(name, None)
            if hosted is None:
                return False
            if self._standby is not None and hosted.listening is not None:
                self._standby.release(str(hosted.port), hosted.listening)
            self._silence(hosted)
            gone = self._folder / f".{hosted.folder.name}"
            discard(gone)
            with contextlib.suppress(FileNotFoundError):  # already removed by another process
                hosted.folder.rename(gone)
            sync_folder(self._folder)
            discard(gone)
            discard(self.data_dir / "damaged" / name)
            self._leave_if_unused()
            return True

    def list(self) -> "list[dict[str, Any]]":
        return [hosted.about() for hosted in self._hosted.values()]

    def allow(self, uid: int) -> None:
        """Answer processes of this user too."""
        if self._users is not None:
            self._users.add(uid)

    def acknowledge(self, name: str) -> bool:
        """Clear the keyspace's fault, which has reached those who should know of it. False if there is no keyspace."""
        hosted = self._hosted.get(name)
        if hosted is not None:
            hosted.fault = None
        return hosted is not None

    def _open_lock(self) -> int:
        path = self.data_dir / "lock"
        if os.path.lexists(path) and not stat.S_ISREG(_kind(path)):
            discard(path)
        return open_regular(path, os.O_RDWR | os.O_CREAT)

    async def _revive(self, folder: Path) -> None:
        """Open the keyspace of an earlier service. One that cannot be read begins anew."""
        name, port = folder.name, None
        try:
            found = _port_of(folder)
            if any(found == other.port for other in self._hosted.values()):
                raise ValueError(f"{folder / 'about'} names port {found}, which is another's")
            port = found
            hosted = self._hosting(name, port)
        except Exception as error:  # of any kind: it must not affect the other keyspaces
            if is_shortage(error):
                raise
            try:
                self._shelve(folder, str(error) or type(error).__name__)
                if port is None:
                    return  # a client that knows its port opens it again
                hosted = self._made(name, port)
            except OSError:
                log.exception("keyspace %s cannot be read, and cannot be begun anew", name)
                return
        try:
            listening = self._bind(name, hosted.port)
        except RendezvousError as error:
            log.warning("%s; trying again", error)
            self._hosted[name] = hosted
            hosted.server.start()
            self._tasks.append(asyncio.create_task(self._bind_until_it_works(hosted)))
            return
        await self._host(hosted, listening)

    def _shelve(self, path: Path, why: str) -> None:
        if os.path.lexists(path):
            place = set_aside(path, self.data_dir / "damaged")
            self._lost[path.name] = f"the keys of {path.name} were lost ({why}); what was found is in {place}"
            log.error("%s", self._lost[path.name])

    async def _bind_until_it_works(self, hosted: Hosted) -> None:
        while self._hosted.get(hosted.name) is hosted:
            await asyncio.sleep(BIND_AGAIN_S)
            with contextlib.suppress(RendezvousError):
                await self._listen(hosted, self._bind(hosted.name, hosted.port))
                return

    def _bind(self, name: str, port: int | None) -> socket.socket:
        # Services of one machine begin at different ports: one must not take a port that another has just released.
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
            discard(Path(path))
            listening.bind(path)
            os.chmod(path, 0o600)
        listening.listen(1024)
        if self._standby is not None:
            self._standby.hold(CONTROL, listening)
        return listening

    async def _listen(self, hosted: Hosted, listening: socket.socket) -> None:
        handle = hosted.server.handle
        hosted.listening = listening
        if self._standby is not None:
            self._standby.hold(str(hosted.port), listening)
        hosted.listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(handle, hosted.lane), sock=listening, backlog=1024
        )

    def _silence(self, hosted: Hosted) -> None:
        if hosted.listener is not None:
            hosted.listener.close()
        for connection in [*hosted.lane.connections, *hosted.lane.refused]:
            connection.abort()
        hosted.server.stop()

    def _refusal(self, transport: asyncio.BaseTransport, connections: int) -> EtcdError | None:
        """Return why a connection to a keyspace is not served."""
        if connections >= self._quota.connections:
            return EtcdError(OVER_QUOTA, f"{connections} connections to this keyspace are open, and no more may be")
        if self._users is None:
            return None
        try:
            uid = uid_of(transport.get_extra_info("socket"))
        except UnknownPeer as error:
            return EtcdError(UNAUTHORIZED, f"whose process this is cannot be found out: {error}")
        if uid in self._users:
            return None
        shown = ", ".join(map(str, sorted(self._users)))
        return EtcdError(UNAUTHORIZED, f"this rendezvous answers processes of the users {shown}; this one is of {uid}")

    async def _keep_on_disk(self) -> None:
        """Sync the journals, many writes at a time, and compact long ones."""
        while True:
            await self._written.wait()
            await asyncio.sleep(FSYNC_EVERY_S)
            self._written.clear()
            for hosted in [h for h in self._hosted.values() if h.server.journal.dirty]:
                try:
                    await self._put_on_disk(hosted)
                except OSError:
                    log.exception("the journal in %s cannot be put on disk", hosted.folder)

    async def _put_on_disk(self, hosted: Hosted) -> None:
        if self._hosted.get(hosted.name) is not hosted:
            return
        journal = hosted.server.journal
        fd = journal.dup()
        try:
            await asyncio.to_thread(os.fdatasync, fd)
        finally:
            os.close(fd)
        begun = journal.begin_compaction() if self._hosted.get(hosted.name) is hosted else None
        if begun is not None:
            size = await asyncio.to_thread(begun.write)
            if self._hosted.get(hosted.name) is hosted:
                journal.finish_compaction(begun, size)

    # -- control

    def _hold(self) -> LongReply:
        self._holders += 1
        self._unheld.clear()
        if self._leaving is not None:
            self._leaving.cancel()
        return LongReply((JSON,), self._release)

    def _release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._unheld.set()
        self._leave_if_unused()

    def _leave_if_unused(self) -> None:
        if self._linger is not None and not self._holders:
            if self._leaving is not None:
                self._leaving.cancel()
            self._leaving = asyncio.get_running_loop().call_later(self._linger, self._leave)

    def _leave(self) -> None:
        """Leave if unused. Nothing is lost by leaving: the next service comes back with all keyspaces."""
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
                return Reply(200, json_line(self.list()), (JSON,))
            case "PUT", path if path.startswith("/keyspaces/"):
                return self._control_open(path.removeprefix("/keyspaces/"), call)
            case "PUT", path if path.startswith("/users/") and path.removeprefix("/users/").isdecimal():
                self.allow(int(path.removeprefix("/users/")))
                return Reply(204)
            case "DELETE", path if path.startswith("/faults/"):
                name = path.removeprefix("/faults/")
                return Reply(204) if self.acknowledge(name) else text_error(404, f"there is no keyspace {name!r}")
            case "DELETE", path if path.startswith("/keyspaces/"):
                return self._control_close(path.removeprefix("/keyspaces/"))
            case _:
                return text_error(404, "404 page not found")

    async def _control_leave(self) -> Reply:
        """Leave now if unused, without an answer; else answer that the service stays."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASED_WITHIN_S):
                await self._unheld.wait()  # the client that asks has just released its hold
        self._leave()
        if self.unused.is_set():
            await asyncio.Event().wait()
        return Reply(200)

    async def _control_open(self, name: str, call: Call) -> Reply:
        port = call.query.removeprefix(b"port=")
        if port and not (port.isdigit() and 0 < int(port) < 1 << 16):
            return text_error(400, f"{unescape(port, plus=False)!r} is no port")
        try:
            await self.open(name, int(port) if port else None)
            return Reply(200, json_line(self._hosted[name].about()), (JSON,))
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
    """Yield a path of the control socket that is short enough for the kernel (107 bytes) however deep the folder
    lies.
    """
    if sys.platform != "linux":
        yield str(data_dir / "control.sock")
        return
    folder = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/control.sock"
    finally:
        os.close(folder)


def _kind(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def _port_of(folder: Path) -> int:
    """Return the port of an earlier service's keyspace; raise an exception of any kind if it cannot be read."""
    about = json.loads(read_regular(folder / "about", ABOUT_BYTES_MAX))
    name, port = about["name"], about["port"]
    if name != folder.name or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise ValueError(f"{folder / 'about'} says {str(about)[:200]}")
    return port


def _is_unfinished(folder: Path) -> bool:
    """Whether `open` was cut off before it answered: nothing was ever written there."""
    if not stat.S_ISDIR(_kind(folder)) or os.path.lexists(folder / "about"):
        return False
    journal = folder / "journal"
    return not os.path.lexists(folder / "snapshot") and (_kind(journal) == 0 or os.lstat(journal).st_size == 0)
