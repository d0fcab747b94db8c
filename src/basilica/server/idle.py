"""The exit of an idle server: one without a live run, and without a request for a while."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from basilica.server.problems import unavailable

NOT_A_USE = ("/health", "/metrics")  # monitors request these, whether or not the server is in use


class IdleExit:
    """Middleware around the application, with one timer, which fires when the time could be up and not before.

    The decision to exit and the refusal of later requests are one step of the event loop, so that no client creates a
    run on a server that is about to exit. Such a client is answered 503, retries, and finds or starts another server.
    """

    def __init__(self, app: ASGIApp, seconds: float, busy: Callable[[], bool]) -> None:
        """`busy` returns whether a run is live."""
        self._app, self._seconds, self._busy = app, seconds, busy
        self._answering = 0
        self._since = 0.0
        self._leaving = False

    @contextmanager
    def watching(self, leave: Callable[[], None]) -> Iterator[None]:
        """Call `leave` when the server has been idle for the time."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            if self._answering or self._busy():
                self._since = loop.time()
            left = self._since + self._seconds - loop.time()
            if left > 0:
                timer = loop.call_later(left, check)
            else:
                self._leaving = True
                leave()

        self._since = loop.time()
        timer = loop.call_later(self._seconds, check)
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
