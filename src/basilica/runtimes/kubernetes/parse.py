"""Parser from pods, nodes, orders and records to observed ranks. Pure.

The rank's own record comes first; without one the container's status counts, and without that the node's.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from basilica.core.ends import (
    COMPLETED,
    ENDED_BY_PLATFORM,
    ERROR,
    NODE_LOST,
    OOM_KILLED,
    START_ERROR,
    UNKNOWN,
    killer_in,
)
from basilica.core.environment import RENDEZVOUS_ENDPOINT
from basilica.core.seen import Ended, SeenRank, Sight
from basilica.kube.manifests.run import (
    POD_GROUP,
    POD_GROUP_RETRIABLE,
    POD_GROUP_SIZE,
    RANK,
    WORKER_CONTAINER,
    PodGroup,
)
from basilica.progress.published import PublishedActivity
from basilica.rendezvous.orders import AttemptRecord, Order, load_record
from basilica.runtimes.kubernetes.node_evidence import Evidence
from basilica.runtimes.rules import TAIL_LINE_CHARS, shown_attempts, tail_of

Json = dict[str, Any]

_DISRUPTIONS = {
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": NODE_LOST,
    "DeletionByPodGC": NODE_LOST,
}
_NEVER_STARTED = (START_ERROR, "ContainerCannotRun")
_OF_THE_ENTRYPOINT = (1, 2, 126, 127, 128)  # codes of an entrypoint that is not there or cannot begin
_HOPELESS = ("InvalidImageName",)  # every other reason for a waiting container may pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """The relevant facts of one pod of a gang. `disruption`: our reason, if the platform ended it.

    `incarnation` counts the pods of a rank. `rendezvous`: the endpoint that its entrypoint knows. `gated`: a queue or
    another gate than the scheduler has yet to admit it. `group`: the pods that Kueue admits together with it;
    `group_closed`: that group waits for no replacement pod.
    """

    name: str
    uid: str
    rank: int
    created: str
    node: str = ""
    phase: str = "Pending"
    deleting: bool = False
    held: bool = False
    incarnation: int = 0
    rendezvous: str = ""
    gated: bool = False
    group: PodGroup | None = None
    group_closed: bool = False
    state: Literal["", "waiting", "running", "terminated"] = ""
    reason: str = ""
    message: str = ""
    exit_code: int = 0
    finished_at: float = 0.0
    disruption: str = ""
    unschedulable: str = ""

    @property
    def over(self) -> bool:
        """Whether its container will not run any more."""
        return self.state == "terminated" or self.phase in ("Succeeded", "Failed")

    @property
    def seen_ended_by_node(self) -> bool:
        """Whether its node has seen the container end."""
        return self.state == "terminated" and self.reason != "ContainerStatusUnknown"

    @property
    def deletable(self) -> bool:
        """Whether it has begun and is not over for Kubernetes: deleting it now would delete its log."""
        return self.state in ("running", "terminated") and self.phase not in ("Succeeded", "Failed")


def by_age(pod: PodFacts) -> tuple[str, int]:
    """Sort key for the pods of a rank, oldest first; the cluster's timestamps have seconds only."""
    return pod.created, pod.incarnation


