"""Notices: planned changes that ranks are told of before they happen. `core.notice_rules` has their rules."""

from dataclasses import dataclass
from enum import StrEnum


class NoticeKind(StrEnum):
    SCALE = "scale"
    RESTART = "restart"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    PREEMPTION = "preemption"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One announced change. `step`: the last step before it, None where ranks answer as soon as they read it.

    `proposed_at`: when `step` was chosen. `done_at`: when the change was made; ranks still wait then, until it reaches
    them. `number` counts the notices of a run, those with another step for the same
    change included; another change of mind keeps it.
    """

    number: int
    kind: NoticeKind
    since: float
    until: float
    reason: str
    target: int | None = None
    step: int | None = None
    proposed_at: float = 0.0
    done_at: float | None = None

    def describe(self) -> str:
        return describe_change(self.kind, self.target, self.reason)


def describe_change(kind: str, target: int | None, reason: str) -> str:
    """Return a planned change in words; also one of a kind that is not known here."""
    match kind:
        case NoticeKind.SCALE:
            return f"the resize to {target} ranks"
        case NoticeKind.RESTART:
            return "the restart of all ranks"
        case NoticeKind.CANCEL:
            return "the end of the run"
        case NoticeKind.DEADLINE:
            return "the run's deadline"
        case _:
            return f"the {kind} ({reason})" if reason else f"the {kind}"
