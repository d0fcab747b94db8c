"""What Kubernetes and Prometheus ask an operator: `/healthz`, `/readyz`, `/metrics`. Nothing else is served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from basilica.rendezvous.http import Call, Connection, Reply, text_error
from basilica.rendezvous.lane import Lane

ASK_SECONDS = 5.0
WAITING_BYTES_MAX = 4 << 20
TEXT = (("Content-Type", "text/plain; charset=utf-8"),)
METRICS = (("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),)


class Health:
    """`ready` gives None, or what is missing; `metrics` the text for Prometheus."""

    def __init__(self, ready: Callable[[], str | None], metrics: Callable[[], bytes]) -> None:
        self._ready, self._metrics = ready, metrics

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Yields the port."""
        lane = Lane(buffered_max=WAITING_BYTES_MAX, body_max=0)
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._answer, lane, within=ASK_SECONDS), host, port
        )
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for connection in list(lane.connections):
                connection.abort()
            await server.wait_closed()

    def _answer(self, call: Call) -> Reply:
        if call.method not in ("GET", "HEAD"):
            return text_error(405, "only GET", ("Allow", "GET, HEAD"))
        match call.path:
            case "/healthz":
                return Reply(200, b"ok\n", TEXT)
            case "/readyz":
                missing = self._ready()
                return Reply(200, b"ok\n", TEXT) if missing is None else Reply(503, f"{missing}\n".encode(), TEXT)
            case "/metrics":
                return Reply(200, self._metrics(), METRICS)
            case _:
                return text_error(404, "not found")
