"""The validation rules of custom resources: as much of CEL as such rules are mostly made of.

Fields and indexes, `has`, `size`, `matches`, `startsWith`, `in`, comparisons, arithmetic of numbers and texts, `!`,
`&&`, `||` and `?:`. What is not known is refused when the definition is created, never passed by.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from basilica_testkube.errors import Cause
from basilica_testkube.values import Json

Names = dict[str, Any]
Code = Callable[[Names], Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>\|\||&&|==|!=|<=|>=|[-+*/%<>!?:.,()\[\]]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("==", "!=", "<", "<=", ">", ">=", "in"),
    ("+", "-"),
    ("*", "/", "%"),
)
_CONSTANTS = {"true": True, "false": False, "null": None}


class CelError(Exception):
    """The rule cannot be read, or cannot be worked out for this value."""


class _Reader:
    """Makes a function of an expression."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        place, text = 0, text.rstrip()
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise CelError(f"cannot read {text[place:]!r}")
            self._tokens.append((str(found.lastgroup), found[str(found.lastgroup)]))
            place = found.end()

    def read(self) -> Code:
        code = self._choice()
        if self._at < len(self._tokens):
            raise CelError(f"cannot read on from {self._tokens[self._at][1]!r}")
        return code

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> tuple[str, str]:
        if self._at >= len(self._tokens) or wanted not in ("", self._peek()):
            raise CelError(f"{wanted or 'more'} expected at {self._peek()!r}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _choice(self) -> Code:
        condition = self._binary(0)
        if self._peek() != "?":
            return condition
        self._take("?")
        yes = self._choice()
        self._take(":")
        no = self._choice()
        return lambda names: yes(names) if condition(names) else no(names)

    def _binary(self, level: int) -> Code:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            left = _operation(self._take()[1], left, self._binary(level + 1))
        return left

    def _unary(self) -> Code:
        if self._peek() == "!":
            self._take()
            below = self._unary()
            return lambda names: not below(names)
        if self._peek() == "-":
            self._take()
            below = self._unary()
            return lambda names: -below(names)
        return self._member(self._primary())

    def _primary(self) -> Code:
        kind, text = self._take()
        if kind == "number":
            number = float(text) if "." in text else int(text)
            return lambda names: number
        if kind == "text":
            said = text[1:-1].encode().decode("unicode_escape")
            return lambda names: said
        if text == "(":
            inside = self._choice()
            self._take(")")
            return inside
        if text == "[":
            items = self._listed("]")
            return lambda names: [item(names) for item in items]
        if kind != "name":
            raise CelError(f"cannot read {text!r}")
        if text in _CONSTANTS:
            return lambda names: _CONSTANTS[text]
        if self._peek() == "(":
            return self._call(text)
        return lambda names: _named(names, text)

    def _call(self, function: str) -> Code:
        start = self._at + 1
        self._take("(")
        given = self._listed(")")
        if function == "size" and len(given) == 1:
            return lambda names: len(given[0](names))
        if function == "has" and len(given) == 1 and self._tokens[self._at - 3][1] == "." and start < self._at - 3:
            return lambda names: _is_there(given[0], names)
        raise CelError(f"unknown function {function}()")

    def _member(self, code: Code) -> Code:
        while self._peek() in (".", "["):
            if self._take()[1] == "[":
                code = _operation("[", code, self._choice())
                self._take("]")
                continue
            name = self._take()[1]
            if self._peek() != "(":
                code = _field(code, name)
                continue
            self._take("(")
            code = _method(name, code, self._listed(")"))
        return code

    def _listed(self, end: str) -> list[Code]:
        items: list[Code] = []
        while self._peek() != end:
            items.append(self._choice())
            if self._peek() != end:
                self._take(",")
        self._take(end)
        return items


def _operation(sign: str, left: Code, right: Code) -> Code:
    if sign == "||":
        return lambda names: bool(left(names)) or bool(right(names))
    if sign == "&&":
        return lambda names: bool(left(names)) and bool(right(names))
    work: dict[str, Callable[[Any, Any], Any]] = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a // b if isinstance(a, int) else a / b,
        "%": lambda a, b: a % b,
        "in": lambda a, b: a in b,
        "[": lambda a, b: a[b],
    }
    operator = work[sign]
    return lambda names: operator(left(names), right(names))


def _method(name: str, code: Code, given: list[Code]) -> Code:
    if name == "size" and not given:
        return lambda names: len(code(names))
    if name == "matches" and len(given) == 1:
        return lambda names: re.search(given[0](names), code(names)) is not None
    if name == "startsWith" and len(given) == 1:
        return lambda names: code(names).startswith(given[0](names))
    raise CelError(f"unknown function .{name}()")


def _field(code: Code, name: str) -> Code:
    return lambda names: _named(code(names), name)


def _named(names: Names, name: str) -> Any:
    if name not in names:
        raise CelError(f"no such key: {name}")
    return names[name]


def _is_there(code: Code, names: Names) -> bool:
    try:
        code(names)
    except CelError:
        return False
    return True


@cache
def compiled(rule: str) -> Code:
    return _Reader(rule).read()


def rule_faults(schema: Json, value: Any, old: Any = None, path: str = "") -> Iterator[Cause]:
    """What the rules of a schema find wrong with a value; with an `old` one, what those of changes do with the change.

    Items of a list have no old ones.
    """
    for rule in schema.get("x-kubernetes-validations") or ():
        text = rule["rule"]
        if (old is not None) != ("oldSelf" in text):
            continue
        try:
            fine = compiled(text)({"self": value, "oldSelf": old})
            problem = rule.get("message") or f"failed rule: {text}"
        except (CelError, TypeError) as error:
            fine, problem = False, f"rule {text!r} cannot be worked out: {error}"
        if not fine:
            shown = type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
            yield Cause(path.lstrip(".") or "<nil>", "FieldValueInvalid", f'Invalid value: "{shown}": {problem}')
    if isinstance(value, dict):
        for key, below in (schema.get("properties") or {}).items():
            if key in value and (old is None or old.get(key) is not None):
                yield from rule_faults(below, value[key], None if old is None else old[key], f"{path}.{key}")
    elif isinstance(value, list) and old is None and isinstance(schema.get("items"), dict):
        for place, item in enumerate(value):
            yield from rule_faults(schema["items"], item, None, f"{path}[{place}]")


def rules_of(schema: Json, path: str) -> Iterator[tuple[str, str]]:
    """Every rule of a schema, with where it stands."""
    for place, rule in enumerate(schema.get("x-kubernetes-validations") or ()):
        yield f"{path}.x-kubernetes-validations[{place}].rule", rule["rule"]
    for key, below in (schema.get("properties") or {}).items():
        yield from rules_of(below, f"{path}.properties[{key}]")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from rules_of(schema[key], f"{path}.{key}")
