"""Deployments: as many pods of a template as are wanted. There are no ReplicaSets and no roll-outs."""

from functools import partial

from basilica_testkube.errors import ApiError
from basilica_testkube.kinds import DEPLOYMENTS, PODS
from basilica_testkube.options import DECODED, DeleteOptions
from basilica_testkube.registry import Registry
from basilica_testkube.store import Change
from basilica_testkube.timing import Timing
from basilica_testkube.values import (
    Json,
    controller_of,
    copied,
    has_condition,
    is_deleting,
    is_ended,
    key_of,
    meta,
)


class DeploymentController:
    """Looks at a Deployment a moment after it or one of its pods has changed."""

    def __init__(self, registry: Registry, timing: Timing) -> None:
        self._registry, self._timing = registry, timing
        self._due: set[tuple[str, str]] = set()
        registry.store.listen(self._note)

    def _note(self, change: Change) -> None:
        if change.kind == DEPLOYMENTS and change.type != "DELETED":
            self._soon(key_of(change.obj))
        elif change.kind == PODS:
            owner = controller_of(change.obj)
            if owner is not None and owner["kind"] == "Deployment":
                self._soon((meta(change.obj)["namespace"], owner["name"]))

    def _soon(self, key: tuple[str, str]) -> None:
        if key not in self._due:
            self._due.add(key)
            self._registry.clock.call_later(self._timing.job_sync, partial(self._look, key))

    def _look(self, key: tuple[str, str]) -> None:
        self._due.discard(key)
        found = self._registry.store.get(DEPLOYMENTS, *key)
        if found is None or is_deleting(found):
            return
        mine = [pod for pod in self._registry.store.items(PODS, key[0]) if _is_of(pod, found)]
        active = [pod for pod in mine if not is_ended(pod) and not is_deleting(pod)]
        wanted: int = found["spec"]["replicas"]
        for _ in range(wanted - len(active)):
            self._create(found)
        for pod in active[wanted:]:
            self._registry.delete(PODS, *key_of(pod), DeleteOptions(uid=meta(pod)["uid"]))
        ready = sum(has_condition(pod, "Ready") for pod in active)
        status = {
            "observedGeneration": meta(found)["generation"],
            "replicas": len(active),
            "readyReplicas": ready,
            "availableReplicas": ready,
        }
        self._registry.change(DEPLOYMENTS, found, lambda new: new.update(status=status))

    def _create(self, deployment: Json) -> None:
        template = copied(deployment["spec"]["template"])
        name = meta(deployment)["name"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": meta(deployment)["uid"]}
        metadata = {
            **(template.get("metadata") or {}),
            "generateName": f"{name}-",
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        }
        try:
            pod = {"metadata": metadata, "spec": template["spec"]}
            self._registry.create(PODS, meta(deployment)["namespace"], pod, DECODED)
        except ApiError:
            self._registry.clock.call_later(self._timing.restart_backoff, partial(self._soon, key_of(deployment)))


def _is_of(pod: Json, deployment: Json) -> bool:
    owner = controller_of(pod)
    return owner is not None and owner["uid"] == meta(deployment)["uid"]
