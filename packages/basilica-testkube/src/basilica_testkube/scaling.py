"""The scale subresource of custom resources: one number of an object, under the same name for every kind."""

from collections.abc import Mapping
from typing import Any

from basilica_testkube.errors import bad_request
from basilica_testkube.kinds import Kind
from basilica_testkube.options import Target
from basilica_testkube.registry import Registry
from basilica_testkube.values import Json, copied, meta


def scale_of(kind: Kind, obj: Json) -> Json:
    """An object as a `Scale`."""
    wanted, observed = kind.scale or ("", "")
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: meta(obj)[key] for key in kept if key in meta(obj)},
        "spec": {"replicas": _at(obj, wanted) or 0},
        "status": {"replicas": _at(obj, observed) or 0},
    }


def scaled(registry: Registry, target: Target, scale: Json) -> Json:
    """Write the number into the object, under all the rules for changing it."""
    obj = copied(registry.get(target.kind, target.namespace, target.name))
    replicas = (scale.get("spec") or {}).get("replicas")
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        raise bad_request("spec.replicas must be a number")
    version = (scale.get("metadata") or {}).get("resourceVersion")
    if version:
        meta(obj)["resourceVersion"] = version
    *path, last = _names((target.kind.scale or ("", ""))[0])
    below = obj
    for name in path:
        below = below.setdefault(name, {})
    below[last] = replicas
    return registry.update(Target(target.kind, target.namespace, target.name), obj)


def _at(obj: Json, path: str) -> Any:
    found: Any = obj
    for name in _names(path):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _names(path: str) -> list[str]:
    return path.strip(".").split(".")
