"""Bodies and patches for the custom resource, as plain values."""

import json
from dataclasses import dataclass

from basilica.core.deployment import Deployment
from basilica.kube.manifests.userdeployment import (
    API_VERSION,
    CREATED_AT,
    DIGEST,
    FINALIZER,
    INSTANCE_LABEL,
    KEY,
    KIND,
    MADE_AS,
    NAME_LABEL,
    ORDER,
    REQUESTED,
    Json,
    body_of,
    instance_of,
)
from basilica.stores.kubernetes.calls import MANAGED_BY
from basilica.stores.kubernetes.codec import REQUESTED_BYTES, REQUESTED_KEPT, Folded, events_text


def secret_name(instance: str) -> str:
    return f"{instance}-secrets"


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """A run that is about to be created."""

    deployment: Deployment
    digest: str
    key: str | None
    secret: str | None

    @property
    def labels(self) -> dict[str, str]:
        return {NAME_LABEL: self.deployment.spec.name, INSTANCE_LABEL: self.deployment.instance}

    @property
    def spec(self) -> Json:
        return body_of(self.deployment.spec, secret=self.secret)

    @property
    def spec_text(self) -> str:
        return json.dumps(self.spec)

    def body(self, order: int, requested: Folded) -> Json:
        deployment = self.deployment
        annotations = {
            MADE_AS: f"{deployment.namespace}/{deployment.instance}",
            CREATED_AT: repr(deployment.status.created_at),
            ORDER: str(order),
            DIGEST: self.digest,
            REQUESTED: events_text(requested, REQUESTED_KEPT, REQUESTED_BYTES),
        }
        annotations |= {} if self.key is None else {KEY: self.key}
        metadata = {
            "name": deployment.instance,
            "namespace": deployment.namespace,
            "labels": MANAGED_BY | self.labels,
            "annotations": annotations,
            "finalizers": [FINALIZER],
        }
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": self.spec}


def is_held(obj: Json) -> bool:
    return FINALIZER in (obj["metadata"].get("finalizers") or ())


def held(obj: Json) -> Json:
    """Return the patch that puts our finalizer and labels on an object made by hand."""
    metadata = obj["metadata"]
    name = (obj.get("spec") or {}).get("name") or metadata["name"]
    labels = {INSTANCE_LABEL: instance_of(obj), NAME_LABEL: name}
    finalizers = [*(metadata.get("finalizers") or ()), FINALIZER]
    return {
        "metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": finalizers, "labels": labels},
    }


def released(obj: Json) -> Json:
    """Return the patch that takes our finalizer off again."""
    metadata = obj["metadata"]
    left = [item for item in metadata.get("finalizers") or () if item != FINALIZER]
    return {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": left}}


def difference(before: Json, after: Json) -> Json:
    """Return the merge patch from one to the other."""
    patch: Json = {key: None for key in before.keys() - after.keys()}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            below = difference(old, value)
            patch |= {key: below} if below else {}
        elif key not in before or old != value:
            patch[key] = value
    return patch


def contains(obj: Json, patch: Json) -> bool:
    """Whether that merge patch has been applied; its resource version does not count."""
    for key, value in patch.items():
        if key == "resourceVersion":
            continue
        found = obj.get(key)
        if isinstance(value, dict):
            if not isinstance(found, dict) or not contains(found, value):
                return False
        elif value is None:
            if found is not None:
                return False
        elif found != value and not (value == [] and found is None):
            return False
    return True
