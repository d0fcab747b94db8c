"""What may stand behind the endpoint: real etcd processes, and peers that do as they are told."""

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

START_SECONDS = 20.0


class Peer:
    """A TCP server on loopback that runs `script` for every connection; `requests` holds what it read first on each."""

    def __init__(self, script: Callable[["Peer", socket.socket, bytes], None], *, host: str = "127.0.0.1") -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.over = threading.Event()
        self.listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self.listener.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        self.threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self.threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self.over.is_set():
                connection, _ = self.listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self.threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            request = b""
            while b"\r\n\r\n" not in request:
                if not (data := connection.recv(65536)):
                    return
                request += data
            self.requests.append(request)
            self.script(self, connection, request)


def saying(answer: bytes) -> Callable[[Peer, socket.socket, bytes], None]:
    """One answer for every request, then the end of the connection."""
    return lambda peer, connection, request: connection.sendall(answer)


class Etcd:
    """An etcd of this test's own on free ports; `v2` or, as from etcd 3.6 on, the v3 gateway only."""

    def __init__(self, data: Path, *, v2: bool) -> None:
        program = shutil.which("etcd")
        if program is None:
            raise AssertionError(
                "etcd is not installed: `apt-get install -y etcd-server` (Debian's 3.4 has the v2 API)"
            )
        self.program, self.data, self.v2 = program, data, v2
        self.port, self.peer_port = free_ports(2)
        self.endpoint = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, self.peer_port))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        options = {
            "--enable-v2": str(self.v2).lower(),
            "--data-dir": str(self.data),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"default={peer}",
            "--heartbeat-interval": "10",
            "--election-timeout": "100",
        }
        with (self.data.parent / f"{self.data.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, *(f"{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=log,
                env=environment,
            )
        until(lambda: self.process is None or self.process.poll() is not None or self.healthy(), START_SECONDS)
        assert self.healthy(), f"etcd did not start; see {self.data}.log"
        return self

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def healthy(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return b"true" in self.ask("GET", "/health")
        return False

    def ask(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            kind = "application/json" if path.startswith("/v3") else "application/x-www-form-urlencoded"
            connection.request(method, path, body, {"Content-Type": kind})
            return connection.getresponse().read()
        finally:
            connection.close()

    def write(self, key: str, node: str) -> None:
        if self.v2:
            self.ask("PUT", f"/v2/keys/basilica/{key}/{quote(os.fsencode(node), safe='')}", "value=1")
        else:
            name = base64.b64encode(os.fsencode(f"/basilica/{key}/{node}")).decode()
            self.ask("POST", "/v3/kv/put", json.dumps({"key": name, "value": "MQ=="}))

    def reset(self) -> None:
        if self.v2:
            self.ask("DELETE", "/v2/keys/basilica?recursive=true")
        else:
            first, end = (base64.b64encode(name).decode() for name in (b"/basilica/", b"/basilica0"))
            self.ask("POST", "/v3/kv/deleterange", json.dumps({"key": first, "range_end": end}))

    def watchers(self) -> int:
        name = rb"etcd_debugging_store_watchers" if self.v2 else rb"etcd_debugging_mvcc_watcher_total"
        found = re.search(rb"^" + name + rb" (\S+)$", self.ask("GET", "/metrics"), re.MULTILINE)
        assert found, f"this etcd does not count its watchers as {name.decode()}"
        return int(float(found[1]))

    def until_watchers(self, number: int) -> None:
        until(lambda: self.watchers() == number, 10)


def until(true: Callable[[], bool], seconds: float) -> None:
    """Return as soon as it is true; an assertion after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.005)


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An endpoint whose SYNs are dropped: its queue of connections is full and nobody accepts."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"
