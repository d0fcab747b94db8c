"""Namespaces that are deleted, as Kubernetes 1.34 deletes them, and pods that wait to be let in."""

import json

import pytest
from kubernetes import client
from kubernetes.client import ApiException

from basilica_testkube import KubeServer
from manifests import config_map, pod


def terminating(kube: KubeServer, core: client.CoreV1Api, name: str, *held: str) -> None:
    core.create_namespace({"metadata": {"name": name}})
    core.create_namespaced_config_map(name, config_map("a"))
    body = pod("held")
    body["metadata"]["finalizers"] = list(held)
    core.create_namespaced_pod(name, body)
    core.delete_namespace(name)
    kube.wait_for(
        lambda: (
            (kube.get("pods", "held", name) or {"metadata": {"deletionTimestamp": ""}})["metadata"].keys()
            >= {"deletionTimestamp"}
        )
    )


def test_nothing_can_be_made_in_a_namespace_that_is_being_deleted(kube: KubeServer, core: client.CoreV1Api) -> None:
    terminating(kube, core, "going", "example.com/held")
    with pytest.raises(ApiException) as refused:
        core.create_namespaced_pod("going", pod("late"))
    body = json.loads(refused.value.body)
    assert (refused.value.status, body["reason"]) == (403, "Forbidden")
    assert body["message"].endswith("unable to create new content in namespace going because it is being terminated")
    assert [cause["reason"] for cause in body["details"]["causes"]] == ["NamespaceTerminating"]


def test_the_pods_of_a_namespace_go_first_and_the_rest_waits_for_them(kube: KubeServer, core: client.CoreV1Api) -> None:
    terminating(kube, core, "ordered", "example.com/held")
    kube.advance(60)
    found = core.read_namespaced_config_map("a", "ordered")
    assert found.metadata.deletion_timestamp is None
    core.patch_namespaced_pod("held", "ordered", {"metadata": {"finalizers": None}})
    kube.wait_for(lambda: kube.get("namespaces", "ordered") is None)


def test_a_pod_with_a_gate_says_so_and_is_placed_without_it(kube: KubeServer, core: client.CoreV1Api) -> None:
    body = pod("gated")
    body["spec"]["schedulingGates"] = [{"name": "example.com/queue"}]
    core.create_namespaced_pod("default", body)

    def placed() -> dict[str, str]:
        conditions = (kube.get("pods", "gated") or {})["status"].get("conditions") or []
        return next((each for each in conditions if each["type"] == "PodScheduled"), {})

    assert kube.wait_for(placed)["reason"] == "SchedulingGated"
    core.patch_namespaced_pod("gated", "default", [{"op": "remove", "path": "/spec/schedulingGates"}])
    kube.wait_for(lambda: placed()["status"] == "True")


def test_a_collection_is_deleted_by_its_labels_and_fields(kube: KubeServer, core: client.CoreV1Api) -> None:
    for name, mine in (("a", "yes"), ("b", "no")):
        body = pod(name)
        body["metadata"]["labels"] = {"mine": mine}
        core.create_namespaced_pod("default", body)
    core.delete_collection_namespaced_pod(
        "default", label_selector="mine=yes", field_selector="status.phase!=Succeeded,status.phase!=Failed"
    )
    kube.wait_for(lambda: [found["metadata"]["name"] for found in kube.objects("pods")] == ["b"])
