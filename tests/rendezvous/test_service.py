"""The service as a process: its files, its ports, its waits."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

from basilica.rendezvous.control import RendezvousControl
from basilica.rendezvous.journal import Journal, JournalDamaged
from basilica.rendezvous.keyspace import EtcdError, Request
from basilica.rendezvous.service import RendezvousError
from tests.rendezvous.harness import Address, Client, Exchange, OurServer, free_port, service_process

T = TypeVar("T")


@pytest.fixture
def journal_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keyspace"
    folder.mkdir()
    return folder


class Orders:
    """Orders to the service in a folder, each in an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, name: str, port: int | None = None) -> int:
        return asyncio.run(self._give(lambda control: control.open(name, port)))

    def close(self, name: str) -> bool:
        return asyncio.run(self._give(lambda control: control.close(name)))

    def list(self) -> "list[dict[str, Any]]":
        return asyncio.run(self._give(lambda control: control.list()))

    async def _give(self, order: Callable[[RendezvousControl], Awaitable[T]]) -> T:
        control = RendezvousControl(self._folder)
        try:
            return await order(control)
        finally:
            await control.disconnect()


def write(journal: Journal, value: str, now: int) -> None:
    request = Request(method="PUT", path="/a", value=value, prev_exist=None)
    journal.record(request, now)
    journal.keyspace.write(request, now)


def test_one_keyspace_by_hand_on_a_given_port(tmp_path: Path) -> None:
    port = free_port()
    with service_process(tmp_path, "--port", str(port)) as process:
        client = Client(("127.0.0.1", port))
        assert client.ask("PUT", "/v2/keys/a", "value=1").status == 201
        assert client.ask("GET", "/v2/machines").raw.decode() == f"http://127.0.0.1:{port}"
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_kill_minus_nine_loses_no_key_that_was_answered_and_no_port(tmp_path: Path) -> None:
    control = Orders(tmp_path)
    wished = free_port()
    with service_process(tmp_path) as process:
        ports = {name: control.open(name) for name in ("one", "two")}
        ports["three"] = control.open("three", wished)
        assert ports["three"] == wished
        for name, port in ports.items():
            client = Client(("127.0.0.1", port))
            for number in range(100):
                assert client.ask("PUT", f"/v2/keys/k{number}", f"value={name}").status == 201
            assert client.ask("PUT", "/v2/keys/soon", "ttl=1").status == 201
            assert client.ask("PUT", "/v2/keys/late", "ttl=1000").status == 201
            client.close()
        process.kill()
        process.wait()
    time.sleep(1.1)
    with service_process(tmp_path):
        assert {row["name"]: row["port"] for row in control.list()} == ports
        assert {name: control.open(name) for name in ports} == ports
        for name, port in ports.items():
            client = Client(("127.0.0.1", port))
            for number in range(100):
                assert client.ask("GET", f"/v2/keys/k{number}").json["node"]["value"] == name
            assert client.ask("GET", "/v2/keys/soon").status == 404
            assert 990 < client.ask("GET", "/v2/keys/late").json["node"]["ttl"] < 1000
            past = client.ask("GET", "/v2/keys/k5?wait=true&waitIndex=5").json
            assert past["node"]["modifiedIndex"] == 9, "the history came back as well"
            client.close()


KEYS = 50  # of each writer, written in turn


