"""The control plane's own objects: the output of `basilica manifests`. Pure.

Rights are the least that the code needs, in three rings. Everywhere: the runs themselves, and objects that are watched
in all namespaces at once (never Secrets, never a command in a pod). In namespaces with our label: all work for runs, by
bindings that the operator makes there (`kube.roles`). In the control plane's own: keys and the lease. The right to bind
widens rights, so an admission policy holds it to namespaces with the label.
"""

from collections.abc import Sequence
from typing import Any

from basilica.kube.manifests.crd import definition
from basilica.kube.manifests.roles import API, MANAGED, OPERATOR, RBAC, RUNS_ROLES
from basilica.kube.manifests.userdeployment import GROUP, PLURAL

Json = dict[str, Any]

HEALTH_PORT, API_PORT = 8080, 7411
REPLICAS = 2
USER = GROUP_ID = 1000
NODE_SECONDS = 30  # how long a node that does not answer is waited for

READ, WRITE = ("get", "list", "watch"), ("create", "patch", "delete")


def manifests(*, namespace: str, image: str, with_api: bool) -> list[Json]:
    """Return all objects, in the order in which they have to be applied."""
    found = [_namespace(namespace), definition()]
    found += [_account(OPERATOR, namespace), *_rights(OPERATOR, namespace, _operator_rules(), _operator_home_rules())]
    found += [_cluster_role(RUNS_ROLES[OPERATOR], OPERATOR, _operator_runs_rules()), *_binding_policy(namespace)]
    arguments = ["operator", "--namespace", namespace, "--image", image, "--port", str(HEALTH_PORT)]
    found += [_deployment(OPERATOR, namespace, image, arguments, HEALTH_PORT), _disruption_budget(OPERATOR, namespace)]
    if with_api:
        arguments = ["serve", "--store", "kubernetes", "--namespace", namespace, "--image", image]
        arguments += ["--host", "0.0.0.0", "--port", str(API_PORT)]
        found.append(_cluster_role(RUNS_ROLES[API], API, _api_runs_rules()))
        found += [_account(API, namespace), *_rights(API, namespace, _api_rules(), _api_home_rules())]
        found += [_deployment(API, namespace, image, arguments, API_PORT), _disruption_budget(API, namespace)]
        found.append(_service(API, namespace, API_PORT))
    return found


# ---- rights ----------------------------------------------------------------------------------------------------------


def _operator_rules() -> list[Json]:
    return [
        _rule(GROUP, [PLURAL], (*READ, "patch", "delete")),
        _rule(GROUP, [f"{PLURAL}/status"], ("patch",)),
        _rule("", ["namespaces", "pods", "services"], ("list", "watch")),
        _rule("", ["nodes"], READ),
        _rule("", ["configmaps"], ("list",)),  # archives of all users at once
        _rule(RBAC, ["rolebindings"], ("create", "patch")),
        _rule(RBAC, ["clusterroles"], ("bind",)) | {"resourceNames": sorted(RUNS_ROLES.values())},
    ]


def _operator_runs_rules() -> list[Json]:
    return [
        _rule("", ["configmaps"], ("get", "list", *WRITE)),  # usage of deleted runs, and archives
        _rule("", ["secrets"], ("get", *WRITE)),  # variables and results of runs
        _rule("", ["events"], ("create", "patch")),
        _rule("", ["pods"], (*READ, *WRITE, "deletecollection")),  # ranks
        _rule("", ["services"], (*READ, *WRITE)),
        _rule("", ["serviceaccounts"], ("get", *WRITE)),
        _rule("apps", ["deployments"], ("get", *WRITE)),
        _rule("networking.k8s.io", ["networkpolicies"], ("get", *WRITE)),
    ]


def _operator_home_rules() -> list[Json]:
    return [_rule("coordination.k8s.io", ["leases"], ("get", "create", "patch"))]


def _api_rules() -> list[Json]:
    return [
        _rule(GROUP, [PLURAL], READ),
        _rule("", ["namespaces"], ("create",)),
        _rule("", ["configmaps"], ("get", "list")),  # also before a user's namespace exists
        _rule("", ["pods", "services"], ("list", "watch")),
        _rule("", ["nodes"], READ),
    ]


def _api_runs_rules() -> list[Json]:
    return [
        _rule(GROUP, [PLURAL], WRITE),
        _rule("", ["configmaps"], ("create", "patch")),  # tickets, usage, directories
        _rule("", ["secrets"], ("get", "create", "patch")),
        _rule("", ["events"], ("create", "patch")),
        _rule("", ["pods"], ("get",)),
        _rule("", ["pods/log"], ("get",)),
        _rule("", ["pods/exec"], ("get", "create")),  # a WebSocket needs `get`, and since 1.35 `create` too
    ]


