"""The cluster of the runtime: pods, services and nodes in a mirror, and the writes of a run."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

from basilica.core.errors import RuntimeUnavailable
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.informer import Informer
from basilica.kube.client.namespaces import goes_anyway
from basilica.kube.manifests.run import (
    BENCH,
    MANAGED_BY,
    POD_FINALIZER,
    POD_GROUP_RETRIABLE,
    RENDEZVOUS,
    RENDEZVOUS_PORT,
    ROLE,
    WORKER,
    PodGroup,
    RunObjects,
    Settings,
)
from basilica.kube.manifests.userdeployment import INSTANCE_LABEL
from basilica.ports import Run
from basilica.runtimes.kubernetes.archives import ClusterArchives
from basilica.runtimes.kubernetes.node_evidence import Nodes
from basilica.runtimes.kubernetes.parse import PodFacts, pod_facts
from basilica.runtimes.kubernetes.refusals import refusals

Json = dict[str, Any]

log = logging.getLogger(__name__)

FORGET_UID_AFTER_S = 30.0
HELD_AT_MOST_S = 120.0
UNKNOWN_FOR_S = 10.0  # every existing run has been observed once within that time
NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"


class Keeper(Enum):
    """The owner of the duty to release the deleted pods of a run."""

    NOBODY = "nobody"  # this process only reads
    PLAN = "plan"  # the plan for the run's pods
    UNKNOWN = "unknown"  # the run has not been observed yet: it may be gone
    OVER = "over"  # no end of the run's ranks is to be recorded any more


class Cluster:
    """The mirror and the writes. `changed` is called with the instance of each run that changed; `keeper` returns who
    releases a run's pods.
    """

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        changed: Callable[[str], None],
        keeper: Callable[[str], Keeper],
    ) -> None:
        self._api, self._settings, self._changed, self._keeper = api, settings, changed, keeper
        self.archives = ClusterArchives(api, settings.archive_bytes)
        ours = f"{MANAGED_BY}=basilica,{ROLE}"
        roles = f"{ours} in ({WORKER},{BENCH},{RENDEZVOUS})"
        self._pods = Informer(api, "/api/v1/pods", label_selector=roles, on_change=self._pod_changed)
        self._services = Informer(
            api, "/api/v1/services", label_selector=f"{ours}={RENDEZVOUS}", on_change=self._changed_of
        )
        self._nodes = Informer(api, "/api/v1/nodes", on_change=self._node_changed, on_back=self._api_returned)
        self._facts: dict[str, dict[str, PodFacts]] = {}  # by instance, then uid
        self._probes: dict[str, dict[str, PodFacts]] = {}
        self._rendezvous: dict[str, set[str]] = {}  # uids of the pods of rendezvous, by instance
        self._gone: dict[str, set[str]] = {}
        self._unseen: dict[str, float] = {}  # uids that a record names and the mirror never showed, since when
        self._held: set[str] = set()  # uids of deleted pods with a timer that releases them, whatever happens
        self._tasks: set[asyncio.Task[None]] = set()
        self.nodes = Nodes()

    async def start(self) -> None:
        await asyncio.gather(*(informer.synced() for informer in self._informers()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(informer.close() for informer in self._informers()))

    def _informers(self) -> tuple[Informer, ...]:
        return self._nodes, self._services, self._pods

    # ---- reads -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `RuntimeUnavailable` while the mirror may be behind: objects that it does not show may exist all the
        same.
        """
        for informer in self._informers():
            if not informer.is_synced or informer.problem is not None:
                raise RuntimeUnavailable(f"the cluster cannot be seen: {informer.problem or 'nothing was read yet'}")

    def pods(self, instance: str) -> Collection[PodFacts]:
        return self._facts.get(instance, {}).values()

    def gone(self, instance: str, named: Collection[str]) -> set[str]:
        """Return which of the named pods do not exist any more.

        A pod that the mirror never showed may be younger than the mirror: it counts as gone only after a while.
        """
        now, known = time.monotonic(), self._facts.get(instance, {})
        gone = self._gone.get(instance, set())
        found: set[str] = set()
        for uid in named:
            if uid in known:
                self._unseen.pop(uid, None)
            elif uid in gone or now - self._unseen.setdefault(uid, now) >= FORGET_UID_AFTER_S:
                found.add(uid)
        return found

    def bench(self, run: Run) -> Collection[PodFacts]:
        """Return the pods of the bench probe, if there is one."""
        return self._probes.get(run.instance, {}).values()

    def has_rendezvous_pod(self, run: Run) -> bool:
        """Whether a pod exists for the rendezvous, on any node or none."""
        return run.instance in self._rendezvous

    def endpoint(self, run: Run) -> str | None:
        """Return the endpoint of the run's rendezvous; None if it has none."""
        service = self._services.get(run.namespace, self.objects(run).rendezvous)
        if service is None or "deletionTimestamp" in service["metadata"]:
            return None
        return _endpoint(service["spec"].get("clusterIP"))

    def objects(self, run: Run) -> RunObjects:
        return RunObjects(
            instance=run.instance,
            namespace=run.namespace,
            spec=run.spec,
            owner=run.owner,
            settings=self._settings,
        )

    def _changed_of(self, obj: Json) -> None:
        instance = (obj["metadata"].get("labels") or {}).get(INSTANCE_LABEL)
        if instance:
            self._changed(instance)

    def _pod_changed(self, pod: Json) -> None:
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        instance = labels.get(INSTANCE_LABEL, "")
        if labels.get(ROLE) == RENDEZVOUS:
            self._rendezvous_changed(pod, instance)
            return
        facts = pod_facts(pod, POD_FINALIZER)
        known = (self._probes if labels.get(ROLE) == BENCH else self._facts).setdefault(instance, {})
        if facts is not None and self._pods.get(metadata["namespace"], metadata["name"]) is not None:
            known[facts.uid] = facts
        else:
            known.pop(metadata["uid"], None)
            self._gone.setdefault(instance, set()).add(metadata["uid"])
        if not known:
            (self._probes if labels.get(ROLE) == BENCH else self._facts).pop(instance, None)
            asyncio.get_running_loop().call_later(FORGET_UID_AFTER_S, self._forget_gone, instance)
        if facts is not None:
            self._schedule_release(metadata["namespace"], instance, facts)
        self._changed(instance)

    def _rendezvous_changed(self, pod: Json, instance: str) -> None:
        metadata, known = pod["metadata"], self._rendezvous.setdefault(instance, set())
        before = bool(known)
        if self._pods.get(metadata["namespace"], metadata["name"]) is not None:
            known.add(metadata["uid"])
        else:
            known.discard(metadata["uid"])
        if not known:
            del self._rendezvous[instance]
        if bool(known) != before:
            self._changed(instance)

    def _forget_gone(self, instance: str) -> None:
        """Drop the uids of deleted pods of a run that has no pods left: records name such pods only shortly after."""
        if instance not in self._facts:
            self._gone.pop(instance, None)

    def _schedule_release(self, namespace: str, instance: str, pod: PodFacts) -> None:
        """Start the timer that releases a held pod under deletion, even if no plan does."""
        keeper = self._keeper(instance)
        if not (pod.deleting and pod.held) or pod.uid in self._held or keeper is Keeper.NOBODY:
            return
        self._held.add(pod.uid)
        delay = {Keeper.OVER: 0.0, Keeper.UNKNOWN: UNKNOWN_FOR_S}.get(keeper, HELD_AT_MOST_S)
        asyncio.get_running_loop().call_later(delay, self._release_overdue, namespace, instance, pod.uid)

    def release_held(self, run: Run) -> None:
        """Release the run's held pods: no end of its ranks is to be recorded any more."""
        for pod in tuple(self.pods(run.instance)):
            self._held.discard(pod.uid)
            self._schedule_release(run.namespace, run.instance, pod)

    def _release_overdue(self, namespace: str, instance: str, uid: str) -> None:
        """Release a held pod that no plan released: it must not block the deletion of its namespace for ever."""
        self._held.discard(uid)
        pod = self._facts.get(instance, {}).get(uid)
        if pod is None or not pod.held or (pod.state == "running" and self._keeper(instance) is not Keeper.PLAN):
            return
        task = asyncio.get_running_loop().create_task(self._release_quietly(namespace, instance, pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release_quietly(self, namespace: str, instance: str, pod: PodFacts) -> None:
        try:
            await self.release(namespace, pod)
        except RuntimeUnavailable as problem:
            log.warning("%s", problem)
            asyncio.get_running_loop().call_later(HELD_AT_MOST_S, self._release_overdue, namespace, instance, pod.uid)

    def _node_changed(self, node: Json) -> None:
        name, now = node["metadata"]["name"], time.monotonic()
        before, none_was_ready = self.nodes.facts.get(name), self.nodes.all_unready
        if self._nodes.get("", name) is None:
            self.nodes.drop(name, now)
        else:
            self.nodes.update(node, now)
        if before == self.nodes.facts.get(name):
            return
        everywhere = none_was_ready != self.nodes.all_unready
        for instance, pods in self._facts.items():
            if everywhere or any(pod.node == name for pod in pods.values()):
                self._changed(instance)

    def _api_returned(self, away_for: float) -> None:
        self.nodes.api_returned(away_for, time.monotonic())

    # ---- writes ----------------------------------------------------------------------------------------------------

    async def make_rendezvous(self, run: Run) -> str:
        """Create everything of the run but the pods; return the endpoint of the rendezvous."""
        objects, paths = self.objects(run), self.objects(run).paths()
        known = [pod.rendezvous for pod in self.pods(run.instance) if pod.rendezvous and not pod.over]
        address = _address(known[0]) if known else None
        with refusals(f"cannot make what {run.instance} needs"):
            service = await self._api.apply(
                paths["rendezvous_service"], objects.rendezvous_service(address), force=True
            )
            self._services.learn(service)
            around = objects.surroundings()
            await asyncio.gather(*(self._api.apply(paths[name], body, force=True) for name, body in around.items()))
        endpoint = _endpoint(service["spec"].get("clusterIP"))
        if endpoint is None:
            raise RuntimeUnavailable(f"the rendezvous of {run.instance} was given no address")
        return endpoint

    async def archive_parts(self, run: Run) -> int:
        """Return the number of parts of the run's archive; 0 if it is not there."""
        archive = run.spec.archive
        return 0 if archive is None else await self.archives.parts(run.namespace, archive)

    async def make_pod(
        self, run: Run, rank: int, incarnation: int, endpoint: str, *, archive_parts: int, group: PodGroup | None
    ) -> str:
        """Create the pod of a rank, unless it exists; return its uid. `ApiError` if Kubernetes refuses it."""
        body = self.objects(run).worker_pod(rank, incarnation, endpoint, archive_parts=archive_parts, group=group)
        return await self._create_pod(self.objects(run).pods_path, body)

    async def _create_pod(self, path: str, body: Json) -> str:
        try:
            pod = await self._api.create(path, body)
        except ApiError as error:
            if error.status != 409:
                raise
            pod = await self._api.get(f"{path}/{body['metadata']['name']}")
        self._pods.learn(pod)
        known = self._pods.get(pod["metadata"]["namespace"], pod["metadata"]["name"])
        if known is not None:
            self._pod_changed(known)
        return str(pod["metadata"]["uid"])

    @asynccontextmanager
    async def _removal(self, run: Run, what: str) -> AsyncIterator[None]:
        """Guard a removal: where the namespace is being deleted and took our rights along, Kubernetes itself
        removes.
        """
        try:
            yield
        except ApiError as error:
            if not await goes_anyway(self._api, run.namespace, error):
                raise RuntimeUnavailable(f"{what}: {error}") from error

    async def delete_pod(self, run: Run, pod: PodFacts) -> None:
        """Delete this pod, and no other one of its name."""
        async with self._removal(run, f"cannot delete {pod.name}"):
            try:
                await self._api.delete(f"{self.objects(run).pods_path}/{pod.name}", uid=pod.uid)
            except ApiError as error:
                if error.status != 409:
                    raise

    async def end_pods(self, run: Run) -> None:
        """Delete all pods of ranks that are not over. Pods that are over stay, with their logs."""
        if all(pod.phase in ("Succeeded", "Failed") or pod.deleting for pod in self.pods(run.instance)):
            return
        objects = self.objects(run)
        async with self._removal(run, f"cannot end the pods of {run.instance}"):
            await self._api.delete_collection(
                objects.pods_path, label_selector=objects.selector(WORKER), field_selector=NOT_OVER
            )

    async def close_group(self, run: Run, pod: PodFacts) -> None:
        """Mark the pod's group for Kueue as one that gets no replacement pod."""
        body = {"metadata": {"annotations": {POD_GROUP_RETRIABLE: "false"}}}
        with refusals(f"cannot close the group of {pod.name}"):
            try:
                await self._api.merge_patch(f"{self.objects(run).pods_path}/{pod.name}", body)
            except ApiError as error:
                if error.status != 404:
                    raise

    async def make_bench(self, run: Run, nodes: Sequence[str], endpoint: str, *, strict: bool) -> None:
        objects = self.objects(run)
        with refusals(f"cannot start the bench probe of {run.instance}"):
            pods = objects.bench_pods(nodes, endpoint, strict=strict)
            await asyncio.gather(*(self._create_pod(objects.pods_path, body) for body in pods))

    async def end_bench(self, run: Run) -> None:
        objects = self.objects(run)
        async with self._removal(run, f"cannot end the bench probe of {run.instance}"):
            await self._api.delete_collection(objects.pods_path, label_selector=objects.selector(BENCH))

    async def end_rendezvous(self, run: Run) -> None:
        paths = self.objects(run).paths()
        async with self._removal(run, f"cannot end the rendezvous of {run.instance}"):
            await self._api.delete(paths["rendezvous"])
            await self._api.delete(paths["rendezvous_service"])  # last: until then it counts as not ended

    async def release(self, namespace: str, pod: PodFacts) -> None:
        """Remove our finalizer from a pod that was held for its exit."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}"
        with refusals(f"cannot let go of {pod.name}"):
            await self._api.remove_finalizer(path, pod.uid, POD_FINALIZER)

    async def remove(self, run: Run) -> None:
        """Delete everything of the run, but for finalizers of pods."""
        objects = self.objects(run)
        async with self._removal(run, f"cannot remove what is kept of {run.instance}"):
            await self._api.delete_collection(objects.pods_path, label_selector=objects.selector(WORKER, BENCH))
            await asyncio.gather(*(self._api.delete(path) for path in objects.paths().values()))


def _endpoint(address: str | None) -> str | None:
    if address in (None, "", "None"):
        return None
    return f"[{address}]:{RENDEZVOUS_PORT}" if ":" in str(address) else f"{address}:{RENDEZVOUS_PORT}"


def _address(endpoint: str) -> str | None:
    """Return the address in an endpoint."""
    return endpoint.rpartition(":")[0].strip("[]") or None
