"""Our service in a thread, real etcd in a process, and a client that hides nothing of either's answers."""

import asyncio
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from basilica.rendezvous.http import Call, Connection, LongReply, Reply
from basilica.rendezvous.journal import Journal, write_snapshot
from basilica.rendezvous.keyserver import KeyspaceServer
from basilica.rendezvous.keyspace import Keyspace
from basilica.rendezvous.lane import Lane
from basilica.rendezvous.quota import Quota

Address = tuple[str, int]
T = TypeVar("T")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


class Exchange:
    """One request on a connection of its own, answered when it is: the way to see a long poll."""

    def __init__(self, address: Address, method: str, target: str, body: str | None = None) -> None:
        self.socket = socket.create_connection(address, timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self.ask(method, target, body)

    def ask(self, method: str, target: str, body: str | None = None) -> None:
        head = f"{method} {target} HTTP/1.1\r\nHost: {self.socket.getpeername()[0]}:{self.socket.getpeername()[1]}\r\n"
        if body is not None:
            kind = "application/x-www-form-urlencoded"
            head += f"Content-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n"
        self.method = method
        self.socket.sendall(f"{head}\r\n{body or ''}".encode())

    def wait_for_headers(self) -> Self:
        while b"\r\n\r\n" not in self.received:
            self._more()
        return self

    def answered(self, within: float = 0.0) -> bool:
        """Whether the whole answer is here, after at most `within` seconds."""
        deadline = time.monotonic() + within
        while self._parse() is None:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self.socket], [], [], left)[0]:
                return False
            self._more()
        return True

    def answer(self) -> Answer:
        """The whole answer; the connection can be asked again."""
        while (parsed := self._parse()) is None:
            self._more()
        answer, self.received = parsed
        return answer

    def close(self) -> None:
        self.socket.close()

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError(f"closed after {self.received!r}")
        self.received += data

    def _parse(self) -> tuple[Answer, bytes] | None:
        head, end, rest = self.received.partition(b"\r\n\r\n")
        if not end:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(first.split()[1])
        if self.method == "HEAD":
            return Answer(status, headers, b""), rest
        if "transfer-encoding" not in headers:
            size = int(headers["content-length"])
            return (Answer(status, headers, rest[:size]), rest[size:]) if len(rest) >= size else None
        body = b""
        while True:
            size_line, end, rest = rest.partition(b"\r\n")
            size = int(size_line, 16) if end else 0
            if not end or len(rest) < size + 2:
                return None
            if size == 0:
                return Answer(status, headers, body), rest[2:]
            body, rest = body + rest[:size], rest[size + 2 :]


class Client:
    """A kept-alive connection."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._exchange: Exchange | None = None

    def ask(self, method: str, target: str, body: str | None = None) -> Answer:
        if self._exchange is None:
            self._exchange = Exchange(self.address, method, target, body)
        else:
            self._exchange.ask(method, target, body)
        answer = self._exchange.answer()
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None


class OurServer:
    """`KeyspaceServer` on a port, in a thread with its loop; the keyspace behind the port can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        quota = Quota()
        self._lane = Lane(buffered_max=quota.buffered, body_max=quota.body_bytes)
        self._count = 0
        self.server: KeyspaceServer | None = None
        self.address: Address = self._run(self._listen())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _handle(self, call: Call) -> Reply | LongReply:
        assert self.server is not None
        return self.server.handle(call)

    async def _listen(self) -> Address:
        self._listener = await self._loop.create_server(lambda: Connection(self._handle, self._lane), "127.0.0.1", 0)
        host, port = self._listener.sockets[0].getsockname()
        return host, port

    def fresh(self, index: int) -> None:
        """A new keyspace that stands where etcd stands."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir(parents=True)
        write_snapshot(folder, Keyspace(index))
        self._run(self._change(lambda: Journal(folder)))

    def restart(self) -> None:
        """Go on with what the files say."""
        assert self.server is not None
        folder = self.server.journal.folder
        self._run(self._change(lambda: Journal(folder)))

    def compact(self) -> None:
        """Snapshot what there is, and go on with that."""
        assert self.server is not None
        folder = self.server.journal.folder

        def reopen() -> Journal:
            journal = Journal(folder, compact_bytes=0)
            before = journal.keyspace.dump()
            journal.compact()
            journal.close()
            again = Journal(folder)
            assert again.keyspace.dump() == before
            return again

        self._run(self._change(reopen))

    async def _change(self, journal: Callable[[], Journal]) -> None:
        before = None
        if self.server is not None:
            self.server.stop()
            before = self.server
        self.server = KeyspaceServer("default", journal())
        if before is not None and before.journal.folder == self.server.journal.folder:
            assert self.server.keyspace.dump() == before.keyspace.dump()
        self.server.start()

    def stop(self) -> None:
        async def end() -> None:
            self._listener.close()
            for connection in list(self._lane.connections):
                connection.abort()
            if self.server is not None:
                self.server.stop()
            await asyncio.sleep(0.01)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_healthy(address: Address, process: "subprocess.Popen[str]", limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while True:
        try:
            exchange = Exchange(address, "GET", "/health")
            healthy = b"true" in exchange.answer().raw
            exchange.close()
            if healthy:
                return
        except OSError:
            pass
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{address} is not healthy after {limit} s"
        time.sleep(0.05)


@contextmanager
def real_etcd(folder: Path) -> Iterator[Address]:
    """Debian's etcd with the v2 API. Its absence is a failure, not a skip: without it nothing holds us to the truth."""
    program = shutil.which("etcd")
    if program is None:
        pytest.fail("real etcd 3.4 is needed as the reference: apt-get install etcd-server")
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = [program, "--enable-v2=true", f"--data-dir={folder}", "--logger=zap", "--log-level=error"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=default={peer}"]
    with (folder.parent / "etcd.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
    address = ("127.0.0.1", int(client.rpartition(":")[2]))
    try:
        wait_until_healthy(address, process)
        yield address
    finally:
        process.kill()
        process.wait()


@contextmanager
def etcd_in_memory() -> Iterator[Address]:
    """One that waits for no disk."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, real_etcd(Path(folder) / "data") as address:
        yield address


@contextmanager
def service_process(data_dir: Path, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """`python -m basilica.rendezvous`, up and running."""
    command = [sys.executable, "-m", "basilica.rendezvous", "--data-dir", str(data_dir), *arguments]
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("rendezvous: "), process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()
