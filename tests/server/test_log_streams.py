"""Logs of any size: the first byte comes at once, and what a server holds for a reader does not grow with them."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from tests.support.server import SECONDS, Server, ended, phase_is, run_request, serving, wait_for

RANKS, MEGABYTES = 4, 24
LINE = "step 12345: a line of a log as trainings write them, of a common length, with a loss 0.12345"


def a_large_log(then: str = "exit 0") -> str:
    return f"yes '{LINE}' | head -c {MEGABYTES}000000; echo; {then}"


def memory(server: Server) -> float:
    """The most memory that the server ever had, in megabytes."""
    status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) / 1024


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


@pytest.mark.parametrize("query", ["", "tail=1000000", "follow=true"])
def test_all_of_a_large_log_takes_no_memory(server: Server, query: str) -> None:
    with server.client() as client:
        client.post("/deployments", json=run_request("train", a_large_log(), target=RANKS)).raise_for_status()
        wait_for(client, "train", ended)
        before, received, last = memory(server), 0, b""
        with client.stream("GET", f"/deployments/train/logs?{query}") as answer:
            for piece in answer.iter_raw():
                if not received:
                    assert memory(server) - before < 20
                received += len(piece)
                last = piece
        assert received > RANKS * MEGABYTES * 1_000_000
        assert last.endswith(b"\n")
        assert memory(server) - before < 40  # of the 96 MB of text, which took 380 MB


def test_followers_that_do_not_read_cost_little_and_nobody_waits_for_them(server: Server) -> None:
    url = httpx2.URL(server.url)
    with server.client() as client, ExitStack() as stack:
        script = a_large_log("touch $BASILICA_CHECKPOINT_DIR/done-$RANK; exec sleep 1000")
        client.post("/deployments", json=run_request("train", script, target=RANKS)).raise_for_status()
        wait_for(client, "train", phase_is("ready"))
        _until_written(server, RANKS)
        before = memory(server)
        asked = _asking(server, "/deployments/train/logs?follow=true")
        for _ in range(20):
            follower = stack.enter_context(socket.create_connection((url.host, url.port)))
            follower.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            follower.sendall(asked)
        read, read_before = _bytes_read(server), -1
        deadline = time.monotonic() + SECONDS
        while read - read_before > 1 << 20:  # until it reads no more for them
            assert memory(server) - before < 20 * 4  # they took 28 MB each
            assert time.monotonic() < deadline
            for _ in range(20):
                client.get("/health").raise_for_status()
                time.sleep(0.05)
            read, read_before = _bytes_read(server), read
        assert memory(server) - before < 20 * 4


@pytest.mark.parametrize("query", ["", "?follow=true"])
def test_a_server_that_goes_away_breaks_off_what_nobody_reads_without_a_traceback(tmp_path: Path, query: str) -> None:
    with serving(tmp_path) as server, server.client() as client, ExitStack() as stack:
        url = httpx2.URL(server.url)
        client.post("/deployments", json=run_request("train", a_large_log(), target=RANKS)).raise_for_status()
        wait_for(client, "train", ended)
        readers = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(10)]
        for reader in readers:
            reader.sendall(_asking(server, f"/deployments/train/logs{query}"))
            assert reader.recv(12) == b"HTTP/1.1 200"
        assert server.stop() == 0
        assert "Traceback" not in server.stderr
        for reader in readers:
            answer = _all_of(reader)
            assert len(answer) < RANKS * MEGABYTES * 1_000_000
            assert not answer.endswith(b"0\r\n\r\n")  # which would say that this was all
    with serving(tmp_path):
        pass


def _bytes_read(server: Server) -> int:
    return int(Path(f"/proc/{server.pid}/io").read_text().split()[1])


def _asking(server: Server, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n".encode()


def _all_of(reader: socket.socket) -> bytes:
    pieces = []
    with suppress(ConnectionResetError):
        while piece := reader.recv(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)


def _until_written(server: Server, ranks: int) -> None:
    state = server.key_file.parent
    deadline = time.monotonic() + SECONDS
    while len(list(state.glob("runs/*/checkpoints/done-*"))) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.05)
