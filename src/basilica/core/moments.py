"""Moments of a run as they read on a clock that is set differently: all of them moved by the same seconds. Pure."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")

# The fields of specs, statuses and events that are moments on the controller's time line. Other numbers are durations,
# amounts, or moments that somebody else measured by a clock of his own.
MOMENTS = frozenset(
    {
        "at",
        "booked_at",
        "completed_at",
        "created_at",
        "done_at",
        "ended_at",
        "failing_since",
        "fell_at",
        "finished_at",
        "first_at",
        "last_at",
        "launched_at",
        "metered_until",
        "missing_since",
        "over_at",
        "process_at",
        "proposed_at",
        "recorded_at",
        "rendezvous_silent_since",
        "restart_at",
        "restored_at",
        "seen_at",
        "silent_since",
        "since",
        "started_at",
        "terminal_at",
        "until",
        "up_since",
        "whole_at",
    }
)


def shifted(value: T, seconds: float) -> T:
    """The same value with every moment in it moved by that much; the value itself if there is nothing to move."""
    if not seconds:
        return value
    moved: T = _shift(value, seconds)
    return moved


def _shift(value: Any, seconds: float) -> Any:
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_shift(each, seconds) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes: dict[str, Any] = {}
    for each in fields(value):
        before = getattr(value, each.name)
        if each.name in MOMENTS and isinstance(before, (int, float)):
            changes[each.name] = before + seconds
        elif isinstance(before, tuple) or is_dataclass(before):
            changes[each.name] = _shift(before, seconds)
    return replace(value, **changes) if changes else value
