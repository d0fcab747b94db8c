"""Custom resources: defined, validated, and gone with their definition."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client import ApiException

from basilica_testkube import KubeServer

GROUP = ("example.org", "v1", "default", "gangs")
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "gangs.example.org"},
    "spec": {
        "group": "example.org",
        "scope": "Namespaced",
        "names": {"plural": "gangs", "kind": "Gang", "shortNames": ["gg"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["size"],
                                "properties": {
                                    "size": {"type": "integer", "minimum": 1},
                                    "mode": {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
                                    "port": {"x-kubernetes-int-or-string": True},
                                    "note": {"type": "string", "nullable": True},
                                    "names": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}},
                                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                                },
                            },
                            "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
                        },
                    }
                },
            }
        ],
    },
}


def gang(name: str = "a", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "example.org/v1", "kind": "Gang", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def custom(kube: KubeServer) -> Iterator[client.CustomObjectsApi]:
    with kube.api_client() as api:
        client.ApiextensionsV1Api(api).create_custom_resource_definition(DEFINITION)
        yield client.CustomObjectsApi(api)


def test_a_definition_is_established(kube: KubeServer, custom: client.CustomObjectsApi) -> None:
    def established() -> bool:
        found = kube.get("customresourcedefinitions", "gangs.example.org") or {}
        conditions = found.get("status", {}).get("conditions", [])
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    kube.wait_for(established)


def test_an_object_is_pruned_and_gets_its_defaults(custom: client.CustomObjectsApi) -> None:
    made = custom.create_namespaced_custom_object(*GROUP, gang(size=2, colour="blue", port="80%", free={"a": [1]}))
    assert made["spec"] == {"size": 2, "port": "80%", "free": {"a": [1]}, "mode": "fast"}
    assert made["metadata"]["generation"] == 1


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "spec.size"),
        ({"size": 0}, "spec.size"),
        ({"size": "2"}, "spec.size"),
        ({"size": 1, "mode": "odd"}, "spec.mode"),
        ({"size": 1, "names": ["ok", "NO"]}, "spec.names[1]"),
        ({"size": None}, "spec.size"),
    ],
)
def test_what_the_schema_forbids_is_refused(custom: client.CustomObjectsApi, spec: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiException) as refused:
        custom.create_namespaced_custom_object(*GROUP, gang(**spec))
    assert refused.value.status == 422
    assert f'"{field}"' in refused.value.body


def test_the_status_is_apart_and_does_not_count_as_a_wish(custom: client.CustomObjectsApi) -> None:
    made = custom.create_namespaced_custom_object(*GROUP, gang(size=1) | {"status": {"phase": "early"}})
    assert "status" not in made
    told = custom.patch_namespaced_custom_object_status(*GROUP, "a", {"status": {"phase": "up"}, "spec": {"size": 9}})
    assert (told["status"], told["spec"]["size"], told["metadata"]["generation"]) == ({"phase": "up"}, 1, 1)
    wished = custom.patch_namespaced_custom_object(*GROUP, "a", {"spec": {"size": 2}})
    assert (wished["metadata"]["generation"], wished["status"]) == (2, {"phase": "up"})


def test_an_update_needs_the_version_that_it_is_about(custom: client.CustomObjectsApi) -> None:
    made = custom.create_namespaced_custom_object(*GROUP, gang(size=1))
    with pytest.raises(ApiException) as refused:
        custom.replace_namespaced_custom_object(*GROUP, "a", gang(size=2))
    assert refused.value.status == 422
    custom.replace_namespaced_custom_object(*GROUP, "a", made | {"spec": {"size": 2}})
    with pytest.raises(ApiException) as refused:
        custom.replace_namespaced_custom_object(*GROUP, "a", made | {"spec": {"size": 3}})
    assert refused.value.status == 409


def test_objects_go_with_their_definition(kube: KubeServer, custom: client.CustomObjectsApi) -> None:
    custom.create_namespaced_custom_object(*GROUP, gang(size=1))
    with kube.api_client() as api:
        client.ApiextensionsV1Api(api).delete_custom_resource_definition("gangs.example.org")
    with pytest.raises(ApiException) as refused:
        custom.list_namespaced_custom_object(*GROUP)
    assert refused.value.status == 404


def test_a_definition_without_types_is_no_structural_schema(kube: KubeServer) -> None:
    versions = [
        {
            "name": "v1",
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {}}}},
        }
    ]
    bad = DEFINITION | {"spec": {**DEFINITION["spec"], "versions": versions}}  # type: ignore[dict-item]
    with kube.api_client() as api, pytest.raises(ApiException) as refused:
        client.ApiextensionsV1Api(api).create_custom_resource_definition(bad)
    assert refused.value.status == 422
