"""This process's records of the cluster's runs, updated by the watch, and at once by its own writes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from basilica.core.damage import DamagedRun
from basilica.core.deployment import Deployment, Owner
from basilica.core.errors import (
    BasilicaError,
    DeploymentDamaged,
    DeploymentNotFound,
    StoreUnavailable,
    ValidationError,
)
from basilica.core.names import namespace_of
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.kube.client.informer import version_of
from basilica.kube.manifests.userdeployment import (
    CREATED_AT,
    DIGEST,
    KEY,
    ORDER,
    REQUESTED,
    Json,
    instance_of,
    moment_of,
    secret_of,
    spec_of,
)
from basilica.stores.bell import Bell
from basilica.stores.kubernetes.codec import Folded, events_of, resolved, state_of
from basilica.stores.kubernetes.patches import is_held
from basilica.stores.rules import ending_stand_in

GONE_KEPT = 10_000

NO_EVENTS: Folded = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One parsed object. `deployment` is None where it is no run; `problem` has the reason."""

    obj: Json
    instance: str
    version: int
    deployment: Deployment | None
    problem: BasilicaError | None = None
    requested: Folded = NO_EVENTS
    observed: Folded = NO_EVENTS

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"]["uid"])

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.obj["metadata"]

    @property
    def key(self) -> str | None:
        return self.annotation(KEY) or None

    @property
    def digest(self) -> str:
        return self.annotation(DIGEST)

    @property
    def age_order(self) -> tuple[str, int, str]:
        """The sort key by creation: by the API server's clock, within a second by our tickets."""
        order = self.annotation(ORDER)
        return self.obj["metadata"]["creationTimestamp"], int(order) if order.isdecimal() else 0, self.instance

    def annotation(self, name: str) -> str:
        return str((self.obj["metadata"].get("annotations") or {}).get(name, ""))

    @property
    def refused(self) -> bool:
        """Whether it is no run and never was one, unlike a run that was accepted once and cannot be read now."""
        return isinstance(self.problem, ValidationError) and not is_held(self.obj)

    def run(self) -> Deployment:
        """Return the run, or raise why there is none: an unreadable run exists, and must not be taken for gone."""
        if self.deployment is not None:
            return self.deployment
        if self.refused:
            raise DeploymentNotFound(self.instance)
        raise DeploymentDamaged(self.damage())

    @property
    def damaged(self) -> bool:
        """Whether it is a run that cannot be read."""
        return self.deployment is None and not self.refused

    def damage(self) -> DamagedRun:
        """Return the known facts of a run that cannot be read."""
        return DamagedRun(
            instance=self.instance,
            user=user_of(self.namespace),
            namespace=self.namespace,
            name=friendly_name_of(self.obj),
            target=_target_of(self.obj),
            created_at=_new_status(self.obj).created_at,
            version=self.version,
            problem=str(self.problem),
        )


def record_of(obj: Json, secrets: Mapping[str, str], earlier: Record | None) -> Record:
    """Parse an object; never fails, whatever its content."""
    instance, version = instance_of(obj), version_of(obj)
    try:
        status = obj.get("status") or {}
        deployment = Deployment(
            instance=instance,
            user=user_of(obj["metadata"]["namespace"]),
            namespace=obj["metadata"]["namespace"],
            spec=spec_of(obj, secrets),
            status=state_of(instance, status["state"]) if status.get("state") else _new_status(obj),
            version=version,
            owner=Owner(obj["metadata"]["name"], obj["metadata"]["uid"]),
        )
        requested = events_of(instance, (obj["metadata"].get("annotations") or {}).get(REQUESTED, ""))
        observed = events_of(instance, status.get("events", ""))
    except (ValidationError, StoreUnavailable) as error:
        damaged = Record(obj=obj, instance=instance, version=version, deployment=None, problem=error)
        return _leaving(damaged, secrets) if damaged.damaged and damaged.deleting else damaged
    return Record(
        obj=obj,
        instance=instance,
        version=version,
        deployment=deployment,
        requested=resolved(requested, version, earlier.requested if earlier else ()),
        observed=resolved(observed, version, earlier.observed if earlier else ()),
    )


def _leaving(record: Record, secrets: Mapping[str, str]) -> Record:
    """Return an unreadable run under deletion with a stand-in that the controller can turn: else it would stay for
    ever.
    """
    spec: DeploymentSpec | None = None
    status: DeploymentStatus | None = None
    with suppress(ValidationError):
        spec = spec_of(record.obj, secrets)
    with suppress(StoreUnavailable):
        state = (record.obj.get("status") or {}).get("state")
        status = state_of(record.instance, state) if state else None
    stand_in = ending_stand_in(record.damage(), Wanted.DELETE, spec, status)
    owner = Owner(record.name, record.uid)
    return replace(record, deployment=replace(stand_in, owner=owner))


def friendly_name_of(obj: Json) -> str:
    """Return the user's name of a run, readable or not."""
    name = (obj.get("spec") or {}).get("name")
    return name if isinstance(name, str) and name else str(obj["metadata"]["name"])


def _target_of(obj: Json) -> int:
    """Return the number of ranks of a run; 1 if it cannot be read."""
    try:
        return int(obj["spec"]["distributed"]["worldSize"]["target"])
    except (KeyError, TypeError, ValueError):
        return 1