def test_killed_in_the_middle_of_many_writes_it_has_all_that_were_answered(tmp_path: Path) -> None:
    port = free_port()
    answered: dict[str, str] = {}

    def write_until_it_dies(writer: int) -> None:
        client = Client(("127.0.0.1", port))
        try:
            for number in count():
                key = f"w{writer}-{number % KEYS}"
                if client.ask("PUT", f"/v2/keys/{key}", f"value={number}&ttl=1000").status in (200, 201):
                    answered[key] = str(number)
        except OSError:
            client.close()

    for _ in range(3):
        with service_process(tmp_path, "--port", str(port)) as process:
            check = Client(("127.0.0.1", port))
            for key, value in answered.items():
                found = int(check.ask("GET", f"/v2/keys/{key}").json["node"]["value"])
                assert found in (int(value), int(value) + KEYS), "the last answer, or the write that was under way"
            check.close()
            threads = [threading.Thread(target=write_until_it_dies, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.4)
            process.kill()
            for thread in threads:
                thread.join()
    assert len(answered) == 4 * KEYS


def test_an_event_is_not_held_back_behind_the_headers(tmp_path: Path) -> None:
    port = free_port()
    with service_process(tmp_path, "--port", str(port)):
        connection = Client(("127.0.0.1", port))
        connection.ask("PUT", "/v2/keys/a", "value=1")
        took = []
        for _ in range(20):
            began = time.perf_counter()
            connection.ask("GET", "/v2/keys/a?wait=true&waitIndex=4")
            took.append(time.perf_counter() - began)
        connection.close()
    assert sorted(took)[10] < 0.02


def test_a_closed_keyspace_is_gone_with_its_waits_and_its_keys(tmp_path: Path) -> None:
    control = Orders(tmp_path)
    with service_process(tmp_path):
        port = control.open("run")
        client = Client(("127.0.0.1", port))
        client.ask("PUT", "/v2/keys/a", "value=1")
        waiting = Exchange(client.address, "GET", "/v2/keys/a?wait=true").wait_for_headers()
        assert control.close("run") is True
        assert control.close("run") is False
        with pytest.raises(ConnectionError):
            waiting.answer()
        with pytest.raises(ConnectionRefusedError):
            Exchange(client.address, "GET", "/v2/keys/a")
        assert list((tmp_path / "keyspaces").iterdir()) == []
        client.close()
        waiting.close()
        client = Client(("127.0.0.1", control.open("run")))
        assert client.ask("GET", "/v2/keys/a").status == 404
        client.close()


def test_orders_that_cannot_be_followed_say_why(tmp_path: Path) -> None:
    control = Orders(tmp_path)
    with service_process(tmp_path), socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(RendezvousError, match="Address already in use"):
            control.open("a", taken)
        control.open("a")
        with pytest.raises(RendezvousError, match="not 1024"):
            control.open("a", 1024)
        with pytest.raises(RendezvousError, match="cannot name"):
            control.open("no spaces")
        second = subprocess.run(
            [*_module(), "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=20, check=False
        )
        assert (second.returncode, "already" in second.stderr) == (1, True)


def _module() -> list[str]:
    return [sys.executable, "-m", "basilica.rendezvous"]


def test_a_port_that_is_taken_after_a_restart_is_waited_for(tmp_path: Path) -> None:
    control = Orders(tmp_path)
    with service_process(tmp_path):
        port = control.open("run")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with service_process(tmp_path):
            assert control.list() == [{"name": "run", "port": port, "serving": False, "fault": None}]
            other.close()
            deadline = time.monotonic() + 5
            while not control.list()[0]["serving"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            client = Client(("127.0.0.1", port))
            assert client.ask("GET", "/health").status == 200
            client.close()


def test_one_damaged_keyspace_does_not_stop_the_others(tmp_path: Path) -> None:
    control = Orders(tmp_path)
    with service_process(tmp_path):
        for name in ("bad", "good"):
            client = Client(("127.0.0.1", control.open(name)))
            for number in range(3):
                client.ask("PUT", "/v2/keys/a", f"value={number}")
            client.close()
    path = tmp_path / "keyspaces" / "bad" / "journal"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with service_process(tmp_path):
        rows = {row["name"]: row for row in control.list()}
        assert rows["good"]["serving"]
        assert "damaged at byte 0" in rows["bad"]["fault"]
        assert control.open("bad") == rows["bad"]["port"]


def test_a_line_that_was_cut_short_is_dropped(journal_folder: Path) -> None:
    journal = Journal(journal_folder)
    write(journal, "1", 10)
    before = journal.keyspace.dump()
    write(journal, "2", 20)
    journal.close()
    path = journal_folder / "journal"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        again = Journal(journal_folder)
        assert again.keyspace.dump() == before
        write(again, "3", 30)
        assert again.keyspace.get(Request(method="GET", path="/a"), 30).node["value"] == "3"
        again.close()
        reread = Journal(journal_folder)
        assert reread.keyspace.dump() == again.keyspace.dump()
        reread.close()


def test_a_crash_between_snapshot_and_emptying_the_journal_repeats_nothing(journal_folder: Path) -> None:
    journal = Journal(journal_folder, compact_bytes=1)
    for number in range(10):
        write(journal, str(number), number)
    lines = (journal_folder / "journal").read_bytes()
    assert journal.compact()
    before = journal.keyspace.dump()
    journal.close()
    (journal_folder / "journal").write_bytes(lines)
    again = Journal(journal_folder)
    assert again.keyspace.dump() == before
    again.close()


def test_a_gap_in_the_journal_is_damage(journal_folder: Path) -> None:
    journal = Journal(journal_folder)
    for number in range(3):
        write(journal, str(number), number)
    journal.close()
    path = journal_folder / "journal"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(JournalDamaged):
        Journal(journal_folder)


def test_a_write_that_failed_fails_again(journal_folder: Path) -> None:
    journal = Journal(journal_folder)
    write(journal, "1", 1)
    request = Request(method="PUT", path="/a", prev_exist=False)
    journal.record(request, 2)
    with pytest.raises(EtcdError):
        journal.keyspace.write(request, 2)
    write(journal, "2", 3)
    journal.close()
    again = Journal(journal_folder)
    assert again.keyspace.dump() == journal.keyspace.dump()
    again.close()


def test_what_cannot_be_journalled_is_not_done(ours: OurServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.fresh(3)
    client = Client(ours.address)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        answer = client.ask("PUT", "/v2/keys/a", "value=1")
    assert (answer.status, answer.json["errorCode"]) == (500, 300)
    assert client.ask("GET", "/v2/keys/a").status == 404
    assert client.ask("PUT", "/v2/keys/a", "value=1").status == 201
    ours.restart()
    assert client.ask("GET", "/v2/keys/a").json["node"]["value"] == "1"
    client.close()


# -- HTTP


def test_thousands_of_waits_are_answered_by_one_write(ours: OurServer) -> None:
    ours.fresh(3)
    waits = [Exchange(ours.address, "GET", "/v2/keys/go?wait=true").wait_for_headers() for _ in range(400)]
    assert not any(wait.answered() for wait in waits)
    client = Client(ours.address)
    client.ask("PUT", "/v2/keys/go", "value=1")
    assert {wait.answer().json["node"]["value"] for wait in waits} == {"1"}
    for wait in waits:
        wait.close()
    client.close()


def test_a_client_that_leaves_is_waited_for_no_longer(ours: OurServer) -> None:
    ours.fresh(3)
    assert ours.server is not None
    Exchange(ours.address, "GET", "/v2/keys/go?wait=true").wait_for_headers().close()
    deadline = time.monotonic() + 5
    while ours.server.keyspace.watching:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_connection_can_be_used_again_after_a_wait(ours: OurServer) -> None:
    ours.fresh(3)
    client = Client(ours.address)
    wait = Exchange(ours.address, "GET", "/v2/keys/go?wait=true").wait_for_headers()
    wait.socket.sendall(b"GET /version HTTP/1.1\r\n\r\n")  # pipelined behind the wait
    client.ask("PUT", "/v2/keys/go", "value=1")
    assert wait.answer().json["action"] == "set"
    assert wait.answer().json["etcdserver"] == "3.4.23"
    wait.close()
    client.close()


def test_a_stream_goes_on(ours: OurServer) -> None:
    ours.fresh(3)
    client = Client(ours.address)
    stream = Exchange(ours.address, "GET", "/v2/keys/?wait=true&recursive=true&stream=true").wait_for_headers()
    for number in range(3):
        client.ask("PUT", "/v2/keys/a", f"value={number}")
    deadline = time.monotonic() + 5
    while stream.received.count(b'"action"') < 3:
        assert time.monotonic() < deadline
        stream.answered(0.05)
    stream.close()
    client.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/3\r\n\r\n",
        b"GET /%zz HTTP/1.1\r\n\r\n",
        b"PUT /v2/keys/a HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /v2/keys/a HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"PUT /v2/keys/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20000,
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_the_connection_ends(ours: OurServer, raw: bytes) -> None:
    with socket.create_connection(ours.address, timeout=10) as connection:
        connection.sendall(raw)
        answer = connection.recv(4096)
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))
        assert b"Connection: close" in answer


@pytest.mark.parametrize("pause", [0, 0.001])
def test_a_request_may_come_in_any_pieces(ours: OurServer, pause: float) -> None:
    ours.fresh(3)
    form = "Content-Type: application/x-www-form-urlencoded\r\n"
    raw = (
        f"PUT /v2/keys/a HTTP/1.1\r\n{form}Transfer-Encoding: chunked\r\n\r\n6\r\nvalue=\r\n3\r\nabc\r\n0\r\n\r\n"
        f"PUT /v2/keys/b HTTP/1.1\r\n{form}Content-Length: 7\r\n\r\nvalue=b"
    ).encode()
    with socket.create_connection(ours.address, timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(len(raw)):
            connection.sendall(raw[number : number + 1])
            time.sleep(pause)
        received = b""
        while received.count(b'"action"') < 2:
            received += connection.recv(4096)
    assert b'"value":"abc"' in received
    assert b'"value":"b"' in received


def test_an_old_client_gets_a_wait_without_chunks(ours: OurServer) -> None:
    ours.fresh(3)
    client = Client(ours.address)
    with socket.create_connection(ours.address, timeout=10) as connection:
        connection.sendall(b"GET /v2/keys/a?wait=true HTTP/1.0\r\n\r\n")
        assert b"200 OK" in connection.recv(4096)
        client.ask("PUT", "/v2/keys/a", "value=1")
        body = b""
        while data := connection.recv(4096):
            body += data
    assert body.startswith(b'{"action":"set"')
    client.close()


def test_curl_is_told_to_go_on(ours: OurServer) -> None:
    ours.fresh(3)
    with socket.create_connection(ours.address, timeout=10) as connection:
        head = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 7\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(f"PUT /v2/keys/a HTTP/1.1\r\n{head}".encode())
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"value=1")
        assert b"201 Created" in connection.recv(4096)


def test_bytes_that_are_no_text_are_shown_as_etcd_shows_them(etcd: Address, ours: OurServer) -> None:
    ours.fresh(3)
    for address in (etcd, ours.address):
        client = Client(address)
        answer = client.ask("PUT", "/v2/keys/bytes", "value=%ff%fe")
        assert answer.json["node"]["value"] == "\ufffd\ufffd"
        assert client.ask("PUT", "/v2/keys/bytes", "prevValue=%ff%fe&value=%ff").status == 200
        client.ask("DELETE", "/v2/keys/bytes")
        client.close()
    ours.restart()
