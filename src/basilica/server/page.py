"""The browser console: its page, its login, and the routes that only the page calls.

The page is plain files of the package. They are the same for every user and contain no secret, so they need no login;
the page requests its data with the session's cookie.
"""

import asyncio
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import RedirectResponse, Response

from basilica.controller.plane import ControlPlane
from basilica.ports import Keys
from basilica.server.auth import authenticate
from basilica.server.overview import watch_all
from basilica.server.problems import plain
from basilica.server.sessions import SESSION_SECONDS, Sessions
from basilica.server.streams import LastingResponse
from basilica.version import __version__
from basilica.wire.base import Outgoing, rfc3339
from basilica.wire.console import BrowserSession, LoggedOut, LoginLink, RunChanges

FILES = Path(__file__).parent / "console"
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'self'",
    ]
)
LINK_IS_USED_UP = "/#/link-used-up"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    media_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """Every file of the page by its name, read once."""
    found = {}
    for path in sorted(FILES.iterdir()):
        if path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            found[path.name] = File(body, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


def add_console(router: APIRouter, plane: ControlPlane, keys: Keys, sessions: Sessions, closing: asyncio.Event) -> None:
    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):  # a client whose run has a name of dots
            return plain(404, "GET /: this is a page for browsers")
        return _answer_file(request, PAGE)

    @router.get("/console/assets/{name}", include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        return _answer_file(request, name)

    @router.post("/console/login-links", status_code=201, response_model=LoginLink)
    async def make_login_link(request: Request) -> Response:
        """A link that logs a browser in once, within five minutes. Made with a key; a session cannot make one."""
        key = await authenticate(keys, request.headers.get("authorization"))
        link = sessions.offer(key)
        path = f"/console/login?{urlencode({'code': link.code})}"
        return _private(LoginLink(path=path, expires_at=rfc3339(link.expires_at + plane.clock.shift())), 201)

    @router.get("/console/login", include_in_schema=False)
    async def log_in(request: Request, code: Annotated[str, Query(max_length=200)] = "") -> Response:
        token = sessions.open(code)
        held = sessions.token_in(request.headers.get("cookie"))
        if token is None:  # a user who is logged in may return here through the browser's history
            here = held is not None and sessions.find(held) is not None
            return _redirect("/" if here else LINK_IS_USED_UP)
        if held is not None:
            sessions.close(held)
        response = _redirect("/")
        response.set_cookie(
            sessions.cookie,
            token,
            max_age=int(SESSION_SECONDS),
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    @router.post("/console/logout", response_model=LoggedOut)
    async def log_out(request: Request) -> Response:
        """End the browser's session; a key stays as it is."""
        token = sessions.token_in(request.headers.get("cookie"))
        if token is not None:
            sessions.close(token)
        response = _private(LoggedOut(logged_out=token is not None))
        response.delete_cookie(sessions.cookie, path="/", httponly=True, samesite="strict")
        return response

    @router.get("/console/session", response_model=BrowserSession)
    async def session(request: Request) -> Response:
        """The user who is logged in, and the server's clock."""
        user: str = request.scope["state"]["user"]
        return _private(BrowserSession(user=user, version=__version__, now=rfc3339(plane.now())))

    @router.get("/watch", response_model=RunChanges, responses={200: {"content": {EVENTS: {"schema": _SSE}}}})
    async def watch_deployments(
        request: Request,
        since: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        last_event_id: Annotated[int | None, Header(ge=0, le=2**63 - 1)] = None,
    ) -> Response:
        """All runs of the user as server-sent events: first those that changed after version `since` (or
        Last-Event-ID), with the names of all runs, then every change. An event with an id is complete: a reader can
        resume after it."""
        user: str = request.scope["state"]["user"]
        changes = watch_all(plane, user, since if last_event_id is None else last_event_id, closing)
        return LastingResponse(changes, media_type=EVENTS)


_SSE = {
    "type": "object",
    "description": "One event; its data is a RunChanges.",
    "properties": {
        "event": {"enum": ["runs"]},
        "id": {"type": "string", "pattern": "^[0-9]+$", "description": "the version to resume after"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "data"],
}


def _answer_file(request: Request, name: str) -> Response:
    """Answer a file of the page. Browsers revalidate it at every visit, so a new server's page is in use at once."""
    file = files().get(name)
    if file is None:
        return plain(404, f"the console has no file {name[:100]!r}")
    headers = {
        "ETag": file.etag,
        "Cache-Control": "no-cache",
        "Vary": "Accept",
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)


def _private(model: Outgoing, status: int = 200) -> Response:
    return Response(model.to_json(), status, media_type="application/json", headers={"Cache-Control": "no-store"})


def _redirect(where: str) -> Response:
    return RedirectResponse(where, 303, headers={"Cache-Control": "no-store"})
