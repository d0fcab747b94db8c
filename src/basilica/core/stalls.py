"""The rule for stalled ranks, and its messages.

A rank that has told its steps and then falls silent for ten times its own usual step time is stalled. It is shown, with
the stacks of its threads, and never touched for it unless the spec asks for that.
"""

from collections.abc import Sequence

from basilica.core.policy import name_ranks
from basilica.core.seen import Stalled

FACTOR = 10.0
FLOOR = 5.0  # seconds: a loop of a millisecond may well pause for a second, to write a checkpoint for instance
STACK_LENGTH_MAX = 8000
STACKS_KEPT = 16  # of a run: in a collective all ranks stall together, and a status must not grow with them

_ROUND = (5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400)


def limit(usual_step_seconds: float) -> float:
    """Seconds of silence after which a rank is stalled."""
    return max(FACTOR * usual_step_seconds, FLOOR)


def every(usual_step_seconds: float) -> str:
    """To two digits: equal events are folded, and a step never takes quite the same time."""
    return f"every {usual_step_seconds:.2g} s" if usual_step_seconds < 100 else f"every {usual_step_seconds:.0f} s"


def announce(stalled: Sequence[tuple[int, Stalled]]) -> str:
    """For the event; without times, so that equal ones are folded."""
    first, stall = stalled[0]
    if len(stalled) == 1:
        return f"rank {first} has stopped reporting; it usually reports {every(stall.usual_step_seconds)}"
    names = name_ranks(rank for rank, _ in stalled)
    usual = every(stall.usual_step_seconds)
    return f"{names} have stopped reporting, rank {first} first; it usually reports {usual}"


def describe(stalled: Sequence[tuple[int, Stalled]], now: float) -> str:
    """One sentence for all of them: who fell silent first, and what their main threads are doing."""
    ordered = in_order(stalled)
    first, stall = ordered[0]
    silence = f"reported nothing for {_over(now - stall.since)} (usually {every(stall.usual_step_seconds)})"
    at = f"its main thread is in {stall.where}" if stall.where else "what its threads do is not known"
    if len(ordered) == 1:
        return f"rank {first} has {silence}; {at}"
    others: dict[str, list[int]] = {}
    for rank, other in ordered[1:]:
        others.setdefault(other.where, []).append(rank)
    text = f"{name_ranks(rank for rank, _ in ordered)} have {silence}: rank {first} fell silent first, {at}"
    for where, ranks in others.items():
        text += f"; {name_ranks(ranks)} in {where}" if where else ""
    return text


def in_order(stalled: Sequence[tuple[int, Stalled]]) -> list[tuple[int, Stalled]]:
    """By their last reports: the one that fell silent first is the likely cause, where the others wait for it."""
    return sorted(stalled, key=lambda entry: (entry[1].since, entry[0]))


def _over(seconds: float) -> str:
    """Round, so that who follows a run is not told the same again every second."""
    whole = max((step for step in _ROUND if step <= seconds), default=None)
    if whole is None:
        return "a few seconds"
    if whole < 60:
        return f"over {whole} s"
    return f"over {whole // 60} min" if whole < 3600 else f"over {whole // 3600} h"
