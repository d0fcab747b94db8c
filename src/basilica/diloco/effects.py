"""The effects of the protocol: a round is a generator that yields them, and a driver answers.

Effects are plain values, so that a simulation can answer as well as an object store.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """An object as a listing shows it."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of an object. With `into` they are put there, which saves a copy where the store can."""

    key: str
    start: int
    length: int
    into: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Now:
    """Answered with seconds on a clock that never goes back."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause, which ends sooner if the store can notify of a change under the prefix."""

    prefix: str
    seconds: float


@dataclass(frozen=True, slots=True)
class List:
    """Answered with a tuple of `Found`: the keys under the prefix, in order, behind `after` where given."""

    prefix: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """Start to read; answered with a ticket for `Finish`. Many may be under way."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Answered with a list: a memoryview for each range (shorter where the object ends), None where there is none."""

    ticket: Any


@dataclass(frozen=True, slots=True)
class Create:
    """Write an object that must not be there; answered with whether this was the one that wrote it.

    Each buffer is valid until the next is asked for; together they have `size` bytes.
    """

    key: str
    size: int
    buffers: Iterable[memoryview]


@dataclass(frozen=True, slots=True)
class Put:
    """Write an object, whatever is there."""

    key: str
    size: int
    buffers: Iterable[memoryview]


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove objects; one that is gone already is fine."""

    keys: tuple[str, ...]


Effect = Now | Pause | List | Begin | Finish | Create | Put | Delete
Flow = Generator[Effect, Any, T]


def fetch(*ranges: Range) -> Flow[list[memoryview | None]]:
    """Read all ranges at once and wait for them."""
    ticket = yield Begin(ranges)
    buffers: list[memoryview | None] = yield Finish(ticket)
    return buffers