def pod_facts(pod: Json, finalizer: str) -> PodFacts | None:
    """Parse a pod; None for one without a rank. `finalizer`: ours, which marks held pods."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    rank, incarnation = annotations.get(RANK, ""), metadata["name"].rpartition("-")[2]
    if not rank.isdecimal():
        return None
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    statuses = [each for each in status.get("containerStatuses") or () if each["name"] == WORKER_CONTAINER]
    state: Json = statuses[0].get("state") or {} if statuses else {}
    kind: Any = next((each for each in ("terminated", "running", "waiting") if each in state), "")
    about: Json = state.get(kind) or {}
    placed = conditions.get("PodScheduled", {})
    return PodFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        rank=int(rank),
        created=metadata.get("creationTimestamp", ""),
        node=pod["spec"].get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        deleting="deletionTimestamp" in metadata,
        held=finalizer in (metadata.get("finalizers") or ()),
        incarnation=int(incarnation) if incarnation.isdecimal() else 0,
        rendezvous=_rendezvous(pod),
        gated=placed.get("reason") == "SchedulingGated",
        group=_group(metadata),
        group_closed=annotations.get(POD_GROUP_RETRIABLE) == "false",
        state=kind,
        reason=str(about.get("reason") or ""),
        message=str(about.get("message") or ""),
        exit_code=int(about.get("exitCode") or 0),
        finished_at=moment(about.get("finishedAt")),
        disruption=_disruption(status, conditions),
        unschedulable=str(placed.get("message") or "") if placed.get("status") == "False" else "",
    )


def _rendezvous(pod: Json) -> str:
    containers = [each for each in pod["spec"].get("containers") or () if each["name"] == WORKER_CONTAINER]
    env = (containers[0].get("env") or ()) if containers else ()
    return str(next((each.get("value") for each in env if each["name"] == RENDEZVOUS_ENDPOINT), None) or "")


def _group(metadata: Json) -> PodGroup | None:
    name = (metadata.get("labels") or {}).get(POD_GROUP, "")
    size = (metadata.get("annotations") or {}).get(POD_GROUP_SIZE, "")
    return PodGroup(name, int(size)) if name and size.isdecimal() else None


def moment(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def _disruption(status: Json, conditions: Mapping[str, Json]) -> str:
    target = conditions.get("DisruptionTarget", {})
    if target.get("status") == "True":
        return _DISRUPTIONS.get(str(target.get("reason")), "Evicted")
    return "Evicted" if status.get("reason") == "Evicted" else ""


def message_record(pod: PodFacts) -> tuple[int, AttemptRecord] | None:
    """Return the last attempt in the pod, which its entrypoint wrote to the container's termination message."""
    if not pod.message.startswith('{"basilica": '):
        return None
    try:
        found = json.loads(pod.message)
        record = load_record(json.dumps(found["record"]))
        return None if record is None else (int(found["basilica"]), record)
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The facts of a run. `gone`: uids of pods that existed and do not any more.

    `activities`: of the programs of ranks, as their agents published them. `evidence`: facts from nodes and the
    rendezvous about ranks that report nothing themselves.
    """

    orders: Mapping[int, Order]
    records: Mapping[tuple[int, int], AttemptRecord]
    pods: Collection[PodFacts]
    activities: Mapping[tuple[int, int], PublishedActivity] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    gone: Collection[str] = ()
    gpus: int = 0
    waiting_for: str = "a pod"
    held_back: Mapping[int, str] = field(default_factory=dict)  # ranks that wait for something else than the others
    queue: str | None = None

    def merged_records(self) -> dict[tuple[int, int], AttemptRecord]:
        """Return the keyspace's records, with ends from termination messages where those have none."""
        found = dict(self.records)
        for pod in self.pods:
            left = message_record(pod) if pod.over else None
            if left is not None:
                known = found.get((pod.rank, left[0]))
                if known is None or (known.ended is None and known.pod == pod.uid):
                    found[pod.rank, left[0]] = left[1]
        return found

    def see(self, now: float) -> tuple[SeenRank, ...]:
        """Return every attempt that has not ended, and of the ended ones the latest few."""
        records = self.merged_records()
        by_uid = {pod.uid: pod for pod in self.pods}
        seen = [self._recorded(key, record, by_uid.get(record.pod), now) for key, record in records.items()]
        by_rank: dict[int, list[PodFacts]] = {}
        for pod in sorted(self.pods, key=by_age):
            by_rank.setdefault(pod.rank, []).append(pod)
        claimed = {record.pod for record in records.values()}
        for rank, order in self.orders.items():
            if order.run and (rank, order.attempt) not in records:
                seen.append(self._ordered(rank, order, by_rank.get(rank, []), claimed, now))
        return tuple(_latest(seen))

    # ---- attempts with a record

    def _recorded(self, key: tuple[int, int], record: AttemptRecord, pod: PodFacts | None, now: float) -> SeenRank:
        node = (pod.node if pod is not None else "") or record.node
        facts = self.evidence.facts(node)
        missed = self.evidence.missed.get(record.pod)
        sight = SeenRank(
            rank=key[0],
            attempt=key[1],
            sight=Sight.UNKNOWN,
            node=node,
            pod_name=pod.name if pod is not None else "",
            provider=facts.provider,
            region=facts.region,
            started_at=record.started_at,
            gpus=self.gpus,
            silent_since=None if missed is None else now - missed,
        )
        found = self.activities.get(key)
        if found is not None:
            activity = found.activity
            sight = replace(
                sight,
                agent=activity.agent,
                progress=activity.progress,
                saving=activity.saving,
                answer=activity.answer,
                leaving=found.leaving,
            )
        ended = record.ended if record.ended is None else refined(record.ended, pod)
        if ended is None:
            ended = self._silent_end(record, pod, now)
        if ended is not None:
            return replace(sight, sight=Sight.ENDED, ended=ended)
        if pod is None or (self.evidence.is_unready(node) and not self.evidence.is_heard(record.pod)):
            return sight
        return replace(sight, sight=Sight.STARTING if record.started_at is None else Sight.RUNNING)

    def _silent_end(self, record: AttemptRecord, pod: PodFacts | None, now: float) -> Ended | None:
        """Return the end of an attempt that could not record it; None if it has not ended, or the facts do not decide.

        A pod's status is the report of its node. When a node does not answer, Kubernetes only gives the pod up.
        """
        if pod is None:
            if record.pod not in self.gone or not (
                self._is_sure_of(record.node) or self.evidence.is_silent(record.pod)
            ):
                return None
            return Ended(exit_code=None, reason=UNKNOWN, finished_at=now, by_platform=True)
        if self._has_ended(pod):
            return container_end(pod, now)
        if self.evidence.is_lost(pod.uid, pod.node):
            return Ended(exit_code=None, reason=NODE_LOST, finished_at=now, by_platform=True)
        return None

    def _has_ended(self, pod: PodFacts) -> bool:
        """Whether nothing can run in the pod any more, by its node's report or by the silence of its agent."""
        return pod.over and (pod.seen_ended_by_node or self._is_sure_of(pod.node) or self.evidence.is_silent(pod.uid))

    def _is_sure_of(self, node: str) -> bool:
        return not node or self.evidence.is_ready(node)

    def lost_in(self) -> float | None:
        """Return the seconds until the next rank counts as lost with its node."""
        silent = (self.evidence.lost_in(pod.uid, pod.node) for pod in self.pods if not pod.over)
        return min((left for left in silent if left is not None), default=None)

    def nodes_lost(self) -> frozenset[int]:
        """Return the ranks that have a pod on a lost node, and no pod that may run elsewhere."""
        lost = {pod.uid for pod in self.pods if self.evidence.is_lost(pod.uid, pod.node)}
        elsewhere = {pod.rank for pod in self.pods if pod.uid not in lost and not self._has_ended(pod)}
        return frozenset(pod.rank for pod in self.pods if pod.uid in lost) - elsewhere

    # ---- attempts that are ordered and not yet claimed

    def _ordered(self, rank: int, order: Order, pods: list[PodFacts], claimed: Collection[str], now: float) -> SeenRank:
        sight = SeenRank(rank=rank, attempt=order.attempt, sight=Sight.QUEUED, gpus=self.gpus)
        failed = [pod for pod in pods if pod.over and pod.uid not in claimed and not pod.deleting]
        problem = start_error(failed[-1]) if failed else ""
        if problem:
            code = failed[-1].exit_code or None
            ended = Ended(exit_code=code, reason=START_ERROR, finished_at=now, start_error=problem)
            return replace(sight, sight=Sight.ENDED, ended=ended, pod_name=failed[-1].name, node=failed[-1].node)
        there = [pod for pod in pods if not pod.over and not pod.deleting]
        waiting = [pod for pod in there if not self.evidence.node_is_lost(pod.node)]
        if not waiting:
            lost = f", since node {there[-1].node} does not answer" if there else ""
            return replace(sight, note=f"waiting for {self.held_back.get(rank, self.waiting_for)}{lost}")
        pod = waiting[-1]
        facts = self.evidence.facts(pod.node)
        sight = replace(sight, pod_name=pod.name, node=pod.node, provider=facts.provider, region=facts.region)
        if not pod.node:
            queued = f"waiting in queue {self.queue}" if pod.gated and self.queue else ""
            return replace(sight, note=queued or pod.unschedulable or "waiting for a node")
        if pod.state == "waiting" and pod.reason in _HOPELESS:
            ended = Ended(
                exit_code=None, reason=START_ERROR, finished_at=now, start_error=f"{pod.reason}: {pod.message}"
            )
            return replace(sight, sight=Sight.ENDED, ended=ended)
        note = ": ".join(part for part in (pod.reason, pod.message) if part) if pod.state == "waiting" else ""
        return replace(sight, sight=Sight.STARTING, note=note)


