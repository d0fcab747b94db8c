"""What is known of a gang on Kubernetes, put together from its pods and its Job. Pure: it is shown things and judges.

A rank's end comes from its container, which is seen first and vanishes soon. The Job's status says why pods were
removed. An end that was seen stands, whatever is seen later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from basilica.core.ends import COMPLETED, ERROR
from basilica.executors.protocol import CANCELLED, CULPRIT, FAILED, PENDING, RUNNING, STOPPED, SUCCEEDED, VICTIM
from basilica.kube.manifests.gang import COMPLETION_INDEX
from basilica.kube.manifests.indexes import parse_indexes

CONTAINER = "replica"
LINES_TOLD = 20  # of a failed rank's output, in its error
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one container."""

    code: int
    reason: str
    finished_at: str
    last_lines: str
    stopped: bool  # its pod was being deleted: somebody else ended it
    why: str = ""  # what the pod says of itself, such as an eviction

    def __str__(self) -> str:
        told = ", ".join(part for part in (self.reason if self.reason != ERROR else "", self.why) if part)
        return f"exit code {self.code} ({told})" if told else f"exit code {self.code}"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Why the Job as a whole ends."""

    reason: str
    message: str
    final: bool  # its pods are gone, too


@dataclass(slots=True)
class GangEvidence:
    """Everything that was seen of one gang."""

    job_name: str
    since: float | None = None  # when it was launched, or first looked at, by the caller's own clock
    exits: dict[int, Exit] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)  # ran at some time
    completed: frozenset[int] = frozenset()
    failed_indexes: frozenset[int] = frozenset()
    pods: dict[int, str] = field(default_factory=dict)  # the present pod of a rank
    waiting: dict[int, str] = field(default_factory=dict)  # why a rank's pod does not run yet
    refusal: str = ""  # what Kubernetes has against pods that are missing
    suspended: bool = False  # the Job makes no pods yet: its queue has not let it in
    logs: dict[int, str] = field(default_factory=dict)  # lines that were fetched
    vanished: set[int] = field(default_factory=set)  # had a pod, and have none
    end: JobEnd | None = None
    complete: bool = False
    gone: bool = False
    fail_fast: bool = True  # one failure ends the gang
    active: int = 0
    news: bool = False  # something that the Job's status will explain
    given_up: str = ""
    _first: int | None = None
    _verdicts: dict[int, str] = field(default_factory=dict)

    # -- being shown things

    def see_pod(self, pod: Json, *, deleted: bool = False) -> int | None:
        """Take note of a pod; returns its rank."""
        rank = rank_of(pod, self.job_name)
        if rank is None:
            return None
        metadata, status = pod["metadata"], pod.get("status") or {}
        name = str(metadata.get("name", ""))
        container = _container_status(status)
        state = container.get("state") or {}
        ended = state.get("terminated")
        if ended is not None or status.get("phase") == "Failed":
            self._see_exit(rank, ended or {}, status, stopped="deletionTimestamp" in metadata)
            self.running.discard(rank)
        elif "running" in state:
            self.running.add(rank)
            self.started.add(rank)
        leaving = deleted or "deletionTimestamp" in metadata
        if not leaving:
            self.pods[rank] = name
            self.vanished.discard(rank)
        elif self.pods.get(rank, name) == name:
            self.pods.pop(rank, None)
            if deleted:
                self.vanished.add(rank)
                self.running.discard(rank)
        self.news |= leaving or (rank in self.exits and self.exits[rank].code != 0)
        reason = waits_for(pod)
        if reason:
            self.waiting[rank] = reason
        else:
            self.waiting.pop(rank, None)
        return rank

    def see_listing(self, pods: list[Any]) -> None:
        """Take note of all pods there are: one that was known and is not among them has gone unseen."""
        for pod in pods:
            self.see_pod(pod)
        present = {str(pod["metadata"].get("name", "")) for pod in pods}
        for rank in [rank for rank, name in self.pods.items() if name not in present]:
            del self.pods[rank]
            self.vanished.add(rank)
            self.running.discard(rank)
            self.news = True

    def _see_exit(self, rank: int, ended: Json, status: Json, *, stopped: bool) -> None:
        code = int(ended.get("exitCode", 1))
        if code == 0 and status.get("phase") != "Failed":
            self.exits[rank] = Exit(0, COMPLETED, str(ended.get("finishedAt", "")), "", stopped)
            self._settle(rank, SUCCEEDED)
            return
        before = self.exits.get(rank)
        if before is not None and before.finished_at == str(ended.get("finishedAt", "")):
            return  # the same end again, in a later state of its pod
        reason = str(ended.get("reason") or status.get("reason") or ERROR)
        why = ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))
        finished = str(ended.get("finishedAt", ""))
        self.exits[rank] = Exit(code or 1, reason, finished, str(ended.get("message") or ""), stopped, why)
        if self._first == rank:
            self._first = None
            for other in self.failed_by_themselves():
                self._compare(other)
        else:
            self._compare(rank)

    def _compare(self, rank: int) -> None:
        """Remember the failure that came first; there may be thousands, so each is looked at once."""
        new = self.exits[rank]
        if not new.stopped and (self._first is None or new.finished_at < self.exits[self._first].finished_at):
            self._first = rank

    def see_job(self, job: Json | None) -> None:
        """Take note of the Job's status; None: there is no such Job."""
        self.news = False
        self.gone = job is None
        if job is None:
            return
        spec = job.get("spec") or {}
        self.fail_fast = spec.get("backoffLimit", 0) == 0
        self.suspended = bool(spec.get("suspend"))
        status = job.get("status") or {}
        self.completed |= parse_indexes(status.get("completedIndexes"))
        self.failed_indexes |= parse_indexes(status.get("failedIndexes"))
        self.active = int(status.get("active") or 0)
        for rank in self.completed:
            self._settle(rank, SUCCEEDED)
        for rank in self.failed_indexes:
            self._settle(rank, FAILED)
        for condition in status.get("conditions") or ():
            if condition.get("status") == "True" and condition.get("type") == "Complete":
                self.complete = True
            if condition.get("status") == "True" and condition.get("type") in ("FailureTarget", "Failed"):
                final = condition["type"] == "Failed" or (self.end is not None and self.end.final)
                self.end = JobEnd(str(condition.get("reason") or ""), str(condition.get("message") or ""), final)

    def give_up(self, why: str) -> None:
        self.given_up = why

    # -- judging

    def status(self, rank: int) -> str:
        """How a rank stands, by all that was seen."""
        verdict = self._verdict(rank)
        if verdict is not None:
            return verdict
        return RUNNING if rank in self.running or self.only_counts else PENDING

    @property
    def only_counts(self) -> bool:
        """Whether it is known that pods are active, and not which: no pod was seen yet."""
        return self.active > 0 and not (self.pods or self.exits or self.vanished)

    def polled_status(self, rank: int) -> str:
        """How a rank stands, by the Job's status and the ends that were seen."""
        verdict = self._verdict(rank)
        if verdict is not None:
            return verdict
        return RUNNING if self.active > 0 else PENDING

    def over(self, rank: int) -> bool:
        return self._verdict(rank) is not None

    def _verdict(self, rank: int) -> str | None:
        """A verdict stands once it was given."""
        if rank not in self._verdicts:
            verdict = self._judge(rank)
            if verdict is not None:
                self._settle(rank, verdict)
        return self._verdicts.get(rank)

    def _judge(self, rank: int) -> str | None:
        if self.given_up:
            return CANCELLED
        if self.complete:
            return SUCCEEDED
        if self.end is not None and self.end.final:
            return FAILED
        failing = self.failing
        if failing and (rank in self.exits or rank in self.vanished) and rank not in self.pods:
            return FAILED
        if failing and rank in self.exits and not self.exits[rank].stopped:
            return FAILED
        if self.gone:
            return FAILED if failing else CANCELLED
        return None

    def culprit(self) -> int | None:
        """The rank that failed first of its own; of ends within one second, the one that was seen first."""
        return self._first

    @property
    def failing(self) -> bool:
        """Whether the gang as a whole is on its way down."""
        return self.end is not None or (self.fail_fast and self._first is not None)

    def unsure(self, ranks: set[int]) -> bool:
        """Whether the gang is failing, or ranks have lost their pods, and the Job has not yet said what follows."""
        lost = {rank for rank, found in list(self.exits.items()) if found.code} | self.vanished
        return self.news or self.failing or any(not self.over(rank) for rank in (lost - self.running) & ranks)

    def failed_by_themselves(self) -> list[int]:
        """Ranks that nobody stopped, the first one first."""
        own = [rank for rank, found in list(self.exits.items()) if found.code and not found.stopped]
        return sorted(own, key=lambda rank: rank != self._first)

    def exit_code(self, rank: int) -> int | None:
        found = self.exits.get(rank)
        return None if found is None else found.code

    def role(self, rank: int) -> str | None:
        """The part of a rank in the failure of the gang; None while nobody is known to have failed by itself."""
        own, culprit = self.exits.get(rank), self.culprit()
        if culprit is None:
            return None
        if rank == culprit:
            return CULPRIT
        return STOPPED if own is None or own.stopped else VICTIM

    def error(self, rank: int) -> str | None:
        """Why a rank did not succeed: its own end, or what it was stopped for; of one that waits, what it waits for."""
        status = self.status(rank)
        if status == PENDING:
            return self.hindrance(rank) or None
        if status == CANCELLED:
            return self.given_up or "cancelled: the Job was deleted"
        if status != FAILED:
            return None
        own, culprit = self.exits.get(rank), self.culprit()
        if own is not None and not own.stopped:
            first = "" if culprit in (rank, None) else f", after rank {culprit} had failed first"
            return f"failed with {own}{first}{self._told_lines(rank)}"
        if culprit is not None and culprit != rank:
            return f"stopped because rank {culprit} failed first ({self.exits[culprit]})"
        reason = ": ".join(part for part in (self.end.reason, self.end.message) if part) if self.end else ""
        ending = f" ({own})" if own is not None else ""
        hindered = self.hindrance(rank)
        never = f"; it never ran: {hindered}" if hindered else ""
        return f"stopped by Kubernetes{': ' if reason else ''}{reason}{ending}{never}{self._told_lines(rank)}"

    @property
    def ever_there(self) -> set[int]:
        """Ranks that had a pod at some time, as far as was seen."""
        return self.pods.keys() | self.exits.keys() | self.vanished | self.started

    def hindrance(self, rank: int) -> str:
        """Why a rank has not run, as far as anybody said; empty if it has."""
        if rank in self.started:
            return ""
        if rank in self.waiting or rank in self.pods:
            return self.waiting.get(rank, "")
        if self.suspended:
            return "the Job is suspended: its queue has not let it in"
        return f"Kubernetes refuses its pod: {self.refusal}" if self.refusal else ""

    def last_lines(self, rank: int) -> str:
        """What is kept of a rank's output."""
        return self.logs.get(rank) or (self.exits[rank].last_lines if rank in self.exits else "")

    def _told_lines(self, rank: int) -> str:
        lines = self.last_lines(rank).splitlines()[-LINES_TOLD:]
        return "".join(f"\n  {line}" for line in lines)

    def _settle(self, rank: int, status: str) -> None:
        self._verdicts.setdefault(rank, status)


def rank_of(pod: Json, job_name: str) -> int | None:
    """By annotation or label, else by the name: `<job>-<rank>-`."""
    metadata = pod["metadata"]
    for field_ in ("annotations", "labels"):
        text = (metadata.get(field_) or {}).get(COMPLETION_INDEX)
        if isinstance(text, str) and text.isdecimal():
            return int(text)
    prefix, name = f"{job_name}-", str(metadata.get("name") or "")
    rank = name[len(prefix) :].partition("-")[0] if name.startswith(prefix) else ""
    return int(rank) if rank.isdecimal() and name.count("-") > prefix.count("-") else None


def waits_for(pod: Json) -> str:
    """Why a pod does not run yet, if it says so: no node for it, an image that cannot be had."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    waiting = (_container_status(status).get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return ""
    return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))


def _container_status(status: Json) -> Json:
    """Of our container; others may have been injected beside it."""
    found = status.get("containerStatuses") or ()
    return next((container for container in found if container.get("name") == CONTAINER), {})
