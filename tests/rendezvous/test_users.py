"""Whose processes a rendezvous of this machine answers: real ones, of other users."""

import asyncio
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from basilica.rendezvous import peers
from basilica.rendezvous.control import RendezvousControl
from basilica.rendezvous.service import Service
from tests.rendezvous.harness import Client, free_port, service_process

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")

NOBODY = 65534
SOMEBODY = next(entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid not in (0, NOBODY))

ASK = """
import os, sys, urllib.error, urllib.request
"x".encode("idna")  # what is imported later could not be read
os.setgroups([]); os.setgid(65534); os.setuid(int(sys.argv[1]))
request = urllib.request.Request(sys.argv[2], b"value=theirs" if sys.argv[3] == "PUT" else None, method=sys.argv[3])
try:
    with urllib.request.urlopen(request, timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.status, error.read().decode())
"""

SEND_AND_LEAVE = """
import os, socket, sys
"x".encode("idna")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for _ in range(200):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
        peer.sendall(b"PUT /v2/keys/stolen?value=1 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
"""


def ask_as(uid: int, port: int, method: str) -> tuple[int, dict[str, object]]:
    url = f"http://127.0.0.1:{port}/v2/keys/a"
    command = [sys.executable, "-I", "-c", ASK, str(uid), url, method]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    status, _, body = said.partition(" ")
    return int(status), json.loads(body)


def test_processes_of_other_users_are_refused_and_told_why(tmp_path: Path) -> None:
    port = free_port()
    with service_process(tmp_path, "--port", str(port), "--allow-uid", str(SOMEBODY)):
        ours = Client(("127.0.0.1", port))
        assert ours.ask("PUT", "/v2/keys/a", "value=ours").status == 201
        for method in ("GET", "PUT", "DELETE"):
            status, body = ask_as(NOBODY, port, method)
            assert (status, body["errorCode"]) == (401, 110)
            assert f"this one is of {NOBODY}" in str(body["cause"])
        assert ours.ask("GET", "/v2/keys/a").json["node"]["value"] == "ours"
        assert ask_as(SOMEBODY, port, "GET")[0] == 200
        assert ask_as(0, port, "GET")[0] == 200
        ours.close()


async def test_a_user_can_be_added_to_a_service_that_runs(tmp_path: Path) -> None:
    service, control = Service(tmp_path, users={0}), RendezvousControl(tmp_path)
    await service.start()
    try:
        port = await service.open("run")
        assert (await asyncio.to_thread(ask_as, SOMEBODY, port, "PUT"))[0] == 401
        await control.allow(SOMEBODY)
        assert (await asyncio.to_thread(ask_as, SOMEBODY, port, "PUT"))[0] == 201
    finally:
        await control.disconnect()
        await service.stop()


def test_who_sends_and_leaves_before_anybody_looks_is_not_taken_for_root(tmp_path: Path) -> None:
    """A socket that was closed belongs to nobody, of whom the kernel speaks as of user 0."""
    port = free_port()
    with service_process(tmp_path, "--port", str(port)) as service:
        os.kill(service.pid, signal.SIGSTOP)  # it looks when all have left
        try:
            subprocess.run([sys.executable, "-I", "-c", SEND_AND_LEAVE, str(port)], timeout=60, check=True)
        finally:
            os.kill(service.pid, signal.SIGCONT)
        ours = Client(("127.0.0.1", port))
        assert ours.ask("GET", "/v2/keys/stolen").status == 404
        ours.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_and_its_tables_say_the_same(family: socket.AddressFamily) -> None:
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.create_server((host, 0), family=family) as listening:
        connecting = (
            "import os, socket, sys; 'x'.encode('idna'); os.setuid(65534);"
            f"s = socket.create_connection(({host!r}, {listening.getsockname()[1]})); sys.stdin.read()"
        )
        command = [sys.executable, "-I", "-c", connecting]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            taken, _ = listening.accept()
            with taken:
                ends = taken.getpeername()[:2], taken.getsockname()[:2]
                assert peers.uid_of(taken) == NOBODY
                assert peers._ask_kernel(family, *ends) == NOBODY
                assert peers._read_tables(family, *ends) == NOBODY
                assert other.stdin is not None
                other.stdin.close()
                other.wait(30)
                with pytest.raises(peers.UnknownPeer):
                    peers.uid_of(taken)


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.0.0.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False)],
)
def test_only_on_loopback_is_everybody_a_process_of_this_machine(host: str, alone: bool) -> None:
    assert peers.is_loopback(host) is alone
