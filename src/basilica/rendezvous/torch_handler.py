"""torchrun's backend `basilica`: agents meet at a run's rendezvous, and nothing but torch has to be installed for it.

torch's own `EtcdRendezvous` keeps the protocol, so agents of this backend and of torch's `etcd` meet in one round, and
the driver of the rendezvous moves both. `Keys` is the client that torch takes from python-etcd otherwise.

torch finds the backend through the entry point `torchrun.handlers`, by `get_handler`. The text of this file also
travels to ranks that have no basilica, so it needs the standard library and torch alone, and keeps to the Python that
ranks may have. torch is imported when an agent asks for its rendezvous, and not before.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import quote, urlencode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

NAME = "basilica"
ENTRY_POINT = ("torchrun.handlers", NAME, "basilica.rendezvous.torch_handler:get_handler")
WORLD = "/basilica/world"  # as in rendezvous.names
PORT = 2379
ANSWER_WITHIN_S = 30.0
BACK_WITHIN_S = 30.0  # a rendezvous that is started anew refuses connections for a moment
ASK_AGAIN_S = 0.1
JOIN_S, LAST_CALL_S = 600, 30  # torch's own defaults
PREFIX = "/torchelastic/p2p"  # torch's own: the driver looks for its state there
RANK, RANKS = "BASILICA_RANK", "ranks"  # the folder is our own, beside torch's keep-alives
KEY_NOT_FOUND, COMPARE_FAILED, ALREADY_EXISTS, INDEX_CLEARED = 100, 101, 105, 401


def get_handler() -> Callable[[Any], Any]:
    """The creator of the handler, for torch's registry.

    `etcd` without python-etcd can only fail in torch: it becomes another name of this backend, since published clients
    say `etcd` in every command line. Agents of any backend get the hooks of `torch_agent`.
    """
    import importlib.util  # noqa: PLC0415

    from torch.distributed.elastic.rendezvous import api  # noqa: PLC0415  its package is being imported

    if importlib.util.find_spec("etcd") is None:
        creators = getattr(api.rendezvous_handler_registry, "_registry", {})
        if "etcd" in creators:
            creators["etcd"] = create
    with suppress(ImportError):  # where this text has travelled alone, the bootstrap attaches them
        from basilica.rendezvous import torch_agent  # noqa: PLC0415

        torch_agent.attach(api.rendezvous_handler_registry)
    return create


def register() -> None:
    """Make the backend known to torch in this process, unless an installed basilica has done so."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry  # noqa: PLC0415

    creator = get_handler()
    try:
        registry.register(NAME, creator)
    except ValueError:  # it is there, by the entry point
        return


def create(params: Any) -> Any:
    """The handler of one agent, with torch's parameters of the `etcd` backend, over plain HTTP."""
    try:
        from torch.distributed.elastic.rendezvous import etcd_rendezvous, utils  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"--rdzv-backend={params.backend} needs torch 2.7 or later, or python-etcd beside an older one: "
            "'pip install python-etcd'"
        ) from error
    if params.get("protocol", "http") != "http":
        raise RuntimeError(
            f"--rdzv-backend={params.backend} speaks plain HTTP: for https, install python-etcd and use "
            "--rdzv-backend=etcd"
        )

    torchs: Any = etcd_rendezvous  # it has no types

    class Meeting(torchs.EtcdRendezvous):  # type: ignore[misc]
        """torch's protocol, with two additions.

        SIGTERM ends the wait for others: the agent has no workers then. torch's own takes the exception of its signal
        handler for a failed attempt and tries again, so an agent that is not wanted any more would take part until it
        is killed.

        Agents are numbered in the order of their ranks in the run, where torch numbers them as they come. Each
        publishes its rank before it confirms, so that a final round has the ranks of all.
        """

        def rendezvous_barrier(self) -> Any:
            with _default_sigterm():
                wait_for_admission(self.client)
                return super().rendezvous_barrier()

        def confirm_phase(self, expected_version: str, this_rank: int) -> Any:
            folder = self.get_path(f"/rdzv/v_{expected_version}/{RANKS}")
            if os.environ.get(RANK):
                self.client.set(f"{folder}/{this_rank}", os.environ[RANK])
            version, seat, members = super().confirm_phase(expected_version, this_rank)
            if members == 1:
                return version, seat, members
            try:
                published = self.client.get(folder).children
            except torchs.etcd.EtcdKeyNotFound:
                published = []
            ranks = {child.key.rpartition("/")[2]: child.value for child in published}
            return version, group_rank(seat, [ranks.get(str(number)) for number in range(members)]), members

    class Handler(torchs.EtcdRendezvousHandler):  # type: ignore[misc]
        """torch's handler under the name that the agent asked for."""

        def get_backend(self) -> str:
            return str(params.backend)

    meeting = Meeting(
        client=Keys(*utils.parse_rendezvous_endpoint(params.endpoint, PORT), _errors(torchs.etcd)),
        prefix=params.get("etcd_prefix", PREFIX),
        run_id=params.run_id,
        num_min_workers=params.min_nodes,
        num_max_workers=params.max_nodes,
        timeout=params.get_as_int("timeout", JOIN_S),
        last_call_timeout=params.get_as_int("last_call_timeout", LAST_CALL_S),
    )
    return Handler(rdzv_impl=meeting, local_addr=params.local_addr)


