"""A control plane in the test's own process: real app, controller and store, and ranks that the test moves."""

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

import httpx2
import uvicorn

from basilica.controller.loop import Controller
from basilica.controller.plane import DEFAULT_LIMITS, ControlPlane, Settings
from basilica.core.actions import Stop
from basilica.core.deployment import Deployment
from basilica.core.errors import ValidationError
from basilica.machine.clocks import SteadyClock
from basilica.ports import Keys, Limits, LogChunk, Run, Store
from basilica.server.acceptor import LimitedServer
from basilica.server.app import build_app
from basilica.server.auth import key_record
from basilica.server.connections import ConnectionLimits
from basilica.server.metrics import Metrics
from basilica.server.serve import Listen, bind
from basilica.stores.memory import MemoryKeys, MemoryStore
from basilica.testing.fake_runtime import FakeRuntime

STORY_SECONDS = 30.0
Json = dict[str, Any]
Given = ParamSpec("Given")


class TalkingRuntime(FakeRuntime):
    """A fake runtime whose ranks also write logs, and that stops ranks only when it is let."""

    runs_images = False

    def __init__(self, *, finish: bool = False) -> None:
        super().__init__(finish=finish)
        self.stubborn = False
        self.followers = 0
        self._logs: dict[tuple[str, int], list[str]] = {}
        self._written = asyncio.Condition()

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None:
        if not self.stubborn:
            await super().stop(run, stops)

    async def write(self, instance: str, rank: int, *lines: str) -> None:
        async with self._written:
            self._logs.setdefault((instance, rank), []).extend(lines)
            self._written.notify_all()

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        kept = self._logs.get((run.instance, rank), [])
        shown = kept if lines is None else kept[max(0, len(kept) - lines) :]
        return LogChunk(rank, tuple(shown), f"0:{len(kept)}")

    async def tail_cursor(self, run: Run, rank: int, lines: int) -> str:
        return f"0:{max(0, len(self._logs.get((run.instance, rank), [])) - lines)}"

    async def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        at = _line_number(cursor)
        self.followers += 1
        try:
            while True:
                kept = self._logs.get((run.instance, rank), [])[at:]
                at += len(kept)
                yield LogChunk(rank, tuple(kept), f"0:{at}")
                if not kept:
                    async with self._written:
                        while len(self._logs.get((run.instance, rank), [])) == at:
                            await self._written.wait()
        finally:
            self.followers -= 1


def _line_number(cursor: str | None) -> int:
    if cursor is None:
        return 0
    attempt, _, line = cursor.partition(":")
    if not (attempt.isdigit() and line.isdigit()):
        raise ValidationError("since", cursor, "not a cursor that this runtime gave out")
    return int(line)


@dataclass(frozen=True, slots=True)
class Sse:
    """One server-sent event."""

    event: str
    id: int
    data: Json


