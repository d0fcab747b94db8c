"""What clients asked for, and what is to go wrong for them."""

import re
from collections import Counter
from dataclasses import dataclass


class Requests:
    """Counts requests by verb and resource: `requests["list", "pods"]`, `requests["get", "pods/log"]`."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, verb: str, resource: str) -> None:
        self._counts[verb, resource] += 1

    def __getitem__(self, what: tuple[str, str]) -> int:
        return self._counts[what]

    @property
    def total(self) -> int:
        return self._counts.total()

    def by_verb(self, verb: str) -> int:
        return sum(n for (found, _), n in self._counts.items() if found == verb)

    def copy(self) -> "Requests":
        twin = Requests()
        twin._counts = self._counts.copy()
        return twin

    def since(self, before: "Requests") -> "Requests":
        """What was asked after `before` was copied."""
        twin = Requests()
        twin._counts = self._counts - before._counts
        return twin

    def clear(self) -> None:
        self._counts.clear()

    def __repr__(self) -> str:
        return ", ".join(f"{n} x {verb} {resource}" for (verb, resource), n in sorted(self._counts.items())) or "none"


@dataclass(slots=True)
class Fault:
    """An answer to give instead of the right one, so many times. Status 0 cuts the connection."""

    verb: str
    resource: str
    status: int
    times: int
    retry_after: int | None = None

    def strikes(self, verb: str, resource: str) -> bool:
        same_verb = self.verb in ("*", verb)
        return self.times > 0 and same_verb and re.fullmatch(self.resource.replace("*", ".*"), resource) is not None
