"""Connections: how many a server holds, whose they are, and how long a client may keep it waiting."""

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from basilica.server.acceptor import Acceptor
from basilica.server.connections import ConnectionLimits, Connections, Place, body_seconds_left, limits_for
from basilica.server.protocol import MAX_PIPELINED
from tests.support.server import run_request, serving, wait_for
from tests.support.world import World, bearer, error_of, key_of, story

ROOMY = ConnectionLimits(members=64, strangers=16)


# ---- the rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("descriptors", "members", "strangers"),
    [(None, 6144, 2048), (1 << 20, 6144, 2048), (1024, 384, 128), (256, 96, 32), (64, 24, 8), (4, 6, 2)],
)
def test_connections_take_at_most_half_of_the_descriptors(
    descriptors: int | None, members: int, strangers: int
) -> None:
    limits = limits_for(descriptors)
    assert (limits.members, limits.strangers) == (members, strangers)


@pytest.mark.parametrize(
    ("waited", "received", "left"), [(0, 0, 20), (19, 0, 1), (20, 0, 0), (20, 8192, 1), (1000, 8192 * 1000, 20)]
)
def test_a_body_has_a_second_more_for_every_eight_kilobytes(waited: float, received: int, left: float) -> None:
    assert body_seconds_left(waited, received, ROOMY) == left


class Closed:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, connections: Connections, name: str) -> Place:
        return connections.admit(lambda: self.names.append(name))


def test_the_stranger_that_has_been_quiet_for_longest_gives_way() -> None:
    connections, closed = Connections(ConnectionLimits(members=1, strangers=3)), Closed()
    first, _, third = (closed(connections, name) for name in ("first", "second", "third"))
    first.head_received()
    closed(connections, "fourth")
    assert closed.names == ["second"]
    assert third.authenticated()
    closed(connections, "fifth")
    assert closed.names == ["second"]  # a member leaves room
    first.release()
    closed(connections, "sixth")
    assert closed.names == ["second"]
    closed(connections, "seventh")
    assert closed.names == ["second", "fourth"]


def test_members_are_refused_at_their_ceiling_and_never_closed_for_others() -> None:
    connections, closed = Connections(ConnectionLimits(members=1, strangers=2)), Closed()
    member, other = closed(connections, "member"), closed(connections, "other")
    assert member.authenticated()
    assert member.authenticated()
    assert not other.authenticated()
    for number in range(5):
        closed(connections, f"stranger {number}")
    assert "member" not in closed.names
    member.release()
    last = closed(connections, "last")
    assert last.authenticated()


# ---- on real sockets ------------------------------------------------------------------------------------------------


async def connected(client: httpx2.AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What the server sends until it closes the connection."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def head_of(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key_of('ann')}", *lines, "", ""]
    ).encode()


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
@story
async def test_a_head_that_does_not_come_in_time_is_408(world: World, sent: bytes) -> None:
    async with world.listening(replace(ROOMY, head_seconds=0.1)) as client:
        reader, writer = await connected(client)
        writer.write(sent)
        answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n")
        assert b"the head of the request did not come within 0.1 s" in answer
        writer.close()


@story
async def test_a_head_that_comes_in_drops_has_no_more_time_than_any_other(world: World) -> None:
    async with world.listening(replace(ROOMY, head_seconds=0.3)) as client:
        reader, writer = await connected(client)
        writer.write(b"GET /health HTTP/1.1\r\n")
        reading = asyncio.create_task(all_of(reader))
        sent = 0
        while not reading.done():
            writer.write(b"x-drop: 1\r\n")
            sent += 1
            await asyncio.sleep(0.02)
        assert reading.result().startswith(b"HTTP/1.1 408")
        assert sent > 3
        writer.close()


@story
async def test_the_next_head_on_a_connection_has_its_time_too(world: World) -> None:
    async with world.listening(replace(ROOMY, head_seconds=0.2)) as client:
        reader, writer = await connected(client)
        writer.write(head_of("GET", "/health") + b"GET /health HTTP/1.1\r\nHo")
        answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"HTTP/1.1 408" in answer
        writer.close()


