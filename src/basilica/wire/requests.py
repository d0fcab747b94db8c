"""Requests, as the official client sends them and with our additions, and their way into the core.

The model of a create request is made from the table of options. pydantic checks types and writes the document; the
values are checked where every body is read.
"""

from collections.abc import Sequence
from dataclasses import MISSING
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model
from pydantic import ValidationError as PydanticError

from basilica.core.errors import ValidationError
from basilica.core.spec import DeploymentSpec
from basilica.wire.base import Incoming
from basilica.wire.forms import U32_LIMITS, Choice, Flag, Form, Number, Quantity, Text, Texts, Variables, Whole, shown
from basilica.wire.spec import GROUPS, TABLE, Option, default, form, from_body, tree

U32 = Annotated[int, Field(ge=U32_LIMITS.low, le=U32_LIMITS.high)]
NULL_TOO = (
    "env",
    "secrets",
    "resources",
    "resources.gpus",
    "distributed",
)  # some clients send null for an omitted field
Body = TypeVar("Body", bound=Incoming)


class ScaleBody(Incoming):
    target: U32


class ExecBody(Incoming):
    rank: U32 = 0
    command: Annotated[list[str], Field(min_length=1)]


class EnrollBody(Incoming):
    enabled: bool


class Nothing(Incoming):
    """A body without meaning: `{}` or none at all."""


def parse(model: type[Body], raw: bytes) -> Body:
    """Parse a request's body, or raise `ValidationError` with the field's path, its value and the problem."""
    try:
        return model.model_validate_json(raw)
    except PydanticError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        value = "?" if _private(field) else shown(first.get("input"))
        raise ValidationError(field, value, first["msg"]) from None


# ---- create ----------------------------------------------------------------------------------------------------------

_TITLE = "`POST /deployments`. Without `distributed`, a gang of `replicas` equal processes."
_BESIDE: dict[str, dict[str, Any]] = {  # fields of a request that are no options of a run
    "": {
        "replicas": (U32, 1),
        "volumes": (list[dict[str, object]] | None, None),
        "enableBilling": (bool, True),
    },
    "distributed": {"enabled": (bool, True)},
}


def create_request(table: Sequence[Option] = TABLE, spec: type[DeploymentSpec] = DeploymentSpec) -> type[Incoming]:
    """Return the model of a create request with these options."""
    return _model("CreateDeployment", _TITLE, "", tree(table), spec)


def _model(name: str, about: str, path: str, below: dict[str, Any], spec: type[DeploymentSpec]) -> type[Incoming]:
    fields: dict[str, Any] = {}
    for part, found in below.items():
        place = f"{path}.{part}".lstrip(".")
        if isinstance(found, Option):
            fields[part] = _field(found, spec)
            continue
        model: Any = _model(f"{part[0].upper()}{part[1:]}Body", GROUPS.get(place, ""), place, found, spec)
        if place in NULL_TOO:
            fields[part] = (model | None, None)
        elif any(info.is_required() for info in model.model_fields.values()):
            fields[part] = (model, ...)
        else:
            fields[part] = (model, model())
    return create_model(name, __base__=Incoming, __doc__=about, **fields, **_BESIDE.get(path, {}))


def _field(option: Option, spec: type[DeploymentSpec]) -> tuple[Any, Any]:
    kind, unless_told = _type(form(option, spec)), default(option, spec)
    if unless_told is MISSING:
        return kind, Field(description=option.about)
    if unless_told is None or option.path in NULL_TOO:
        return kind | None, Field(None, description=option.about)
    return kind, Field(unless_told, description=option.about)


def _type(form: Form) -> Any:
    """Return the type for pydantic; limits and choices are in the document, and checked with the rest."""
    match form:
        case Text(most, str(pattern)):
            return Annotated[str, Field(json_schema_extra={"maxLength": most, "pattern": pattern})]
        case Text() | Quantity():
            return str
        case Texts():
            return tuple[str, ...]
        case Variables():
            return dict[str, str]
        case Flag():
            return bool
        case Choice(values):
            return Annotated[str, Field(json_schema_extra={"enum": list(values)})]
        case Whole(limits):
            return Annotated[U32, Field(json_schema_extra={"minimum": int(limits.low), "maximum": int(limits.high)})]
        case Number(limits):
            told: Any = {"minimum": limits.low, "maximum": limits.high}
            return Annotated[float, Field(allow_inf_nan=False, json_schema_extra=told)]


CreateDeployment = create_request()


def to_spec(
    body: Incoming, table: Sequence[Option] = TABLE, spec: type[DeploymentSpec] = DeploymentSpec
) -> DeploymentSpec:
    """Return the core's spec of a create request; the core checks every rule beyond the types."""
    told = body.model_dump(by_alias=True)
    if told["volumes"]:
        raise ValidationError("volumes", f"{len(told['volumes'])} of them", "are not supported by this server")
    if told["distributed"] is None or not told["distributed"]["enabled"]:
        told["distributed"] = {"worldSize": dict.fromkeys(("min", "target", "max"), told["replicas"])}
    return from_body(told, table, spec)


_PRIVATE = tuple(option.path for option in TABLE if isinstance(form(option), Variables))


def _private(field: str) -> bool:
    return field == "body" or any(f"{field}.".startswith(f"{path}.") for path in _PRIVATE)
