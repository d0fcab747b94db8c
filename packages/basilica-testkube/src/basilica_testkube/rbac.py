"""Role-based access control, as the API server decides it: by the roles and bindings that the cluster holds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from basilica_testkube.errors import ApiError
from basilica_testkube.values import Json, meta

_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What somebody wants to do. `namespace` is empty for all of them, and for what has none."""

    verb: str
    group: str
    resource: str  # with its subresource: pods/exec
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Roles:
    """The objects that give rights."""

    cluster_roles: Mapping[str, Json]
    roles: Mapping[tuple[str, str], Json]
    cluster_bindings: Iterable[Json]
    bindings: Iterable[Json]

    @classmethod
    def of(cls, objects: Iterable[Json]) -> "Roles":
        by_kind: dict[str, list[Json]] = {}
        for obj in objects:
            by_kind.setdefault(str(obj.get("kind")), []).append(obj)
        return cls(
            {meta(role)["name"]: role for role in by_kind.get("ClusterRole", ())},
            {(meta(role)["namespace"], meta(role)["name"]): role for role in by_kind.get("Role", ())},
            by_kind.get("ClusterRoleBinding", ()),
            by_kind.get("RoleBinding", ()),
        )

    def allow(self, user: str, action: Action) -> bool:
        return any(_covers(rule, action) for rule in self._rules(user, action.namespace))

    def may_bind(self, user: str, binding: Json) -> bool:
        """Whether somebody may give others this role: only who has the right to bind it, or all rights that it has."""
        reference = binding["roleRef"]
        namespace = meta(binding).get("namespace", "")
        plural = "clusterroles" if reference["kind"] == "ClusterRole" else "roles"
        bind = Action(
            verb="bind",
            group="rbac.authorization.k8s.io",
            resource=plural,
            namespace=namespace if plural == "roles" else "",
            name=reference["name"],
        )
        if self.allow(user, bind):
            return True
        return all(
            self.allow(user, Action(verb=verb, group=group, resource=resource, namespace=namespace))
            for rule in self._of(reference, namespace)
            for verb in rule["verbs"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        )

    def _rules(self, user: str, namespace: str) -> Iterator[Json]:
        for binding in self.cluster_bindings:
            if _is_subject(user, binding):
                yield from self._of(binding["roleRef"], "")
        for binding in self.bindings:
            if namespace and meta(binding)["namespace"] == namespace and _is_subject(user, binding):
                yield from self._of(binding["roleRef"], namespace)

    def _of(self, reference: Json, namespace: str) -> Iterable[Json]:
        cluster = reference["kind"] == "ClusterRole"
        role = self.cluster_roles.get(reference["name"]) if cluster else self.roles.get((namespace, reference["name"]))
        return () if role is None else role.get("rules") or ()


def _is_subject(user: str, binding: Json) -> bool:
    for subject in binding.get("subjects") or ():
        if subject["kind"] == "ServiceAccount":
            if user == f"{_ACCOUNT}{subject['namespace']}:{subject['name']}":
                return True
        elif subject["kind"] == "User" and subject["name"] == user:
            return True
    return False


def _covers(rule: Json, action: Action) -> bool:
    names = rule.get("resourceNames")
    return (
        action.verb in rule["verbs"]
        and action.group in rule["apiGroups"]
        and action.resource in rule["resources"]
        and (not names or action.name in names)
    )


def refused(user: str, action: Action) -> ApiError:
    where = f' in the namespace "{action.namespace}"' if action.namespace else " at the cluster scope"
    plural = f"{action.resource}.{action.group}" if action.group else action.resource
    which = f'{plural} "{action.name}"' if action.name else plural  # as for a list, a create or a deletecollection
    message = (
        f'{which} is forbidden: User "{user}" cannot {action.verb} resource "{action.resource}" '
        f'in API group "{action.group}"{where}'
    )
    return ApiError(403, "Forbidden", message)
