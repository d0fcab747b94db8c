"""The middleware around every request: authentication, the limit of the body, and the metrics of its duration."""

import time
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from basilica.core.errors import AuthenticationError, BasilicaError
from basilica.ports import Keys
from basilica.server.metrics import Metrics
from basilica.server.problems import answer, plain, unavailable
from basilica.server.sessions import Sessions, user_of

MAX_BODY = 4 << 20
MAX_ARCHIVE = 512 << 20
ARCHIVES = "/archives"
OPEN_PATHS = ("/", "/console/login", "/health", "/metrics", "/openapi.json", "/docs")
OPEN_PREFIXES = ("/public/", "/console/assets/")
# For browsers: the output of ranks must never be rendered as a page, whatever it contains, nor be cached on disk.
IN_BROWSERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class BodyTooLarge(Exception):
    """Raised out of `receive`, through the reader of the body."""


class Gate:
    """Plain ASGI middleware, since every request pays for it."""

    def __init__(self, app: ASGIApp, keys: Keys, sessions: Sessions, metrics: Metrics) -> None:
        self._app, self._keys, self._sessions, self._metrics = app, keys, sessions, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def recording_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in IN_BROWSERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._handle(scope, receive, recording_send)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            self._metrics.observe_request(scope["method"], path, status, time.perf_counter() - began)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # A base URL that ends with a slash makes the published client request //deployments.
        path = scope["path"] = "/" + scope["path"].lstrip("/")
        if path not in OPEN_PATHS and not path.startswith(OPEN_PREFIXES):
            try:
                user = await user_of(self._keys, self._sessions, scope["method"], headers)
            except BasilicaError as error:
                await answer(error)(scope, receive, send)
                return
            allowed = partial(self._is_allowed, scope["method"], headers)
            state = scope.setdefault("state", {})
            if not state.get("authenticated", _always)():
                refusal = unavailable("as many connections are open here as there may be: close some, or ask again")
                await refusal(scope, receive, send)
                return
            state.update(user=user, allowed=allowed)
        limit = MAX_ARCHIVE if path == ARCHIVES else MAX_BODY
        too_large = plain(413, f"the body is larger than {limit} bytes")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit):
            await too_large(scope, receive, send)
            return
        received = 0

        async def counting_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise BodyTooLarge
            return message

        try:
            await self._app(scope, counting_receive, send)
        except BodyTooLarge:
            await too_large(scope, receive, send)

    async def _is_allowed(self, method: str, headers: Headers) -> bool:
        """Return whether the request's access is valid. Lasting responses check again: a session or key may end."""
        try:
            await user_of(self._keys, self._sessions, method, headers)
        except AuthenticationError:
            return False
        return True


def _always() -> bool:
    return True
