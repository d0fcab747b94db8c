"""Refusals as the API server words them: an exception for each, a `Status` object on the wire."""

from dataclasses import dataclass
from typing import Any

from basilica_testkube.kinds import Kind
from basilica_testkube.values import Json


@dataclass(frozen=True, slots=True)
class Cause:
    """One field that is wrong, and why."""

    field: str
    reason: str
    message: str

    def as_json(self) -> Json:
        return {"reason": self.reason, "message": self.message, "field": self.field}

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ApiError(Exception):
    """An answer that is no success. `details` go into the `Status` as they are."""

    def __init__(self, code: int, reason: str, message: str, details: Json | None = None) -> None:
        super().__init__(code, reason, message, details)
        self.code, self.reason, self.message, self.details = code, reason, message, details

    def __str__(self) -> str:
        return f"{self.code} {self.reason}: {self.message}"

    @property
    def body(self) -> Json:
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        return body | ({"details": self.details} if self.details else {})


def _about(kind: Kind, name: str) -> Json:
    return {"name": name, "group": kind.group, "kind": kind.plural}


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def not_found(kind: Kind, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{kind.resource} "{name}" not found', _about(kind, name))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(kind: Kind, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{kind.resource} "{name}" already exists', _about(kind, name))


def conflict(kind: Kind, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {kind.resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, _about(kind, name))


def modified_meanwhile(kind: Kind, name: str) -> ApiError:
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(kind, name, why)


def invalid(kind: Kind, name: str, causes: list[Cause]) -> ApiError:
    listed = str(causes[0]) if len(causes) == 1 else f"[{', '.join(map(str, causes))}]"
    shown = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    details = {"name": name, "group": kind.group, "kind": kind.kind, "causes": [cause.as_json() for cause in causes]}
    return ApiError(422, "Invalid", f'{shown} "{name}" is invalid: {listed}', details)


def forbidden(kind: Kind, name: str, why: str) -> ApiError:
    return ApiError(403, "Forbidden", f'{kind.resource} "{name}" is forbidden: {why}', _about(kind, name))


def terminating(kind: Kind, name: str, namespace: str) -> ApiError:
    """Nothing can be made in a namespace that is being deleted."""
    refusal = forbidden(
        kind, name, f"unable to create new content in namespace {namespace} because it is being terminated"
    )
    cause = Cause("metadata.namespace", "NamespaceTerminating", f"namespace {namespace} is being terminated")
    return ApiError(403, refusal.reason, refusal.message, {**_about(kind, name), "causes": [cause.as_json()]})


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def too_old(wanted: int, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {wanted} ({oldest})")


def expired_list() -> ApiError:
    return ApiError(
        410,
        "Expired",
        "The provided continue parameter is too old to display a consistent list result. You can start a new list "
        "without the continue parameter.",
    )


def too_large(wanted: int, current: int) -> ApiError:
    message = f"Too large resource version: {wanted}, current: {current}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return ApiError(504, "Timeout", message, {"retryAfterSeconds": 1, "causes": causes})


def unsupported_media(kind: str) -> ApiError:
    return ApiError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {kind}")
