"""The state of a gang on Kubernetes, derived from its pods and its Job. Pure: it reads objects and makes no calls.

The end of a rank comes from its container, which is observed first and vanishes soon. The Job's status gives the reason
why pods were removed. A verdict is final, whatever is observed later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from basilica.core.ends import COMPLETED, ERROR
from basilica.executors.protocol import CANCELLED, CULPRIT, FAILED, PENDING, RUNNING, STOPPED, SUCCEEDED, VICTIM
from basilica.kube.manifests.gang import COMPLETION_INDEX
from basilica.kube.manifests.indexes import parse_indexes

CONTAINER = "replica"
LINES_QUOTED = 20  # last lines of a failed rank's output that its error quotes
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one container."""

    code: int
    reason: str
    finished_at: str
    last_lines: str
    stopped: bool  # its pod was being deleted: the container did not end by itself
    why: str = ""  # reason and message of the pod's status, such as an eviction

    def __str__(self) -> str:
        details = ", ".join(part for part in (self.reason if self.reason != ERROR else "", self.why) if part)
        return f"exit code {self.code} ({details})" if details else f"exit code {self.code}"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The reason why the Job as a whole ends."""

    reason: str
    message: str
    final: bool  # its pods are gone, too


@dataclass(slots=True)
class GangEvidence:
    """All observations of one gang, and the verdicts on its ranks."""

    job_name: str
    since: float | None = None  # time of the launch or of the first follow, on the caller's own clock
    exits: dict[int, Exit] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)  # ran at some time
    completed: frozenset[int] = frozenset()
    failed_indexes: frozenset[int] = frozenset()
    pods: dict[int, str] = field(default_factory=dict)  # the present pod of a rank
    waiting: dict[int, str] = field(default_factory=dict)  # why a rank's pod does not run yet
    refusal: str = ""  # why Kubernetes refuses the missing pods
    suspended: bool = False  # the Job creates no pods yet: its queue has not admitted it
    logs: dict[int, str] = field(default_factory=dict)  # output that was fetched from pods
    vanished: set[int] = field(default_factory=set)  # ranks whose pod was removed
    end: JobEnd | None = None
    complete: bool = False
    gone: bool = False
    fail_fast: bool = True  # one failure ends the gang
    active: int = 0
    news: bool = False  # a change that the Job's status will explain
    given_up: str = ""
    _first: int | None = None
    _verdicts: dict[int, str] = field(default_factory=dict)

    # -- observations

    def see_pod(self, pod: Json, *, deleted: bool = False) -> int | None:
        """Record a pod; return its rank."""
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
        """Record a listing of all pods: a known pod that is not in it was removed unobserved."""
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
        """Keep the earliest failure; there may be thousands, so each is compared once."""
        new = self.exits[rank]
        if not new.stopped and (self._first is None or new.finished_at < self.exits[self._first].finished_at):
            self._first = rank

    def see_job(self, job: Json | None) -> None:
        """Record the Job's status; None: there is no such Job."""
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

    # -- verdicts

    def status(self, rank: int) -> str:
        """Return the status of a rank, by all observations."""
        verdict = self._verdict(rank)
        if verdict is not None:
            return verdict
        return RUNNING if rank in self.running or self.only_counts else PENDING

    @property
    def only_counts(self) -> bool:
        """Whether only the number of active pods is known, since no pod was observed yet."""
        return self.active > 0 and not (self.pods or self.exits or self.vanished)

    def polled_status(self, rank: int) -> str:
        """Return the status of a rank, by the Job's status and the observed ends."""
        verdict = self._verdict(rank)
        if verdict is not None:
            return verdict
        return RUNNING if self.active > 0 else PENDING

    def over(self, rank: int) -> bool:
        return self._verdict(rank) is not None

    def _verdict(self, rank: int) -> str | None:
        """Return the verdict on a rank, or None; the first verdict is final."""
        if rank not in self._verdicts:
            verdict = self._decide(rank)
            if verdict is not None:
                self._settle(rank, verdict)
        return self._verdicts.get(rank)

    def _decide(self, rank: int) -> str | None:
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
        """Return the rank that failed first by itself; of ends within one second, the first observed."""
        return self._first

    @property
    def failing(self) -> bool:
        """Whether the gang as a whole is failing."""
        return self.end is not None or (self.fail_fast and self._first is not None)

    def unsure(self, ranks: set[int]) -> bool:
        """Return whether the gang fails or ranks lost their pods, and the Job's status does not yet explain it."""
        lost = {rank for rank, found in list(self.exits.items()) if found.code} | self.vanished
        return self.news or self.failing or any(not self.over(rank) for rank in (lost - self.running) & ranks)

    def failed_by_themselves(self) -> list[int]:
        """Return the failed ranks that were not stopped, the culprit first."""
        own = [rank for rank, found in list(self.exits.items()) if found.code and not found.stopped]
        return sorted(own, key=lambda rank: rank != self._first)

    def exit_code(self, rank: int) -> int | None:
        found = self.exits.get(rank)
        return None if found is None else found.code

    def role(self, rank: int) -> str | None:
        """Return the role of a rank in the gang's failure; None while no rank is known to have failed by itself."""
        own, culprit = self.exits.get(rank), self.culprit()
        if culprit is None:
            return None
        if rank == culprit:
            return CULPRIT
        return STOPPED if own is None or own.stopped else VICTIM

    def error(self, rank: int) -> str | None:
        """Return why a rank did not succeed: its own end, or the reason of its stop; why a pending rank waits."""
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
            return f"failed with {own}{first}{self._quoted_lines(rank)}"
        if culprit is not None and culprit != rank:
            return f"stopped because rank {culprit} failed first ({self.exits[culprit]})"
        reason = ": ".join(part for part in (self.end.reason, self.end.message) if part) if self.end else ""
        ending = f" ({own})" if own is not None else ""
        hindered = self.hindrance(rank)
        never = f"; it never ran: {hindered}" if hindered else ""
        return f"stopped by Kubernetes{': ' if reason else ''}{reason}{ending}{never}{self._quoted_lines(rank)}"

    @property
    def ever_there(self) -> set[int]:
        """Ranks that had a pod at some time, as far as observed."""
        return self.pods.keys() | self.exits.keys() | self.vanished | self.started

    def hindrance(self, rank: int) -> str:
        """Return why a rank has not run, as far as Kubernetes reports it; empty if it has."""
        if rank in self.started:
            return ""
        if rank in self.waiting or rank in self.pods:
            return self.waiting.get(rank, "")
        if self.suspended:
            return "the Job is suspended: its queue has not let it in"
        return f"Kubernetes refuses its pod: {self.refusal}" if self.refusal else ""

    def last_lines(self, rank: int) -> str:
        """Return the kept output of a rank."""
        return self.logs.get(rank) or (self.exits[rank].last_lines if rank in self.exits else "")

    def _quoted_lines(self, rank: int) -> str:
        lines = self.last_lines(rank).splitlines()[-LINES_QUOTED:]
        return "".join(f"\n  {line}" for line in lines)

    def _settle(self, rank: int, status: str) -> None:
        self._verdicts.setdefault(rank, status)


def rank_of(pod: Json, job_name: str) -> int | None:
    """Return the rank of a pod: by annotation or label, else by the name `<job>-<rank>-`."""
    metadata = pod["metadata"]
    for field_ in ("annotations", "labels"):
        text = (metadata.get(field_) or {}).get(COMPLETION_INDEX)
        if isinstance(text, str) and text.isdecimal():
            return int(text)
    prefix, name = f"{job_name}-", str(metadata.get("name") or "")
    rank = name[len(prefix) :].partition("-")[0] if name.startswith(prefix) else ""
    return int(rank) if rank.isdecimal() and name.count("-") > prefix.count("-") else None


def waits_for(pod: Json) -> str:
    """Return why a pod does not run yet, if its status gives a reason: no node, an image that cannot be pulled."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    waiting = (_container_status(status).get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return ""
    return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))


def _container_status(status: Json) -> Json:
    """Return the status of the replica's container; others may have been injected beside it."""
    found = status.get("containerStatuses") or ()
    return next((container for container in found if container.get("name") == CONTAINER), {})
