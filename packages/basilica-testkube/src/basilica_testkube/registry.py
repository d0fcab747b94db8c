"""Reading and writing objects with the rules of the API server; controllers write through it as clients do."""

import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from basilica_testkube import patch as patches
from basilica_testkube.apply import applied, check_conflicts, leaves
from basilica_testkube.clock import ClusterClock
from basilica_testkube.defaults import fill_in
from basilica_testkube.errors import (
    Cause,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    method_not_allowed,
    modified_meanwhile,
    not_found,
    terminating,
    unsupported_media,
)
from basilica_testkube.kinds import NAMESPACES, PODS, QUOTAS, Kind, KindTable
from basilica_testkube.options import DeleteOptions, Options, Target
from basilica_testkube.rules import change_faults, faults
from basilica_testkube.schema import Walk, object_metadata, published
from basilica_testkube.store import Store
from basilica_testkube.values import Json, copied, finalizers_of, is_deleting, is_ended, meta

_SAFE_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_SYSTEM_FIELDS = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
)
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"


class Registry:
    """The objects of a cluster, behind the rules for changing them."""

    def __init__(self, store: Store, clock: ClusterClock, kinds: KindTable, version: str) -> None:
        self.store, self.clock, self.kinds, self.version = store, clock, kinds, version
        self._random = random.Random()
        self._words: dict[tuple[str, str], dict[str, Json]] = {}  # (uid, subresource) to what each manager applied
        self.warnings: list[str] = []  # for the answer that is being made

    # -- reading

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        found = self.store.get(kind, namespace, name)
        if found is None:
            raise not_found(kind, name)
        return found

    # -- writing

    def create(self, kind: Kind, namespace: str, body: Json, options: Options | None = None) -> Json:
        """Store a new object; `body` is the caller's and is not kept."""
        obj = self._decoded(kind, body, options or Options())
        metadata = meta(obj)
        if namespace and metadata.setdefault("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        self._check_namespace(kind, namespace, metadata.get("name") or "")
        if kind == PODS:
            self._check_quotas(namespace, metadata)
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise invalid(
                    kind,
                    "",
                    [Cause("metadata.name", "FieldValueRequired", "Required value: name or generateName is required")],
                )
            metadata["name"] = self._free_name(kind, namespace, metadata["generateName"])
        for field in _SYSTEM_FIELDS:
            metadata.pop(field, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.clock.stamp()}
        if kind.generation or kind.custom:
            metadata["generation"] = 1
        if kind.status and kind != PODS:
            obj.pop("status", None)
        with _required(kind, metadata["name"]):
            fill_in(kind, obj)
        if self.store.get(kind, namespace, metadata["name"]) is not None:
            raise already_exists(kind, metadata["name"])
        with _required(kind, metadata["name"]):
            self._refuse(kind, obj, faults(kind, obj))
        return self.store.put(kind, obj)

    def update(self, target: Target, body: Json, options: Options | None = None) -> Json:
        """Replace an object, or its status alone; a resource version that is not the present one is a conflict."""
        kind, name = target.kind, target.name
        old = self.get(kind, target.namespace, name)
        if target.subresource == "status" and not kind.status:
            raise method_not_allowed()
        new = self._decoded(kind, body, options or Options())
        if meta(new).setdefault("name", name) != name:
            raise bad_request(
                f"the name of the object ({meta(new)['name']}) does not match the name on the URL ({name})"
            )
        wanted = meta(new).get("resourceVersion")
        if wanted and wanted != meta(old)["resourceVersion"]:
            raise modified_meanwhile(kind, name)
        uids = meta(new).get("uid", meta(old)["uid"]), meta(old)["uid"]
        if uids[0] != uids[1]:
            why = "Precondition failed: UID in precondition: {}, UID in object meta: {}"
            raise conflict(kind, name, why.format(*uids))
        if not wanted and kind.custom and not target.subresource:
            cause = Cause(
                "metadata.resourceVersion", "FieldValueInvalid", "Invalid value: 0: must be specified for an update"
            )
            raise invalid(kind, name, [cause])
        return self._replace(kind, old, new, target.subresource)

    def patch(self, target: Target, body: Json | list[Json], media: str, options: Options | None = None) -> Json:
        """Change part of an object. An apply creates what is not there."""
        options = options or Options()
        if media in patches.APPLY_PATCH:
            return self._apply(target, body, options)
        old = self.get(target.kind, target.namespace, target.name)
        with _fitting():
            new = self._patched(target.kind, old, body, media)
        return self.update(target, new, options)

    def _patched(self, kind: Kind, old: Json, body: Json | list[Json], media: str) -> Json:
        new: Json
        if media == patches.JSON_PATCH:
            if not isinstance(body, list):
                raise bad_request("a JSON patch is a list of operations")
            return patches.json_patched(old, body)
        if not isinstance(body, dict):
            raise bad_request("a merge patch is an object")
        if media == patches.MERGE_PATCH:
            new = patches.merged(old, body)
            return new
        if media != patches.STRATEGIC_PATCH or kind.custom:
            raise unsupported_media(media)
        new = patches.strategically_merged(old, body, published(kind, self.version), self.version)
        return new

    def change(self, kind: Kind, obj: Json, edit: Callable[[Json], None], *, whole: bool = False) -> Json | None:
        """Edit the present state of an object as a controller does; None if it is gone or another object by now.

        `edit` may change the metadata, the status and what stands at the top; the rest with `whole` only, since all
        versions of an object share it.
        """
        old = self.store.get(kind, meta(obj).get("namespace", ""), meta(obj)["name"])
        if old is None or meta(old)["uid"] != meta(obj)["uid"]:
            return None
        new = copied(old) if whole else {**old, "metadata": copied(meta(old))}
        if not whole and "status" in old:
            new["status"] = copied(old["status"])
        edit(new)
        return self._store_changed(kind, old, new)

    # -- deleting

    def delete(self, kind: Kind, namespace: str, name: str, options: DeleteOptions | None = None) -> Json:
        """Delete an object, or mark it where something must happen first. Returns its last state."""
        options = options or DeleteOptions()
        obj = self.get(kind, namespace, name)
        self.check_preconditions(kind, obj, options)
        propagation = options.propagation or ("Orphan" if kind.orphans else "Background")
        finalizers = [item for item in finalizers_of(obj) if item not in (FOREGROUND, ORPHAN)]
        if propagation == "Foreground":
            finalizers.append(FOREGROUND)
        elif propagation == "Orphan":
            finalizers.append(ORPHAN)
        elif options.propagation is None:
            finalizers = list(finalizers_of(obj))
        grace = self._grace(kind, obj, options.grace)
        new = copied(obj)
        _set_or_drop(meta(new), "finalizers", finalizers)
        held = bool(finalizers) or grace > 0 or kind == NAMESPACES
        if held:
            self._mark(kind, new, grace)
            return self._store_changed(kind, obj, new)
        self._remove(kind, obj)
        return obj

    def check_preconditions(self, kind: Kind, obj: Json, options: DeleteOptions) -> None:
        if options.uid not in (None, meta(obj)["uid"]):
            why = f"Precondition failed: UID in precondition: {options.uid}, UID in object meta: {meta(obj)['uid']}"
            raise conflict(kind, meta(obj)["name"], why)
        if options.resource_version not in (None, meta(obj)["resourceVersion"]):
            raise modified_meanwhile(kind, meta(obj)["name"])

    def _free_name(self, kind: Kind, namespace: str, prefix: str) -> str:
        """A name that nobody has; after a few unlucky draws the last one, which is refused then."""
        for _ in range(8):
            name = self._generated(prefix)
            if self.store.get(kind, namespace, name) is None:
                break
        return name

    def _generated(self, prefix: str) -> str:
        return prefix[:58] + "".join(self._random.choices(_SAFE_LETTERS, k=5))

    # -- inside

    def _grace(self, kind: Kind, obj: Json, wanted: int | None) -> int:
        if kind != PODS:
            return 0
        if not obj["spec"].get("nodeName") or is_ended(obj):
            return 0
        grace: int = obj["spec"]["terminationGracePeriodSeconds"] if wanted is None else wanted
        if is_deleting(obj):
            grace = min(grace, meta(obj)["deletionGracePeriodSeconds"])
        return grace

    def _mark(self, kind: Kind, obj: Json, grace: int) -> None:
        metadata = meta(obj)
        if "deletionTimestamp" not in metadata or grace < metadata.get("deletionGracePeriodSeconds", 0):
            metadata["deletionTimestamp"] = self.clock.stamp(self.clock.now() + grace)
            metadata["deletionGracePeriodSeconds"] = grace
        if (kind.generation or kind.custom) and "generation" in metadata:
            metadata["generation"] += 1
        if kind == NAMESPACES:
            obj.setdefault("status", {})["phase"] = "Terminating"

    def _remove(self, kind: Kind, obj: Json) -> None:
        self._words.pop((meta(obj)["uid"], ""), None)
        self._words.pop((meta(obj)["uid"], "status"), None)
        self.store.remove(kind, obj)

    def _check_namespace(self, kind: Kind, namespace: str, name: str) -> None:
        if not kind.namespaced:
            return
        found = self.store.get(NAMESPACES, "", namespace)
        if found is None:
            raise not_found(NAMESPACES, namespace)
        if is_deleting(found):
            raise terminating(kind, name, namespace)

    def _check_quotas(self, namespace: str, metadata: Json) -> None:
        """Of quotas, those for the number of pods are kept; pods that are over do not count."""
        for quota in self.store.items(QUOTAS, namespace):
            limit = quota["spec"].get("hard", {}).get("pods")
            used = sum(not is_ended(pod) for pod in self.store.items(PODS, namespace))
            if limit is not None and used >= int(limit):
                name = metadata.get("name") or f"{metadata.get('generateName', '')}xxxxx"
                told = f"requested: pods=1, used: pods={used}, limited: pods={limit}"
                raise forbidden(PODS, name, f"exceeded quota: {meta(quota)['name']}, {told}")

    def schema_of(self, kind: Kind) -> Json:
        found: Json = kind.schema if kind.custom else published(kind, self.version)
        return found

    def _decoded(self, kind: Kind, body: Json, options: Options) -> Json:
        """The object that a body says, with what it must say checked."""
        if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
            raise bad_request("the body is no object with metadata")
        body = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        if (body["apiVersion"], body["kind"]) != (kind.api_version, kind.kind):
            message = f"{body['apiVersion']}, Kind={body['kind']} does not match {kind.api_version}, Kind={kind.kind}"
            raise bad_request(f"the API version in the data does not match the expected one: {message}")
        body.setdefault("metadata", {})
        if options.decoded:
            made: Json = copied(body)
            return made
        walk = Walk() if kind.custom else Walk(self.version)
        obj = walk.decode(copied(body), self.schema_of(kind))
        if kind.custom:
            typed = Walk(self.version)
            obj["metadata"] = typed.decode(obj["metadata"], object_metadata(self.version), ".metadata")
            walk.mistyped, walk.unknown = typed.mistyped, [*walk.unknown, *typed.unknown]
        name = body["metadata"].get("name") or ""
        if walk.mistyped:
            raise bad_request(
                f"{kind.kind} in version {kind.version!r} cannot be handled as a {kind.kind}: {walk.mistyped[0]}"
            )
        if walk.unknown and options.field_validation == "Strict":
            told = ", ".join(f'unknown field "{path}"' for path in walk.unknown)
            raise bad_request(f"strict decoding error: {told}")
        if walk.unknown and options.field_validation == "Warn":
            self.warnings += [f'unknown field "{path}"' for path in walk.unknown]
        self._refuse(kind, {"metadata": {"name": name}}, walk.causes)
        found: Json = obj
        return found

    def _refuse(self, kind: Kind, obj: Json, causes: list[Cause]) -> None:
        if causes:
            raise invalid(kind, meta(obj)["name"], causes)

    def _replace(self, kind: Kind, old: Json, new: Json, subresource: str) -> Json:
        if subresource == "status":
            metadata = copied(meta(old))
            obj = {**copied(old), "metadata": metadata, "status": new.get("status", {})}
            return self._store_changed(kind, old, obj)
        obj = {**new, "metadata": {**meta(new)}}
        for field in (*_SYSTEM_FIELDS, "resourceVersion", "namespace", "managedFields"):
            _set_or_drop(meta(obj), field, meta(old).get(field))
        if kind.status:
            _set_or_drop(obj, "status", copied(old.get("status")))
        if not kind.custom:
            _keep_server_side(kind, old, obj)
        added = set(finalizers_of(obj)) - set(finalizers_of(old))
        if is_deleting(old) and added:
            raise forbidden(
                kind,
                meta(old)["name"],
                f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}",
            )
        with _required(kind, meta(old)["name"]):
            self._refuse(kind, obj, [*faults(kind, obj), *change_faults(kind, old, obj)])
        if (kind.generation or kind.custom) and _wish(kind, old) != _wish(kind, obj):
            meta(obj)["generation"] = meta(old).get("generation", 0) + 1
        return self._store_changed(kind, old, obj)

    def _store_changed(self, kind: Kind, old: Json, new: Json) -> Json:
        """Write what differs; an object that was waiting for its last finalizer is gone with it."""
        held = finalizers_of(new) or (kind == NAMESPACES and (new.get("spec") or {}).get("finalizers"))
        if is_deleting(new) and not held and meta(new).get("deletionGracePeriodSeconds", 0) == 0:
            self._remove(kind, old)
            return new
        return old if new == old else self.store.put(kind, new)

    def _apply(self, target: Target, body: Json | list[Json], options: Options) -> Json:
        kind, namespace, name, subresource = target.kind, target.namespace, target.name, target.subresource
        if not isinstance(body, dict):
            raise bad_request("an apply configuration is an object")
        manager = options.field_manager
        if not manager:
            raise bad_request(
                "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch"
            )
        if not isinstance(body.get("metadata", {}), dict):
            raise bad_request("the metadata of an apply configuration is an object")
        body = {**body, "metadata": {**body.get("metadata", {}), "name": name}}
        if body["metadata"].get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        old = self.store.get(kind, namespace, name)
        schema, version = self.schema_of(kind), "" if kind.custom else self.version
        if old is None:
            if subresource:
                raise not_found(kind, name)
            new = self.create(kind, namespace, body, options)
        else:
            words = self._words.get((meta(old)["uid"], subresource), {})
            if not options.force:
                with _fitting():
                    mine = leaves(body, schema, version)
                others = {other: leaves(word, schema, version) for other, word in words.items() if other != manager}
                check_conflicts(mine, others)
            with _fitting():
                desired = applied(old, words.get(manager), body, schema, version)
            new = self.update(target, desired, options)
        self._words.setdefault((meta(new)["uid"], subresource), {})[manager] = copied(body)
        return self.change(kind, new, lambda obj: self._note_manager(obj, manager, body, subresource)) or new

    def _note_manager(self, obj: Json, manager: str, body: Json, subresource: str) -> None:
        fields = _field_set({key: value for key, value in body.items() if key not in ("apiVersion", "kind")})
        entry = {
            "manager": manager,
            "operation": "Apply",
            "apiVersion": obj["apiVersion"],
            "fieldsType": "FieldsV1",
            "fieldsV1": fields,
        }
        entry |= {"subresource": subresource} if subresource else {}
        managed = meta(obj).get("managedFields") or []
        before = [m for m in managed if (m["manager"], m.get("subresource", "")) == (manager, subresource)]
        same = bool(before) and before[0]["fieldsV1"] == fields
        entry["time"] = before[0]["time"] if same else self.clock.stamp()
        meta(obj)["managedFields"] = [*(m for m in managed if m not in before), entry]


