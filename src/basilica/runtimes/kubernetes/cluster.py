"""The cluster as the runtime needs it: Jobs, pods, addresses and nodes in a mirror, and the few writes of a run."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from basilica.core.errors import RuntimeUnavailable
from basilica.kube.api import ApiError, KubeApi
from basilica.kube.informer import Informer
from basilica.kube.refused import last_refusal, refusals_of
from basilica.kube.run import (
    BENCH,
    MANAGED_BY,
    POD_FINALIZER,
    RENDEZVOUS,
    RENDEZVOUS_PORT,
    ROLE,
    WORKER,
    RunObjects,
    Settings,
)
from basilica.kube.userdeployment import INSTANCE_LABEL
from basilica.ports import Run
from basilica.runtimes.kubernetes.archives import ClusterArchives
from basilica.runtimes.kubernetes.node_evidence import Nodes
from basilica.runtimes.kubernetes.parse import PodFacts, pod_facts
from basilica.runtimes.kubernetes.refusals import refusals

Json = dict[str, Any]

log = logging.getLogger(__name__)

FORGET_UID_AFTER_S = 30.0
HELD_AT_MOST_S = 120.0
CLOSING_DEADLINE_S = 1  # of a Job that is to be over; what runs in spite of that is ended with it


class Cluster:
    """`changed` is called with the instance of each run of which something changed."""

    def __init__(self, api: KubeApi, settings: Settings, changed: Callable[[str], None]) -> None:
        self._api, self._settings, self._changed = api, settings, changed
        self.archives = ClusterArchives(api, settings.archive_bytes)
        ours = f"{MANAGED_BY}=basilica,{ROLE}"
        gangs = f"{ours} in ({WORKER},{BENCH})"
        self._pods = Informer(api, "/api/v1/pods", label_selector=gangs, on_change=self._pod_changed)
        self._jobs = Informer(api, "/apis/batch/v1/jobs", label_selector=gangs, on_change=self._changed_of)
        self._services = Informer(
            api, "/api/v1/services", label_selector=f"{ours}={RENDEZVOUS}", on_change=self._changed_of
        )
        self._nodes = Informer(api, "/api/v1/nodes", on_change=self._node_changed, on_back=self._asked_again)
        self._facts: dict[str, dict[str, PodFacts]] = {}  # by instance, then uid
        self._probes: dict[str, dict[str, PodFacts]] = {}
        self._gone: dict[str, set[str]] = {}
        self._complaints: dict[str, str] = {}
        self._unseen: dict[str, float] = {}  # uids that a record names and no look has shown, since when
        self._held: set[str] = set()  # uids of deleted pods that are let go of after a while, whatever happens
        self._tasks: set[asyncio.Task[None]] = set()
        self.nodes = Nodes()

    async def start(self) -> None:
        await asyncio.gather(*(informer.synced() for informer in self._informers()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(informer.close() for informer in self._informers()))

    def _informers(self) -> tuple[Informer, ...]:
        return self._nodes, self._services, self._jobs, self._pods

    # ---- looking ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """`RuntimeUnavailable` while the mirror may be behind: what it does not show may be there all the same."""
        for informer in self._informers():
            if not informer.is_synced or informer.problem is not None:
                raise RuntimeUnavailable(f"the cluster cannot be seen: {informer.problem or 'nothing was read yet'}")

    def pods(self, instance: str) -> Collection[PodFacts]:
        return self._facts.get(instance, {}).values()

    def gone(self, instance: str, named: Collection[str]) -> set[str]:
        """Which of the named pods are not there any more.

        One that was never seen may be younger than the mirror: it counts as gone only after a while.
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

    def complaint(self, instance: str) -> str:
        """What Kubernetes last had against pods of the run, as far as somebody asked."""
        return self._complaints.get(instance, "")

    def job(self, run: Run) -> Json | None:
        return self._jobs.get(run.namespace, run.instance)

    def bench(self, run: Run) -> tuple[Json | None, Collection[PodFacts]]:
        """The Job of the bench probe, if there is one, and its pods."""
        return self._jobs.get(run.namespace, self.objects(run).bench), self._probes.get(run.instance, {}).values()

    def endpoint(self, run: Run) -> str | None:
        """Where the run's rendezvous is; None if it has none."""
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
        if facts is not None and facts.deleting and facts.held and facts.uid not in self._held:
            self._held.add(facts.uid)
            loop = asyncio.get_running_loop()
            loop.call_later(HELD_AT_MOST_S, self._let_go, metadata["namespace"], instance, facts.uid)
        self._changed(instance)

    def _forget_gone(self, instance: str) -> None:
        """Pods that are gone are only asked for soon after; a run that has none any more keeps nothing here."""
        if instance not in self._facts:
            self._gone.pop(instance, None)

    def _let_go(self, namespace: str, instance: str, uid: str) -> None:
        """A pod whose run is gone is asked for by nobody; it must not keep its namespace for ever."""
        self._held.discard(uid)
        pod = self._facts.get(instance, {}).get(uid)
        if pod is not None and pod.held:
            task = asyncio.get_running_loop().create_task(self._release_quietly(namespace, instance, pod))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _release_quietly(self, namespace: str, instance: str, pod: PodFacts) -> None:
        try:
            await self.release(namespace, pod)
        except RuntimeUnavailable as problem:
            log.warning("%s", problem)
            asyncio.get_running_loop().call_later(HELD_AT_MOST_S, self._let_go, namespace, instance, pod.uid)

    def _node_changed(self, node: Json) -> None:
        name, now = node["metadata"]["name"], time.monotonic()
        before, none_was_ready = self.nodes.facts.get(name), self.nodes.all_unready
        if self._nodes.get("", name) is None:
            self.nodes.drop(name, now)
        else:
            self.nodes.take(node, now)
        if before == self.nodes.facts.get(name):
            return
        everywhere = none_was_ready != self.nodes.all_unready
        for instance, pods in self._facts.items():
            if everywhere or any(pod.node == name for pod in pods.values()):
                self._changed(instance)

    def _asked_again(self, away_for: float) -> None:
        self.nodes.asked_again(away_for, time.monotonic())

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def make(self, run: Run, size: int) -> None:
        """All that the run needs, the Job last; what is there already stays as it is, but has the size."""
        job = self.job(run)
        if job is not None and self.endpoint(run) is not None:
            if size > _size(job):
                await self.resize(run, size)
            return
        endpoint = await self.make_rendezvous(run)
        if job is None:
            archive = run.spec.archive
            parts = 0 if archive is None else await self.archives.parts(run.namespace, archive)
            with refusals(f"cannot make the Job of {run.instance}"):
                objects = self.objects(run)
                await self._create_job(objects.job(size, endpoint, archive_parts=parts), objects.paths()["job"])

    async def make_rendezvous(self, run: Run) -> str:
        """All but the Job; where the rendezvous will be."""
        objects, paths = self.objects(run), self.objects(run).paths()
        job = self.job(run)
        address = None if job is None else _address(job)
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

    async def _create_job(self, job: Json, path: str) -> None:
        try:
            self._jobs.learn(await self._api.create(path.rpartition("/")[0], job))
        except ApiError as error:
            if error.status != 409:
                raise
            self._jobs.learn(await self._api.get(path))

    async def resize(self, run: Run, size: int) -> None:
        """Give the Job this many ranks. One that has finished would take it and do nothing: it is replaced."""
        path = self.objects(run).paths()["job"]
        with refusals(f"cannot resize {run.instance}"):
            job = await self._api.merge_patch(path, {"spec": {"completions": size, "parallelism": size}})
            self._jobs.learn(job)
            if is_finished(job):
                await self._api.delete(path, uid=job["metadata"]["uid"])
                raise RuntimeUnavailable(f"the Job of {run.instance} was over; another takes its place")

    async def suspend(self, run: Run, suspended: bool) -> None:
        with refusals(f"cannot suspend or resume {run.instance}"):
            path = self.objects(run).paths()["job"]
            self._jobs.learn(await self._api.merge_patch(path, {"spec": {"suspend": suspended}}))

    async def close_job(self, run: Run) -> None:
        """Have the Job make no pod any more, and end what is left. Pods that have ended stay, with their logs.

        One whose ranks have all done their work is over by itself.
        """
        job = self.job(run)
        if job is None or is_finished(job) or job["spec"].get("activeDeadlineSeconds") is not None:
            return
        done = {pod.rank for pod in self.pods(run.instance) if pod.state == "terminated" and pod.exit_code == 0}
        if done >= set(range(_size(job))):
            return
        with refusals(f"cannot end the Job of {run.instance}"):
            path = self.objects(run).paths()["job"]
            body = {"spec": {"activeDeadlineSeconds": CLOSING_DEADLINE_S}}
            self._jobs.learn(await self._api.merge_patch(path, body))

    async def make_bench(self, run: Run, nodes: Sequence[str], endpoint: str, *, strict: bool) -> None:
        objects = self.objects(run)
        with refusals(f"cannot start the bench probe of {run.instance}"):
            await self._create_job(objects.bench_job(nodes, endpoint, strict=strict), objects.paths()["bench"])

    async def end_bench(self, run: Run) -> None:
        with refusals(f"cannot end the bench probe of {run.instance}"):
            await self._api.delete(self.objects(run).paths()["bench"])

    async def ask_for_complaints(self, run: Run) -> None:
        """Why the Job gets no pods: a quota, a policy. Only events tell, and those are too many to be watched."""
        events = f"/api/v1/namespaces/{run.namespace}/events"
        with refusals(f"cannot read what was said of the Job of {run.instance}"):
            found, _ = await self._api.list(events, field_selector=refusals_of(run.instance))
        self._complaints[run.instance] = last_refusal(found)

    def forget_complaints(self, instance: str) -> None:
        self._complaints.pop(instance, None)

    async def end_rendezvous(self, run: Run) -> None:
        paths = self.objects(run).paths()
        with refusals(f"cannot end the rendezvous of {run.instance}"):
            await self._api.delete(paths["rendezvous"])
            await self._api.delete(paths["rendezvous_service"])  # last: while it is there, it is to be ended

    async def release(self, namespace: str, pod: PodFacts) -> None:
        """Let a pod go that we held for its exit."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}"
        with refusals(f"cannot let go of {pod.name}"):
            await self._api.remove_finalizer(path, pod.uid, POD_FINALIZER)

    async def remove(self, run: Run) -> None:
        """Everything of the run; pods go with their Job."""
        paths = self.objects(run).paths().values()
        await asyncio.gather(*(self.release(run.namespace, pod) for pod in list(self.pods(run.instance)) if pod.held))
        with refusals(f"cannot remove what is kept of {run.instance}"):
            await asyncio.gather(*(self._api.delete(path) for path in paths))


def is_finished(job: Json) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def _size(job: Json) -> int:
    return int(job["spec"].get("completions") or 0)


def _endpoint(address: str | None) -> str | None:
    if address in (None, "", "None"):
        return None
    return f"[{address}]:{RENDEZVOUS_PORT}" if ":" in str(address) else f"{address}:{RENDEZVOUS_PORT}"


def _address(job: Json) -> str | None:
    """The address of the rendezvous that the ranks of this Job know."""
    env = job["spec"]["template"]["spec"]["containers"][0].get("env") or ()
    found = next((each["value"] for each in env if each["name"] == "BASILICA_RDZV_ENDPOINT"), "")
    return str(found).rpartition(":")[0].strip("[]") or None
