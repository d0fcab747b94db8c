"""A way to the stage that a test can cut, as a network does: what is open breaks, what is tried is refused."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from tests.console.stage import Stage


class Relay:
    """Lives in the stage's loop."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._port = urlsplit(stage.url).port
        self._writers: set[asyncio.StreamWriter] = set()
        self._broken = False
        self._server = stage.do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def login_link(self) -> str:
        return self._stage.login_link().replace(self._stage.url, self.url)

    def cut(self) -> None:
        self._broken = True
        self._stage.call(self._break)

    def mend(self) -> None:
        self._broken = False

    def close(self) -> None:
        self._stage.call(self._server.close)
        self.cut()
        self._stage.do(self._server.wait_closed())

    def _break(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._broken:
            writer.close()
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ends = {writer, inner_writer}
        self._writers |= ends
        try:
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        finally:
            self._writers -= ends


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def relaying(stage: Stage) -> Iterator[Relay]:
    relay = Relay(stage)
    try:
        yield relay
    finally:
        relay.close()
