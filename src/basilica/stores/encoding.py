"""Specs and statuses as JSON, by the types of core. Unknown fields are ignored, missing ones take their defaults."""

import hashlib
import json

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError
from pydantic_core import ValidationError as Unreadable

from basilica.core.errors import ValidationError
from basilica.core.spec import DeploymentSpec
from basilica.core.status import DeploymentStatus

_SPEC = TypeAdapter(DeploymentSpec)
_STATUS = TypeAdapter(DeploymentStatus)


def encode_spec(spec: DeploymentSpec) -> str:
    """Encode with the defaults written out: a run keeps those it was started with, even if a later version has
    others.
    """
    try:
        return _SPEC.dump_json(spec).decode()
    except (PydanticSerializationError, UnicodeError) as error:
        raise ValidationError("spec", spec.name, f"cannot be stored: {error}") from error


def encode_status(status: DeploymentStatus) -> str:
    """Encode without the defaults: they all mean "nothing yet", and most of a status is nothing yet."""
    return _STATUS.dump_json(status, exclude_defaults=True).decode()


class Undecodable(ValueError):
    """A stored text is no spec or status. The message has the place and the problem, but not the value: it may be a
    secret.
    """


def decode_spec(text: str) -> DeploymentSpec:
    try:
        return _SPEC.validate_json(_bytes(text))
    except Unreadable as error:
        raise _undecodable("spec", error) from None


def decode_status(text: str) -> DeploymentStatus:
    try:
        return _STATUS.validate_json(_bytes(text))
    except Unreadable as error:
        raise _undecodable("status", error) from None


def _bytes(text: str) -> bytes:
    """Return the bytes as they are in the file, valid UTF-8 or not."""
    return text.encode("utf-8", "surrogateescape")


def spec_digest(spec: DeploymentSpec) -> str:
    """Return a digest that is equal for equal specs: the order of variables does not count."""
    text = json.dumps(json.loads(encode_spec(spec)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _undecodable(what: str, error: Unreadable) -> Undecodable:
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    places = "; ".join(": ".join(filter(None, (".".join(map(str, p["loc"])), p["msg"]))) for p in problems)
    return Undecodable(f"its {what} is damaged: {places}")
