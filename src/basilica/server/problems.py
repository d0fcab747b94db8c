"""Errors as responses: the one place that maps an exception to a status and a body."""

import time

from starlette.responses import Response

from basilica.core.errors import (
    AuthenticationError,
    AuthorizationError,
    BasilicaError,
    Conflict,
    DeploymentDamaged,
    DeploymentNotFound,
    DiskFull,
    DistributedError,
    QuotaExceeded,
    RateLimitError,
    RuntimeUnavailable,
    StoreUnavailable,
    UDTerminalState,
    ValidationError,
    WorldClosed,
    WorldSizeOutOfBounds,
)
from basilica.wire.base import rfc3339
from basilica.wire.responses import ErrorDetail, Problem

# The first class that matches decides, so that a subclass of several bases gets the more specific status.
_STATUS: tuple[tuple[type[BasilicaError], int], ...] = (
    (ValidationError, 400),
    (AuthenticationError, 401),
    (AuthorizationError, 403),
    (DeploymentNotFound, 404),
    (Conflict, 409),
    (DistributedError, 409),
    (RateLimitError, 429),
    (DeploymentDamaged, 409),
    (DiskFull, 507),
    (StoreUnavailable, 503),
    (RuntimeUnavailable, 503),
)
_HTTP_CODES = {
    400: "BASILICA_API_BAD_REQUEST",
    404: "BASILICA_API_NOT_FOUND",
    405: "BASILICA_API_BAD_REQUEST",
    413: "BASILICA_API_INVALID_REQUEST",
}


def status_of(error: BasilicaError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def answer(error: BasilicaError) -> Response:
    status = status_of(error)
    response = problem(status, error.code, str(error), retryable=error.retryable, details=_details(error))
    if isinstance(error, RateLimitError):
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def unavailable(message: str) -> Response:
    """Return a temporary refusal, after which the connection is closed."""
    response = answer(StoreUnavailable(message))
    response.headers["Connection"] = "close"
    return response


def plain(status: int, message: str) -> Response:
    """Return an error of HTTP itself: no such route, method not allowed, body too large."""
    return problem(status, _HTTP_CODES.get(status, "BASILICA_API_BAD_REQUEST"), message)


def problem(
    status: int, code: str, message: str, *, retryable: bool = False, details: dict[str, object] | None = None
) -> Response:
    detail = ErrorDetail(
        code=code, message=message, timestamp=rfc3339(time.time()), retryable=retryable, details=details
    )
    return Response(Problem(error=detail).to_json(), status, media_type="application/json")


def _details(error: BasilicaError) -> dict[str, object] | None:
    """Return the attributes of an error, so that a client can raise the same class with the same attributes."""
    match error:
        case WorldSizeOutOfBounds():
            return {"requested": error.requested, "min": error.min, "max": error.max}
        case ValidationError():
            return {"field": error.field}
        case QuotaExceeded():
            return {
                "what": error.what,
                "limit": error.limit,
                "current": error.current,
                "requested": error.requested,
            }
        case UDTerminalState():
            return {"phase": error.phase, "requestedTarget": error.requested_target}
        case WorldClosed():
            return {"requestedTarget": error.requested_target}
        case _:
            return None
