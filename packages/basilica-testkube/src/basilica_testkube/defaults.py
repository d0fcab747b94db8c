"""What the API server fills in when an object is created."""

import uuid
from collections.abc import Callable

from basilica_testkube.kinds import Kind
from basilica_testkube.values import Json, containers_of, meta

MAX_INT32 = (1 << 31) - 1


def fill_in(kind: Kind, obj: Json) -> None:
    """Set the defaults of a kind, in place."""
    fill = _DEFAULTS.get(kind.kind)
    if fill is not None and not kind.custom:
        fill(obj)


def _pod(pod: Json) -> None:
    _pod_spec(pod)
    pod["status"] = {"phase": "Pending", "qosClass": "Burstable"}


def _pod_spec(pod: Json) -> None:
    spec = pod["spec"]
    for key, value in {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "enableServiceLinks": True,
    }.items():
        spec.setdefault(key, value)
    if account := spec.get("serviceAccountName"):
        spec["serviceAccount"] = account
    for container in containers_of(pod):
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        image = container.get("image", "")
        latest = ":" not in image.rpartition("/")[2] or image.endswith(":latest")
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        resources = container.setdefault("resources", {})
        for name, amount in (resources.get("limits") or {}).items():
            resources.setdefault("requests", {}).setdefault(name, amount)
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")
        for variable in container.get("env") or []:
            reference = (variable.get("valueFrom") or {}).get("fieldRef")
            if reference is not None:
                reference.setdefault("apiVersion", "v1")


def _running_pod(pod: Json) -> None:
    _pod(pod)
    spec = pod["spec"]
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    spec.setdefault("priority", 0)
    tolerations = spec.setdefault("tolerations", [])
    for reason in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{reason}"
        if not any(t.get("key") in (key, None) and t.get("effect") in (None, "NoExecute") for t in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})


def _job(job: Json) -> None:
    spec = job["spec"]
    if "completions" not in spec and "parallelism" not in spec:
        spec["completions"] = 1
    for key, value in {
        "parallelism": 1,
        "completionMode": "NonIndexed",
        "suspend": False,
        "backoffLimit": MAX_INT32 if "backoffLimitPerIndex" in spec else 6,
        "podReplacementPolicy": "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed",
    }.items():
        spec.setdefault(key, value)
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        for pattern in rule.get("onPodConditions") or []:
            pattern.setdefault("status", "True")
    template = spec["template"]
    if not spec.get("manualSelector"):
        uid = meta(job)["uid"]
        labels = template.setdefault("metadata", {}).setdefault("labels", {})
        names = {"controller-uid": uid, "job-name": meta(job)["name"]}
        for name, value in names.items():
            labels.setdefault(name, value)
            labels.setdefault(f"batch.kubernetes.io/{name}", value)
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    _pod_spec(template)
    job["status"] = {}


def _namespace(namespace: Json) -> None:
    namespace.setdefault("spec", {})["finalizers"] = ["kubernetes"]
    namespace["status"] = {"phase": "Active"}
    meta(namespace).setdefault("labels", {})["kubernetes.io/metadata.name"] = meta(namespace)["name"]


def _service(service: Json) -> None:
    spec = service["spec"]
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if spec.setdefault("clusterIP", _address(meta(service)["uid"])) != "None":
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
    for port in spec.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))
    service.setdefault("status", {"loadBalancer": {}})


def _address(uid: str) -> str:
    """On the loopback network, where no pod has its own; two clusters at once must not have the same."""
    number = uuid.UUID(uid).int
    return f"127.{96 + number % 31}.{number >> 8 & 255}.{number >> 16 & 255}"


def _deployment(deployment: Json) -> None:
    deployment["spec"].setdefault("replicas", 1)
    _pod_spec(deployment["spec"]["template"])
    deployment["status"] = {}


def _secret(secret: Json) -> None:
    secret.setdefault("type", "Opaque")


def _network_policy(policy: Json) -> None:
    types = ["Ingress"] + (["Egress"] if "egress" in policy["spec"] else [])
    policy["spec"].setdefault("policyTypes", types)


def _definition(definition: Json) -> None:
    names = definition["spec"]["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    definition["spec"].setdefault("conversion", {"strategy": "None"})
    definition["status"] = {}


def _node(node: Json) -> None:
    node.setdefault("spec", {})
    node.setdefault("status", {})


_DEFAULTS: dict[str, Callable[[Json], None]] = {
    "Pod": _running_pod,
    "Job": _job,
    "Namespace": _namespace,
    "Service": _service,
    "Deployment": _deployment,
    "Secret": _secret,
    "NetworkPolicy": _network_policy,
    "CustomResourceDefinition": _definition,
    "Node": _node,
}
