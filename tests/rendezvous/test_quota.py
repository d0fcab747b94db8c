"""How much one keyspace may take, and that the others do not notice when it takes all of that."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest

from basilica.rendezvous import lane as lanes
from basilica.rendezvous.client import Answer, KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.keyspace import EVENT_INDEX_CLEARED, HISTORY_BYTES, OVER_QUOTA, EtcdError, Keyspace, Request
from basilica.rendezvous.lane import Lane
from basilica.rendezvous.quota import Quota, why_not_write
from basilica.rendezvous.service import Service

SMALL = Quota(keys=20, weight=40_000, value_bytes=8_000, waits=3, connections=12, buffered=200_000)


@asynccontextmanager
async def serving(folder: Path, quota: Quota, *names: str) -> AsyncIterator[list[KeysClient]]:
    service = Service(folder, quota=quota)
    await service.start()
    clients = [KeysClient(f"127.0.0.1:{await service.open(name)}") for name in names]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()
        await service.stop()


def refused(answer: Answer) -> str:
    assert (answer.status, answer.body["errorCode"]) == (507, OVER_QUOTA), answer
    assert answer.body["message"] == "Quota of the keyspace exceeded"
    return str(answer.body["cause"])


async def test_what_is_too_much_is_refused_with_a_reason_and_deleting_makes_room(tmp_path: Path) -> None:
    async with serving(tmp_path, SMALL, "run", "other") as (run, other):
        assert "a value may have 8000" in refused(await run.put("/a", "x" * 8_001))
        assert (await run.put("/a", "x" * 8_000)).ok
        answers = [await run.put(f"/big/{number}", "x" * 8_000) for number in range(6)]
        full = next(answer for answer in answers if not answer.ok)
        assert "may take 40000: delete some keys" in refused(full)
        assert (await run.put("/a", "y" * 8_000)).ok  # in place of as much
        assert (await run.put("/basilica/world", "{}")).ok  # there is always room for what the controller says
        assert (await other.put("/a", "x" * 8_000)).ok
        assert (await run.delete("/big", recursive=True)).ok
        for number in range(30):
            answer = await run.put(f"/many/{number}", "")
            if not answer.ok:
                break
        assert "may have 20: delete some" in refused(answer)
        assert (await run.put("/basilica/mesh-ready/here", "ready")).ok


async def test_a_full_keyspace_is_as_full_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, SMALL, "run") as (run,):
        while (await run.put(f"/k/{time.monotonic_ns()}", "é" * 1_000)).ok:
            pass
    async with serving(tmp_path, SMALL, "run") as (run,):
        refused(await run.put("/another", "é" * 1_000))
        assert (await run.delete("/k", recursive=True)).ok
        assert (await run.put("/another", "é" * 1_000)).ok


async def test_waits_and_connections_are_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, SMALL, "run", "other") as (run, other):
        index = (await run.put("/a", "1")).index
        endpoint = run._exchange._host
        waiting = [KeysClient(endpoint) for _ in range(4)]
        tasks = [asyncio.create_task(client.wait("/b", index + 1)) for client in waiting]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        assert len(done) == 1
        assert "and 3 may" in refused(done.pop().result())
        assert (await run.put("/b", "1")).ok
        for task in pending:
            assert (await task).ok
        for client in waiting:
            await client.close()

        port = int(endpoint.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        told = [await asyncio.wait_for(reader.read(400), 20) for reader, _ in idle[SMALL.connections :]]
        assert all(b"507" in answer and b"no more may be" in answer for answer in told)
        assert (await run.get("/a")).ok  # who was there before stays
        assert (await other.get("/")).ok
        for _, writer in idle:
            writer.close()


async def test_a_body_that_is_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with serving(tmp_path, SMALL, "run") as (run,):
        port = int(run._exchange._host.rpartition(":")[2])
        for framing in (b"Content-Length: 9000000", b"Transfer-Encoding: chunked"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"PUT /v2/keys/a HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n895440\r\n")
            assert b"413" in await asyncio.wait_for(reader.readline(), 20)
            writer.close()


async def test_bytes_that_wait_for_the_rest_of_their_requests_are_bounded_together(tmp_path: Path) -> None:
    async with serving(tmp_path, SMALL, "run", "other") as (run, other):
        port = int(run._exchange._host.rpartition(":")[2])
        began = [await asyncio.open_connection("127.0.0.1", port) for _ in range(11)]
        for _, writer in began:
            writer.write(b"PUT /v2/keys/a HTTP/1.1\r\nHost: x\r\nContent-Length: 80000\r\n\r\n" + b"x" * 60_000)
        reads = [asyncio.create_task(reader.readline()) for reader, _ in began]
        done, pending = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        assert any(b"503" in task.result() for task in done if task.exception() is None)
        assert (await other.put("/a", "1")).ok
        for task in pending:
            task.cancel()
        for _, writer in began:
            writer.close()


def test_a_history_of_large_values_is_forgotten_sooner() -> None:
    keyspace = Keyspace()
    value = "x" * (1 << 20)
    for number in range(40):
        keyspace.write(Request(method="PUT", path="/a", value=f"{number}{value}"), 1)
    held = [event for event in keyspace._events if event is not None]
    assert sum(event.weight for event in held) <= HISTORY_BYTES
    with pytest.raises(EtcdError) as cleared:
        keyspace.watch("/a", lambda _: None, since=keyspace.index - 30)
    assert cleared.value.code == EVENT_INDEX_CLEARED
    _, past = keyspace.watch("/a", lambda _: None, since=keyspace.index)
    assert past is not None
    again = Keyspace.load(keyspace.dump())
    assert again.dump() == keyspace.dump()
    assert (again.keys, again.weight) == (keyspace.keys, keyspace.weight)


def test_what_is_counted_is_what_is_there() -> None:
    keyspace = Keyspace()
    for request in (
        Request(method="PUT", path="/a/b/c", value="1"),
        Request(method="PUT", path="/a/b/c", value="four"),
        Request(method="PUT", path="/a/b/c", value="é", prev_exist=True),
        Request(method="POST", path="/a/b", value="x"),
        Request(method="PUT", path="/d", dir=True),
        Request(method="DELETE", path="/a/b/c"),
    ):
        if request.method == "PUT":
            before = keyspace.keys, keyspace.weight
            keys, weight = keyspace.growth(request.path, request.value)
            keyspace.write(request, 1)
            assert (keyspace.keys, keyspace.weight) == (before[0] + keys, before[1] + weight)
        else:
            keyspace.write(request, 1)
    assert keyspace.keys == 4
    keyspace.write(Request(method="DELETE", path="/a", recursive=True), 1)
    keyspace.write(Request(method="DELETE", path="/d", dir=True), 1)
    assert (keyspace.keys, keyspace.weight) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "fits"),
    [
        (Request(method="PUT", path="/a", value="x" * 100), True),
        (Request(method="PUT", path="/a", value="x" * 101), False),
        (Request(method="PUT", path="/a", value="é" * 51), False),
        (Request(method="PUT", path="/new", value=""), False),
        (Request(method="POST", path="/a", value=""), False),
        (Request(method="PUT", path="/a", refresh=True, deadline=5), True),
        (Request(method="PUT", path="/new", refresh=True, deadline=5), True),  # there is nothing to refresh: 404
        (Request(method="DELETE", path="/a"), True),
        (Request(method="PUT", path="/basilica", value=""), False),  # a quarter of one key is none
    ],
)
def test_the_rules(request_: Request, fits: bool) -> None:
    keyspace = Keyspace()
    keyspace.write(Request(method="PUT", path="/a", value=""), 1)
    assert (why_not_write(Quota(keys=1, value_bytes=100), keyspace, request_) is None) is fits


class Endless:
    """A connection that always has one more request, each of which takes a millisecond by the lane's clock."""

    now = 0.0

    def __init__(self) -> None:
        self.answered = 0

    def answer_next(self) -> bool:
        Endless.now += 0.001
        self.answered += 1
        return True

    def hold_back(self, hold: bool) -> None:
        pass

    def unsent(self) -> int:
        return 0

    def abort(self) -> None:
        pass


