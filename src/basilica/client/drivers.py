"""The two drivers of flows: one blocks, one awaits. Every side effect of the SDK happens here.

A driver that a child inherits through a fork opens connections of its own.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

import httpx2

from basilica.client.effects import Answer, Call, Effect, Emit, Flow, Lines, NextLine, NoAnswer, Now, Sleep

T = TypeVar("T")
CONNECT_SECONDS = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server and the credentials of requests to it."""

    url: str
    key: str | None = None
    verify: Any = True

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class BlockingDriver:
    """Runs flows in the calling thread."""

    def __init__(self, locate: Callable[[], Endpoint]) -> None:
        self._locate = locate
        self._http: httpx2.Client | None = None
        self._endpoint: Endpoint | None = None
        self._pid = 0

    def run(self, flow: Flow[T]) -> T:
        outcome: list[T] = []
        for value in self._drive(flow, outcome):
            raise TypeError(f"this flow emits values and must be iterated over: {value!r}")
        return outcome[0]

    def iterate(self, flow: Flow[None]) -> Iterator[Any]:
        """Yield the values that a flow emits; closing the iterator closes the flow and its stream."""
        yield from self._drive(flow, [])

    def close(self) -> None:
        if self._http is not None and self._pid == os.getpid():
            self._http.close()
        self._http = None

    def _drive(self, flow: Flow[Any], outcome: list[Any]) -> Generator[Any, None, None]:
        with ExitStack() as opened:
            lines: Iterator[str] | None = None
            reply: Any = None
            try:
                while True:
                    effect: Effect = flow.send(reply)
                    match effect:
                        case Call():
                            reply = self._call(effect)
                        case Sleep(seconds, jitter):
                            time.sleep(_jittered(seconds, jitter))
                            reply = None
                        case Now():
                            reply = time.monotonic()
                        case Emit(value):
                            reply = yield value
                        case Lines(call):
                            reply, lines = self._open(call, opened)
                        case NextLine():
                            reply = self._next(lines)
                        case _:
                            assert_never(effect)
            except StopIteration as done:
                outcome.append(done.value)
            finally:
                flow.close()

    def _client(self) -> httpx2.Client:
        endpoint = self._locate()
        if self._http is None or self._pid != os.getpid() or endpoint != self._endpoint:
            self._http = httpx2.Client(**_settings(endpoint))
            self._pid, self._endpoint = os.getpid(), endpoint
        return self._http

    def _call(self, call: Call) -> Answer | NoAnswer:
        deadline = None if call.total is None else time.monotonic() + call.total
        content = bytearray()
        try:
            with self._client().stream(**_request(call)) as answer:
                if deadline is not None:  # httpx2 bounds each read alone
                    timeouts = answer.request.extensions["timeout"]
                    timeouts["read"] = max(0.001, min(timeouts["read"], deadline - time.monotonic()))
                for chunk in answer.iter_bytes():
                    content += chunk
                    if deadline is not None and time.monotonic() > deadline:
                        return _too_late(call)
        except httpx2.TransportError as error:
            return _no_answer(error)
        return Answer(answer.status_code, answer.headers, bytes(content))

    def _open(self, call: Call, opened: ExitStack) -> tuple[Answer | NoAnswer, Iterator[str] | None]:
        opened.close()
        try:
            answer = opened.enter_context(self._client().stream(**_request(call, endless=True)))
            if answer.is_error:
                return Answer(answer.status_code, answer.headers, answer.read()), None
        except httpx2.TransportError as error:
            return _no_answer(error), None
        return Answer(answer.status_code, answer.headers, b""), answer.iter_lines()

    def _next(self, lines: Iterator[str] | None) -> str | NoAnswer | None:
        if lines is None:
            return None
        try:
            return next(lines, None)
        except httpx2.TransportError as error:
            return _no_answer(error)


