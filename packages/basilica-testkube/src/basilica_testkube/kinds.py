"""The table of kinds. A kind is a row; a custom resource definition adds rows while the server runs."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """What the server must know of a kind to serve it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False  # has a status subresource, which the main resource does not write
    generation: bool = False  # counts the changes of its spec
    short: tuple[str, ...] = ()
    schema: Any = None  # of a custom resource; the others have published ones
    custom: bool = False
    scale: tuple[str, str] | None = None  # where the wanted and the observed number are, if it can be scaled
    orphans: bool = False  # its dependents stay when it is deleted and nobody says how

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The name in messages: `pods`, `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def key(self) -> tuple[str, str]:
        """What objects are stored under: the same for every version."""
        return self.group, self.plural


ADMISSION = "admissionregistration.k8s.io"  # kept, and not enforced
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False, status=True, short=("ns",))
NODES = Kind("", "v1", "nodes", "Node", namespaced=False, status=True, short=("no",))
PODS = Kind("", "v1", "pods", "Pod", status=True, generation=True, short=("po",))
EVENTS = Kind("", "v1", "events", "Event", short=("ev",))
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount", short=("sa",))
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", short=("cm",))
SECRETS = Kind("", "v1", "secrets", "Secret")
QUOTAS = Kind("", "v1", "resourcequotas", "ResourceQuota", status=True, short=("quota",))
SERVICES = Kind("", "v1", "services", "Service", status=True, short=("svc",))
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment", status=True, generation=True, short=("deploy",))
JOBS = Kind("batch", "v1", "jobs", "Job", status=True, generation=True, orphans=True)
DEFINITIONS = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    status=True,
    generation=True,
    short=("crd", "crds"),
)
BUILT_IN = (
    NAMESPACES,
    NODES,
    PODS,
    EVENTS,
    SERVICE_ACCOUNTS,
    CONFIG_MAPS,
    SECRETS,
    QUOTAS,
    JOBS,
    DEFINITIONS,
    SERVICES,
    DEPLOYMENTS,
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", generation=True, short=("netpol",)),
    Kind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False),
    Kind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    Kind(
        ADMISSION, "v1", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", namespaced=False, generation=True
    ),
    Kind(ADMISSION, "v1", "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", namespaced=False),
    Kind("coordination.k8s.io", "v1", "leases", "Lease"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", status=True, generation=True, short=("pdb",)),
)


class KindTable:
    """Which kinds there are now."""

    def __init__(self) -> None:
        self._kinds = {(kind.group, kind.version, kind.plural): kind for kind in BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        return self._kinds.get((group, version, plural))

    def of_object(self, api_version: str, kind: str) -> Kind | None:
        """The kind that an object or an owner reference names."""
        return next((k for k in self._kinds.values() if k.api_version == api_version and k.kind == kind), None)

    def all(self) -> list[Kind]:
        return list(self._kinds.values())

    def add(self, kind: Kind) -> None:
        self._kinds[kind.group, kind.version, kind.plural] = kind

    def remove_resource(self, group: str, plural: str) -> None:
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind.key != (group, plural)}
