"""Runs as custom resources. Reads are answered from one shared watch and from the answers to our own writes.

Versions are Kubernetes' resource versions. They are opaque by tradition and numbers in fact; the API now promises that
those of one resource can be compared, and nothing else is done with them here. Generations are Kubernetes' own.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from basilica.core.damage import DamagedRun
from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentNotFound, StaleVersion, StoreUnavailable
from basilica.core.events import Event, RecordedEvent
from basilica.core.names import namespace_of
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.manifests.userdeployment import REQUESTED, Json, body_of, path_of, secret_of
from basilica.ports import NO_LIMITS, Limits, UsageRow
from basilica.stores.kubernetes import codec, patches
from basilica.stores.kubernetes.admission import Admission
from basilica.stores.kubernetes.calls import core_path, is_gone, unavailable
from basilica.stores.kubernetes.cluster import Cluster
from basilica.stores.kubernetes.ledger import Ledger
from basilica.stores.kubernetes.records import Record
from basilica.stores.rules import ending_stand_in, is_live, is_open, usage_of

log = logging.getLogger("basilica.store")

GONE_SECONDS = 5.0
TRIES = 20
_OBJECT_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


class KubernetesStore:
    """`open` it first. Any number of processes may use the same cluster, each through a store of its own.

    `noticed` is set when an object appears that its schema let pass and that cannot be read as a run.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        component: str = "basilica",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._now = api, now
        self.noticed = asyncio.Event()
        self._cluster = Cluster(api, component, self._notice)
        self._ledger = Ledger(api)
        self._admission = Admission(self._cluster, self._ledger)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # each lives while it is used

    async def open(self) -> None:
        """Return when every object has been listed once; `StoreUnavailable` if that takes too long."""
        await self._cluster.open()

    async def close(self) -> None:
        await self._cluster.close()

    @property
    def behind(self) -> str | None:
        """Why reads may be out of date; None while the watch is open."""
        return None if self._cluster.problem is None else str(self._cluster.problem)

    def _lock(self, instance: str) -> asyncio.Lock:
        lock = self._locks.get(instance)
        if lock is None:
            lock = self._locks[instance] = asyncio.Lock()
        return lock

    def _notice(self, record: Record) -> None:
        if record.problem is not None:
            log.warning("%s/%s is no run: %s", record.namespace, record.name, record.problem)
        self.noticed.set()

    def problems(self) -> list[Record]:
        """Return the objects that are no runs."""
        return [record for record in self._cluster.records.all() if record.problem is not None]

    def lacking(self) -> list[tuple[Record, str]]:
        """Return the runs whose Secret cannot be read, each with the reason."""
        found = [(self._cluster.lacking.get(record.uid), record) for record in self._cluster.records.all()]
        return [(record, problem) for problem, record in found if problem is not None]

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def get(self, instance: str) -> Deployment:
        return await self._cluster.whole(self._cluster.known(instance))

    async def find(self, namespace: str, name: str) -> Deployment:
        found = self._cluster.named(namespace, name)
        if found is None and _OBJECT_NAME.fullmatch(name):
            await self._cluster.ask_for(namespace, name)  # another server may have made it a moment ago
            found = self._cluster.named(namespace, name)
        if found is None:
            raise DeploymentNotFound(name)
        return await self._cluster.whole(found)

    async def deployments(self, namespace: str | None = None) -> list[Deployment]:
        return self._cluster.records.runs(namespace)

    async def listed(self, namespace: str | None = None) -> list[Deployment | DamagedRun]:
        return self._cluster.records.listed(namespace)

    async def live(self) -> list[str]:
        return [d.instance for d in reversed(self._cluster.records.runs()) if is_open(d.spec, d.status)]

    async def prune(self, before: float) -> list[str]:
        ended = [
            (d.status.terminal_at, d.instance)
            for d in self._cluster.records.runs()
            if not is_open(d.spec, d.status) and d.status.terminal_at is not None and d.status.terminal_at < before
        ]
        return [instance for _, instance in sorted(ended)]

    async def events(self, instance: str, *, limit: int | None = None, since: int = 0) -> list[RecordedEvent]:
        record = self._cluster.records.get(instance)
        if record is None:
            return []
        found = [e for e in reversed(codec.merged(record.requested, record.observed)) if e.version > since]
        return found if limit is None else found[: max(limit, 0)]

    async def usage(self, user: str, *, limit: int | None = None, offset: int = 0) -> list[UsageRow]:
        namespace = namespace_of(user)
        rows = [usage_of(deployment) for deployment in self._cluster.records.runs(namespace)]
        known = {row.instance for row in rows}
        rows += [row for row in await self._ledger.rows(namespace, user) if row.instance not in known]
        rows.sort(key=lambda row: -row.created_at)  # stable: existing runs stay in their order
        rows = rows[max(offset, 0) :]
        return rows if limit is None else rows[: max(limit, 0)]

    async def wait_change(self, instance: str, version: int, timeout: float | None) -> Deployment | None:
        found = await self._cluster.records.bell.wait_change(self._cluster.records.load, instance, version, timeout)
        return None if found is None else await self.get(instance)

    def changes(self, since: int | None = None) -> AsyncGenerator[str, None]:
        return self._cluster.records.bell.changes(() if since is None else self._cluster.records.changed_since(since))

    # ---- writing ----------------------------------------------------------------------------------------------------

    async def create(
        self,
        deployment: Deployment,
        events: Sequence[Event] = (),
        *,
        idempotency_key: str | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        record, made = await self._admission.create(deployment, events, idempotency_key, limits)
        if made and deployment.status != DeploymentStatus(created_at=deployment.status.created_at):
            return await self.save_status(record.run(), deployment.status, now=self._now())
        return await self._cluster.whole(record)

    async def change_spec(
        self,
        instance: str,
        change: Callable[[Deployment], DeploymentSpec],
        events: Sequence[Event] = (),
        *,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        async with self._lock(instance):
            for _ in range(TRIES):
                before = await self.get(instance)
                spec = change(before)
                if replace(spec, generation=before.spec.generation) == before.spec:
                    return before  # Kubernetes counts no generation either
                more = spec.world.target - before.spec.world.target if is_live(before.status) else 0
                try:
                    if more <= 0 or limits.ranks is None:
                        return await self._write_spec(before, spec, events)
                    async with self._admission.enlarging(before, more, limits):
                        return await self._write_spec(before, spec, events)
                except StaleVersion:
                    continue  # the newer version has been read by now
        raise StoreUnavailable(f"{instance} is changed by others all the time; try again")

    async def _write_spec(self, before: Deployment, spec: DeploymentSpec, events: Sequence[Event]) -> Deployment:
        record, now = self._cluster.known(before.instance), self._now()
        if record.version != before.version:
            raise StaleVersion(f"{before.instance} has changed since version {before.version}")
        if spec.wanted is Wanted.DELETE and not record.deleting:
            return await self._mark_deleted(record, spec)
        body: Json = {"metadata": {"resourceVersion": str(record.version)}}
        body["spec"] = patches.difference(body_of(before.spec), body_of(spec))
        if events:
            requested = codec.fold(record.requested, events, now)
            text = codec.events_text(requested, codec.REQUESTED_KEPT, codec.REQUESTED_BYTES)
            body["metadata"]["annotations"] = {REQUESTED: text}
        return await self._cluster.whole(self._cluster.wrote(await self._cluster.patch(record, body), events, now))

    async def condemn(self, instance: str) -> Deployment:
        """Mark the object as deleted: with that mark an unreadable run is read as a stand-in."""
        async with self._lock(instance):
            for _ in range(TRIES):
                record = self._cluster.known(instance)
                if record.deployment is not None:
                    return await self._mark_deleted(record, record.deployment.spec.ended_by(Wanted.DELETE))
                stand_in = ending_stand_in(record.damage(), Wanted.DELETE, None, None)
                try:
                    return await self._mark_deleted(replace(record, deployment=stand_in), stand_in.spec)
                except StaleVersion:
                    continue  # the newer version has been read by now
        raise StoreUnavailable(f"{instance} is changed by others all the time; try again")

    async def _mark_deleted(self, record: Record, spec: DeploymentSpec) -> Deployment:
        """Delete in Kubernetes' own way: our finalizer holds the object until its ranks are stopped and recorded."""
        path = path_of(record.namespace, record.name)
        try:
            await self._api.delete(path, uid=record.uid, resource_version=str(record.version))
        except ApiError as error:
            if error.status != 409:
                raise unavailable(error) from error
            await self._cluster.refresh(record)
            raise StaleVersion(f"{record.instance} has changed since version {record.version}") from error
        fresh = await self._cluster.refresh(record)
        return replace(record.run(), spec=spec) if fresh is None else await self._cluster.whole(fresh)

    async def save_status(
        self, before: Deployment, status: DeploymentStatus, events: Sequence[Event] = (), *, now: float
    ) -> Deployment:
        async with self._lock(before.instance):
            record = self._cluster.known(before.instance)
            if record.version != before.version:
                raise StaleVersion(f"{before.instance} has changed since version {before.version}")
            if status == before.status and not events:
                return before
            if not patches.is_held(record.obj) and not record.deleting:
                record = self._cluster.wrote(await self._cluster.patch(record, patches.held(record.obj)))
            observed = codec.fold(record.observed, events, now)
            body = {
                "metadata": {"resourceVersion": str(record.version)},
                "status": codec.status_body(before.spec, status, observed, now),
            }
            saved = self._cluster.wrote(await self._cluster.patch(record, body, "status"), events, now)
        return await self._cluster.whole(saved)

    async def refuse(self, record: Record, problem: str) -> None:
        """Publish on the object that it is no run: a condition and an event."""
        metadata, now = record.obj["metadata"], self._now()
        if (record.obj.get("status") or {}).get("observedGeneration") == metadata["generation"]:
            return
        body = {
            "metadata": {"resourceVersion": str(record.version)},
            "status": codec.refusal_body(metadata["generation"], problem, now),
        }
        obj = await self._cluster.patch(record, body, "status")
        self._cluster.records.take(obj)
        self._cluster.mirror.publish(obj, [Event("InvalidSpec", problem, warning=True)], now, {})

    async def explain(self, record: Record, problem: str) -> None:
        """Publish on the object what its run waits for."""
        known, now = record.obj.get("status") or {}, self._now()
        if known.get("message") == problem:
            return
        generation = record.obj["metadata"]["generation"]
        body = {
            "metadata": {"resourceVersion": str(record.version)},
            "status": codec.waiting_body(known, generation, problem, now),
        }
        self._cluster.records.take(await self._cluster.patch(record, body, "status"))

    # ---- deleting ----------------------------------------------------------------------------------------------------

    async def delete(self, instance: str) -> None:
        async with self._lock(instance):
            record = self._cluster.records.get(instance)
            if record is None:
                return
            if record.deployment is not None:
                await self._ledger.write(record.namespace, usage_of(record.deployment))
            self._cluster.records.leave(record, True)
            try:
                await self._release(record)
            finally:
                self._cluster.records.leave(record, False)

    async def _release(self, record: Record) -> None:
        """Take our finalizer off and delete the object, in whatever state others have brought it meanwhile."""
        path, obj = path_of(record.namespace, record.name), record.obj
        try:
            for _ in range(TRIES):
                if not patches.is_held(obj):
                    break
                try:
                    obj = await self._api.merge_patch(path, patches.released(obj))
                except ApiError as error:
                    if error.status != 409 and not error.transient:
                        raise
                    obj = await self._api.get(path)
            if "deletionTimestamp" not in obj["metadata"]:
                await self._api.delete(path, uid=record.uid)
            secret = secret_of(obj)
            if secret is not None and secret == patches.secret_name(record.instance):
                await self._api.delete(core_path(record.namespace, "secrets", secret))
        except ApiError as error:
            if not (is_gone(error, record.name) or error.status == 409):  # 409: another object of that name by now
                raise unavailable(error) from error
        await self._cluster.until(lambda: self._cluster.records.get(record.instance) is None, GONE_SECONDS)
        self._cluster.gone(record)
