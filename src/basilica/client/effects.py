"""The effects of flows. An operation of the SDK is one generator that yields them, and either driver can run it.

Effects are plain values: a test drives a flow with a list of answers.
"""

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from basilica.core.errors import ServerError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. `timeout` bounds the silence of the server, `total` the whole request to its last byte, in
    seconds."""

    method: str
    path: str
    body: object = None
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 30.0
    total: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes

    def parsed(self, parse: Callable[[Any], T]) -> T:
        """Return the body as `parse` reads it; `ServerError` for a body that is no JSON, or JSON of another shape."""
        try:
            body = json.loads(self.content)
        except ValueError:
            raise ServerError(self.status, f"not JSON, so hardly a Basilica server: {self._excerpt()}") from None
        try:
            return parse(body)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ServerError(
                self.status, f"JSON of another shape, so hardly a Basilica server ({problem}): {self._excerpt()}"
            ) from None

    def _excerpt(self) -> str:
        return repr(self.content[:100].decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A request without an answer: refused, dropped, timed out. `sent`: the server may have acted on it anyway."""

    problem: str
    sent: bool


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause. With `jitter`, half to one and a half times as long, so that many clients do not retry at once."""

    seconds: float
    jitter: bool = False


@dataclass(frozen=True, slots=True)
class Now:
    """The time of a monotonic clock."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Open a request whose answer is read line by line: `Line` effects read it, and its last is None."""

    call: Call


@dataclass(frozen=True, slots=True)
class NextLine:
    """The next line of the stream that was opened last: text, None at its end, NoAnswer if it broke."""


@dataclass(frozen=True, slots=True)
class Emit:
    """A value for the caller that iterates over the flow."""

    value: Any


Effect = Call | Sleep | Now | Lines | NextLine | Emit
Flow = Generator[Effect, Any, T]