@story
async def test_a_connection_waits_for_its_next_request_as_long_as_ever(world: World) -> None:
    async with world.listening(replace(ROOMY, head_seconds=0.05, body_seconds=0.05, stall_seconds=0.05)) as client:
        reader, writer = await connected(client)
        for between in (b"", b"\r\n"):  # an empty line after a body is no request
            writer.write(head_of("GET", "/health", "Content-Length: 2") + b"{}" + between)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 OK")
            await asyncio.sleep(0.2)
            assert not reader.at_eof()
        writer.close()


@story
async def test_an_empty_line_does_not_keep_a_connection_for_ever(world: World) -> None:
    async with world.listening(ROOMY, keep_alive=1) as client:
        reader, writer = await connected(client)
        writer.write(head_of("GET", "/health"))
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert await asyncio.wait_for(all_of(reader), 20) == b""
        writer.close()


@story
async def test_a_body_that_does_not_come_in_time_is_408(world: World) -> None:
    async with world.listening(replace(ROOMY, body_seconds=0.1)) as client:
        reader, writer = await connected(client)
        writer.write(head_of("POST", "/deployments", "Content-Length: 100") + b"{")
        answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the body of the request did not come within 0.1 s" in answer
        writer.close()
        assert (await client.get("/deployments")).json()["total"] == 0


@story
async def test_a_body_that_nobody_wants_any_more_has_no_more_time_either(world: World) -> None:
    async with world.listening(replace(ROOMY, body_seconds=0.2)) as client:
        reader, writer = await connected(client)
        writer.write(head_of("POST", "/no-such-path", "Content-Length: 100") + b"{")
        answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 404")
        assert b"HTTP/1.1 408" not in answer  # the one request has its one answer
        writer.close()


@story
async def test_a_body_that_comes_slowly_and_steadily_is_read(world: World) -> None:
    body = b'{"unknown": "' + b"x" * 40_000 + b'"}'
    async with world.listening(replace(ROOMY, body_seconds=0.2, body_rate=10_000)) as client:
        reader, writer = await connected(client)
        writer.write(head_of("POST", "/deployments", f"Content-Length: {len(body)}"))
        for start in range(0, len(body), 2_000):
            writer.write(body[start : start + 2_000])
            await asyncio.sleep(0.05)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


@story
async def test_the_time_in_which_the_server_does_not_read_is_not_the_clients(world: World) -> None:
    go_on = asyncio.Event()

    async def slow_disk(user: str, chunks: object) -> object:
        await go_on.wait()
        return await keep(user, chunks)  # type: ignore[arg-type]

    keep, world.runtime.store_archive = world.runtime.store_archive, slow_disk  # type: ignore[assignment, method-assign]
    # What comes buys little time: the first part, which is read before anybody waits, would buy seconds otherwise.
    async with world.listening(replace(ROOMY, body_seconds=0.5, body_rate=5_000_000)) as client:
        sending = asyncio.create_task(client.put("/archives", content=b"x" * 5_000_000))
        await asyncio.sleep(1)
        assert not sending.done()
        go_on.set()
        assert (await sending).status_code == 200


@story
async def test_a_client_that_reads_nothing_is_disconnected(world: World) -> None:
    instance = await world.deploy(target=1)
    await world.runtime.write(instance, 0, *("x" * 100_000 for _ in range(300)))
    async with world.listening(replace(ROOMY, stall_seconds=0.2)) as client:
        reader, writer = await connected(client)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head_of("GET", f"/deployments/{instance}/logs?follow=true"))
        while not world.runtime.followers:
            await asyncio.sleep(0.01)
        while world.runtime.followers:
            await asyncio.sleep(0.02)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert not (await all_of(reader)).endswith(b"0\r\n\r\n")  # broken off, so that it does not look like the end
        writer.close()


@story
async def test_an_answer_that_nobody_takes_does_not_keep_its_connection(world: World) -> None:
    instance = await world.deploy(target=1)
    world.runtime.result_files[instance] = {0: b'"' + b"x" * 16_000_000 + b'"'}
    async with world.listening(replace(ROOMY, stall_seconds=0.2)) as client:
        reader, writer = await connected(client)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head_of("GET", f"/deployments/{instance}/results", "Connection: close"))
        await asyncio.sleep(1)  # the server gives up after 0.2 s
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await all_of(reader)) < 16_000_000
        writer.close()