@contextmanager
def _fitting() -> Iterator[None]:
    """A patch of another shape than the object cannot be worked out."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise bad_request(f"the patch does not fit the object: {error!r}") from error


@contextmanager
def _required(kind: Kind, name: str) -> Iterator[None]:
    """A field that the rules of a kind look up and do not find is one that must be given."""
    try:
        yield
    except KeyError as missing:
        cause = Cause(str(missing.args[0]), "FieldValueRequired", "Required value")
        raise invalid(kind, name, [cause]) from missing


def _field_set(value: object) -> Json:
    return {f"f:{k}": _field_set(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _wish(kind: Kind, obj: Json) -> Json:
    """What a generation counts: all but the metadata and, where it is apart, the status."""
    left_out = ("metadata", "status") if kind.status or not kind.custom else ("metadata",)
    return {key: value for key, value in obj.items() if key not in left_out}


def _keep_server_side(kind: Kind, old: Json, new: Json) -> None:
    """Defaults that a client leaves out of an update stand as they are."""
    if kind.kind == "Job":
        for key in ("selector", "suspend", "completionMode", "parallelism", "backoffLimit", "podReplacementPolicy"):
            if key in old["spec"]:
                new.setdefault("spec", {}).setdefault(key, copied(old["spec"][key]))
    if kind == NAMESPACES:
        new["spec"] = copied(old["spec"])


def _set_or_drop(target: Json, key: str, value: object) -> None:
    if value is None or value == []:
        target.pop(key, None)
    else:
        target[key] = value
