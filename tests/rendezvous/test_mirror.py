"""A copy of a keyspace follows what is behind its address, also when that is another one all at once."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from basilica.rendezvous.client import NOTICED_AFTER_S, KeysClient
from basilica.rendezvous.mirror import KeysMirror
from tests.rendezvous.harness import OurServer

PATIENCE_S = 20.0


class Address:
    """An address that stays while what answers there changes, as that of a Service does."""

    def __init__(self, port: int) -> None:
        self._backend = port
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def move(self, port: int) -> None:
        self._backend = port
        for writer in self._open:
            writer.close()

    def close(self) -> None:
        self._server.close()
        self.move(self._backend)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs_reader, theirs = await asyncio.open_connection("127.0.0.1", self._backend)
        self._open |= {writer, theirs}
        await asyncio.gather(_pass_on(reader, theirs), _pass_on(theirs_reader, writer))
        self._open -= {writer, theirs}


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


@pytest.fixture
def two_of_ours(tmp_path: Path) -> Iterator[list[OurServer]]:
    servers = [OurServer(tmp_path / name) for name in ("old", "young")]
    for server in servers:
        server.fresh(3)
    yield servers
    for server in servers:
        server.stop()


def test_a_younger_keyspace_takes_the_place_of_an_older_one(two_of_ours: list[OurServer]) -> None:
    old, young = two_of_ours

    async def story() -> None:
        address = Address(old.address[1])
        endpoint = await address.start()
        changed = asyncio.Event()
        mirror = KeysMirror(endpoint, "/run", lambda _: changed.set())
        following = asyncio.create_task(mirror.run())

        async def until(values: dict[str, str]) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while mirror.values != values:
                    changed.clear()
                    await changed.wait()

        async def put(server: OurServer, key: str, value: str) -> None:
            keys = KeysClient("{}:{}".format(*server.address))
            await keys.put(key, value)
            await keys.close()

        try:
            for number in range(50):
                await put(old, "/run/number", str(number))
            await until({"/run/number": "49"})
            await put(young, "/run/number", "first")
            address.move(young.address[1])
            await until({"/run/number": "first"})
            await put(young, "/run/number", "second")
            await until({"/run/number": "second"})
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            address.close()

    asyncio.run(story())


def test_a_keyspace_whose_machine_is_silent_is_noticed_within_three_heartbeats(
    monkeypatch: pytest.MonkeyPatch, two_of_ours: list[OurServer]
) -> None:
    """Nothing ends a wait at a machine that is cut off but the kernel's own questions."""
    connected: list[socket.socket] = []
    connect = asyncio.open_connection

    async def watched(host: str, port: int, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        streams = await connect(host, port, limit=limit)
        connected.append(streams[1].get_extra_info("socket"))
        return streams

    async def story(endpoint: str) -> None:
        keys = KeysClient(endpoint)
        await keys.put("/run/key", "value")
        [ours] = connected
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            ours.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count == NOTICED_AFTER_S
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == NOTICED_AFTER_S * 1000
        await keys.close()

    monkeypatch.setattr("basilica.rendezvous.client.asyncio.open_connection", watched)
    asyncio.run(story("{}:{}".format(*two_of_ours[0].address)))