@story
async def test_requests_without_end_behind_one_that_goes_on_end_the_connection(world: World) -> None:
    instance = await world.deploy(target=1)
    async with world.listening(ROOMY) as client:
        reader, writer = await connected(client)
        writer.write(head_of("GET", f"/deployments/{instance}/watch"))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head_of("GET", "/health") * (MAX_PIPELINED + 2))
        assert b"HTTP/1.1 200" not in await all_of(reader)
        writer.close()
        assert (await client.get("/health")).status_code == 200


@story
async def test_strangers_who_say_nothing_keep_nobody_out(world: World) -> None:
    async with world.listening(ConnectionLimits(members=8, strangers=4)) as client:
        assert (await client.get("/deployments")).status_code == 200  # a member from now on
        crowd = [await connected(client) for _ in range(20)]
        for _ in range(3):
            assert (await client.get("/deployments")).status_code == 200
            async with httpx2.AsyncClient(base_url=client.base_url, trust_env=False, verify=False) as newcomer:
                assert (await newcomer.get("/health")).status_code == 200
                error_of(await newcomer.get("/deployments", headers=bearer("wrong")), 401)
        gone = [await asyncio.wait_for(all_of(reader), 5) for reader, _ in crowd[:16]]
        assert gone == [b""] * 16
        for _, writer in crowd:
            writer.close()


@story
async def test_more_users_than_there_is_room_for_are_told_so(world: World) -> None:
    async with world.listening(ConnectionLimits(members=2, strangers=4)) as client:
        first, second = [await connected(client) for _ in range(2)]
        for reader, writer in (first, second):
            writer.write(head_of("GET", "/deployments"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        refused = await client.get("/deployments")
        error = error_of(refused, 503)
        assert (error["retryable"], refused.headers["connection"]) == (True, "close")
        assert (await client.get("/health")).status_code == 200
        first[1].close()
        await first[1].wait_closed()
        while (await client.get("/deployments")).status_code != 200:
            await asyncio.sleep(0.01)
        second[1].close()


@story
async def test_too_few_descriptors_for_a_connection_are_no_busy_loop(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("basilica.server.acceptor.TRY_AGAIN_SECONDS", 0.3)
    tries = 0

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    with Exhausted() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        connections, closed = Connections(ConnectionLimits(members=8, strangers=8)), Closed()
        closed(connections, "quiet")
        opened = asyncio.Event()

        class Seen(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transport.close()
                opened.set()

        acceptor = Acceptor(sock, connections, lambda _: Seen(), None)
        with caplog.at_level(logging.WARNING, "basilica.server"):
            loop = asyncio.get_running_loop()
            began = loop.time()
            _, writer = await asyncio.open_connection(*sock.getsockname())
            await opened.wait()
        assert loop.time() - began > 0.8
        assert tries in (4, 5)
        assert closed.names == ["quiet"]
        assert "Too many open files" in caplog.text
        writer.close()
        await acceptor.close()


# ---- as a process ---------------------------------------------------------------------------------------------------


def test_half_open_connections_do_not_starve_a_server_of_few_descriptors(tmp_path: Path) -> None:
    with serving(tmp_path / "state", descriptors=256) as server:
        limit = Path(f"/proc/{server.pid}/limits").read_text()
        assert "256" in next(line for line in limit.splitlines() if line.startswith("Max open files"))
        url = httpx2.URL(server.url)
        crowd = []
        for _ in range(500):
            stranger = socket.create_connection((url.host, url.port))
            stranger.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
            crowd.append(stranger)
        with server.client() as client:
            assert client.get("/health").elapsed.total_seconds() < 5
            client.post("/deployments", json=run_request("train", "exit 0", target=2)).raise_for_status()
            wait_for(client, "train", lambda body: bool(body["phase"] == "succeeded"))
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < 128 + 64
        for stranger in crowd:
            stranger.close()
        assert "Traceback" not in server.stderr
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_server_takes_as_many_descriptors_as_the_system_allows(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(tmp_path / "state") as server:
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        soft = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]
        assert soft == str(hard)
