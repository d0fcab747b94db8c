"""The sequence of rounds of one named all-reduce: the position of a replica in it, and one call. Pure.

**Repeated calls.** A call that raised any error may be repeated with the same numbers. So a replica moves to the next
round by one assignment at the end of a call: every step that can fail comes before, housekeeping included. A repeated
call plays the same round once more, finds its own part there, and reads the decision.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from basilica.diloco.arithmetic import Residuals
from basilica.diloco.effects import Flow
from basilica.diloco.housekeeping import Housekeeper
from basilica.diloco.rounds import Outcome, Round

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing:
    """The number of the next round, and the state that the rounds before it hand on."""

    round: int = 0
    chain: str = ""
    expected: tuple[int, ...] = ()
    residuals: Residuals | None = None

    def state(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"round": self.round, "chain": self.chain, "expected": list(self.expected)}
        if self.residuals is not None:
            fields["residuals"] = {"sent": self.residuals.sent, "made": self.residuals.made}
        return fields

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Standing":
        left = fields.get("residuals")
        residuals = None if left is None else Residuals(dict(left["sent"]), dict(left["made"]))
        return cls(fields["round"], fields["chain"], tuple(fields["expected"]), residuals)


class RoundSequence:
    """One replica's side of one named all-reduce."""

    def __init__(self, standing: Standing, housekeeper: Housekeeper) -> None:
        self.standing = standing
        self.running = False
        """Whether a call is running: there is one at a time."""
        self._housekeeper = housekeeper

    def play(self, course: Round, deliver: Callable[[Outcome], T]) -> Flow[T]:
        """Play the next round. `deliver` converts its outcome into the call's return value."""
        outcome = yield from course.play()
        yield from self._housekeeper.after(course.place, outcome)
        delivered = deliver(outcome)
        residuals = course.numbers.residuals(counted=outcome.counted)
        self.standing = Standing(outcome.round + 1, outcome.chain, outcome.following, residuals)
        return delivered
