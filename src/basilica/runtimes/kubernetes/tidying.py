"""What a look at a run shows to be due on the cluster: shrink a Job, let pods go, give a half-placed gang back.

It is done in the background, one thing at a time for each run, and found out again by the next look if it failed.
"""

import random
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from basilica.core.seen import SeenRank, Sight
from basilica.core.spec import Wanted
from basilica.kube.refused import AwaitedPods
from basilica.ports import Run
from basilica.runtimes.kubernetes.cluster import Cluster, is_finished
from basilica.runtimes.kubernetes.keyspace import RunKeys
from basilica.runtimes.kubernetes.parse import Gang, PodFacts

GANG_RELEASED = "GangReleased"
LEAVE_WITHIN_S = 30.0
Spawn = Callable[[str, Coroutine[Any, Any, object]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what may never come, in seconds.

    `keyspace_seconds`: for a rendezvous, before a cancelled run is ended without it. `placement_seconds`: for a gang of
    which too few ranks have a node; then it gives its nodes back and tries again after up to `back_off_seconds`.
    """

    keyspace_seconds: float = 30.0
    placement_seconds: float = 600.0
    back_off_seconds: float = 60.0


class Tidying:
    def __init__(self, cluster: Cluster, patience: Patience, spawn: Spawn, queue: str | None) -> None:
        self._cluster, self._patience, self._spawn, self._queue = cluster, patience, spawn, queue
        self._busy: set[str] = set()
        self._resume_at: dict[str, float] = {}
        self._shrink_since: dict[str, float] = {}
        self._homeless_since: dict[str, float] = {}
        self._awaited: dict[str, AwaitedPods] = {}  # of Jobs that have fewer pods than they should
        self._warnings: dict[str, tuple[tuple[str, str], ...]] = {}

    def warnings(self, instance: str) -> tuple[tuple[str, str], ...]:
        return self._warnings.get(instance, ())

    def forget(self, instance: str) -> None:
        self._warnings.pop(instance, None)
        for kept in (self._resume_at, self._shrink_since, self._homeless_since, self._awaited):
            kept.pop(instance, None)
        self._cluster.forget_complaints(instance)

    def tidy(self, run: Run, gang: Gang, ranks: Sequence[SeenRank], keys: RunKeys | None, now: float) -> float | None:
        """Begin what is due, unless something of this run is under way; when to look again, if nothing changes."""
        if run.instance not in self._busy:
            work = self._conclude(gang, ranks, keys) or self._due(run, gang, ranks, now)
            if work is not None:
                self._busy.add(run.instance)
                self._spawn(run.instance, self._do(run.instance, work))
        dues = [self._resume_at.get(run.instance)]
        if run.instance in self._homeless_since:
            dues.append(self._homeless_since[run.instance] + self._patience.placement_seconds)
        if run.instance in self._awaited:
            dues.append(self._awaited[run.instance].ask_at)
        if run.instance in self._shrink_since:
            dues.append(self._shrink_since[run.instance] + LEAVE_WITHIN_S)
        return min((at for at in dues if at is not None and at > now), default=None)

    def _conclude(
        self, gang: Gang, ranks: Sequence[SeenRank], keys: RunKeys | None
    ) -> Coroutine[Any, Any, object] | None:
        """Ends that only containers or nodes tell of are written down: pods do not stay."""
        silent = {key for key, record in gang.records.items() if record.ended is None}
        ends = {
            (seen.rank, seen.attempt): seen.ended
            for seen in ranks
            if seen.ended is not None and (seen.rank, seen.attempt) in silent
        }
        return keys.conclude(ends) if ends and keys is not None and keys.silent_for == 0.0 else None

    async def _do(self, instance: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        finally:
            self._busy.discard(instance)

    def _due(self, run: Run, gang: Gang, ranks: Sequence[SeenRank], now: float) -> Coroutine[Any, Any, object] | None:
        idle = [pod for pod in gang.pods if pod.held and _may_go(pod, gang)]
        if idle:
            return self._let_go(run, idle)
        job = self._cluster.job(run)
        if run.spec.wanted is not Wanted.RUN:
            return None
        waiting = any(rank.sight is not Sight.ENDED for rank in ranks)
        if job is None:
            return self._cluster.make(run, _wanted_size(run, gang, ranks)) if waiting else None
        if is_finished(job) or not waiting:
            return None
        wanted, size = _wanted_size(run, gang, ranks), int(job["spec"].get("completions") or 0)
        if size > wanted:
            since = self._shrink_since.setdefault(run.instance, now)
            leaving = any(pod.rank >= wanted and pod.deletable for pod in gang.pods)
            return None if leaving and now - since < LEAVE_WITHIN_S else self._cluster.resize(run, wanted)
        self._shrink_since.pop(run.instance, None)
        if self._queue is not None:  # it places gangs, and would place one anew that changes its size
            return None
        return (
            self._bring_back(run, gang, ranks, size)
            or self._place(run, gang, job, now)
            or self._ask_for_complaints(run, gang, job, now)
        )

    def _ask_for_complaints(
        self, run: Run, gang: Gang, job: dict[str, Any], now: float
    ) -> Coroutine[Any, Any, object] | None:
        """A Job that Kubernetes makes no pods for says so in events alone; one that gets more and more has none."""
        there = len({pod.rank for pod in gang.pods if not pod.deleting})
        if there >= int(job["spec"].get("completions") or 0) or job["spec"].get("suspend"):
            self._awaited.pop(run.instance, None)
            self._cluster.forget_complaints(run.instance)
            return None
        awaited = self._awaited.setdefault(run.instance, AwaitedPods())
        return self._cluster.ask_for_complaints(run) if awaited.is_time_to_ask(there, now) else None

    def _bring_back(
        self, run: Run, gang: Gang, ranks: Sequence[SeenRank], size: int
    ) -> Coroutine[Any, Any, object] | None:
        """Have ranks that left, and are wanted again, get their pods at once.

        For its Job a rank that left because it was told to has failed, and Kubernetes gives it another pod only after a
        while. A Job that was smaller meanwhile has forgotten that: so it shrinks, and grows when it has seen that. This
        is only possible for the highest ranks, which is why those that are still leaving are waited for.
        """
        waiting = {rank.rank for rank in ranks if rank.sight is Sight.QUEUED}
        if any(rank >= size for rank in waiting):
            forgotten = not any(pod.rank >= size and pod.counted_on for pod in gang.pods)
            return self._cluster.resize(run, 1 + max(waiting)) if forgotten else None
        told = {record.pod for record in gang.records.values() if record.ended is not None and record.ended.stopped}
        left = {pod.rank for pod in gang.pods if pod.phase == "Failed" and pod.counted_on and pod.uid in told}
        there = {pod.rank for pod in gang.pods if pod.phase != "Failed"}
        smaller = size
        while smaller > 1 and smaller - 1 in (left & waiting) - there:
            smaller -= 1
        if smaller == size or any(pod.phase != "Failed" and _is_leaving(pod, gang, told) for pod in gang.pods):
            return None
        return self._cluster.resize(run, smaller)

    async def _let_go(self, run: Run, pods: Sequence[PodFacts]) -> None:
        for pod in pods:
            await self._cluster.release(run.namespace, pod)

    def _place(self, run: Run, gang: Gang, job: dict[str, Any], now: float) -> Coroutine[Any, Any, object] | None:
        """Two gangs of which each has half of what both need would wait for each other for ever."""
        if job["spec"].get("suspend"):
            due = self._resume_at.setdefault(run.instance, time.time() + self._pause())
            return self._cluster.suspend(run, False) if now >= due else None
        self._resume_at.pop(run.instance, None)
        living = [pod for pod in gang.pods if not pod.over and not pod.deleting]
        homeless = [pod for pod in living if not pod.node]
        began = any(record.started_at is not None for record in gang.records.values())
        placed = len(living) - len(homeless)
        if began or placed == 0 or placed >= run.spec.world.min or not homeless:
            self._homeless_since.pop(run.instance, None)
            return None
        if now - self._homeless_since.setdefault(run.instance, now) < self._patience.placement_seconds:
            return None
        del self._homeless_since[run.instance]
        told = (
            f"only {placed} of the {run.spec.world.min} ranks that are needed found a node within "
            f"{self._patience.placement_seconds:g} s ({homeless[0].unschedulable or 'no node'}): it lets go of them "
            "and tries again"
        )
        self._warnings[run.instance] = ((GANG_RELEASED, told),)
        self._resume_at[run.instance] = now + self._pause()
        return self._cluster.suspend(run, True)

    def _pause(self) -> float:
        return random.uniform(0.5, 1.0) * self._patience.back_off_seconds


def _may_go(pod: PodFacts, gang: Gang) -> bool:
    """A pod that is being deleted, in which nothing runs any more, and whose rank's end is recorded, if it had one."""
    return (
        pod.deleting
        and pod.state != "running"
        and all(record.ended is not None for record in gang.records.values() if record.pod == pod.uid)
    )


def _is_leaving(pod: PodFacts, gang: Gang, told: Collection[str]) -> bool:
    """It was told to leave, or ended what it was told to end and has not taken up what its rank is to do next."""
    order = gang.orders.get(pod.rank)
    if order is None or not order.run:
        return order is not None and order.leave
    return pod.uid in told and (pod.rank, order.attempt) not in gang.records


def _wanted_size(run: Run, gang: Gang, ranks: Sequence[SeenRank]) -> int:
    """As many as the world wants, and no fewer than it takes to keep what runs and what is done."""
    running = [rank.rank for rank in ranks if rank.sight is not Sight.ENDED]
    done = [
        pod.rank for pod in gang.pods if pod.phase == "Succeeded" or (pod.state == "terminated" and not pod.exit_code)
    ]
    done += [
        rank.rank for rank in ranks if rank.ended is not None and rank.ended.exit_code == 0 and not rank.ended.stopped
    ]
    return max([run.spec.world.target, *(1 + rank for rank in (*running, *done))])