class World:
    """One control plane. `async with` it: at the end it is closed, and nothing of it may be left running."""

    def __init__(
        self,
        *,
        store: Store | None = None,
        keys: Keys | None = None,
        limits: Limits = DEFAULT_LIMITS,
        finish: bool = False,
        runtime: TalkingRuntime | None = None,
    ) -> None:
        self.memory = MemoryStore()
        self.store: Store = store or self.memory
        self.keys: Keys = keys or MemoryKeys()
        self.runtime = runtime or TalkingRuntime(finish=finish)
        self.clock = SteadyClock()
        self.closing = asyncio.Event()
        self.metrics = Metrics()
        self.plane = ControlPlane(self.store, self.runtime, self.clock, Settings(limits=limits))
        self.controller = Controller(self.store, self.runtime, self.clock)
        self.metrics.add_controller(self.controller)
        self.app = build_app(self.plane, self.keys, self.metrics, self.closing)
        self.ann: httpx2.AsyncClient  # a client of hers, as `bob` is one of his
        self.bob: httpx2.AsyncClient
        self.stranger: httpx2.AsyncClient  # without a key
        self._exits = AsyncExitStack()
        self._before: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "World":
        self._before = asyncio.all_tasks()
        for user in ("ann", "bob"):
            await self.keys.add_key(key_record(key_of(user), user, 1.0))
        self.ann, self.bob = [await self._exits.enter_async_context(self.client(key_of(u))) for u in ("ann", "bob")]
        self.stranger = await self._exits.enter_async_context(self.client(None))
        await self.controller.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()
        await self.controller.close()
        assert self.left_tasks() == []

    def left_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task not in self._before]

    def client(self, key: str | None) -> httpx2.AsyncClient:
        """A client that calls the app without a socket; exceptions that escape the app fail the test."""
        return httpx2.AsyncClient(
            transport=httpx2.ASGITransport(self.app),
            base_url="http://world",
            headers=bearer(key),
            timeout=STORY_SECONDS,
        )

    # ---- what people do ---------------------------------------------------------------------------------------------

    async def deploy(self, name: str = "train", *, target: int = 2, who: httpx2.AsyncClient | None = None) -> str:
        """Start a run of up to 8 ranks; its instance name, once its ranks are up."""
        answer = await (who or self.ann).post("/deployments", json=a_request(name, target=target))
        assert answer.status_code == 201, answer.text
        instance: str = answer.json()["instanceName"]
        await self.until(instance, lambda d: len(self.runtime.running(instance)) == target)
        await self.until(instance, lambda d: d.status.ready == target)
        return instance

    async def end(self, instance: str, *codes: int) -> Deployment:
        """Its ranks exit with these codes, in order; the run as it is when it is settled."""
        for rank, code in enumerate(codes):
            self.runtime.exit(instance, rank, code)
        return await self.settled(instance)

    async def settled(self, instance: str) -> Deployment:
        return await self.until(instance, lambda d: d.status.settled)

    async def until(self, instance: str, done: Callable[[Deployment], bool]) -> Deployment:
        """The first state that satisfies `done`; it is looked at after each change."""
        found = await self.store.get(instance)
        while not done(found):
            changed = await self.store.wait_change(instance, found.version, STORY_SECONDS / 3)
            assert changed is not None, f"nothing happened; the last state is {found}"
            found = changed
        return found

    # ---- over a real socket -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def listening(
        self, limits: ConnectionLimits | None = None, *, keep_alive: int = 5
    ) -> AsyncIterator[httpx2.AsyncClient]:
        """The app on a socket, as `basilica serve` has it; a client of ann's."""
        with closing(bind(Listen(port=0))) as sock:
            config = uvicorn.Config(
                self.app,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                loop="none",
                timeout_keep_alive=keep_alive,
            )
            server = LimitedServer(config, limits)
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            try:
                async with httpx2.AsyncClient(
                    base_url=url, headers=bearer(key_of("ann")), timeout=STORY_SECONDS, trust_env=False, verify=False
                ) as client:
                    yield client
            finally:
                server.should_exit = True
                self.closing.set()
                await serving


def story(test: Callable[Concatenate[World, Given], Awaitable[None]]) -> Callable[Given, None]:
    """Make a test of a coroutine that takes a world; one that hangs fails."""

    @functools.wraps(test)
    def told(*args: Given.args, **kwargs: Given.kwargs) -> None:
        async def tell() -> None:
            async with World() as world:
                await test(world, *args, **kwargs)

        asyncio.run(asyncio.wait_for(tell(), STORY_SECONDS))

    signature = inspect.signature(test)
    rest = [p for p in signature.parameters.values() if p.name != "world"]
    told.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    return told


def key_of(user: str) -> str:
    return f"key-of-{user}"


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def a_request(name: str = "train", *, target: int = 2, min: int = 1, max: int = 8, **more: Any) -> Json:
    """A create request; `more` are fields beside `distributed`."""
    world = {"min": min, "target": target, "max": max}
    return {"instanceName": name, "distributed": {"worldSize": world, "command": "train.sh"}} | more


def error_of(answer: httpx2.Response, status: int, code: str | None = None) -> Json:
    """The error of an answer, once its status, its code and the form that the official client needs are checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    error: Json = body["error"]
    assert isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["retryable"], bool)
    assert error["timestamp"].endswith("Z")
    if code is not None:
        assert error["code"] == code
    return error


@dataclass
class SseReader:
    """Reads a stream of server-sent events; comments are counted."""

    response: httpx2.Response
    comments: int = 0
    _lines: AsyncIterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self._lines = self.response.aiter_lines()

    async def next(self) -> Sse:
        """The next event; `StopAsyncIteration` at the end of the stream."""
        fields: dict[str, str] = {}
        while True:
            line = await anext(self._lines)
            if line.startswith(":"):
                self.comments += 1
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                return Sse(fields["event"], int(fields["id"]), json.loads(fields["data"]))

    async def until(self, done: Callable[[Sse], bool]) -> Sse:
        while not done(event := await self.next()):
            pass
        return event

    async def rest(self) -> list[Sse]:
        events: list[Sse] = []
        try:
            while True:
                events.append(await self.next())
        except StopAsyncIteration:
            return events
