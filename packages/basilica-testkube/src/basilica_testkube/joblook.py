"""One look of the Job controller at a Job and its pods."""

from dataclasses import dataclass, field

from basilica_testkube import indexes
from basilica_testkube.clock import moment_of
from basilica_testkube.values import Json, is_deleting, is_ended, meta, phase_of

End = tuple[str, str]  # reason and message


@dataclass(slots=True)
class Memory:
    """What the controller keeps of a Job beside its status."""

    failures: int = 0  # since the last success
    not_before: float = 0.0
    create_not_before: float = 0.0  # after a pod that was refused
    index_not_before: dict[int, float] = field(default_factory=dict)
    index_counts: dict[int, tuple[int, int]] = field(default_factory=dict)  # failures that count, and ignored ones
    counted: set[str] = field(default_factory=set)  # uids of failed pods that wait to be replaced

    def forget_from(self, size: int) -> None:
        """An index that is not wanted any more begins anew when it is wanted again."""
        for found in (self.index_not_before, self.index_counts):
            for index in [index for index in found if index >= size]:
                del found[index]


@dataclass(slots=True)
class Look:
    """One look at a Job and its pods."""

    job: Json
    pods: list[Json]
    status: Json
    completions: int | None
    memory: Memory
    completed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    end: End | None = None
    released: list[Json] = field(default_factory=list)  # pods that are counted
    new_failure: bool = False

    @property
    def spec(self) -> Json:
        found: Json = self.job["spec"]
        return found

    @property
    def indexed(self) -> bool:
        return bool(self.spec["completionMode"] == "Indexed")

    @property
    def per_index(self) -> bool:
        return "backoffLimitPerIndex" in self.spec

    def active(self) -> list[Json]:
        return [pod for pod in self.pods if not is_ended(pod) and not is_deleting(pod)]

    def terminating(self) -> list[Json]:
        return [pod for pod in self.pods if not is_ended(pod) and is_deleting(pod)]


def set_indexes(status: Json, key: str, found: set[int]) -> None:
    if found:
        status[key] = indexes.written(found)
    else:
        status.pop(key, None)


def is_running(pod: Json) -> bool:
    return phase_of(pod) == "Running"


def removal_order(pod: Json) -> tuple[bool, bool, float]:
    """Those that do least go first: without a node, not running, youngest."""
    return bool(pod["spec"].get("nodeName")), is_running(pod), -moment_of(meta(pod)["creationTimestamp"])
