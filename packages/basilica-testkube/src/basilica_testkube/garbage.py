"""Deletion that goes on: dependents of what is gone, contents of a namespace, definitions and their objects."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from basilica_testkube.errors import ApiError
from basilica_testkube.kinds import NAMESPACES, PODS, SERVICE_ACCOUNTS, Kind
from basilica_testkube.options import DeleteOptions
from basilica_testkube.registry import FOREGROUND, ORPHAN, Registry
from basilica_testkube.store import Change
from basilica_testkube.timing import Timing
from basilica_testkube.values import Json, finalizers_of, is_deleting, key_of, meta, owners_of

Member = tuple[Kind, str, str]  # kind, namespace, name


class GarbageCollector:
    """Keeps an index of who depends on whom, and acts a moment after a change."""

    def __init__(self, registry: Registry, timing: Timing) -> None:
        self._registry, self._timing = registry, timing
        self._dependents: dict[str, set[Member]] = defaultdict(set)
        self._alive: set[str] = set()
        self._looked_at_soon: set[str] = set()  # namespaces
        registry.store.listen(self._note)

    def dependents(self, uid: str) -> set[Member]:
        return self._dependents.get(uid, set())

    def _note(self, change: Change) -> None:
        obj = change.obj
        member = (change.kind, *key_of(obj))
        uid = meta(obj)["uid"]
        owners = {owner["uid"] for owner in owners_of(obj)} if change.type != "DELETED" else set()
        before = {owner["uid"] for owner in owners_of(change.old)} if change.old else set()
        for owner in before - owners:
            self._dependents[owner].discard(member)
        for owner in owners:
            self._dependents[owner].add(member)
        if change.type == "DELETED":
            self._alive.discard(uid)
            if self._dependents.get(uid):
                self._later(lambda: self._owner_gone(uid))
            for owner in before:
                self._later(partial(self._owner_waits, owner))
            self._look_at_namespace(meta(obj).get("namespace", ""))
            return
        self._alive.add(uid)
        if change.type == "ADDED" and owners:
            self._later(lambda: self._orphaned_at_birth(change.kind, obj))
        if is_deleting(obj):
            self._later(lambda: self._deleting(change.kind, obj))
        if change.kind == NAMESPACES and change.type == "ADDED":
            self._add_default_account(meta(obj)["name"])

    def _later(self, action: Callable[[], None]) -> None:
        self._registry.clock.call_later(self._timing.garbage, action)

    def _add_default_account(self, namespace: str) -> None:
        self._registry.create(SERVICE_ACCOUNTS, namespace, {"metadata": {"name": "default"}})

    # -- what has to go on

    def _owner_gone(self, uid: str) -> None:
        for kind, namespace, name in sorted(self.dependents(uid), key=lambda m: m[1:]):
            obj = self._registry.store.get(kind, namespace, name)
            if obj is not None:
                self._collect(kind, obj)

    def _orphaned_at_birth(self, kind: Kind, obj: Json) -> None:
        found = self._registry.store.get(kind, *key_of(obj))
        if found is not None and not any(owner["uid"] in self._alive for owner in owners_of(found)):
            self._collect(kind, found)

    def _collect(self, kind: Kind, obj: Json) -> None:
        """Delete what has no owner left; forget the owners that are gone of what has."""
        living = [owner for owner in owners_of(obj) if owner["uid"] in self._alive]
        if living:
            self._registry.change(kind, obj, lambda new: meta(new).update(ownerReferences=living))
        elif owners_of(obj):
            self._delete(kind, obj, "Background")

    def _delete(self, kind: Kind, obj: Json, propagation: str) -> None:
        if is_deleting(obj) and propagation == "Background":
            return
        try:
            self._registry.delete(kind, *key_of(obj), DeleteOptions(propagation=propagation, uid=meta(obj)["uid"]))
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def _deleting(self, kind: Kind, obj: Json) -> None:
        found = self._registry.store.get(kind, *key_of(obj))
        if found is None or meta(found)["uid"] != meta(obj)["uid"]:
            return
        if ORPHAN in finalizers_of(found):
            self._orphan(kind, found)
        elif FOREGROUND in finalizers_of(found):
            for dependent_kind, namespace, name in sorted(self.dependents(meta(found)["uid"]), key=lambda m: m[1:]):
                dependent = self._registry.store.get(dependent_kind, namespace, name)
                if dependent is not None and not is_deleting(dependent):
                    deeper = bool(self.dependents(meta(dependent)["uid"]))
                    self._delete(dependent_kind, dependent, "Foreground" if deeper else "Background")
            self._owner_waits(meta(found)["uid"], kind, found)
        if kind == NAMESPACES:
            self._empty_namespace(meta(found)["name"])

    def _orphan(self, kind: Kind, owner: Json) -> None:
        uid = meta(owner)["uid"]
        for dependent_kind, namespace, name in list(self.dependents(uid)):
            dependent = self._registry.store.get(dependent_kind, namespace, name)
            if dependent is not None:
                self._registry.change(dependent_kind, dependent, lambda new: _disown(new, uid))
        self._registry.change(kind, owner, lambda new: _drop_finalizer(new, ORPHAN))

    def _owner_waits(self, uid: str, kind: Kind | None = None, owner: Json | None = None) -> None:
        """An owner in foreground deletion goes when nothing that blocks it is left."""
        if owner is None:
            found = next((pair for pair in self._deleting_owners() if meta(pair[1])["uid"] == uid), None)
            if found is None:
                return
            kind, owner = found
        if kind is None or FOREGROUND not in finalizers_of(owner):
            return
        for dependent_kind, namespace, name in self.dependents(uid):
            dependent = self._registry.store.get(dependent_kind, namespace, name)
            if dependent is not None and any(
                o["uid"] == uid and o.get("blockOwnerDeletion") for o in owners_of(dependent)
            ):
                return
        self._registry.change(kind, owner, lambda new: _drop_finalizer(new, FOREGROUND))

    def _deleting_owners(self) -> list[tuple[Kind, Json]]:
        store = self._registry.store
        return [
            (kind, obj)
            for kind in self._registry.kinds.all()
            if kind.kind not in ("Pod", "Event")
            for obj in store.values(kind)
            if FOREGROUND in finalizers_of(obj)
        ]

    # -- namespaces

    def _contents(self, namespace: str) -> list[tuple[Kind, Json]]:
        store = self._registry.store
        return [(k, obj) for k in self._registry.kinds.all() if k.namespaced for obj in store.items(k, namespace)]

    def _empty_namespace(self, namespace: str) -> None:
        """Pods first, and the rest only when they are gone, as Kubernetes 1.34 does it."""
        pods = [(PODS, pod) for pod in self._registry.store.items(PODS, namespace)]
        for kind, obj in pods or self._contents(namespace):
            if not is_deleting(obj):
                self._delete(kind, obj, "Background")
        self._namespace_waits(namespace)

    def _look_at_namespace(self, namespace: str) -> None:
        if namespace and namespace not in self._looked_at_soon:
            self._looked_at_soon.add(namespace)
            self._later(lambda: self._namespace_waits(namespace))

    def _namespace_waits(self, namespace: str) -> None:
        self._looked_at_soon.discard(namespace)
        found = self._registry.store.get(NAMESPACES, "", namespace)
        if found is None or not is_deleting(found):
            return
        contents = self._contents(namespace)
        if any(not is_deleting(obj) for _, obj in contents) and not any(kind == PODS for kind, _ in contents):
            self._later(lambda: self._empty_namespace(namespace))
        if not contents:
            self._registry.change(NAMESPACES, found, lambda new: new["spec"].pop("finalizers", None), whole=True)


def _disown(obj: Json, uid: str) -> None:
    left = [owner for owner in owners_of(obj) if owner["uid"] != uid]
    if left:
        meta(obj)["ownerReferences"] = left
    else:
        meta(obj).pop("ownerReferences", None)


def _drop_finalizer(obj: Json, finalizer: str) -> None:
    left = [item for item in finalizers_of(obj) if item != finalizer]
    if left:
        meta(obj)["finalizers"] = left
    else:
        meta(obj).pop("finalizers", None)
