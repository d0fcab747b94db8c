"""What an operator answers to Kubernetes and Prometheus, and to whoever asks nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from basilica.operator import health
from basilica.operator.health import Health

PROBLEM: list[str] = []


@asynccontextmanager
async def operator() -> AsyncIterator[int]:
    async with Health(lambda: PROBLEM[0] if PROBLEM else None, lambda: b"runs 3\n").listening("127.0.0.1", 0) as port:
        yield port


async def ask(port: int, request: str) -> tuple[int, str, str]:
    """Status, head and body; the connection ends with the answer, whatever was asked for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{request} HTTP/1.1\r\nHost: operator\r\n\r\n".encode())
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), head, body


def test_each_question_has_its_answer() -> None:
    async def story() -> None:
        async with operator() as port:
            assert (await ask(port, "GET /healthz"))[::2] == (200, "ok\n")
            assert (await ask(port, "GET /readyz?verbose"))[::2] == (200, "ok\n")
            PROBLEM.append("the list of runs is not there yet")
            try:
                assert (await ask(port, "GET /readyz"))[::2] == (503, "the list of runs is not there yet\n")
                assert (await ask(port, "GET /healthz"))[0] == 200
            finally:
                PROBLEM.clear()
            status, head, body = await ask(port, "GET /metrics")
            assert (status, body) == (200, "runs 3\n")
            assert "text/plain; version=0.0.4" in head
            status, head, body = await ask(port, "HEAD /metrics")
            assert (status, body) == (200, "")
            assert "Content-Length: 7" in head
            assert (await ask(port, "GET /deployments"))[0] == 404
            assert (await ask(port, "POST /healthz"))[0] == 405
            assert (await ask(port, "nonsense"))[0] == 400

    asyncio.run(story())


def test_who_asks_nothing_is_cut_off_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ASK_SECONDS", 0.3)

    async def story() -> None:
        async with operator() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HT")
            assert (await ask(port, "GET /healthz"))[0] == 200
            async with asyncio.timeout(10):
                with suppress(ConnectionResetError):  # an end is as good
                    assert await reader.read() == b""
            writer.close()

    asyncio.run(story())


def test_an_operator_that_ends_does_not_wait_for_open_connections() -> None:
    async def story() -> None:
        async with asyncio.timeout(4), operator() as port:  # less than a connection has
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0)
        writer.close()

    asyncio.run(story())
