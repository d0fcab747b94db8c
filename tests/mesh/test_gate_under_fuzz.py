"""The gate against everything that is no rendezvous: it returns None, in time, whatever stands behind the endpoint."""

import contextlib
import io
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from basilica.mesh import mesh_status, mesh_wait
from tests.mesh.conftest import Pod
from tests.mesh.peers import Peer, black_hole, free_ports, saying, until
from tests.support.exploring import examples

Script = Callable[[Peer, socket.socket, bytes], None]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
MISSING = b'HTTP/1.1 404 Not Found\r\nX-Etcd-Index: 7\r\nContent-Length: 17\r\n\r\n{"errorCode":100}'
TIMEOUT = 0.02


@contextlib.contextmanager
def in_time(timeout: float = TIMEOUT) -> Iterator[None]:
    """At most a second past the timeout, apart from what the machine kept everybody waiting."""
    over = threading.Event()
    lost = 0.0

    def stand_by() -> None:
        nonlocal lost
        before = time.monotonic()
        while not over.wait(0.01):
            now = time.monotonic()
            lost += max(0.0, now - before - 0.02)
            before = now

    bystander = threading.Thread(target=stand_by)
    bystander.start()
    began = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - began
        over.set()
        bystander.join()
    assert took < timeout + 1 + lost, f"{took - timeout:.2f} s past the timeout, {lost:.2f} s of them lost to others"


def silent(peer: Peer, connection: socket.socket, request: bytes) -> None:
    peer.over.wait(30)


def reset(peer: Peer, connection: socket.socket, request: bytes) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def drip(text: bytes) -> Script:
    def script(peer: Peer, connection: socket.socket, request: bytes) -> None:
        for byte in text:
            connection.sendall(bytes([byte]))
            if peer.over.wait(0.02):
                return

    return script


def endless(head: bytes, body: bytes) -> Script:
    def script(peer: Peer, connection: socket.socket, request: bytes) -> None:
        connection.sendall(head)
        while not peer.over.is_set():
            connection.sendall(body)

    return script


PEERS: dict[str, Script] = {
    "silent": silent,
    "reset": reset,
    "closed at once": saying(b""),
    "binary": saying(bytes(range(256)) * 40),
    "tls": saying(b"\x15\x03\x01\x00\x02\x02\x46"),
    "http 2": saying(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"),
    "half a status line": saying(b"HTTP/1."),
    "half a header": saying(b"HTTP/1.1 404 Not Fo"),
    "a status that is none": saying(b"HTTP/1.1 abc\r\n\r\n"),
    "no status": saying(b"HTTP/1.1\r\n\r\n"),
    "status 000": saying(b"HTTP/1.1 000 Nothing\r\n\r\n"),
    "server error": saying(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"),
    "not found in html": saying(b"HTTP/1.0 404 Not Found\r\n\r\n<html>"),
    "negative length": saying(b"HTTP/1.1 404 N\r\nContent-Length: -5\r\n\r\nabc"),
    "enormous length": saying(b"HTTP/1.1 404 N\r\nContent-Length: 99999999999999999999\r\n\r\nabc"),
    "bad chunks": saying(b"HTTP/1.1 404 N\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"),
    "deep json": saying(b"HTTP/1.1 404 N\r\nContent-Length: 60000\r\n\r\n" + b"[" * 60000),
    "json that is no object": saying(b"HTTP/1.1 404 N\r\nContent-Length: 4\r\n\r\nnull"),
    "slow drip of headers": drip(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 500),
    "slow drip of a body": drip(b"HTTP/1.1 404 N\r\nContent-Length: 900\r\n\r\n" + b"a" * 900),
    "endless headers": endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000),
    "endless body": endless(b"HTTP/1.1 404 N\r\n\r\n", b"x" * 65536),
    "endless chunks": endless(
        b"HTTP/1.1 404 N\r\nTransfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n"
    ),
    "endless interim answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_wrong_answer_is_a_timeout(name: str, pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    with Peer(PEERS[name]) as peer:
        pod(peer.endpoint)
        with in_time():
            mesh_wait(TIMEOUT)
        assert mesh_status() == "timeout"
        begin, end = capsys.readouterr().err.splitlines()
    assert begin.startswith("mesh-wait: BEGIN ")
    assert re.match(r"mesh-wait: TIMEOUT after=\ds node=host-1", end)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda body: b"HTTP/1.1 404 N\r\n" + body)))
def test_no_bytes_make_it_raise(pod: Pod, answer: bytes) -> None:
    with Peer(saying(answer)) as peer:
        pod(peer.endpoint)
        with in_time(0):
            mesh_wait(0)
    assert mesh_status() == "timeout"


def test_200_releases_before_its_endless_body_has_come(pod: Pod) -> None:
    with Peer(endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536)) as peer:
        pod(peer.endpoint)
        mesh_wait(30)
    assert mesh_status() == "ready"