class AsyncDriver:
    """Runs flows in the caller's event loop; connections belong to the loop that made them."""

    def __init__(self, locate: Callable[[], Endpoint]) -> None:
        self._locate = locate
        self._http: httpx2.AsyncClient | None = None
        self._endpoint: Endpoint | None = None
        self._home: tuple[int, int] = (0, 0)
        self._answers = False

    async def run(self, flow: Flow[T]) -> T:
        outcome: list[T] = []
        async for value in self._drive(flow, outcome):
            raise TypeError(f"this flow emits values and must be iterated over: {value!r}")
        return outcome[0]

    async def iterate(self, flow: Flow[None]) -> AsyncGenerator[Any, None]:
        async for value in self._drive(flow, []):
            yield value

    async def close(self) -> None:
        if self._http is not None and self._home == _here():
            await self._http.aclose()
        self._http = None

    async def _drive(self, flow: Flow[Any], outcome: list[Any]) -> AsyncGenerator[Any, None]:
        async with AsyncExitStack() as opened:
            lines: AsyncGenerator[str, None] | None = None
            reply: Any = None
            try:
                while True:
                    effect: Effect = flow.send(reply)
                    match effect:
                        case Call():
                            reply = await self._call(effect)
                        case Sleep(seconds, jitter):
                            await asyncio.sleep(_jittered(seconds, jitter))
                            reply = None
                        case Now():
                            reply = time.monotonic()
                        case Emit(value):
                            reply = yield value
                        case Lines(call):
                            reply, lines = await self._open(call, opened)
                        case NextLine():
                            reply = await self._next(lines)
                        case _:
                            assert_never(effect)
            except StopIteration as done:
                outcome.append(done.value)
            finally:
                flow.close()

    async def _client(self) -> httpx2.AsyncClient:
        # Looking for the server may start one, which takes a moment; while it answers, looking costs nothing.
        endpoint = self._locate() if self._answers else await asyncio.to_thread(self._locate)
        if self._http is None or self._home != _here() or endpoint != self._endpoint:
            self._http = httpx2.AsyncClient(**_settings(endpoint))
            self._home, self._endpoint = _here(), endpoint
        return self._http

    async def _call(self, call: Call) -> Answer | NoAnswer:
        client = await self._client()
        try:
            async with asyncio.timeout(call.total):
                answer = await client.request(**_request(call))
        except httpx2.TransportError as error:
            self._answers = False
            return _no_answer(error)
        except TimeoutError:
            self._answers = False
            return _too_late(call)
        self._answers = answer.status_code < 500
        return Answer(answer.status_code, answer.headers, answer.content)

    async def _open(self, call: Call, opened: Any) -> tuple[Answer | NoAnswer, Any]:
        await opened.aclose()
        try:
            client = await self._client()
            answer = await opened.enter_async_context(client.stream(**_request(call, endless=True)))
            if answer.is_error:
                return Answer(answer.status_code, answer.headers, await answer.aread()), None
        except httpx2.TransportError as error:
            return _no_answer(error), None
        return Answer(answer.status_code, answer.headers, b""), answer.aiter_lines()

    async def _next(self, lines: Any) -> str | NoAnswer | None:
        if lines is None:
            return None
        try:
            return await anext(lines, None)
        except httpx2.TransportError as error:
            return _no_answer(error)


def _settings(endpoint: Endpoint) -> dict[str, Any]:
    host = httpx2.URL(endpoint.url).host
    return {
        "base_url": endpoint.url,
        "headers": endpoint.headers(),
        "timeout": httpx2.Timeout(30, connect=CONNECT_SECONDS),
        "verify": endpoint.verify,
        "trust_env": host not in LOOPBACK,  # a proxy cannot reach this machine's loopback
    }


def _here() -> tuple[int, int]:
    return os.getpid(), id(asyncio.get_running_loop())


def _jittered(seconds: float, jitter: bool) -> float:
    return max(0.0, seconds * random.uniform(0.5, 1.5) if jitter else seconds)


def _request(call: Call, *, endless: bool = False) -> dict[str, Any]:
    timeout = httpx2.Timeout(None if endless else call.timeout, connect=min(CONNECT_SECONDS, call.timeout))
    request: dict[str, Any] = {"method": call.method, "url": call.path, "timeout": timeout}
    if call.params:
        request["params"] = {k: v for k, v in call.params.items() if v is not None}
    if call.headers:
        request["headers"] = dict(call.headers)
    if call.content is not None:
        request["content"] = call.content
    elif call.body is not None:
        request["json"] = call.body
    return request


def _too_late(call: Call) -> NoAnswer:
    return NoAnswer(f"the answer was not complete within {call.total:g} s", sent=True)


def _no_answer(error: httpx2.TransportError) -> NoAnswer:
    sent = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
    return NoAnswer(f"{type(error).__name__}: {error}", sent)