def group_rank(seat: int, ranks: Sequence[str | None]) -> int:
    """The number of an agent in its group: the position of its rank among `ranks`, which are in the order of torch's
    own numbers, as `seat` is.

    Where a rank is missing, as that of an agent of torch's own backend is, or is there twice, torch's numbers stay.
    """
    numbers = [int(rank) for rank in ranks if rank is not None and rank.isascii() and rank.isdigit()]
    if len(set(numbers)) < len(ranks):
        return seat
    return sorted(numbers).index(numbers[seat])


def wait_for_admission(keys: Keys) -> None:
    """Wait until the run lets this rank join the others: they are told of it first, so that they lose no step.

    A rendezvous without our keys admits everybody.
    """
    rank = os.environ.get(RANK, "")
    while rank.isdecimal():
        try:
            found = keys.get(WORLD)
            admitted = json.loads(found.value or "{}").get("admitted")
        except (keys.errors.by_code[KEY_NOT_FOUND], ValueError, AttributeError):
            return
        if type(admitted) is not int or int(rank) < admitted:
            return
        with suppress(keys.errors.timeout, keys.errors.by_code[INDEX_CLEARED]):
            keys.watch(WORLD, found.etcd_index + 1)


@contextmanager
def _default_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's matter
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


class NoRendezvous(ConnectionRefusedError):
    """The rendezvous is away for longer than an agent waits. torch's lease threads end by this type without a trace."""


class Errors:
    """The exceptions that torch's code catches, as classes that can be raised.

    torch names python-etcd's where that is installed, else those of a stand-in that refuses to be raised.
    """

    def __init__(
        self, by_code: Mapping[int, type[Exception]], other: type[Exception], timeout: type[Exception]
    ) -> None:
        self.by_code, self.other, self.timeout = by_code, other, timeout


def _errors(etcd: Any) -> Errors:
    def raisable(caught: type[Exception]) -> type[Exception]:
        def init(self: Exception, *args: object) -> None:
            Exception.__init__(self, *args)

        return type(caught.__name__, (caught,), {"__init__": init, "payload": None})

    by_code = {
        KEY_NOT_FOUND: raisable(etcd.EtcdKeyNotFound),
        COMPARE_FAILED: raisable(etcd.EtcdCompareFailed),
        ALREADY_EXISTS: raisable(etcd.EtcdAlreadyExist),
        INDEX_CLEARED: raisable(etcd.EtcdEventIndexCleared),
    }
    return Errors(by_code, raisable(etcd.EtcdException), raisable(etcd.EtcdWatchTimedOut))


class Found:
    """A key as the rendezvous answers it, with the attributes that torch's code reads and sets."""

    def __init__(self, node: Mapping[str, Any], etcd_index: int) -> None:
        self.key: str = node.get("key", "/")
        self.value: str | None = node.get("value")
        self.dir: bool = node.get("dir", False)
        self.modified: int = node.get("modifiedIndex", 0)
        self.etcd_index = etcd_index
        self.children = [Found(child, etcd_index) for child in node.get("nodes") or ()]


