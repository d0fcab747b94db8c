"""Pods that Kubernetes refuses to create for a Job: by a quota, a pod security standard, an admission policy.

Only events report it, not the Job's status. Those are too many to be watched, so they are listed when pods are missing.
Pure: when to list, the selector, and the parser.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PODS_WITHIN_S = 3.0
ASK_EVERY_S = 30.0


@dataclass(slots=True)
class AwaitedPods:
    """The schedule of that request for a Job with too few pods: a Job whose pods increase has no trouble."""

    ask_at: float = 0.0
    most: int = -1  # that it ever had

    def is_time_to_ask(self, there: int, now: float) -> bool:
        """Whether to ask now, with so many pods there; after True, not again for a while."""
        if there > self.most:
            self.most = there
            self.ask_at = now + PODS_WITHIN_S
        if now < self.ask_at:
            return False
        self.ask_at = now + ASK_EVERY_S
        return True


def refusals_of(job_name: str) -> str:
    """Return the field selector of the events about refused pods."""
    return f"involvedObject.kind=Job,involvedObject.name={job_name},reason=FailedCreate"


def last_refusal(events: Iterable[Mapping[str, Any]]) -> str:
    """Return Kubernetes' last reason to refuse a pod; empty if there is none."""
    last = max(events, key=_time, default=None)
    return "" if last is None else without_pod_name(str(last.get("message") or ""))


def _time(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def without_pod_name(message: str) -> str:
    """Return the message without the name of the pod, which is another one each time."""
    return message.removeprefix("Error creating: ").partition(" is forbidden: ")[2] or message
