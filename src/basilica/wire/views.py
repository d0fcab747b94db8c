"""The one mapping of fields to answers, for server and client: a field has its Python name in a body, in camelCase.

The server fills its models from the core's facts, and the client reads its views, by the names of their fields. The
metadata of a field has its name on the wire, if that differs, and its value where a server does not send it.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import datetime
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

View = TypeVar("View")
Reader = Callable[[Any, str], Any]
NOTHING: Mapping[str, Any] = {}
_KEY, _ABSENT = "key", "absent"


def wire_field(key: str = "", *, absent: Any = MISSING) -> Mapping[str, Any]:
    """Return the metadata of a field: its name on the wire, and its value if a server does not send it."""
    return ({_KEY: key} if key else {}) | ({} if absent is MISSING else {_ABSENT: absent})


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def key_of(field: Field[Any]) -> str:
    name: str = field.metadata.get(_KEY) or camel(field.name)
    return name


def is_moment(name: str) -> bool:
    """Return whether the field is a time: seconds since the epoch in the core, RFC 3339 on the wire, a datetime in the
    client."""
    return name in ("at", "since", "until") or name.endswith("_at")


def moment(text: str | None) -> datetime | None:
    """Parse RFC 3339; None for another server's free text."""
    try:
        return None if not text else datetime.fromisoformat(text)
    except ValueError:
        return None


def read(view: type[View], body: Mapping[str, Any], given: Mapping[str, Any] = NOTHING, **absent: Any) -> View:
    """Read a view from its part of an answer, apart from the values given.

    `absent` has values of fields that are not there. `TypeError` if a field without a neutral value is absent, or a
    whole number is another value.
    """
    kind: type = view
    values = _neutral(kind) | absent | dict(given)
    for name, key, reader in _plan(kind):
        value = None if name in given else body.get(key)
        found = None if value is None or value == "" else reader(value, key)
        if found is not None:
            values[name] = found
    return view(**values)


@cache
def _plan(view: type) -> tuple[tuple[str, str, Reader], ...]:
    hints = get_type_hints(view)
    return tuple((field.name, key_of(field), _reader(hints[field.name])) for field in fields(view))


@cache
def _neutral(view: type) -> dict[str, Any]:
    """Return the values of fields that have no default and are absent."""
    hints = get_type_hints(view)
    nulls = {field.name: None for field in fields(view) if field.default is MISSING and _or_none(hints[field.name])}
    return nulls | {f.name: f.metadata[_ABSENT] for f in fields(view) if _ABSENT in f.metadata}


def _or_none(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _reader(hint: Any) -> Reader:
    kind = next(part for part in get_args(hint) if part is not NoneType) if _or_none(hint) else hint
    if get_origin(kind) is tuple:
        item = _reader(get_args(kind)[0])
        return lambda value, key: tuple(item(each, key) for each in value)
    if get_origin(kind) is Mapping:
        value_reader = _reader(get_args(kind)[1])
        return lambda value, key: {name: value_reader(each, key) for name, each in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return lambda value, key: read(kind, value)
    if kind is datetime:
        return lambda value, key: moment(value)
    if kind is int:
        return _whole
    if kind is float:
        return lambda value, key: float(value)  # also of "NaN", since JSON has no such number
    return lambda value, key: value


def _whole(value: Any, key: str) -> int:
    """Return a whole number, which waits compare; any other value makes it an answer of another shape."""
    if not isinstance(value, int):
        raise TypeError(f"{key} is {value!r}, not a whole number")
    return value