class Keys:
    """A blocking client of etcd's v2 keys API, with the methods of python-etcd's that torch calls.

    Threads share it: torch renews its leases in threads of their own while it waits. Each call has a connection to
    itself, and connections are used again.
    """

    def __init__(self, host: str, port: int, errors: Errors) -> None:
        self._host, self._port, self.errors = host, port, errors
        self._idle: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def __del__(self) -> None:  # torch drops its client without a word
        self.close()

    @property
    def machines(self) -> list[str]:
        return [f"http://{self._host}:{self._port}"]

    def get(self, key: str) -> Found:
        return self._call("GET", key)

    def set(self, key: str, value: str | None, ttl: int | None = None) -> Found:
        return self.write(key, value, ttl=ttl)

    def write(self, key: str, value: str | None, ttl: int | None = None, dir: bool = False, **conditions: Any) -> Found:
        return self._call("PUT", key, form={"value": value, "ttl": ttl, "dir": dir or None, **conditions})

    def test_and_set(self, key: str, value: str, prev_value: str, ttl: int | None = None) -> Found:
        return self.write(key, value, ttl=ttl, prevValue=prev_value)

    def update(self, found: Found) -> Found:
        return self.write(found.key, found.value, prevExist=True, prevIndex=found.modified)

    def refresh(self, key: str, ttl: int) -> Found:
        return self._call("PUT", key, form={"ttl": ttl, "refresh": True, "prevExist": True})

    def delete(self, key: str, **conditions: Any) -> Found:
        return self._call("DELETE", key, query=conditions)

    def watch(
        self, key: str, index: int | None = None, timeout: float | None = None, recursive: bool | None = None
    ) -> Found:
        """The next change. A wait that ends without one has timed out for the caller, who reads again in any case.

        It is not repeated on another connection: a rendezvous that lost its keys would count for long until it came to
        that index.
        """
        query = {"wait": True, "waitIndex": index, "recursive": recursive}
        within = ANSWER_WITHIN_S if timeout is None else max(timeout, 0.001)
        try:
            return self._answered(*self._ask("GET", _target(key, query), None, within))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self.errors.timeout(f"watching {key}: {error!r}") from None

    def _call(
        self, method: str, key: str, query: Mapping[str, Any] | None = None, form: Mapping[str, Any] | None = None
    ) -> Found:
        """Ask until there is an answer, and give a rendezvous that is started anew the time that it takes."""
        target, body = _target(key, query or {}), None if form is None else urlencode(_texts(form))
        deadline = None
        while True:
            try:
                answer = self._ask(method, target, body, ANSWER_WITHIN_S)
            except (OSError, http.client.HTTPException) as error:
                deadline = time.monotonic() + BACK_WITHIN_S if deadline is None else deadline
                if time.monotonic() >= deadline:
                    place = f"{self._host}:{self._port}"
                    raise NoRendezvous(f"the rendezvous at {place} did not answer: {error!r}") from error
                time.sleep(ASK_AGAIN_S)
                continue
            return self._answered(*answer)

    def _ask(self, method: str, target: str, body: str | None, within: float) -> tuple[int, int, bytes]:
        connection = self._connection(within)
        headers = {} if body is None else {"Content-Type": "application/x-www-form-urlencoded"}
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            raw, index = response.read(), int(response.headers.get("X-Etcd-Index") or 0)
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:  # else the server closes it
            self._idle.append(connection)
        return response.status, index, raw

    def _answered(self, status: int, index: int, raw: bytes) -> Found:
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if status < 300 and isinstance(body, dict) and isinstance(body.get("node"), dict):
            return Found(body["node"], index)
        if isinstance(body, dict) and "errorCode" in body:
            kind = self.errors.by_code.get(body["errorCode"], self.errors.other)
            raise kind(f"{body.get('message')} : {body.get('cause')}")
        if not raw and status < 300:
            raise ValueError("it ended without an event")
        raise self.errors.other(f"what answers at {self._host}:{self._port} is no rendezvous (HTTP {status})")

    def _connection(self, within: float) -> http.client.HTTPConnection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(0):  # readable while nothing was asked: it is closed
                connection.sock.settimeout(within)
                return connection
            connection.close()
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within)
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
            if hasattr(socket, option):  # a wait may last for long: the kernel asks whether the machine is there
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return connection


def _target(key: str, query: Mapping[str, Any]) -> str:
    asked = urlencode(_texts(query))
    return "/v2/keys/" + quote(key.strip("/")) + (f"?{asked}" if asked else "")


def _texts(given: Mapping[str, Any]) -> dict[str, str]:
    """Values as etcd takes them, without those that are None."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in given.items()
        if value is not None
    }
