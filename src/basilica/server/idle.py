"""The end of a server that nobody needs: no run is live, and nobody has asked anything for a while."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from basilica.server.problems import unavailable

NOT_A_USE = ("/health", "/metrics")  # what monitors ask for, whether or not anybody needs us


class IdleExit:
    """Around the application. One timer, which looks when the time could be up and not before.

    The decision to leave and the refusal of what comes after it are one step of the event loop, so that nobody makes a
    run on a server that is about to go. They are answered 503, come back, and find or start another.
    """

    def __init__(self, app: ASGIApp, seconds: float, busy: Callable[[], bool]) -> None:
        """`busy` tells whether a run is live."""
        self._app, self._seconds, self._busy = app, seconds, busy
        self._answering = 0
        self._since = 0.0
        self._leaving = False

    @contextmanager
    def watching(self, leave: Callable[[], None]) -> Iterator[None]:
        """Call `leave` when the time has come."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            if self._answering or self._busy():
                self._since = loop.time()
            left = self._since + self._seconds - loop.time()
            if left > 0:
                timer = loop.call_later(left, look)
            else:
                self._leaving = True
                leave()

        self._since = loop.time()
        timer = loop.call_later(self._seconds, look)
        try:
            yield
        finally:
            timer.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "/" + scope["path"].lstrip("/") in NOT_A_USE:
            await self._app(scope, receive, send)
        elif self._leaving:
            refusal = unavailable("this server has been idle and stops: ask again, to find the next one")
            await refusal(scope, receive, send)
        else:
            self._answering += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._answering -= 1
                self._since = asyncio.get_running_loop().time()
