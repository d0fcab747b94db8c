"""The awaitable twin: the same rules, without ever holding up its event loop."""

import asyncio
import socket
import time

import pytest

from basilica.mesh import mesh_status, mesh_wait_async
from tests.mesh.conftest import Pod
from tests.mesh.peers import Etcd, Peer, black_hole, saying, until


def test_it_is_released_by_a_key_written_while_it_waits(etcd: Etcd, pod: Pod) -> None:
    pod(etcd.endpoint)

    async def story() -> float:
        wait = asyncio.create_task(mesh_wait_async(20))
        await asyncio.to_thread(etcd.until_watchers, 2)
        began = time.monotonic()
        await asyncio.to_thread(etcd.write, "mesh-degraded", "host-1")
        await wait
        return time.monotonic() - began

    assert asyncio.run(story()) < 1
    assert mesh_status() == "degraded"


def test_it_times_out_and_the_loop_goes_on_meanwhile(pod: Pod) -> None:
    async def story() -> tuple[float, float]:
        wait, began, longest, before = (
            asyncio.create_task(mesh_wait_async(0.3)),
            time.monotonic(),
            0.0,
            time.monotonic(),
        )
        while not wait.done():
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        await wait
        return time.monotonic() - began, longest

    with black_hole() as endpoint:
        pod(endpoint)
        took, longest = asyncio.run(story())
    assert mesh_status() == "timeout"
    assert 0.3 <= took < 1.3
    assert longest < 0.2


def test_it_can_be_cancelled_and_leaves_nothing_open(pod: Pod) -> None:
    def silent(peer: Peer, connection: socket.socket, request: bytes) -> None:
        ends.append(connection.recv(1))

    ends: list[bytes] = []

    async def story(peer: Peer) -> None:
        wait = asyncio.create_task(mesh_wait_async(30))
        await asyncio.to_thread(until, lambda: bool(peer.requests), 5)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait

    with Peer(silent) as peer:
        pod(peer.endpoint)
        asyncio.run(story(peer))
        until(lambda: len(ends) == len(peer.requests), 5)
    assert set(ends) == {b""}
    assert mesh_status() is None


def test_an_outer_time_limit_wins(pod: Pod) -> None:
    async def story() -> None:
        async with asyncio.timeout(0.05):
            await mesh_wait_async(30)

    with black_hole() as endpoint:
        pod(endpoint)
        with pytest.raises(TimeoutError):
            asyncio.run(story())


def test_many_at_once_are_released_together(pod: Pod) -> None:
    async def story() -> None:
        await asyncio.gather(*(mesh_wait_async(5) for _ in range(50)))

    with Peer(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as peer:
        pod(peer.endpoint)
        asyncio.run(story())
    assert mesh_status() == "ready"


def test_outside_a_pod_it_returns_at_once(pod: Pod) -> None:
    asyncio.run(mesh_wait_async())
    assert mesh_status() is None
