"""The exception of an error answer: by the server's error code, else by the status."""

import json
import re
from typing import Any

from basilica.client.effects import Answer
from basilica.core.errors import (
    AuthenticationError,
    AuthorizationError,
    BasilicaError,
    Conflict,
    DeploymentNotFound,
    DistributedError,
    NameInUse,
    QuotaExceeded,
    RateLimitError,
    RendezvousUnavailable,
    ServerError,
    UDTerminalState,
    ValidationError,
    WorldClosed,
    WorldSizeOutOfBounds,
)
from basilica.wire.spec import python_name

TRANSIENT = (429, 502, 503, 504)


def error_of(answer: Answer, name: str = "") -> BasilicaError:
    """Return the exception for an error answer; `name` is the run of the request."""
    code, message, details = _parts(answer)
    match code:
        case "WorldSizeOutOfBounds" if _has(details, "requested", "min", "max"):
            return WorldSizeOutOfBounds(details["requested"], details["min"], details["max"])
        case "QuotaExceeded" if _has(details, "what", "limit", "current", "requested"):
            return QuotaExceeded(details["what"], details["limit"], details["current"], details["requested"])
        case "UDTerminalState":
            return UDTerminalState(details.get("phase", ""), details.get("requestedTarget"), name)
        case "WorldClosed":
            return WorldClosed(name, details.get("requestedTarget", 0))
        case "NameInUse":
            return NameInUse(details.get("name", name), details.get("instance", ""))
        case "RendezvousUnavailable":
            return RendezvousUnavailable(message)
        case "DistributedError":
            return DistributedError(message)
        case _:
            return _by_status(answer, name, message, details)


def _by_status(answer: Answer, name: str, message: str, details: dict[str, Any]) -> BasilicaError:
    match answer.status:
        case 400 | 413 | 422:
            return _invalid(str(details.get("field", "request")), message)
        case 401:
            return AuthenticationError(message)
        case 403:
            return AuthorizationError(message)
        case 404:
            return DeploymentNotFound(name) if name else ServerError(404, message)
        case 409:
            return Conflict(message)
        case 429:
            return RateLimitError(retry_after(answer) or 1.0)
        case status:
            return ServerError(status, message)


class Shown(str):
    """A value that the server has quoted already, and `repr` must not quote again."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _invalid(field: str, message: str) -> ValidationError:
    """Return the error with the field's name in the SDK. Our server's text is parsed, since the exception composes it
    again."""
    found = re.fullmatch(rf"{re.escape(field)}: (?P<problem>.*) \(got (?P<value>.*)\)", message, re.DOTALL)
    if found is None:
        return ValidationError(python_name(field), None, message)
    return ValidationError(python_name(field), Shown(found["value"]), found["problem"])


def _has(details: dict[str, Any], *names: str) -> bool:
    """Return whether all details are there: another server's error may have the same code without them."""
    return all(name in details for name in names)


def retry_after(answer: Answer) -> float | None:
    try:
        return float(answer.headers.get("retry-after", ""))
    except ValueError:
        return None


def _parts(answer: Answer) -> tuple[str, str, dict[str, Any]]:
    try:
        error = json.loads(answer.content)["error"]
        details = error["details"] if isinstance(error.get("details"), dict) else {}
        return str(error["code"]), str(error["message"]), details
    except (AttributeError, LookupError, TypeError, ValueError):
        text = answer.content[:500].decode("utf-8", "replace").strip()
        return "", text or f"the server answered {answer.status}", {}
