"""The roles of the control plane in users' namespaces, and their bindings. Pure.

It may act for runs only in namespaces with the label `app.kubernetes.io/managed-by=basilica`. There the operator binds
two cluster roles, one to itself and one to the API. A namespace that the API makes has the label; an administrator
labels any other.
"""

from typing import Any

Json = dict[str, Any]

MANAGED = "app.kubernetes.io/managed-by=basilica"
RBAC = "rbac.authorization.k8s.io"
OPERATOR, API = "basilica-operator", "basilica-api"
RUNS_ROLES = {OPERATOR: f"{OPERATOR}-runs", API: f"{API}-runs"}


def bindings(namespace: str, home: str) -> dict[str, Json]:
    """Return the bindings, by path, of the control plane in `home` in a namespace."""
    found: dict[str, Json] = {}
    for account, role in RUNS_ROLES.items():
        path = f"/apis/{RBAC}/v1/namespaces/{namespace}/rolebindings/{role}"
        found[path] = {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": role, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "basilica"}},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": home}],
        }
    return found
