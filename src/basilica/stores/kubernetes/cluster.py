"""The runs of a cluster, read and written one at a time, for all parts of the store.

Reads are answered from one shared watch and from the answers to our own writes.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from basilica.core.deployment import Deployment
from basilica.core.errors import BasilicaError, DeploymentNotFound, StaleVersion, StoreUnavailable
from basilica.core.events import Event
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.client.informer import Informer
from basilica.kube.manifests.userdeployment import EVERYWHERE, NAME_LABEL, Json, path_of
from basilica.stores.kubernetes import codec, patches
from basilica.stores.kubernetes.calls import is_gone, read_secret, unavailable
from basilica.stores.kubernetes.mirror import EventMirror
from basilica.stores.kubernetes.records import Record, Records, friendly_name_of

SYNC_SECONDS = 30.0


async def synced(informer: Informer) -> None:
    """Return when every object has been listed once; `StoreUnavailable` if that takes too long."""
    try:
        async with asyncio.timeout(SYNC_SECONDS):
            await informer.synced()
    except TimeoutError:
        problem = informer.problem
        await informer.close()
        slow: BasilicaError = StoreUnavailable("the Kubernetes API gives no list of what there is")
        raise (slow if problem is None else unavailable(problem)) from None


class Cluster:
    """Knows every run, and changes one only from the state that it knows."""

    def __init__(self, api: KubeApi, component: str, on_problem: Callable[[Record], None]) -> None:
        self.api = api
        self.records = Records(on_problem)
        self.mirror = EventMirror(api, component)
        self._warned: set[str] = set()  # uids
        self._on_problem = on_problem
        self.lacking: dict[str, str] = {}  # why a run's Secret cannot be read, by the run's uid
        self._informer = Informer(api, EVERYWHERE, on_change=self._on_change)

    async def open(self) -> None:
        await synced(self._informer)

    async def close(self) -> None:
        await self._informer.close()
        await self.mirror.close()
        self.records.bell.close()

    @property
    def problem(self) -> ApiError | None:
        """Why the records may be out of date; None while the watch is open."""
        return self._informer.problem

    # ---- records ----------------------------------------------------------------------------------------------------

    def known(self, instance: str) -> Record:
        record = self.records.get(instance)
        if record is None:
            raise DeploymentNotFound(instance)
        return record

    def named(self, namespace: str, name: str) -> Record | None:
        record = self.records.get(name)
        if record is not None and record.namespace == namespace and not record.refused:
            return record
        mine = [r for r in self.records.all(namespace) if not r.refused and friendly_name_of(r.obj) == name]
        return max(mine, key=lambda r: r.age_order, default=None)

    async def whole(self, record: Record) -> Deployment:
        """Return the run with the values of its Secret, which is read once."""
        secret = self.records.lacks_secrets(record)
        if secret is not None:
            try:
                values = await read_secret(self.api, record.namespace, secret)
            except StoreUnavailable as error:
                self._report_problem(record, str(error))
                raise
            self.lacking.pop(record.uid, None)
            self._warned.discard(record.uid)
            record = self.records.learn_secrets(record, values)
        return record.run()

    def _report_problem(self, record: Record, problem: str) -> None:
        """Record the problem, and publish an event on the run once."""
        if self.lacking.get(record.uid) != problem:
            self.lacking[record.uid] = problem
            self._on_problem(record)
        if record.uid not in self._warned:
            self._warned.add(record.uid)
            self.mirror.publish(record.obj, [Event("SecretUnavailable", problem, warning=True)], time.time(), {})

    async def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Check `done` after each change of any run; False when the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), contextlib.aclosing(self.records.bell.changes(())) as changes:
                while not done() and await anext(changes, None) is not None:
                    pass
        return done()

    # ---- changes --------------------------------------------------------------------------------------------------

    def _on_change(self, obj: Json) -> None:
        """Apply a change of the watch. An object that a list lacks is gone, unless we know a newer state than the
        list.
        """
        metadata = obj["metadata"]
        found = self._informer.get(metadata["namespace"], metadata["name"])
        if found is not None and found["metadata"]["uid"] == metadata["uid"]:
            self.records.take(obj)
            return
        known = self.records.of_uid(obj)
        if known is None or known.version <= max(int(metadata["resourceVersion"]), self._informer.version):
            self.records.drop(obj, max(int(metadata["resourceVersion"]), self._informer.version))

    def wrote(
        self, obj: Json, events: Sequence[Event] = (), at: float = 0.0, secrets: dict[str, str] | None = None
    ) -> Record:
        record = self.records.take(obj, secrets)
        if record is None:
            raise DeploymentNotFound(obj["metadata"]["name"])
        if record.version == int(obj["metadata"]["resourceVersion"]):
            self._informer.learn(obj)
        known = codec.merged(record.requested, record.observed)
        self.mirror.publish(obj, events, at, {(e.reason, e.message): e.count for e in known})
        return record

    def gone(self, record: Record) -> None:
        self.lacking.pop(record.uid, None)
        self.records.drop(record.obj, max(record.version, self._informer.version))

    # ---- requests ------------------------------------------------------------------------------------------------

    async def refresh(self, record: Record) -> Record | None:
        """Read the object as it is at this moment; None if it is gone."""
        try:
            obj = await self.api.get(path_of(record.namespace, record.name))
        except ApiError as error:
            if not is_gone(error, record.name):
                raise unavailable(error) from error
            obj = None
        if obj is None or obj["metadata"]["uid"] != record.uid:
            self.gone(record)
            return None
        return self.records.take(obj)

    async def ask_for(self, namespace: str, name: str) -> None:
        try:
            found, _ = await self.api.list(path_of(namespace), label_selector=f"{NAME_LABEL}={name}")
            if not found:
                found = [await self.api.get(path_of(namespace, name))]
        except ApiError as error:
            if error.status != 404:
                raise unavailable(error) from error
            return
        for obj in found:
            self.records.take(obj)

    async def patch(self, record: Record, body: Json, subresource: str = "") -> Json:
        """Change the object if it still has that version: `StaleVersion` otherwise, and then the newer one has been
        read.
        """
        path = path_of(record.namespace, record.name, subresource)
        try:
            return await self.api.merge_patch(path, body)
        except ApiError as error:
            if is_gone(error, record.name):
                self.gone(record)
                raise DeploymentNotFound(record.instance) from error
            if error.status != 409 and not error.transient:
                raise unavailable(error) from error
            fresh = await self.refresh(record)
            if fresh is None:
                raise DeploymentNotFound(record.instance) from error
            if error.transient and patches.contains(fresh.obj, body):
                return fresh.obj  # the answer was lost, the write was not
            if fresh.version == record.version:
                raise unavailable(error) from error
            raise StaleVersion(f"{record.instance} has changed since version {record.version}") from error
