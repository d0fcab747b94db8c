"""Values as Python source."""

from collections.abc import Iterator
from typing import Any


def literal(value: object) -> str | None:
    """Return Python source of an equal value, None if there is none: plain data only, no subclasses, no cycles."""
    try:
        return "".join(_literal(value, ()))
    except _NoLiteral:
        return None


class _NoLiteral(Exception):
    pass


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("set([", "])"),
    frozenset: ("frozenset([", "])"),
}


def _literal(value: Any, within: tuple[int, ...]) -> Iterator[str]:
    kind = type(value)
    if kind is float:
        special = {"inf": "1e999", "-inf": "-1e999", "nan": 'float("nan")'}
        yield special.get(repr(value), repr(value))
    elif kind in (type(None), bool, int, str, bytes, complex):
        try:
            yield repr(value)
        except ValueError:  # a number of thousands of digits
            yield hex(value)
    elif (kind is not dict and kind not in _BRACKETS) or id(value) in within or len(within) > 50:
        raise _NoLiteral
    else:
        within = (*within, id(value))
        if kind is dict:
            yield "{"
            for key, item in value.items():
                yield from _literal(key, within)
                yield ": "
                yield from _literal(item, within)
                yield ", "
            yield "}"
            return
        before, after = _BRACKETS[kind]
        yield before
        for item in value:
            yield from _literal(item, within)
            yield ", "
        yield after


def a(value: object) -> str:
    """Return the name of the value's type with an article."""
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
