"""What the API server refuses beyond what the schemas say: names, pods, Jobs, and changes that may not be made."""

import base64
import re
from collections.abc import Callable, Iterator

from basilica_testkube.cel import CelError, compiled, rule_faults, rules_of
from basilica_testkube.errors import Cause
from basilica_testkube.kinds import Kind
from basilica_testkube.quantities import amount
from basilica_testkube.values import Json, containers_of, meta

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_ENV = re.compile(r"[\x20-\x3c\x3e-\x7e]+")  # printable, without "="; what 1.30 and later take
_FIELD_PATHS = re.compile(
    r"metadata\.(name|namespace|uid|labels|annotations)|metadata\.(labels|annotations)\['[^']+'\]|spec\.nodeName"
    r"|spec\.serviceAccountName|status\.(hostIP|hostIPs|podIP|podIPs)"
)
_DATA_BYTES_MAX = 1 << 20  # of a ConfigMap or a Secret
_RBAC = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def faults(kind: Kind, obj: Json) -> list[Cause]:
    """Why this object may not exist."""
    found = [*_names(kind, obj)]
    check = _CHECKS.get(kind.kind)
    if kind.custom:
        found += rule_faults(kind.schema, obj)
    elif check is not None:
        found += check(obj)
    return found


def change_faults(kind: Kind, old: Json, new: Json) -> list[Cause]:
    """Why this object may not become that one."""
    if kind.custom:
        return list(rule_faults(kind.schema, new, old))
    check = _CHANGES.get(kind.kind)
    return list(check(old, new)) if check is not None else []


def _bad(field: str, value: object, why: str) -> Cause:
    shown = f'"{value}"' if isinstance(value, str) else value
    return Cause(field, "FieldValueInvalid", f"Invalid value: {shown}: {why}")


def _required(field: str, why: str = "") -> Cause:
    return Cause(field, "FieldValueRequired", f"Required value: {why}" if why else "Required value")


def _names(kind: Kind, obj: Json) -> Iterator[Cause]:
    name = meta(obj)["name"]
    one_label = kind.kind in ("Namespace", "Service")
    if kind.kind in _RBAC:
        pattern, longest = re.compile(r"[^/%]+"), 253
    else:
        pattern, longest = (_LABEL, 63) if one_label else (_SUBDOMAIN, 253)
    if len(name) > longest:
        yield _bad("metadata.name", name, f"must be no more than {longest} characters")
    elif not pattern.fullmatch(name):
        what = "label" if one_label else "subdomain"
        yield _bad(
            "metadata.name",
            name,
            f"a lowercase RFC 1123 {what} must consist of lower case alphanumeric characters, '-' or '.'",
        )
    yield from _labels(meta(obj), "metadata.labels")
    for place, owner in enumerate(meta(obj).get("ownerReferences") or []):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield _required(f"metadata.ownerReferences[{place}].{field}")
    for finalizer in meta(obj).get("finalizers") or []:
        if "/" not in finalizer and finalizer not in ("orphan", "foregroundDeletion", "kubernetes"):
            yield _bad(
                "metadata.finalizers", finalizer, "name is neither a standard finalizer name nor is it fully qualified"
            )


def _labels(metadata: Json, field: str) -> Iterator[Cause]:
    for key, value in (metadata.get("labels") or {}).items():
        if not isinstance(value, str):
            continue
        if len(value) > 63 or not _VALUE.fullmatch(value):
            yield _bad(field, value, "a valid label must be 63 characters or less, alphanumeric, '-', '_' or '.'")
        if len(key.rpartition("/")[2]) > 63:
            yield _bad(field, key, "name part must be no more than 63 characters")


def _pod(pod: Json, field: str = "spec") -> Iterator[Cause]:
    if not pod["spec"].get("containers"):
        yield _required(f"{field}.containers")
    seen: set[str] = set()
    for place, container in enumerate(containers_of(pod)):
        here = f"{field}.containers[{place}]"
        name = container.get("name", "")
        if not _LABEL.fullmatch(name) or len(name) > 63:
            yield _bad(f"{here}.name", name, "must be a lowercase RFC 1123 label of at most 63 characters")
        if name in seen:
            yield Cause(f"{here}.name", "FieldValueDuplicate", f'Duplicate value: "{name}"')
        seen.add(name)
        if not container.get("image"):
            yield _required(f"{here}.image")
        yield from _environment(container, here)
        yield from _resources(container, here)
    for place, toleration in enumerate(pod["spec"].get("tolerations") or []):
        if toleration.get("operator", "Equal") == "Exists" and toleration.get("value"):
            yield _bad(
                f"{field}.tolerations[{place}].operator", "Exists", "value must be empty when `operator` is 'Exists'"
            )
        if not toleration.get("key") and toleration.get("operator") != "Exists":
            yield _bad(f"{field}.tolerations[{place}].operator", "", "operator must be Exists when `key` is empty")


