"""When a server is idle, decided without a server and without waiting: the loop's time is the test's."""

import asyncio
import heapq
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from basilica.server.idle import IdleExit


class World:
    """An application that answers when it is let, behind an `IdleExit` of 100 seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.live, self.left = 0.0, False, False
        self.held = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self.idle = IdleExit(self._app, 100.0, lambda: self.live)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> "World":
        heapq.heappush(self._timers, (self.now + seconds, len(self._timers), call))
        return self

    def cancel(self) -> None:
        self._timers.clear()

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, call = heapq.heappop(self._timers)
            call()
        self.now = until

    @contextmanager
    def serving(self) -> Iterator[None]:
        def leave() -> None:
            self.left = True

        with self.idle.watching(leave):
            yield

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if self.held:
            await _for_ever()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, path: str = "/deployments") -> int:
        """The status of the answer."""
        asking = self.begin(path)
        with pytest.raises(StopIteration):
            asking.send(None)
        return self.statuses[-1]

    def begin(self, path: str) -> Any:
        self.statuses: list[int] = []

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        scope = {"type": "http", "path": path, "method": "GET", "headers": []}
        return self.idle(scope, receive, send).__await__()  # type: ignore[arg-type]


@types.coroutine
def _for_ever() -> Iterator[None]:
    while True:
        yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_it_leaves_after_the_time_without_a_request(world: World) -> None:
    with world.serving():
        world.pass_time(99)
        assert not world.left
        world.pass_time(1)
        assert world.left


def test_a_request_begins_the_time_anew(world: World) -> None:
    with world.serving():
        for _ in range(5):
            world.pass_time(99)
            assert world.ask() == 200
        assert not world.left
        world.pass_time(100)
        assert world.left


@pytest.mark.parametrize("path", ["/health", "/metrics", "//health"])
def test_monitors_do_not_keep_it(world: World, path: str) -> None:
    with world.serving():
        world.pass_time(99)
        assert world.ask(path) == 200
        world.pass_time(1)
        assert world.left
        assert world.ask(path) == 200


def test_a_live_run_keeps_it_and_then_a_whole_time_must_pass(world: World) -> None:
    with world.serving():
        world.live = True
        world.pass_time(1000)
        assert not world.left
        world.live = False
        world.pass_time(99)
        assert not world.left
        world.pass_time(101)
        assert world.left


def test_an_answer_that_goes_on_keeps_it(world: World) -> None:
    with world.serving():
        world.held = True
        following = world.begin("/deployments/train/logs")
        following.send(None)
        world.pass_time(1000)
        assert not world.left
        following.close()  # the reader goes away
        world.pass_time(99)
        assert not world.left
        world.pass_time(101)
        assert world.left


def test_what_comes_after_the_decision_is_refused_as_passing(world: World) -> None:
    with world.serving():
        world.pass_time(100)
        assert world.left
        assert world.ask() == 503


def test_a_server_that_stops_for_another_reason_looks_no_more(world: World) -> None:
    with world.serving():
        pass
    world.pass_time(1000)
    assert not world.left
