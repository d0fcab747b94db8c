"""The rules of custom resources are worked out as the API server does, and what cannot be read is refused."""

from typing import Any

import pytest

from basilica_testkube import KubeServer
from basilica_testkube.cel import CelError, compiled, rule_faults
from basilica_testkube.errors import ApiError

VALUE = {"min": 1, "max": 3, "name": "abc", "list": [1, 2], "on": True, "off": False, "deep": {"x": "y"}}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("self.min <= self.max", True),
        ("self.min > self.max || self.on", True),
        ("self.min < self.max && !self.on", False),
        ("has(self.name) && size(self.name) == 3", True),
        ("has(self.missing)", False),
        ("has(self.deep.x) == has(self.deep.z)", False),
        ("self.deep.x == 'y'", True),
        ("self.name.matches('^[a-c]+$')", True),
        ('self.name.startsWith("b")', False),
        ("self.list[1] == 2 && 2 in self.list", True),
        ("self.off ? self.missing : self.min + 2 == self.max", True),
        ("(self.min + 1) * 2 == 4 && -self.min < 0", True),
        ("self.list.size() == 2 && self.name in ['abc', 'd']", True),
    ],
)
def test_a_rule_gives_what_it_says(rule: str, expected: bool) -> None:
    assert compiled(rule)({"self": VALUE}) is expected


@pytest.mark.parametrize(
    "rule", ["self.", "self.min <=", "frob(self)", "self.name.frob()", "has(self)", "self @ 2", "1 2"]
)
def test_what_cannot_be_read_is_refused(rule: str) -> None:
    with pytest.raises(CelError):
        compiled(rule)


def test_rules_of_changes_are_asked_when_something_changes() -> None:
    schema: dict[str, Any] = {
        "properties": {
            "n": {"x-kubernetes-validations": [{"rule": "self >= oldSelf", "message": "n only grows"}]},
            "items": {"items": {"x-kubernetes-validations": [{"rule": "self > 0"}]}},
        }
    }
    assert not list(rule_faults(schema, {"n": 1}))
    assert not list(rule_faults(schema, {"n": 2}, {"n": 1}))
    [fault] = rule_faults(schema, {"n": 1}, {"n": 2})
    assert (fault.field, "n only grows" in fault.message) == ("n", True)
    [fault] = rule_faults(schema, {"items": [1, 0]})
    assert (fault.field, "failed rule: self > 0" in fault.message) == ("items[1]", True)


def test_a_definition_with_a_rule_that_cannot_be_read_is_refused() -> None:
    schema = {
        "type": "object",
        "properties": {"spec": {"type": "object", "x-kubernetes-validations": [{"rule": "self."}]}},
    }
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "Thing", "plural": "things"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "names": names, "versions": [version]},
    }
    with KubeServer(processes=False) as kube, pytest.raises(ApiError, match="compilation failed"):
        kube.create(definition)
