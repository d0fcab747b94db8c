"""Label and field selectors: from a query string to a test of an object."""

import re
from collections.abc import Callable

from basilica_testkube.errors import bad_request
from basilica_testkube.kinds import Kind
from basilica_testkube.values import Json, at, labels_of

Match = Callable[[Json], bool]
_IN = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")
_EQUAL = re.compile(r"([^=!\s]+)\s*(==|=|!=)\s*([^=!\s]*)")
_FIELDS = {
    ("", "pods"): (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
        "status.podIP",
    ),
    ("", "events"): (
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    ("", "nodes"): ("spec.unschedulable",),
    ("", "namespaces"): ("status.phase",),
    ("", "secrets"): ("type",),
    ("batch", "jobs"): ("status.successful",),
}


def selector(kind: Kind, labels: str, fields: str) -> Match | None:
    """A test for objects, or None where everything is wanted."""
    tests = [*_label_tests(labels), *_field_tests(kind, fields)]
    if not tests:
        return None
    return lambda obj: all(test(obj) for test in tests)


def _split(text: str) -> list[str]:
    """The requirements of a selector; commas inside parentheses belong to a set."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _label_tests(text: str) -> list[Match]:
    tests: list[Match] = []
    for part in _split(text):
        if found := _IN.fullmatch(part):
            key, among = found[1], {value.strip() for value in found[3].split(",")}
            tests.append(_label_in(key, among, wanted=found[2] == "in"))
        elif found := _EQUAL.fullmatch(part):
            tests.append(_label_in(found[1], {found[3]}, wanted=found[2] != "!="))
        elif re.fullmatch(r"!?[A-Za-z0-9][-A-Za-z0-9_./]*", part):
            tests.append(_label_there(part.lstrip("!"), wanted=not part.startswith("!")))
        else:
            raise bad_request(f"unable to parse requirement: {part!r}")
    return tests


def _label_in(key: str, among: set[str], *, wanted: bool) -> Match:
    return lambda obj: (labels_of(obj).get(key) in among) is wanted


def _label_there(key: str, *, wanted: bool) -> Match:
    return lambda obj: (key in labels_of(obj)) is wanted


def _field_tests(kind: Kind, text: str) -> list[Match]:
    known = ("metadata.name", "metadata.namespace", *_FIELDS.get(kind.key, ()))
    tests: list[Match] = []
    for part in _split(text):
        found = _EQUAL.fullmatch(part)
        if found is None:
            raise bad_request(f"invalid field selector: {part!r}")
        if found[1] not in known:
            raise bad_request(f"field label not supported: {found[1]}")
        tests.append(_field_is(found[1], found[3], wanted=found[2] != "!="))
    return tests


def _field_is(path: str, value: str, *, wanted: bool) -> Match:
    def test(obj: Json) -> bool:
        found = at(obj, path)
        return (("" if found is None else str(found)) == value) is wanted

    return test


def matches_selector(labels: dict[str, str], wanted: Json) -> bool:
    """A label selector as objects hold it: `matchLabels` and `matchExpressions`."""
    if any(labels.get(key) != value for key, value in (wanted.get("matchLabels") or {}).items()):
        return False
    return all(matches_expression(labels, rule) for rule in wanted.get("matchExpressions") or [])


def matches_expression(labels: dict[str, str], rule: Json) -> bool:
    value, among = labels.get(rule["key"]), rule.get("values") or []
    match rule["operator"]:
        case "In":
            return value in among
        case "NotIn":
            return value not in among
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(among[0])
        case "Lt":
            return value is not None and int(value) < int(among[0])
        case other:
            raise bad_request(f"{other!r} is no operator of a selector")