def _environment(container: Json, here: str) -> Iterator[Cause]:
    for place, variable in enumerate(container.get("env") or []):
        there = f"{here}.env[{place}]"
        if not _ENV.fullmatch(variable.get("name", "")):
            yield _bad(
                f"{there}.name",
                variable.get("name", ""),
                "a valid environment variable name is printable ASCII without '='",
            )
        source = variable.get("valueFrom")
        if source is not None and "value" in variable and variable["value"]:
            yield _bad(f"{there}.valueFrom", "", "may not be specified when `value` is not empty")
        path = ((source or {}).get("fieldRef") or {}).get("fieldPath")
        if path is not None and not _FIELD_PATHS.fullmatch(path):
            yield _bad(
                f"{there}.valueFrom.fieldRef.fieldPath", path, "error converting fieldPath: field label not supported"
            )


def _resources(container: Json, here: str) -> Iterator[Cause]:
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, wanted in requests.items():
        if name in limits and amount(wanted) > amount(limits[name]):
            yield _bad(
                f"{here}.resources.requests", wanted, f"must be less than or equal to {name} limit of {limits[name]}"
            )
    for name, limit in {**requests, **limits}.items():
        if amount(limit) < 0:
            yield _bad(f"{here}.resources", limit, "must be greater than or equal to 0")
        if "/" in name and amount(requests.get(name, limit)) != amount(limits.get(name, -1)):
            yield _bad(f"{here}.resources", limit, f"{name}: extended resources must have requests equal to limits")


def _job(job: Json) -> Iterator[Cause]:
    spec, name = job["spec"], meta(job)["name"]
    template = spec["template"]
    indexed = spec["completionMode"] == "Indexed"
    for key in (
        "parallelism",
        "completions",
        "backoffLimit",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
    ):
        if key in spec and spec[key] < (1 if key == "activeDeadlineSeconds" else 0):
            yield _bad(f"spec.{key}", spec[key], "must be greater than or equal to 0")
    if spec["completionMode"] not in ("Indexed", "NonIndexed"):
        message = f'Unsupported value: "{spec["completionMode"]}": supported values: "NonIndexed", "Indexed"'
        yield Cause("spec.completionMode", "FieldValueNotSupported", message)
    policy = template["spec"].get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        message = f'Unsupported value: "{policy}": supported values: "OnFailure", "Never"'
        yield Cause("spec.template.spec.restartPolicy", "FieldValueNotSupported", message)
    if indexed:
        yield from _indexed(spec, name)
    elif "backoffLimitPerIndex" in spec:
        yield _bad("spec.backoffLimitPerIndex", spec["backoffLimitPerIndex"], "requires indexed completion mode")
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        yield _required("spec.backoffLimitPerIndex", "when maxFailedIndexes is specified")
    if "podFailurePolicy" in spec:
        yield from _failure_policy(spec, policy)
    if "successPolicy" in spec:
        yield Cause("spec.successPolicy", "FieldValueForbidden", "Forbidden: this test server has no success policies")
    yield from _labels(template.get("metadata") or {}, "spec.template.metadata.labels")
    yield from _pod(template, "spec.template.spec")


def _indexed(spec: Json, name: str) -> Iterator[Cause]:
    if "completions" not in spec:
        yield _required("spec.completions", "when completion mode is Indexed")
        return
    if spec["parallelism"] > 100_000:
        yield _bad(
            "spec.parallelism",
            spec["parallelism"],
            "must be less than or equal to 100000 when completion mode is Indexed",
        )
    longest = f"{name}-{max(spec['completions'] - 1, 0)}"
    if len(longest) > 63:
        yield _bad("metadata.name", name, f"pod hostname {longest} would be longer than 63 characters")


def _failure_policy(spec: Json, restart_policy: str | None) -> Iterator[Cause]:
    if restart_policy != "Never":
        message = 'only "Never" is supported when podFailurePolicy is specified'
        yield _bad("spec.template.spec.restartPolicy", restart_policy or "", message)
    if spec["podReplacementPolicy"] != "Failed":
        message = f'Unsupported value: "{spec["podReplacementPolicy"]}": supported values: "Failed"'
        yield Cause("spec.podReplacementPolicy", "FieldValueNotSupported", message)
    for place, rule in enumerate(spec["podFailurePolicy"].get("rules") or []):
        here = f"spec.podFailurePolicy.rules[{place}]"
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield _bad(here, "", "specifying one of OnExitCodes and OnPodConditions is required, not both")
        if rule.get("action") == "FailIndex" and "backoffLimitPerIndex" not in spec:
            yield _bad(f"{here}.action", "FailIndex", "requires the backoffLimitPerIndex to be set")
        codes = rule.get("onExitCodes") or {}
        if codes.get("operator") == "In" and 0 in codes.get("values", ()):
            yield _bad(f"{here}.onExitCodes.values", 0, "must not be 0 for the In operator")


