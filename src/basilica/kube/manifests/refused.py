"""Pods that Kubernetes refuses to make for a Job: by a quota, a pod security standard, an admission policy.

The Job's status says nothing of it, only events do. Those are too many to be watched, so they are asked for when pods
do not come. Pure: when to ask, for what, and what the answer says.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PODS_WITHIN_S = 3.0
ASK_EVERY_S = 30.0


@dataclass(slots=True)
class AwaitedPods:
    """When to ask why a Job has fewer pods than it should: one that gets more and more has no trouble."""

    ask_at: float = 0.0
    most: int = -1  # that it ever had

    def is_time_to_ask(self, there: int, now: float) -> bool:
        """Whether to ask now, with so many pods there; once said, not again for a while."""
        if there > self.most:
            self.most = there
            self.ask_at = now + PODS_WITHIN_S
        if now < self.ask_at:
            return False
        self.ask_at = now + ASK_EVERY_S
        return True


def refusals_of(job_name: str) -> str:
    """The field selector of the events that tell of refused pods."""
    return f"involvedObject.kind=Job,involvedObject.name={job_name},reason=FailedCreate"


def last_refusal(events: Iterable[Mapping[str, Any]]) -> str:
    """What Kubernetes last had against a pod; empty if it had nothing."""
    last = max(events, key=_time, default=None)
    return "" if last is None else without_pod_name(str(last.get("message") or ""))


def _time(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def without_pod_name(message: str) -> str:
    """Without the name of the pod, which is another one each time."""
    return message.removeprefix("Error creating: ").partition(" is forbidden: ")[2] or message
