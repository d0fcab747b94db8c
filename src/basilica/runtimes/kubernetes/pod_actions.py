"""The executor of a plan for a run's pods, in the background. The next look plans a failed action again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from basilica.kube.client.api import ApiError
from basilica.kube.client.namespaces import is_terminating
from basilica.kube.manifests.refused import without_pod_name
from basilica.ports import Run
from basilica.runtimes.kubernetes.cluster import Cluster
from basilica.runtimes.kubernetes.fair_slots import FairSlots
from basilica.runtimes.kubernetes.parse import PodFacts
from basilica.runtimes.kubernetes.pod_plan import NewPod, PodPlan
from basilica.runtimes.kubernetes.run_state import Doing, RunState

log = logging.getLogger(__name__)

AT_ONCE = 32  # requests of all runs together
ONCE_FOR_EACH = ("release", "delete", "close")  # of a pod; not repeated until the mirror shows the effect

Spawn = Callable[[str, Coroutine[Any, Any, object]], None]


class PodActions:
    """`spawn` runs a coroutine for a run in the background, and wakes the run when it is done."""

    def __init__(self, cluster: Cluster, spawn: Spawn) -> None:
        self._cluster, self._spawn = cluster, spawn
        self._slots = FairSlots(AT_ONCE)

    def carry_out(self, run: Run, state: RunState, plan: PodPlan) -> None:
        """Start the plan's actions that are not under way already."""
        there = {pod.uid for pod in self._cluster.pods(run.instance)}
        state.doing = {each for each in state.doing if each[0] not in ONCE_FOR_EACH or each[1] in there}
        keys = state.keys
        if keys is not None and plan.conclude:
            self._begin(run, state, ("conclude", ""), lambda: keys.conclude(plan.conclude))
        if keys is not None and plan.dismiss:
            self._begin(run, state, ("dismiss", ""), lambda: keys.dismiss(plan.dismiss))
        for pod in plan.release:
            self._begin(run, state, ("release", pod.uid), lambda pod=pod: self._release(run, pod))  # type: ignore[misc]
        for pod in plan.delete:
            self._begin(run, state, ("delete", pod.uid), lambda pod=pod: self._delete(run, pod))  # type: ignore[misc]
        for pod in plan.close:
            self._begin(run, state, ("close", pod.uid), lambda pod=pod: self._cluster.close_group(run, pod))  # type: ignore[misc]
        if plan.end_gang:
            self._begin(run, state, ("end", ""), lambda: self._cluster.end_pods(run))
        new = [pod for pod in plan.create if ("create", pod.rank) not in state.doing]
        if new:
            state.doing |= {("create", pod.rank) for pod in new}
            self._spawn(run.instance, self._create_all(run, state, new))

    def _begin(self, run: Run, state: RunState, what: Doing, work: Callable[[], Awaitable[object]]) -> None:
        if what not in state.doing:
            state.doing.add(what)
            self._spawn(run.instance, self._do(state, what, work))

    async def _do(self, state: RunState, what: Doing, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except BaseException:
            state.doing.discard(what)
            raise
        if what[0] not in ONCE_FOR_EACH:
            state.doing.discard(what)

    async def _release(self, run: Run, pod: PodFacts) -> None:
        async with self._slots.hold(run.instance):
            await self._cluster.release(run.namespace, pod)

    async def release_all(self, run: Run) -> None:
        """Release every pod of the run that is held."""
        held = [pod for pod in self._cluster.pods(run.instance) if pod.held]
        await asyncio.gather(*(self._release(run, pod) for pod in held))

    async def _delete(self, run: Run, pod: PodFacts) -> None:
        async with self._slots.hold(run.instance):
            await self._cluster.delete_pod(run, pod)

    # ---- pod creation

    async def _create_all(self, run: Run, state: RunState, pods: Sequence[NewPod]) -> None:
        tries = state.ledger.refusal is not None
        try:
            if state.archive_parts is None:
                state.archive_parts = await self._cluster.archive_parts(run)
            await asyncio.gather(*(self._create(run, state, pod, tries=tries) for pod in pods))
        finally:
            state.doing -= {("create", pod.rank) for pod in pods}

    async def _create(self, run: Run, state: RunState, pod: NewPod, *, tries: bool) -> None:
        """Create one pod. `tries`: it probes whether pods are still refused."""
        async with self._slots.hold(run.instance):
            endpoint = self._cluster.endpoint(run)
            if endpoint is not None and _is_still_due(state, pod, tries=tries):
                await self._make(run, state, pod, endpoint)
        state.doing.discard(("create", pod.rank))

    async def _make(self, run: Run, state: RunState, pod: NewPod, endpoint: str) -> None:
        try:
            uid = await self._cluster.make_pod(
                run, pod.rank, pod.incarnation, endpoint, archive_parts=state.archive_parts or 0, group=pod.group
            )
        except ApiError as error:
            if is_terminating(error):
                state.ledger = replace(state.ledger, terminating=True)
                return
            if state.ledger.refusal is None:
                log.warning("%s: no pod for rank %d: %s", run.instance, pod.rank, error)
            living = sum(not each.over and not each.deleting for each in self._cluster.pods(run.instance))
            state.ledger = state.ledger.refused(without_pod_name(error.message), time.time(), living)
        else:
            state.ledger = state.ledger.born(pod.rank, uid, time.time())


def _is_still_due(state: RunState, pod: NewPod, *, tries: bool) -> bool:
    """Whether no stop, end, or refusal of another pod of the run has come in between."""
    ledger = state.ledger
    order = None if state.keys is None else state.keys.orders.get(pod.rank)
    if state.closed or order is None or not order.run or order.attempt != pod.attempt:
        return False
    return not ledger.terminating and ledger.resume_at is None and (tries or ledger.refusal is None)
