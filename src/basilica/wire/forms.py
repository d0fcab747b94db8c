"""The forms of options' values in a body: each reads and writes one form. Schemas are made of them.

A form checks only the kind of a value: the core decides which values are valid.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from basilica.core.errors import ValidationError
from basilica.core.quantities import format_cpu, format_memory, parse_cpu, parse_memory
from basilica.core.spec import LABEL_BYTES_MAX, Range

U32_LIMITS = Range(0, 2**32 - 1)


@dataclass(frozen=True, slots=True)
class Text:
    """A text. `most` and `pattern` are for schemas, here and below."""

    most: int = LABEL_BYTES_MAX
    pattern: str | None = None

    def read(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise _wrong(where, value, "a text")
        return value

    def write(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Texts:
    letters: int = 256
    most: int = 64

    def read(self, value: Any, where: str) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise _wrong(where, value, "a list of texts")
        return tuple(value)

    def write(self, value: tuple[str, ...]) -> list[str]:
        return list(value)


@dataclass(frozen=True, slots=True)
class Variables:
    """Texts by name. They may be secrets: a value is never shown."""

    def read(self, value: Any, where: str) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise ValidationError(where, type(value).__name__, "must be a map of texts")
        for name, text in value.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise ValidationError(f"{where}.{name}", type(text).__name__, "must be a text")
        return dict(value)

    def write(self, value: Mapping[str, str]) -> dict[str, str]:
        return dict(value)


@dataclass(frozen=True, slots=True)
class Flag:
    def read(self, value: Any, where: str) -> bool:
        if not isinstance(value, bool):
            raise _wrong(where, value, "true or false")
        return value

    def write(self, value: bool) -> bool:
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    limits: Range = U32_LIMITS

    def read(self, value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(where, value, "a whole number")
        return value

    def write(self, value: int) -> int:
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A number. With `zero_is_none`, 0 means the same as the core's None: no limit of time."""

    limits: Range
    zero_is_none: bool = False

    def read(self, value: Any, where: str) -> float | None:
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
            raise _wrong(where, value, "a number")
        return None if self.zero_is_none and not value else float(value)

    def write(self, value: float) -> float:
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    values: tuple[str, ...]

    @property
    def wanted(self) -> str:
        *others, last = (repr(value) for value in self.values)
        return f"{', '.join(others)} or {last}" if others else last

    def read(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise _wrong(where, value, self.wanted)
        return value

    def write(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity as Kubernetes writes it: a text, or a plain number."""

    parse: Callable[[str, str], float]
    format: Callable[[Any], str]

    def read(self, value: Any, where: str) -> float:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise _wrong(where, value, "a quantity such as '8' or '32Gi'")
        return self.parse(str(value), where)

    def write(self, value: float) -> str:
        return self.format(value)


CORES = Quantity(parse_cpu, format_cpu)
BYTES = Quantity(parse_memory, format_memory)
Form = Text | Texts | Variables | Flag | Whole | Number | Choice | Quantity


def form_of(hint: Any) -> Form:
    """Return the form of values that have this type in the core, with its limits."""
    members = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is not Annotated and type(None) in get_args(hint):
        form = form_of(members[0])
        return Number(form.limits, zero_is_none=True) if isinstance(form, Number) else form
    limits = next((extra for extra in members[1:] if isinstance(extra, Range)), None)
    match members[0] if get_origin(hint) is Annotated else hint:
        case kind if kind is bool:
            return Flag()
        case kind if kind is int:
            return Whole() if limits is None else Whole(limits)
        case kind if kind is float and limits is not None:
            return Number(limits)
        case kind if kind is str:
            return Text()
        case kind if get_origin(kind) is Literal:
            return Choice(get_args(kind))
        case kind if kind == tuple[str, ...]:
            return Texts()
        case kind if kind == Mapping[str, str]:
            return Variables()
        case kind:
            raise TypeError(f"{kind} has no form in a body: give the option one")


def shown(value: object) -> object:
    """Return a value for an error message. Only single values are shown: an object or a list may contain secrets."""
    short = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 200)
    return value if short or value is None else type(value).__name__


def _wrong(where: str, value: object, wanted: str) -> ValidationError:
    return ValidationError(where, shown(value), f"must be {wanted}")