def _api_home_rules() -> list[Json]:
    return [
        _rule("", ["secrets"], (*READ, "create", "delete")),  # API keys
        _rule("coordination.k8s.io", ["leases"], READ),  # whether an operator is at work
    ]


def _cluster_role(name: str, part: str, rules: list[Json]) -> Json:
    """Return a role that the operator binds, namespace by namespace; the binding of a missing role grants nothing."""
    metadata = {"name": name, "labels": _labels(part)}
    return {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": rules}


def _binding_policy(namespace: str) -> list[Json]:
    """Return the policy that confines the operator's bindings to namespaces with our label. Kubernetes 1.30 and later
    has such policies.
    """
    label, _, value = MANAGED.partition("=")
    group = "admissionregistration.k8s.io/v1"
    metadata = {"name": f"{OPERATOR}-bindings", "labels": _labels(OPERATOR)}
    rule = {
        "apiGroups": [RBAC],
        "apiVersions": ["*"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["rolebindings"],
    }
    account = f"system:serviceaccount:{namespace}:{OPERATOR}"
    labels = "namespaceObject.metadata.labels"
    labelled = f"has({labels}) && '{label}' in {labels} && {labels}['{label}'] == '{value}'"
    subjects = f"object.subjects.all(s, s.kind == 'ServiceAccount' && s.namespace == '{namespace}')"
    policy = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": metadata,
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "matchConditions": [{"name": "operator", "expression": f"request.userInfo.username == '{account}'"}],
            "validations": [
                {"expression": labelled, "message": f"the operator binds roles only in namespaces with {MANAGED}"},
                {"expression": subjects, "message": f"the operator binds roles only to accounts of {namespace}"},
            ],
        },
    }
    binding = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": metadata,
        "spec": {"policyName": metadata["name"], "validationActions": ["Deny"]},
    }
    return [policy, binding]


def _rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> Json:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def _rights(name: str, namespace: str, everywhere: list[Json], at_home: list[Json]) -> list[Json]:
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    found: list[Json] = []
    for kind, rules, home in (("ClusterRole", everywhere, {}), ("Role", at_home, {"namespace": namespace})):
        metadata = {"name": name, **home, "labels": _labels(name)}
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": metadata, "rules": rules}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [subject],
        }
        found += [role, binding]
    return found


# ---- the rest --------------------------------------------------------------------------------------------------------


def _labels(name: str) -> Json:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "basilica"}


def _namespace(name: str) -> Json:
    labels = {"app.kubernetes.io/part-of": "basilica", "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def _account(name: str, namespace: str) -> Json:
    metadata = {"name": name, "namespace": namespace, "labels": _labels(name)}
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}


def _deployment(name: str, namespace: str, image: str, arguments: Sequence[str], port: int) -> Json:
    operator = name == OPERATOR
    probe = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
    alive, ready = ("/healthz", "/readyz") if operator else ("/health", "/health")
    container: Json = {
        "name": name,
        "image": image,
        "command": ["basilica"],
        "args": list(arguments),
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
        "livenessProbe": {"httpGet": {"path": alive, "port": "http"}, **probe},
        "readinessProbe": {"httpGet": {"path": ready, "port": "http"}, **probe},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    security = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": GROUP_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(name)},
        "matchLabelKeys": ["pod-template-hash"],  # pods that an update is about to end do not count
    }
    # The default is five minutes, and a lost node may have had all replicas.
    elsewhere = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_SECONDS}
    pod = {
        "serviceAccountName": name,
        "securityContext": security,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "topologySpreadConstraints": [spread],
        "tolerations": [{**elsewhere, "key": f"node.kubernetes.io/{what}"} for what in ("unreachable", "not-ready")],
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}
    spec = {
        "replicas": REPLICAS,
        "selector": {"matchLabels": _labels(name)},
        "template": {"metadata": {"labels": _labels(name), "annotations": annotations}, "spec": pod},
    }
    metadata = {"name": name, "namespace": namespace, "labels": _labels(name)}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _disruption_budget(name: str, namespace: str) -> Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": namespace, "labels": _labels(name)},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": _labels(name)}},
    }


def _service(name: str, namespace: str, port: int) -> Json:
    """Return the Service. A browser's session is known to the replica that opened it, so a browser stays with one."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": _labels(name)},
        "spec": {
            "selector": _labels(name),
            "ports": [{"name": "http", "port": 80, "targetPort": port, "protocol": "TCP"}],
            "sessionAffinity": "ClientIP",
        },
    }
