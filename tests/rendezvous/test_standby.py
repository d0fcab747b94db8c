"""A detached service that is killed: nobody who comes meanwhile is turned away, and nothing is left when it ends."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from basilica.rendezvous.control import RendezvousControl
from tests.rendezvous.harness import Address, Answer, Client

T = TypeVar("T")
PATIENCE_S = 30.0


class Detached:
    """`python -m basilica.rendezvous --detach`, its orders and its two processes."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self.data_dir = data_dir
        command = [sys.executable, "-m", "basilica.rendezvous", "--data-dir", str(data_dir), "--detach", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
            assert started.stdout is not None
            assert started.stdout.readline().startswith("rendezvous: 0 keyspaces")
        self.parent = parent_of(self.pid)

    @property
    def pid(self) -> int:
        return int((self.data_dir / "lock").read_text())

    def order(self, order: Callable[[RendezvousControl], Awaitable[T]]) -> T:
        async def give() -> T:
            control = RendezvousControl(self.data_dir)
            try:
                return await order(control)
            finally:
                await control.disconnect()

        return asyncio.run(give())

    def open(self, name: str, port: int | None = None) -> Address:
        return "127.0.0.1", self.order(lambda control: control.open(name, port))

    def kill(self) -> int:
        """The service itself; its pid. Whoever is killed is gone when this returns."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_there(pid), "the killed one is gone")
        return pid

    def replaced(self, killed: int) -> bool:
        with contextlib.suppress(ValueError):  # just being written
            return self.pid != killed and is_there(self.pid)
        return False

    def end(self) -> None:
        """The parent first, or it would start another."""
        for pid in (self.parent, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not is_there(pid), "it is gone")  # type: ignore[misc]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.005)


def ask(address: Address, method: str, target: str, body: str | None = None) -> Answer:
    with contextlib.closing(Client(address)) as client:
        return client.ask(method, target, body)


def refuses(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=PATIENCE_S).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Detached]:
    started = Detached(tmp_path / "data")
    yield started
    started.end()


def test_who_comes_while_it_is_away_waits_and_is_not_refused(service: Detached) -> None:
    address = service.open("run")
    ask(address, "PUT", "/v2/keys/mine", "value=precious")
    refused, over = [], threading.Event()

    def knock() -> None:
        while not over.is_set():
            refused.append(refuses(address))

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        for _ in range(3):
            killed = service.kill()
            answer = ask(address, "GET", "/v2/keys/mine")
            assert answer.json["node"]["value"] == "precious"
            until(lambda killed=killed: service.replaced(killed), "another serves")  # type: ignore[misc]
            assert parent_of(service.pid) == service.parent
            assert [row["name"] for row in service.order(lambda control: control.list())] == ["run"]
    finally:
        over.set()
        knocking.join()
    assert refused
    assert not any(refused)


def test_one_that_is_killed_before_it_was_up_is_followed_by_another(service: Detached) -> None:
    address = service.open("run")
    killed = service.kill()
    until(lambda: service.replaced(killed), "another begins")
    service.kill()
    assert ask(address, "GET", "/health").status == 200


def test_the_port_of_a_keyspace_that_is_closed_refuses_at_once_and_for_good(service: Detached) -> None:
    closed, stays = service.open("closed"), service.open("stays")
    assert service.order(lambda control: control.close("closed"))
    assert refuses(closed)
    killed = service.kill()
    assert ask(stays, "GET", "/health").status == 200
    until(lambda: service.replaced(killed), "another serves")
    assert refuses(closed)
    assert service.open("again", closed[1]) == closed
    assert ask(closed, "GET", "/health").status == 200


def test_the_port_of_a_keyspace_whose_files_are_gone_refuses_until_it_is_opened_anew(service: Detached) -> None:
    address = service.open("run")
    shutil.rmtree(service.data_dir / "keyspaces")
    service.kill()
    assert service.order(lambda control: control.list()) == []
    assert refuses(address)
    assert service.open("run", address[1]) == address
    assert ask(address, "GET", "/v2/keys/").json["node"].get("nodes") is None
    service.kill()
    assert ask(address, "GET", "/health").status == 200


def test_without_its_parent_it_goes_on_until_it_is_killed_itself(service: Detached) -> None:
    address = service.open("run")
    os.kill(service.parent, signal.SIGKILL)
    until(lambda: not is_there(service.parent), "the parent is gone")
    assert service.open("another") != address
    assert service.order(lambda control: control.close("another"))
    assert ask(address, "GET", "/health").status == 200
    service.kill()
    assert refuses(address)


@pytest.mark.parametrize("ending", ["asked to", "unused"])
def test_when_it_ends_as_it_should_nothing_is_left(tmp_path: Path, ending: str) -> None:
    service = Detached(tmp_path / "data", *(["--linger", "0.2"] if ending == "unused" else []))
    pid = service.pid
    if ending == "asked to":
        address = service.open("run")
        os.kill(pid, signal.SIGTERM)
    until(lambda: not is_there(pid), "the service is gone")
    until(lambda: not is_there(service.parent), "and so is its parent")
    if ending == "asked to":
        assert refuses(address)


def test_one_that_cannot_start_says_why_and_is_not_tried_again(service: Detached) -> None:
    command = [sys.executable, "-m", "basilica.rendezvous", "--data-dir", str(service.data_dir), "--detach"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == ""
    assert "runs in" in done.stderr
