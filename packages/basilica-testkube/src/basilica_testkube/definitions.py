"""Custom resource definitions: each one adds kinds to the table, and takes them and their objects away with it."""

from basilica_testkube.kinds import DEFINITIONS, Kind
from basilica_testkube.registry import Registry
from basilica_testkube.store import Change
from basilica_testkube.values import Json, set_condition

_METADATA = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


class DefinitionController:
    """Serves what is defined."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        registry.store.listen(self._note)

    def _note(self, change: Change) -> None:
        if change.kind != DEFINITIONS:
            return
        spec = change.obj["spec"]
        self._registry.kinds.remove_resource(spec["group"], spec["names"]["plural"])
        if change.type != "DELETED":
            for kind in kinds_of(change.obj):
                self._registry.kinds.add(kind)
        if change.type == "ADDED":
            self._registry.clock.call_later(0, lambda: self._accept(change.obj))
        elif change.type == "DELETED":
            for kind in kinds_of(change.obj)[:1]:
                for obj in self._registry.store.items(kind):
                    self._registry.store.remove(kind, obj)

    def _accept(self, definition: Json) -> None:
        def accept(new: Json) -> None:
            now = self._registry.clock.stamp()
            status = new.setdefault("status", {})
            set_condition(status, now, "NamesAccepted", "True", reason="NoConflicts", message="no conflicts found")
            set_condition(
                status,
                now,
                "Established",
                "True",
                reason="InitialNamesAccepted",
                message="the initial names have been accepted",
            )
            status["acceptedNames"] = new["spec"]["names"]
            status["storedVersions"] = [v["name"] for v in new["spec"]["versions"] if v["storage"]]

        self._registry.change(DEFINITIONS, definition, accept)


def kinds_of(definition: Json) -> list[Kind]:
    """The kinds that a definition serves, one for each version."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Kind(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            namespaced=spec["scope"] == "Namespaced",
            status="status" in (version.get("subresources") or {}),
            generation=True,
            short=tuple(names.get("shortNames") or ()),
            schema=_Schema(_with_head(version["schema"]["openAPIV3Schema"])),
            custom=True,
            scale=_scale(version.get("subresources") or {}),
        )
        for version in spec["versions"]
        if version.get("served")
    ]


def _scale(subresources: Json) -> tuple[str, str] | None:
    paths = subresources.get("scale")
    return None if paths is None else (paths["specReplicasPath"], paths["statusReplicasPath"])


class _Schema(dict):  # type: ignore[type-arg]
    """A schema that can be part of a frozen kind: compared and hashed as itself."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _with_head(schema: Json) -> Json:
    """Every object has its identity and metadata, whether the schema says so or not."""
    head = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    return {**schema, "properties": {**(schema.get("properties") or {}), **head, "metadata": _METADATA}}
