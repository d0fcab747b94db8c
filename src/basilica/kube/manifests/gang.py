"""The manifests of a gang: one Indexed Job, whose completion index is the rank, or a pod for each rank without a Job.

The one place that writes them. Absent values are left out, so that the cluster's own defaults hold. Pure: nothing is
drawn, read or requested here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
HOSTNAME_MAX = 63  # `<job>-<index>` is the host name of a pod
INSTANCE_TYPES = {"A100": "p4d.24xlarge", "H100": "p5.48xlarge", "A10G": "g5.xlarge", "T4": "g4dn.xlarge"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container of every rank. `rank_env` names the variable that holds the rank; `fields` are variables from the
    pod.
    """

    name: str
    image: str
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    rank_env: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)  # ports, probes, mounts: as Kubernetes writes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes on which ranks may run."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A gang of `size` ranks. `job` and `pod` are further fields of the Job's and the pods' specs."""

    name: str
    namespace: str
    size: int
    container: Container
    labels: Mapping[str, str] = field(default_factory=dict)  # of the Job and its pods
    job_labels: Mapping[str, str] = field(default_factory=dict)
    pod_annotations: Mapping[str, str] = field(default_factory=dict)
    pod_finalizers: Sequence[str] = ()
    owner: Mapping[str, Any] | None = None
    placement: Placement = field(default_factory=Placement)
    service_account_name: str | None = None
    runtime_class_name: str | None = None
    restart_policy: str = "Never"
    job: Mapping[str, Any] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)


def indexed_job(gang: Gang) -> Json:
    """Return the Job of a gang, all ranks at once: `completions` and `parallelism` are the size, and change
    together.
    """
    _check_host_names(gang)
    metadata: Json = {"name": gang.name, "namespace": gang.namespace, "labels": {**gang.labels, **gang.job_labels}}
    if gang.owner is not None:
        metadata["ownerReferences"] = [dict(gang.owner)]
    spec: Json = {
        "completionMode": "Indexed",
        "completions": gang.size,
        "parallelism": gang.size,
        **gang.job,
        "template": {"metadata": _pod_metadata(gang), "spec": _pod_spec(gang)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def rank_pod(gang: Gang, rank: int, name: str) -> Json:
    """Return the pod of one rank. Its host name is the one that an Indexed Job of the gang's name would give it."""
    _check_host_names(gang)
    metadata: Json = {"name": name, "namespace": gang.namespace, **_pod_metadata(gang)}
    if gang.owner is not None:
        metadata["ownerReferences"] = [dict(gang.owner)]
    spec = {"hostname": f"{gang.name}-{rank}", **_pod_spec(gang, rank)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _check_host_names(gang: Gang) -> None:
    longest = f"{gang.name}-{gang.size - 1}"
    if len(longest) > HOSTNAME_MAX:
        over = len(longest) - HOSTNAME_MAX
        raise ValueError(
            f"the name {gang.name!r} is {over} characters too long: {longest!r}, the host name of the last rank, "
            f"may have {HOSTNAME_MAX}"
        )


def gpu_placement(
    gpu: str | None,
    *,
    node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, Any]] | None = None,
    resource_key: str = "nvidia.com/gpu",
) -> tuple[Placement, dict[str, str]]:
    """Return the placement and the limits of ranks with that GPU: one GPU each.

    An unknown name requests a GPU of any kind. The caller's node selector and tolerations take precedence.
    """
    mapped = {INSTANCE_TYPE: INSTANCE_TYPES[gpu]} if gpu in INSTANCE_TYPES else {}
    accepted = list(tolerations or ())
    if gpu is not None and tolerations is None:
        accepted = [{"key": resource_key, "operator": "Exists", "effect": "NoSchedule"}]
    placement = Placement(node_selector={**mapped, **(node_selector or {})}, tolerations=accepted)
    return placement, {} if gpu is None else {resource_key: "1"}


def literal(value: str) -> str:
    """Escape a value for Kubernetes, which would replace `$(NAME)`, and makes one dollar of two."""
    return value.replace("$", "$$")


def _pod_metadata(gang: Gang) -> Json:
    found: Json = {"labels": dict(gang.labels)}
    if gang.pod_annotations:
        found["annotations"] = dict(gang.pod_annotations)
    if gang.pod_finalizers:
        found["finalizers"] = list(gang.pod_finalizers)
    return found


def _pod_spec(gang: Gang, rank: int | None = None) -> Json:
    spec: Json = {"restartPolicy": gang.restart_policy, "containers": [_container(gang.container, rank)]}
    if gang.placement.node_selector:
        spec["nodeSelector"] = dict(gang.placement.node_selector)
    if gang.placement.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in gang.placement.tolerations]
    if gang.service_account_name is not None:
        spec["serviceAccountName"] = gang.service_account_name
    if gang.runtime_class_name is not None:
        spec["runtimeClassName"] = gang.runtime_class_name
    return {**spec, **gang.pod}


def _container(container: Container, rank: int | None) -> Json:
    """Return the container. `rank`: None in a template, whose pods read it from the annotation of their Job."""
    found: Json = {"name": container.name, "image": container.image}
    if container.command:
        found["command"] = list(container.command)
    env: list[Json] = []
    if container.rank_env is not None:
        noted = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}}
        env.append({"name": container.rank_env, **(noted if rank is None else {"value": str(rank)})})
    env += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in container.fields.items()]
    env += [{"name": name, "value": literal(value)} for name, value in container.env.items()]
    if env:
        found["env"] = env
    resources = {"requests": dict(container.requests), "limits": dict(container.limits)}
    if any(resources.values()):
        found["resources"] = {kind: amounts for kind, amounts in resources.items() if amounts}
    return {**found, **container.more}
