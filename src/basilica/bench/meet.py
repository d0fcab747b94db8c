"""How the two probes find each other.

Rank 0 listens. Rank 1 is told where, as HOST:PORT, or both are told a key of the run's rendezvous (the keys API
of etcd v2): rank 0 writes its address there, and rank 1 waits for it. A key is for one meeting: who tries again takes
another. Strangers at rank 0's port are turned away.
"""

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

from basilica.bench.link import Deadline, Link, PeerGone, ProbeError

HELLO_WITHIN_S = 5.0
DIAL_AGAIN_S = 0.2
KEY_TTL_S = 3600
KEYS = "/v2/keys/basilica/bench/"

Address = tuple[str, int]


def parse_address(text: str) -> Address:
    """`HOST:PORT`, `[V6]:PORT`, `:PORT` for every interface; `ValueError` if it is neither."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(address: Address) -> socket.socket:
    host, port = address
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ProbeError(f"cannot listen at {host or '*'}:{port}: {error.strerror or error}") from None


def welcome(listener: socket.socket, hello: dict[str, Any], deadline: Deadline) -> tuple[Link, dict[str, Any]]:
    """Rank 0: the link to the probe that knows our token, and what it said of itself."""
    turned_away = 0
    while deadline.left() > 0:
        listener.settimeout(deadline.left())
        try:
            sock, _ = listener.accept()
        except (TimeoutError, ConnectionError):
            continue
        try:
            link = Link(sock, Deadline(min(HELLO_WITHIN_S, deadline.left())))
            link.expect_greeting()
            theirs = link.hear()
            if theirs.get("token") != hello["token"]:
                raise ProbeError("another run's probe")
            link.greet()
            link.tell(**hello)
        except (ProbeError, OSError):  # OSError: it is gone already
            sock.close()
            turned_away += 1
            continue
        return Link(sock, deadline, _name(theirs)), theirs
    strangers = f"; {turned_away} others called, none of them a probe of this run" if turned_away else ""
    raise ProbeError(f"the other probe did not come within {deadline.seconds:g} s{strangers}")


def call(address: Address, hello: dict[str, Any], deadline: Deadline) -> tuple[Link, dict[str, Any]]:
    """Rank 1: the link to rank 0, and what that said of itself. Rank 0 may come later than we."""
    host, port = address
    problem = "there was no time to try"
    while deadline.left() > 0:
        try:
            sock = socket.create_connection((host, port), timeout=deadline.left())
            if sock.getsockname() == sock.getpeername():  # TCP may connect a dialled port of this machine to itself
                sock.close()
                continue
            link = Link(sock, deadline, f"the probe at {host}:{port}")
            link.greet()
            link.tell(**hello)
            link.expect_greeting()
            theirs = link.hear()
        except (OSError, PeerGone) as error:  # a proxy may take the call before rank 0 is there
            problem = getattr(error, "strerror", None) or str(error)
            time.sleep(min(DIAL_AGAIN_S, deadline.left()))
            continue
        if theirs.get("token") != hello["token"]:
            raise ProbeError(f"the probe at {host}:{port} belongs to another run")
        link.peer = _name(theirs)
        return link, theirs
    raise ProbeError(f"no probe answers at {host}:{port}: {problem} ({deadline.seconds:g} s)")


def _name(hello: dict[str, Any]) -> str:
    return f"the probe on {hello.get('node') or 'the other node'}"


# ---- through the run's rendezvous --------------------------------------------------------------------------------


def publish(rendezvous: Address, key: str, port: int, deadline: Deadline) -> None:
    """Write down where we listen: at the address by which we reach the rendezvous, since others reach us there too."""

    def put(connection: http.client.HTTPConnection) -> bool:
        connection.connect()
        host = connection.sock.getsockname()[0]
        body = urlencode({"value": json.dumps([host, port]), "ttl": KEY_TTL_S})
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("PUT", KEYS + quote(key, safe=""), body, headers)
        return connection.getresponse().status in (200, 201)

    while not _asked(rendezvous, deadline, put):
        time.sleep(min(DIAL_AGAIN_S, deadline.left()))


def look_up(rendezvous: Address, key: str, deadline: Deadline) -> Address:
    """Where rank 0 listens, once it has written it down."""
    found: list[Address] = []
    index = 0

    def get(connection: http.client.HTTPConnection) -> bool:
        nonlocal index
        wait = f"?wait=true&waitIndex={index}" if index else ""
        connection.request("GET", KEYS + quote(key, safe="") + wait)
        answer = connection.getresponse()
        index = int(answer.headers.get("X-Etcd-Index") or 0) + 1
        body = json.loads(answer.read(1 << 16))
        if answer.status == 200:
            host, port = json.loads(body["node"]["value"])
            found.append((str(host), int(port)))
        return bool(found) or answer.status == 404  # with 404 the next request waits

    while not found:
        if not _asked(rendezvous, deadline, get):
            index = 0
            time.sleep(min(DIAL_AGAIN_S, deadline.left()))
    return found[0]


def _asked(rendezvous: Address, deadline: Deadline, ask: Callable[[http.client.HTTPConnection], bool]) -> bool:
    """Ask once; False if there was no good answer. `ProbeError` once the time is up."""
    host, port = rendezvous
    if deadline.left() <= 0:
        raise ProbeError(
            f"the other probe could not be found through the rendezvous at {host}:{port} ({deadline.seconds:g} s)"
        )
    connection = http.client.HTTPConnection(host, port, timeout=deadline.left())
    try:
        return ask(connection)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    finally:
        with suppress(OSError):
            connection.close()