def test_a_closed_port_is_a_timeout_that_says_why(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod(f"127.0.0.1:{free_ports(1)[0]}")
    with in_time():
        mesh_wait(TIMEOUT)
    assert mesh_status() == "timeout"
    assert "Connection refused" in capsys.readouterr().err


def test_a_black_hole_is_a_timeout(pod: Pod) -> None:
    with black_hole() as endpoint:
        pod(endpoint)
        with in_time():
            mesh_wait(TIMEOUT)
    assert mesh_status() == "timeout"


def test_a_resolver_that_hangs_is_a_timeout(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    over, real = threading.Event(), socket.getaddrinfo

    def hanging(host: str, port: int, *args: Any, **options: Any) -> Any:
        if not options.get("flags"):
            over.wait(30)
        return real(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    pod("rendezvous.invalid:2379")
    try:
        with in_time():
            mesh_wait(TIMEOUT)
    finally:
        over.set()
    assert mesh_status() == "timeout"


def test_a_name_that_resolves_later_and_has_a_dead_address_first_releases(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(host: str, port: int, *args: Any, **options: Any) -> Any:
        asked.append(host)
        if options.get("flags") or len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*stream, ("127.0.0.1", closed)), (*stream, ("127.0.0.1", hole)), (*stream, ("127.0.0.1", port))]

    (closed,) = free_ports(1)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with Peer(saying(OK)) as peer, black_hole() as dropped:
        hole = int(dropped.rpartition(":")[2])
        pod(f"rendezvous.example:{peer.port}")
        mesh_wait(10)
    assert mesh_status() == "ready"


def test_a_redirect_is_not_followed(pod: Pod) -> None:
    with Peer(saying(OK)) as elsewhere:
        redirect = f"HTTP/1.1 307 Go\r\nLocation: http://{elsewhere.endpoint}/\r\nContent-Length: 0\r\n\r\n".encode()
        with Peer(saying(redirect)) as peer:
            pod(peer.endpoint)
            with in_time():
                mesh_wait(TIMEOUT)
        assert mesh_status() == "timeout"
        assert elsewhere.requests == []


def test_proxies_in_the_environment_do_not_apply(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(saying(MISSING)) as proxy, Peer(saying(OK)) as peer:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{proxy.endpoint}")
        monkeypatch.setenv("no_proxy", "\x01::[")
        pod(peer.endpoint)
        mesh_wait(5)
        assert mesh_status() == "ready"
        assert proxy.requests == []


def test_a_watch_that_returns_at_once_is_not_asked_in_a_loop(pod: Pod) -> None:
    def script(peer: Peer, connection: socket.socket, request: bytes) -> None:
        connection.sendall(OK if b"wait=true" in request else MISSING)

    with Peer(script) as peer:
        pod(peer.endpoint)
        mesh_wait(1)
        assert mesh_status() == "timeout"
        assert len(peer.requests) < 20


def test_a_server_without_long_polls_is_looked_at_every_two_seconds(pod: Pod) -> None:
    looks: list[float] = []

    def script(peer: Peer, connection: socket.socket, request: bytes) -> None:
        if b"mesh-ready" in request and b"wait" not in request:
            looks.append(time.monotonic())
        connection.sendall(OK if len(looks) == 2 and b"mesh-ready" in request else b"HTTP/1.0 404 Not Found\r\n\r\n")

    with Peer(script) as peer:
        pod(peer.endpoint)
        mesh_wait(10)
    assert mesh_status() == "ready"
    assert 1.5 < looks[1] - looks[0] < 2.5


def test_a_server_that_needs_longer_than_a_look_to_answer_still_releases(pod: Pod) -> None:
    def script(peer: Peer, connection: socket.socket, request: bytes) -> None:
        if b"mesh-degraded" in request:
            peer.over.wait(2.5)
            connection.sendall(MISSING)
        else:
            connection.sendall(OK)

    with Peer(script) as peer:
        pod(peer.endpoint)
        mesh_wait(10)
    assert mesh_status() == "ready"


@pytest.mark.parametrize(
    ("hangs", "status"), [(b"mesh-degraded", "ready"), (b"mesh-ready", "degraded")], ids=["degraded", "ready"]
)
@pytest.mark.parametrize("timeout", [0, 20])
def test_a_key_that_hangs_does_not_hide_the_other(pod: Pod, hangs: bytes, status: str, timeout: float) -> None:
    def script(peer: Peer, connection: socket.socket, request: bytes) -> None:
        if hangs in request:
            peer.over.wait(30)
        connection.sendall(OK)

    with Peer(script) as peer:
        pod(peer.endpoint)
        began = time.monotonic()
        mesh_wait(timeout)
        assert time.monotonic() - began < 5
    assert mesh_status() == status


def test_ready_wins_over_a_degraded_key_that_answers_sooner(pod: Pod) -> None:
    def script(peer: Peer, connection: socket.socket, request: bytes) -> None:
        if b"mesh-ready" in request:
            peer.over.wait(0.2)
        connection.sendall(OK)

    with Peer(script) as peer:
        pod(peer.endpoint)
        mesh_wait(20)
    assert mesh_status() == "ready"


class Numberless:
    def __float__(self) -> float:
        raise RuntimeError("no number")


@pytest.mark.parametrize("timeout", [None, math.nan, math.inf, -math.inf, "soon", b"", Numberless(), [], 10**400])
def test_no_limit_means_sixty_seconds(timeout: Any, pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    with Peer(saying(OK)) as peer:
        pod(peer.endpoint)
        mesh_wait(timeout)
    assert mesh_status() == "ready"
    assert " timeout=60s" in capsys.readouterr().err


@pytest.mark.parametrize("timeout", [0, -1, -1e300, "0", False])
def test_no_time_means_one_look(timeout: Any, pod: Pod) -> None:
    with Peer(saying(OK)) as peer:
        pod(peer.endpoint)
        mesh_wait(timeout)
        assert mesh_status() == "ready"
    with black_hole() as endpoint:
        pod(endpoint)
        with in_time(0):
            mesh_wait(timeout)
        assert mesh_status() == "timeout"


BAD_ENDPOINTS = ["a:b", ":2379", "[::1", "a:99999", "a:0", "a b:1", "a@b:1", "https://a:1", "a\r\nX: y:1", "[]:1", "/"]


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
def test_an_endpoint_that_is_none_ends_at_once(endpoint: str, pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod(endpoint)
    with in_time(0):
        mesh_wait()
    assert mesh_status() == "timeout"
    assert "is not host:port" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("endpoint", ["[::1]:{port}", "localhost:{port}", "http://127.0.0.1:{port}/"])
def test_endpoints_of_every_kind_are_found(endpoint: str, pod: Pod) -> None:
    with Peer(saying(OK), host="::1" if endpoint.startswith("[") else "127.0.0.1") as peer:
        pod(endpoint.format(port=peer.port))
        mesh_wait(5)
    assert mesh_status() == "ready"


def test_without_node_or_endpoint_there_is_nothing_to_wait_for(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Peer(saying(OK)) as peer:
        pod(peer.endpoint)
        mesh_wait()
        assert mesh_status() == "ready"
        monkeypatch.setenv("NODE_NAME", "")
        mesh_wait()
        assert mesh_status() is None
        monkeypatch.setenv("KUBERNETES_NODE_NAME", "host-2")
        mesh_wait()
        assert mesh_status() == "ready"
        assert any(b"/v2/keys/basilica/mesh-ready/host-2 " in request for request in peer.requests)
        monkeypatch.delenv("BASILICA_RDZV_ENDPOINT")
        mesh_wait()
        assert mesh_status() is None
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["BEGIN", "OK", "SKIP"] * 2


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO(), "ascii"), object()])
def test_a_broken_stderr_does_not_matter(stream: Any, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(saying(OK)) as peer:
        pod(peer.endpoint, "käse")
        monkeypatch.setattr(sys, "stderr", stream)
        mesh_wait(5)
    assert mesh_status() == "ready"


def test_keyboard_interrupt_passes_through_and_leaves_nothing_open(pod: Pod) -> None:
    def interrupt(peer: Peer, connection: socket.socket, request: bytes) -> None:
        main = threading.main_thread().ident
        assert main is not None
        if request == peer.requests[0]:
            signal.pthread_kill(main, signal.SIGINT)
        closed.append(connection.recv(1) == b"")

    closed: list[bool] = []
    with Peer(interrupt) as peer:
        pod(peer.endpoint)
        with pytest.raises(KeyboardInterrupt):
            mesh_wait(30)
        assert mesh_status() is None
        until(lambda: len(closed) == len(peer.requests), 5)
    assert all(closed)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NODE_NAME", "KUBERNETES_NODE_NAME")}
    return subprocess.run(
        [sys.executable, "-m", "basilica.mesh", *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments", [["--timeout", "0"], ["--timeout=-1"], ["--timeout", "x"], ["--what"], ["--timeout"]]
)
def test_the_command_always_exits_0(arguments: list[str]) -> None:
    with Peer(saying(OK)) as peer:
        done = command(*arguments, NODE_NAME="host-1", BASILICA_RDZV_ENDPOINT=peer.endpoint)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "mesh-wait: OK after=0s"


def test_the_command_exits_0_after_a_timeout() -> None:
    done = command("--timeout", "0", NODE_NAME="host-1", BASILICA_RDZV_ENDPOINT=f"127.0.0.1:{free_ports(1)[0]}")
    assert done.returncode == 0
    assert "mesh-wait: TIMEOUT" in done.stderr


def test_importing_it_loads_nothing_else_of_the_package_and_no_event_loop() -> None:
    code = "import sys, basilica.mesh; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("basilica")} == {"basilica", "basilica.mesh", "basilica.version"}
    assert not {"asyncio", "ssl", "http.client", "urllib.request", "argparse"} & loaded
