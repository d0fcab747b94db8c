"""What Kubernetes and Prometheus ask an operator: `/healthz`, `/readyz`, `/metrics`. Nothing else is served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

LINE_MAX = 4096
ASK_SECONDS = 5.0

Answer = tuple[HTTPStatus, str, bytes]


class Health:
    """`ready` gives None, or what is missing; `metrics` the text for Prometheus."""

    def __init__(self, ready: Callable[[], str | None], metrics: Callable[[], bytes]) -> None:
        self._ready, self._metrics = ready, metrics

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Yields the port."""
        server = await asyncio.start_server(self._serve, host, port, limit=LINE_MAX)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                request = (await reader.readline()).decode("latin-1").split()
                while (await reader.readline()).strip():
                    pass
                status, kind, body = self._answer(request)
                head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # whoever asked is gone, or asked nothing that could be answered
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, request: list[str]) -> Answer:
        text = "text/plain; charset=utf-8"
        if len(request) < 2 or request[0] not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, text, b"only GET\n"
        match request[1].partition("?")[0]:
            case "/healthz":
                return HTTPStatus.OK, text, b"ok\n"
            case "/readyz":
                missing = self._ready()
                if missing is None:
                    return HTTPStatus.OK, text, b"ok\n"
                return HTTPStatus.SERVICE_UNAVAILABLE, text, f"{missing}\n".encode()
            case "/metrics":
                return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", self._metrics()
            case _:
                return HTTPStatus.NOT_FOUND, text, b"not found\n"
