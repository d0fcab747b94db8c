"""The rules that every runtime agrees on, whatever its ranks run as. Pure.

How an end is named is in `core.ends`, and the environment of a rank in `core.environment`: floors below the runtimes
need those two as well.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

ENDED_ATTEMPTS_SHOWN = 4
"""The ended attempts of a rank that the controller is shown: those that it has yet to book are among them."""

TAIL_LINES, TAIL_LINE_CHARS = 20, 500
"""The last lines of a rank's output that are recorded with its end, and the characters of each."""

COMMAND_RUNS = b"\x06"
"""The first byte that the supervisor of a command beside a rank writes: all that follows is the command's own."""

KILL_AGAIN_SECONDS = 0.05
"""The pause between two SIGKILLs to what is left of an attempt: a process may fork between them."""


def shown_attempts(attempts: Iterable[T], place: Callable[[T], tuple[int, int]], ended: Callable[[T], bool]) -> list[T]:
    """Return the attempts that the controller is shown, by rank and attempt: the live ones, and the last ended ones.

    `place` gives the rank and the number of an attempt.
    """
    kept: list[T] = []
    counted: Counter[int] = Counter()
    for attempt in sorted(attempts, key=lambda each: (place(each)[0], -place(each)[1])):
        if ended(attempt):
            counted[place(attempt)[0]] += 1
            if counted[place(attempt)[0]] > ENDED_ATTEMPTS_SHOWN:
                continue
        kept.append(attempt)
    return sorted(kept, key=place)


def tail_of(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the part of a rank's last lines that is recorded with its end."""
    return tuple(line[:TAIL_LINE_CHARS] for line in lines[-TAIL_LINES:])