def _latest(seen: Iterable[SeenRank]) -> list[SeenRank]:
    return shown_attempts(seen, lambda each: (each.rank, each.attempt), lambda each: each.sight is Sight.ENDED)


def refined(ended: Ended, pod: PodFacts | None) -> Ended:
    """Return the rank's own end with the platform's reason, where the platform ended it."""
    if pod is None or not ended.by_platform or ended.reason != ENDED_BY_PLATFORM:
        return ended
    return replace(ended, reason=pod.disruption or ended.reason)


def container_end(pod: PodFacts, now: float) -> Ended:
    """Return the end of a rank that ended with its container, before it could record its end."""
    finished = pod.finished_at or now
    if not pod.seen_ended_by_node:
        return Ended(exit_code=None, reason=pod.disruption or UNKNOWN, finished_at=finished, by_platform=True)
    code = pod.exit_code
    if code == 0:  # the entrypoint exits with 0 only if its rank did
        return Ended(exit_code=0, reason=COMPLETED, finished_at=finished)
    killer = None if code is None else killer_in(code)
    by_platform = bool(pod.disruption) or pod.deleting
    if pod.disruption:
        reason = pod.disruption
    elif pod.reason == OOM_KILLED:
        reason, by_platform = OOM_KILLED, False
    elif by_platform:
        reason = ENDED_BY_PLATFORM
    else:
        reason = killer or ERROR
    tail = () if message_record(pod) else tail_of(pod.message.splitlines())
    return Ended(
        exit_code=code,
        reason=reason,
        finished_at=finished,
        signal=killer,
        by_platform=by_platform,
        log_tail=tail,
    )


def start_error(pod: PodFacts) -> str:
    """Return why the rank's program was never executed in this pod; empty if it was, or if the platform prevented
    it.
    """
    if pod.disruption or pod.state != "terminated":
        return ""
    if pod.reason in _NEVER_STARTED or pod.exit_code in _OF_THE_ENTRYPOINT:
        words = " ".join(pod.message.split())[-TAIL_LINE_CHARS:]
        return f"the container ended with code {pod.exit_code} before the rank was started: {words or pod.reason}"
    return ""
