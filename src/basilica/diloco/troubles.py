"""Troubles: errors of work that no round depends on, such as removing old rounds and saving states.

Such an error is never raised where the numbers are: the round is decided, and its result is right. It is logged once
for each cause, kept until the same work succeeds, and shown by `basilica diloco inspect`.
"""

import logging
import threading
from dataclasses import dataclass, replace

log = logging.getLogger("basilica.diloco")
LONGEST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Trouble:
    """Work that fails at present: what it is, its last error, and how often it has failed in a row."""

    work: str
    error: str
    failures: int = 1

    def __str__(self) -> str:
        times = f" ({self.failures} times)" if self.failures > 1 else ""
        return f"{self.work} fails{times}: {self.error}"


class Troubles:
    """The work of one replica that fails at present. May be used from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._current: dict[str, Trouble] = {}
        self._logged: set[tuple[str, str]] = set()

    def record(self, work: str, error: Exception) -> None:
        """Keep an error, and log it if this work has not failed like that before."""
        text = f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
        with self._guard:
            known = self._current.get(work)
            self._current[work] = Trouble(work, text) if known is None else _again(known, text)
            cause = (work, type(error).__name__)
            new = cause not in self._logged
            self._logged.add(cause)
        if new:
            log.warning("%s fails: %s; no round depends on it, and it is tried again later", work, text)

    def resolve(self, work: str) -> None:
        """Forget the errors of work that has succeeded; the next one is logged again."""
        with self._guard:
            known = self._current.pop(work, None)
            self._logged = {cause for cause in self._logged if cause[0] != work}
        if known is not None:
            log.info("%s succeeds again", work)

    @property
    def current(self) -> tuple[Trouble, ...]:
        with self._guard:
            return tuple(self._current.values())


def _again(known: Trouble, text: str) -> Trouble:
    return replace(known, error=text, failures=known.failures + 1)
