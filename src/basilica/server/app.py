"""The FastAPI application around a control plane."""

import asyncio
import logging

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from basilica.controller.plane import ControlPlane
from basilica.core.errors import BasilicaError, ValidationError
from basilica.ports import Keys
from basilica.server.metrics import Metrics
from basilica.server.middleware import BodyTooLarge, Gate
from basilica.server.openapi import describe
from basilica.server.page import add_console
from basilica.server.problems import answer, plain, problem, status_of
from basilica.server.routes import build_router
from basilica.server.sessions import Sessions
from basilica.version import __version__

log = logging.getLogger("basilica.server")


def build_app(
    plane: ControlPlane, keys: Keys, metrics: Metrics, closing: asyncio.Event, sessions: Sessions | None = None
) -> FastAPI:
    """Build the application. Lasting responses end when `closing` is set: the server is about to stop. Without
    `sessions`, browser sessions end with the application."""
    sessions = Sessions(plane.clock) if sessions is None else sessions
    app = FastAPI(
        title="Basilica",
        version=__version__,
        description="Elastic distributed training that tells you what is going on.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    router = build_router(plane, metrics, closing)
    add_console(router, plane, keys, sessions, closing)
    app.include_router(router)
    app.add_middleware(Gate, keys=keys, sessions=sessions, metrics=metrics)
    _answer_errors(app, router)
    describe(app)
    return app


def _answer_errors(app: FastAPI, router: APIRouter) -> None:
    @app.exception_handler(BasilicaError)
    async def known(_: Request, error: BasilicaError) -> Response:
        if status_of(error) >= 500:
            log.error("%s: %s", type(error).__name__, error)
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def bad_parameters(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "request"
        return answer(ValidationError(field, first.get("input"), first["msg"]))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return plain(400, "the body broke off")  # for the metrics: nobody reads it

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        response = plain(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods(router, request.scope["path"]))
        return response

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        if isinstance(error, BodyTooLarge):
            raise error
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(500, BasilicaError.code, "internal error; the server's log has the details")


def _methods(router: APIRouter, path: str) -> list[str]:
    """Return the methods that a path allows; the framework names only those of the first matching route."""
    fitting = [r for r in router.routes if isinstance(r, APIRoute) and r.path_regex.match(path)]
    return sorted({method for route in fitting for method in route.methods or ()})
