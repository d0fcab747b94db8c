"""One shape of an answer for both of its ends: a field is called in a body what it is called in Python, in camelCase.

The server fills its models from the core's facts, and the client reads its views, by the names of their fields. A field
that is called otherwise on the wire, or that has a meaning where a server does not tell it, says so in its metadata.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import datetime
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

View = TypeVar("View")
Reader = Callable[[Any, str], Any]
_KEY, _UNLESS_TOLD = "key", "unless told"


def told_as(key: str = "", *, unless_told: Any = MISSING) -> Mapping[str, Any]:
    """Metadata of a field: its name on the wire, and what it is if a server does not tell."""
    return ({_KEY: key} if key else {}) | ({} if unless_told is MISSING else {_UNLESS_TOLD: unless_told})


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def key_of(field: Field[Any]) -> str:
    name: str = field.metadata.get(_KEY) or camel(field.name)
    return name


def is_moment(name: str) -> bool:
    """Seconds since the epoch in the core, RFC 3339 on the wire, a datetime in the client."""
    return name in ("at", "since") or name.endswith("_at")


def moment(text: str | None) -> datetime | None:
    """RFC 3339; another server's free text is no time."""
    try:
        return None if not text else datetime.fromisoformat(text)
    except ValueError:
        return None


def read(view: type[View], body: Mapping[str, Any], **unless_told: Any) -> View:
    """A view from its part of an answer; `TypeError` if something is not told that nothing can stand for, or a whole
    number is something else."""
    kind: type = view
    told = _neutral(kind) | unless_told
    for name, key, reader in _plan(kind):
        value = body.get(key)
        found = None if value is None or value == "" else reader(value, key)
        if found is not None:
            told[name] = found
    return view(**told)


@cache
def _plan(view: type) -> tuple[tuple[str, str, Reader], ...]:
    hints = get_type_hints(view)
    return tuple((field.name, key_of(field), _reader(hints[field.name])) for field in fields(view))


@cache
def _neutral(view: type) -> dict[str, Any]:
    """What stands for a field that has no default and is not told."""
    hints = get_type_hints(view)
    absent = {field.name: None for field in fields(view) if field.default is MISSING and _or_none(hints[field.name])}
    return absent | {f.name: f.metadata[_UNLESS_TOLD] for f in fields(view) if _UNLESS_TOLD in f.metadata}


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
    """Waits compare it; anything else in its place is an answer of another shape."""
    if not isinstance(value, int):
        raise TypeError(f"{key} is {value!r}, not a whole number")
    return value
