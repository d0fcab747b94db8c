"""Manifests that several tests use."""

from typing import Any

Json = dict[str, Any]


def pod(name: str, *command: str, **spec: Any) -> Json:
    container = {"name": "main", "image": "any", "command": list(command) or ["true"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container], **spec},
    }


def job(name: str, size: int, *command: str, pod_spec: Json | None = None, **spec: Any) -> Json:
    """An Indexed Job, elastic, that fails at the first failure."""
    container = {"name": "main", "image": "any", "command": list(command) or ["true"]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container], **(pod_spec or {})}}
    wanted = {"completions": size, "parallelism": size, "completionMode": "Indexed", "backoffLimit": 0}
    if "backoffLimitPerIndex" in spec:
        del wanted["backoffLimit"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {**wanted, **spec, "template": template},
    }


def config_map(name: str, **data: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def owned(obj: Json, owner: Json, *, blocks: bool = False) -> Json:
    """`obj` as a dependent of `owner`."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    reference |= {"blockOwnerDeletion": True} if blocks else {}
    return {**obj, "metadata": {**obj["metadata"], "ownerReferences": [reference]}}