async def test_a_lane_yields_to_the_others_after_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: Endless.now)
    monkeypatch.setattr(lanes, "time", clock)
    lane = Lane(buffered_max=1, body_max=1)
    busy = [Endless() for _ in range(50)]
    for connection in busy:
        lane.serve(connection)
    longest = 0.0
    for _ in range(20):
        began = Endless.now
        await asyncio.sleep(0)
        longest = max(longest, Endless.now - began)
    assert sum(connection.answered for connection in busy) >= 20  # it goes on
    assert longest < lanes.SLICE_S + 0.002, "all 50 would take 50 ms for one request each, in every turn"
    for connection in busy:
        lane.leave(connection)
    await asyncio.sleep(0.01)


@pytest.mark.timeout(120)
async def test_one_run_that_writes_all_it_can_does_not_keep_another_waiting(tmp_path: Path) -> None:
    """Values of the largest size, as fast as twenty connections can, and a neighbour who writes a word now and then."""
    quota = Quota(weight=64 << 20)
    async with serving(tmp_path, quota, "loud", "quiet") as (loud, quiet):
        body = urlencode({"value": "%" * (1 << 20)}).encode()
        port = int(loud._exchange._host.rpartition(":")[2])

        def shout(number: int) -> None:
            with socket.create_connection(("127.0.0.1", port)) as line:
                head = f"PUT /v2/keys/{number} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                kind = "Content-Type: application/x-www-form-urlencoded\r\n\r\n"
                for _ in range(4):
                    line.sendall(f"{head}{kind}".encode() + body)
                    if not line.recv(1 << 16).startswith(b"HTTP/1.1 20"):
                        return  # it is too much

        shouting = [asyncio.create_task(asyncio.to_thread(shout, number)) for number in range(20)]
        slowest = 0.0
        while not all(task.done() for task in shouting):
            began = time.perf_counter()
            try:
                assert (await quiet.put("/a", "word")).ok
            except NoAnswer:
                pytest.fail("the neighbour was kept waiting for ten seconds")
            slowest = max(slowest, time.perf_counter() - began)
            await asyncio.sleep(0.01)
        await asyncio.gather(*shouting, return_exceptions=True)
        assert slowest < 3.0, f"the neighbour was kept waiting for {slowest:.1f} s"