def _job_change(old: Json, new: Json) -> Iterator[Cause]:
    before, after = old["spec"], new["spec"]
    for key in (
        "selector",
        "completionMode",
        "podFailurePolicy",
        "backoffLimitPerIndex",
        "manualSelector",
        "successPolicy",
    ):
        if before.get(key) != after.get(key):
            yield _bad(f"spec.{key}", "", "field is immutable")
    moved = before.get("completions") != after.get("completions")
    together = after["completionMode"] == "Indexed" and after.get("completions") == after["parallelism"]
    was_together = before.get("completions") == before["parallelism"]
    if moved and not (together and was_together):
        yield _bad(
            "spec.completions", after.get("completions", 0), "can only be modified in tandem with spec.parallelism"
        )
    never_ran = before.get("suspend") and "startTime" not in (old.get("status") or {})
    if before["template"] != after["template"] and not never_ran:
        yield _bad("spec.template", "", "field is immutable")


def _pod_change(old: Json, new: Json) -> Iterator[Cause]:
    def fixed(pod: Json) -> Json:
        spec = {
            key: value
            for key, value in pod["spec"].items()
            if key not in ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates")
        }
        lists = ("containers", "initContainers")
        return spec | {k: [{**c, "image": ""} for c in spec.get(k) or []] for k in lists}

    gates = [[gate["name"] for gate in pod["spec"].get("schedulingGates") or ()] for pod in (old, new)]
    if not set(gates[1]) <= set(gates[0]):
        why = "Forbidden: only deletion is allowed, but found new scheduling gates"
        yield Cause("spec.schedulingGates", "FieldValueForbidden", why)
    if fixed(old) != fixed(new):
        allowed = "`spec.containers[*].image`, `spec.activeDeadlineSeconds` or additions to `spec.tolerations`"
        yield Cause("spec", "FieldValueForbidden", f"Forbidden: pod updates may not change fields other than {allowed}")


def _kept_data(obj: Json) -> Iterator[Cause]:
    """A ConfigMap or a Secret holds a mebibyte."""
    encoded = [*(obj.get("binaryData") or {}).values()]
    texts = [*(obj.get("data") or {}).values()]
    if obj["kind"] == "Secret":
        texts, encoded = [*(obj.get("stringData") or {}).values()], texts
    size = sum(len(text.encode()) for text in texts)
    for place, text in enumerate(encoded):
        try:
            size += len(base64.b64decode(text, validate=True))
        except ValueError:
            yield _bad(f"data[{place}]", "", "illegal base64 data")
    if size > _DATA_BYTES_MAX:
        yield Cause("data", "FieldValueTooLong", f"Too long: may not be more than {_DATA_BYTES_MAX} bytes")


def _kept_data_change(old: Json, new: Json) -> Iterator[Cause]:
    if not old.get("immutable"):
        return
    for field in ("immutable", "data", "binaryData"):
        if (old.get(field) or {}) != (new.get(field) or {}):
            yield Cause(field, "FieldValueForbidden", "Forbidden: field is immutable when `immutable` is set")


def _definition(definition: Json) -> Iterator[Cause]:
    spec = definition["spec"]
    wanted = f"{spec['names']['plural']}.{spec['group']}"
    if meta(definition)["name"] != wanted:
        yield _bad("metadata.name", meta(definition)["name"], f'must be spec.names.plural+"."+spec.group: {wanted}')
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        yield _bad("spec.versions", "", "must have exactly one version marked as storage version")
    for place, version in enumerate(spec["versions"]):
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            yield _required(f"spec.versions[{place}].schema.openAPIV3Schema", "schemas are required")
        elif schema.get("type") != "object":
            yield _bad(
                f"spec.versions[{place}].schema.openAPIV3Schema.type",
                schema.get("type", ""),
                "must be object at the root",
            )
        elif schema:
            yield from _structural(schema, f"spec.versions[{place}].schema.openAPIV3Schema")
            yield from _unreadable_rules(schema, f"spec.versions[{place}].schema.openAPIV3Schema")


def _unreadable_rules(schema: Json, field: str) -> Iterator[Cause]:
    for where, rule in rules_of(schema, field):
        try:
            compiled(rule)
        except CelError as error:
            yield _bad(where, rule, f"compilation failed: {error}")


def _structural(schema: Json, field: str) -> Iterator[Cause]:
    """Every value of a structural schema says what it is."""
    if not (
        schema.get("type")
        or schema.get("x-kubernetes-int-or-string")
        or schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        yield _required(f"{field}.type", "must not be empty for specified object fields")
    for key, below in (schema.get("properties") or {}).items():
        yield from _structural(below, f"{field}.properties[{key}]")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _structural(schema[key], f"{field}.{key}")


_CHECKS: dict[str, Callable[[Json], Iterator[Cause]]] = {
    "Pod": _pod,
    "Job": _job,
    "CustomResourceDefinition": _definition,
    "ConfigMap": _kept_data,
    "Secret": _kept_data,
}
_CHANGES: dict[str, Callable[[Json, Json], Iterator[Cause]]] = {
    "Job": _job_change,
    "Pod": _pod_change,
    "ConfigMap": _kept_data_change,
    "Secret": _kept_data_change,
}
