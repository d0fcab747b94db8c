"""Admission of new and larger runs: the decisions that servers must take one after the other."""

import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

from basilica.core.deployment import Deployment
from basilica.core.errors import Conflict, NameInUse, ValidationError
from basilica.core.events import Event
from basilica.core.spec import DeploymentSpec
from basilica.kube.client.api import ApiError
from basilica.kube.manifests.userdeployment import RANKS_MAX, Json, owner_reference, path_of
from basilica.ports import Limits
from basilica.stores.encoding import spec_digest
from basilica.stores.kubernetes import codec, patches
from basilica.stores.kubernetes.calls import core_path, secret_body, unavailable
from basilica.stores.kubernetes.cluster import Cluster
from basilica.stores.kubernetes.ledger import Ledger
from basilica.stores.kubernetes.records import Record
from basilica.stores.kubernetes.tickets import Tickets, Work
from basilica.stores.rules import IDEMPOTENCY_SECONDS, check_limits, is_live

log = logging.getLogger("basilica.store")

SHOWN_SECONDS = 3.0


class Admission:
    """Checks of names, limits and repeated requests."""

    def __init__(self, cluster: Cluster, ledger: Ledger) -> None:
        self._cluster, self._ledger = cluster, ledger
        self._tickets = Tickets(cluster.api, self._is_shown)

    async def create(
        self, deployment: Deployment, events: Sequence[Event], idempotency_key: str | None, limits: Limits
    ) -> tuple[Record, bool]:
        """Return the new run and True, or the one that the same request has made before and False."""
        new = patches.New(
            deployment=deployment,
            digest=_digest(deployment.spec),
            key=None if idempotency_key is None else hashlib.sha256(idempotency_key.encode()).hexdigest(),
            secret=patches.secret_name(deployment.instance) if deployment.spec.secrets else None,
        )
        if len(new.spec_text) > codec.SPEC_BYTES:
            problem = f"does not fit into a Kubernetes object: {codec.SPEC_BYTES >> 10} KiB at most"
            raise ValidationError("spec", f"{len(new.spec_text)} bytes", problem)
        namespace = deployment.namespace
        earlier: list[Record] = []

        async def decide() -> Work | None:
            earlier.extend(self._made_before(new))
            if earlier:
                return None
            await self._check_name(deployment)
            self._check_limits(namespace, limits, new_deployments=1, new_ranks=deployment.spec.world.target)
            _check_ranks(deployment.spec.world.max)
            await self._check_instance(namespace, deployment.instance)
            return Work(deployment.instance, 1)

        async with self._tickets.lock(namespace):
            order = await self._tickets.take(namespace, decide)
            if order is None:
                return earlier[0], False
            try:
                return await self._make(new, events, order), True
            except (ApiError, Conflict) as error:
                await self._tickets.give_back(namespace)
                raise (unavailable(error) if isinstance(error, ApiError) else error) from error

    @contextlib.asynccontextmanager
    async def enlarging(self, before: Deployment, more: int, limits: Limits) -> AsyncIterator[None]:
        """Exclude all other creations and enlargements of the same user while a run gets more ranks."""

        async def decide() -> Work:
            self._check_limits(before.namespace, limits, new_deployments=0, new_ranks=more)
            return Work(before.instance, before.spec.generation + 1)

        async with self._tickets.lock(before.namespace):
            await self._tickets.take(before.namespace, decide)
            try:
                yield
            except BaseException:
                await self._tickets.give_back(before.namespace)
                raise

    async def _make(self, new: patches.New, events: Sequence[Event], order: int) -> Record:
        deployment = new.deployment
        namespace, secrets = deployment.namespace, dict(deployment.spec.secrets)
        if new.secret is not None:
            body = secret_body(new.secret, namespace, secrets, new.labels)
            with _already_there_is_fine():
                await self._cluster.api.create(core_path(namespace, "secrets"), body)
        requested = codec.fold((), events, deployment.status.created_at)
        obj = await self._post(deployment, new.body(order, requested))
        if new.secret is not None:
            owned = {"metadata": {"ownerReferences": [owner_reference(obj)]}}
            try:
                await self._cluster.api.merge_patch(core_path(namespace, "secrets", new.secret), owned)
            except ApiError as error:  # the run is made; its Secret is deleted with it in any case
                log.info("the Secret of %s has no owner: %s", deployment.instance, error)
        return self._cluster.wrote(obj, events, deployment.status.created_at, secrets)

    async def _post(self, deployment: Deployment, body: Json) -> Json:
        """Create the object; if the answer is lost, find out whether it was created."""
        namespace, instance = deployment.namespace, deployment.instance
        try:
            return await self._cluster.api.create(path_of(namespace), body)
        except ApiError as error:
            if error.status != 409 and not error.transient:
                raise
            failure = error
        try:
            obj = await self._cluster.api.get(path_of(namespace, instance))
        except ApiError:
            raise failure from None
        if not patches.contains(obj["metadata"], {"annotations": body["metadata"]["annotations"]}):
            raise Conflict(f"the instance name {instance!r} has been given already") from failure
        return obj

    def _made_before(self, new: patches.New) -> list[Record]:
        """Return the run that an earlier create with the same key has made, if there is one."""
        oldest = new.deployment.status.created_at - IDEMPOTENCY_SECONDS
        for record in self._cluster.records.all(new.deployment.namespace):
            same_key = new.key is not None and record.key == new.key and record.deployment is not None
            if not same_key or record.run().status.created_at <= oldest:
                continue
            if record.digest != new.digest:
                raise Conflict(f"the idempotency key was used for another request already (it made {record.instance})")
            return [record]
        return []

    async def _check_name(self, deployment: Deployment) -> None:
        """Raise `NameInUse`, unless the run that has the name has ended and our watch is behind."""
        for record in list(self._cluster.records.all(deployment.namespace)):
            other = record.deployment
            if other is None or other.spec.name != deployment.spec.name or not is_live(other.status):
                continue
            fresh = await self._cluster.refresh(record)
            if fresh is not None and is_live(fresh.run().status):
                raise NameInUse(deployment.spec.name, other.instance)

    def _check_limits(self, namespace: str, limits: Limits, *, new_deployments: int, new_ranks: int) -> None:
        live = [d for d in self._cluster.records.runs(namespace) if is_live(d.status)]
        check_limits(
            limits,
            deployments=len(live),
            ranks=sum(d.spec.world.target for d in live),
            new_deployments=new_deployments,
            new_ranks=new_ranks,
        )

    async def _check_instance(self, namespace: str, instance: str) -> None:
        if self._cluster.records.get(instance) is not None or await self._ledger.has(namespace, instance):
            raise Conflict(f"the instance name {instance!r} has been given already")

    async def _is_shown(self, namespace: str, work: Work) -> bool:
        """Whether our watch has shown that work by now, or that it came to nothing."""

        def shown() -> bool:
            record = self._cluster.records.get(work.instance)
            if record is None:
                return self._cluster.records.is_gone(work.instance)
            return int(record.obj["metadata"]["generation"]) >= work.generation

        if shown() or await self._cluster.until(shown, SHOWN_SECONDS):
            return True
        return await self._ledger.has(namespace, work.instance)


def _digest(spec: DeploymentSpec) -> str:
    """Return a digest that identifies a request. Values of secrets are left out: others may read it."""
    return spec_digest(replace(spec, secrets=dict.fromkeys(spec.secrets, "")))


def _check_ranks(most: int) -> None:
    """Check the store's own limit, after the user's: a user with a lower limit gets that one in the error."""
    if most > RANKS_MAX:
        problem = f"the status of so many ranks does not fit into a Kubernetes object: {RANKS_MAX} at most"
        raise ValidationError("distributed.worldSize.max", most, problem)


@contextlib.contextmanager
def _already_there_is_fine() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status != 409:
            raise
