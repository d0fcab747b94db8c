"""What a flow asks for. An operation of the SDK is one generator that yields these, and two drivers can run it.

Nothing here does anything: a test drives a flow with a list of answers.
"""

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from basilica.core.errors import ServerError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. `timeout` bounds the wait for its answer, in seconds."""

    method: str
    path: str
    body: object = None
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        """The body; one that is no JSON came from something that is not our server."""
        try:
            return json.loads(self.content)
        except ValueError:
            text = self.content[:100].decode("utf-8", "replace")
            raise ServerError(self.status, f"not JSON, so hardly a Basilica server: {text!r}") from None


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The request got none: refused, dropped, timed out. `sent`: the server may have acted on it all the same."""

    problem: str
    sent: bool


@dataclass(frozen=True, slots=True)
class Sleep:
    """With `jitter`, half to one and a half times as long, so that many clients do not come back at once."""

    seconds: float
    jitter: bool = False


@dataclass(frozen=True, slots=True)
class Now:
    """A clock that never goes back."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Open a request whose answer is read line by line: `Line` effects read it, and its last is None."""

    call: Call


@dataclass(frozen=True, slots=True)
class NextLine:
    """The next line of the stream that was opened last: text, None at its end, NoAnswer if it broke."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand a value to whoever iterates over the flow."""

    value: Any


Effect = Call | Sleep | Now | Lines | NextLine | Emit
Flow = Generator[Effect, Any, T]