def user_of(namespace: str) -> str:
    """Return the user of a namespace. A namespace of no user stands for itself, and no user of the API reaches it."""
    user = namespace.removeprefix(namespace_of(""))
    return user if namespace_of(user) == namespace else namespace


def _new_status(obj: Json) -> DeploymentStatus:
    """Return the status of a run that the operator has not seen yet. The API's clock is finer than Kubernetes'."""
    text = (obj["metadata"].get("annotations") or {}).get(CREATED_AT, "")
    try:
        return DeploymentStatus(created_at=float(text))
    except ValueError:
        return DeploymentStatus(created_at=moment_of(obj["metadata"]["creationTimestamp"]))


class Records:
    """The records by instance name. Rings the bell when one changes."""

    def __init__(self, on_problem: Callable[[Record], None] = lambda record: None) -> None:
        self.bell = Bell()
        self._on_problem = on_problem
        self._records: dict[str, Record] = {}
        self._namespaces: dict[str, set[str]] = {}
        self._objects: dict[tuple[str, str], str] = {}  # namespace and object name to instance
        self._gone: OrderedDict[str, tuple[str, int]] = OrderedDict()  # uid to instance and version
        self._leaving: set[str] = set()  # uids of objects that we are deleting: only their end is a change
        self._secrets: dict[str, Mapping[str, str]] = {}  # the values of an object's Secret, by the object's uid

    def take(self, obj: Json, secrets: Mapping[str, str] | None = None) -> Record | None:
        """Record an object from a watch or an answer; None if it is known to be gone. An older version than the known
        one changes nothing.
        """
        uid = obj["metadata"]["uid"]
        if uid in self._gone:
            return None
        if secrets is not None:
            self._secrets[uid] = dict(secrets)
        instance = instance_of(obj)
        known = self._records.get(instance)
        if known is not None and known.uid == uid and (known.version >= version_of(obj) or uid in self._leaving):
            return known
        record = record_of(obj, self._secrets.get(uid, {}), known)
        before = self._objects.get((record.namespace, record.name))
        if before is not None and self._records[before].uid != uid:  # recreated during a gap of the watch
            self.drop(self._records[before].obj, record.version)
        self._objects[record.namespace, record.name] = instance
        self._records[instance] = record
        self._namespaces.setdefault(record.namespace, set()).add(instance)
        self.bell.ring(instance)
        if record.problem is not None:
            self._on_problem(record)
        return record

    def learn_secrets(self, record: Record, secrets: Mapping[str, str]) -> Record:
        """Return the same object's record with the values of its Secret."""
        self._secrets[record.uid] = dict(secrets)
        again = record_of(record.obj, secrets, record)
        if self._records.get(record.instance) is record:
            self._records[record.instance] = again
        return again

    def lacks_secrets(self, record: Record) -> str | None:
        """Return the name of the Secret that has to be read before the run is whole."""
        return None if record.uid in self._secrets else secret_of(record.obj)

    def leave(self, record: Record, leaving: bool) -> None:
        """Ignore all changes of the object but its end; or, where the deletion failed, none any more."""
        (self._leaving.add if leaving else self._leaving.discard)(record.uid)

    def drop(self, obj: Json, version: int) -> None:
        """Record that the object is gone."""
        uid, instance = obj["metadata"]["uid"], instance_of(obj)
        if uid in self._gone:
            return
        self._gone[uid] = (instance, version)
        self._leaving.discard(uid)
        while len(self._gone) > GONE_KEPT:
            self._gone.popitem(last=False)
        self._secrets.pop(uid, None)
        known = self._records.get(instance)
        if known is not None and known.uid == uid:
            del self._records[instance]
            del self._objects[known.namespace, known.name]
            self._namespaces[known.namespace].discard(instance)
        self.bell.ring(instance)

    def get(self, instance: str) -> Record | None:
        return self._records.get(instance)

    def of_uid(self, obj: Json) -> Record | None:
        """Return the record of that very object."""
        record = self._records.get(instance_of(obj))
        return record if record is not None and record.uid == obj["metadata"]["uid"] else None

    def is_gone(self, instance: str) -> bool:
        return any(instance == gone for gone, _ in self._gone.values())

    def load(self, instance: str) -> Deployment:
        record = self._records.get(instance)
        if record is None:
            raise DeploymentNotFound(instance)
        return record.run()

    def all(self, namespace: str | None = None) -> Iterator[Record]:
        """Yield records, unordered, also of objects that are no runs."""
        if namespace is None:
            yield from self._records.values()
        else:
            yield from (self._records[instance] for instance in self._namespaces.get(namespace, ()))

    def runs(self, namespace: str | None = None) -> list[Deployment]:
        """Return the readable runs, newest first."""
        return [run for run in self.listed(namespace) if isinstance(run, Deployment)]

    def listed(self, namespace: str | None = None) -> list[Deployment | DamagedRun]:
        """Return all runs, newest first, unreadable ones too."""
        found = [record for record in self.all(namespace) if not record.refused]
        found.sort(key=lambda record: record.age_order, reverse=True)
        return [record.damage() if record.deployment is None else record.deployment for record in found]

    def changed_since(self, version: int) -> list[str]:
        """Return instances in the order of their last change, those that are gone too."""
        changed = {record.instance: record.version for record in self._records.values()}
        changed |= dict(self._gone.values())
        return [i for i, v in sorted(changed.items(), key=lambda item: item[1]) if v > version]
