"""Where pods go, and what becomes of them when the place is gone."""

from typing import Any

import httpx2

from basilica_testkube import KubeServer, NodeSpec
from manifests import job, pod

Json = dict[str, Any]
GPU = {"nvidia.com/gpu": "1"}


def with_gpu(body: Json, count: int = 1) -> Json:
    body["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": str(count)}}
    return body


def found(kube: KubeServer, name: str) -> Json:
    pod = kube.get("pods", name)
    assert pod is not None
    return pod


def condition(pod: Json, name: str) -> Json:
    return next((c for c in pod["status"].get("conditions", []) if c["type"] == name), {})


def test_pods_go_where_selectors_taints_and_resources_allow() -> None:
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    nodes = [
        NodeSpec("plain"),
        NodeSpec("gpu", labels={"model": "h100"}, capacity={"nvidia.com/gpu": "2"}, taints=(taint,)),
    ]
    with KubeServer(processes=False, nodes=nodes, speed=0) as kube:
        tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        kube.create(pod("anywhere"))
        kube.create(pod("intolerant", nodeSelector={"model": "h100"}))
        for n in range(3):
            kube.create(with_gpu(pod(f"g{n}", tolerations=tolerations)))
        kube.advance(1)
        assert found(kube, "anywhere")["spec"]["nodeName"] == "plain"
        assert [found(kube, f"g{n}")["spec"].get("nodeName") for n in range(3)] == ["gpu", "gpu", None]
        for name, why in (("g2", "Insufficient nvidia.com/gpu"), ("intolerant", "untolerated taint")):
            waiting = condition(found(kube, name), "PodScheduled")
            assert (waiting["status"], waiting["reason"]) == ("False", "Unschedulable")
            assert why in waiting["message"]
        told = {(e["involvedObject"]["name"], e["reason"]) for e in kube.objects("events")}
        assert ("g2", "FailedScheduling") in told
        kube.end_container("g0")
        kube.advance(1)
        assert found(kube, "g2")["spec"]["nodeName"] == "gpu"  # a place became free


def test_a_new_node_takes_what_waits() -> None:
    with KubeServer(processes=False, nodes=[], speed=0) as kube:
        kube.create(pod("a"))
        kube.advance(1)
        assert "no nodes" in condition(found(kube, "a"), "PodScheduled")["message"]
        kube.add_node(NodeSpec("late"))
        kube.advance(1)
        assert found(kube, "a")["status"]["phase"] == "Running"


def test_a_lost_node_is_noticed_late_and_its_pods_hang() -> None:
    with KubeServer(processes=False, nodes=[NodeSpec("a"), NodeSpec("b")], speed=0) as kube:
        kube.create(pod("p", nodeSelector={"kubernetes.io/hostname": "a"}))
        kube.advance(1)
        kube.lose_node("a")
        kube.advance(30)
        assert condition(found(kube, "p"), "Ready")["status"] == "True"  # nobody knows yet
        answer = httpx2.get(f"{kube.url}/api/v1/namespaces/default/pods/p/log")
        assert answer.status_code == 500
        kube.advance(15)
        assert condition(kube.get("nodes", "a") or {}, "Ready")["status"] == "Unknown"
        assert condition(found(kube, "p"), "Ready")["status"] == "False"
        assert "deletionTimestamp" not in found(kube, "p")["metadata"]
        kube.advance(310)
        assert "deletionTimestamp" in found(kube, "p")["metadata"]
        assert condition(found(kube, "p"), "DisruptionTarget")["reason"] == "DeletionByTaintManager"
        kube.advance(3600)
        assert found(kube, "p")["status"]["phase"] == "Running"  # terminating for ever: there is nobody to end it


def test_pods_of_a_removed_node_go_and_an_index_is_replaced_elsewhere() -> None:
    policy = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}
    with KubeServer(processes=False, nodes=[NodeSpec("a"), NodeSpec("b")], speed=0) as kube:
        kube.create(job("gang", 1, backoffLimitPerIndex=0, podFailurePolicy=policy))
        kube.advance(1)
        (first,) = kube.pods("gang")
        kube.lose_node(first["spec"]["nodeName"])
        httpx2.delete(f"{kube.url}/api/v1/nodes/{first['spec']['nodeName']}").raise_for_status()
        kube.advance(15)
        (second,) = kube.pods("gang")
        assert second["spec"]["nodeName"] != first["spec"]["nodeName"]
        assert second["status"]["phase"] == "Running"


def test_a_node_that_comes_back_says_that_its_containers_are_over() -> None:
    with KubeServer(processes=False, speed=0) as kube:
        kube.create(pod("p"))
        kube.advance(1)
        kube.lose_node("node-0")
        kube.advance(400)
        kube.find_node("node-0")
        kube.advance(1)
        assert kube.get("pods", "p") is None
        kube.create(pod("q"))
        kube.advance(1)
        assert found(kube, "q")["status"]["phase"] == "Running"
