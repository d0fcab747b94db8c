"""Objects as the official client writes and reads them."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kubernetes import client, config, dynamic
from kubernetes.client import ApiException

from basilica_testkube import KubeServer, Timing
from manifests import config_map, job, owned, pod


def status_of(error: pytest.ExceptionInfo[ApiException]) -> tuple[int, str]:
    return error.value.status, json.loads(error.value.body)["reason"]


def test_an_object_has_an_identity_and_versions(core: client.CoreV1Api) -> None:
    made = core.create_namespaced_config_map("default", config_map("a", x="1"))
    assert made.metadata.uid
    assert made.metadata.creation_timestamp is not None
    changed = core.patch_namespaced_config_map("a", "default", {"data": {"y": "2"}})
    assert changed.data == {"x": "1", "y": "2"}
    assert int(changed.metadata.resource_version) > int(made.metadata.resource_version)
    again = core.patch_namespaced_config_map("a", "default", {"data": {"y": "2"}})
    assert again.metadata.resource_version == changed.metadata.resource_version  # nothing changed, nothing written


def test_what_is_there_cannot_be_created_again(core: client.CoreV1Api) -> None:
    core.create_namespaced_config_map("default", config_map("a"))
    with pytest.raises(ApiException) as refused:
        core.create_namespaced_config_map("default", config_map("a"))
    assert status_of(refused) == (409, "AlreadyExists")


def test_an_update_of_an_older_version_is_a_conflict(core: client.CoreV1Api) -> None:
    old = core.create_namespaced_config_map("default", config_map("a"))
    core.patch_namespaced_config_map("a", "default", {"data": {"x": "1"}})
    with pytest.raises(ApiException) as refused:
        core.replace_namespaced_config_map("a", "default", old)
    assert status_of(refused) == (409, "Conflict")


def test_what_is_not_there_is_not_found(core: client.CoreV1Api) -> None:
    with pytest.raises(ApiException) as refused:
        core.read_namespaced_pod("nobody", "default")
    assert status_of(refused) == (404, "NotFound")
    with pytest.raises(ApiException) as refused:
        core.create_namespaced_config_map("nowhere", config_map("a"))
    assert status_of(refused) == (404, "NotFound")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"completionMode": "indexed"}, "spec.completionMode"),
        ({"parallelism": -1}, "spec.parallelism"),
        ({"backoffLimitPerIndex": 1, "completionMode": "NonIndexed"}, "spec.backoffLimitPerIndex"),
        ({"maxFailedIndexes": 1}, "spec.backoffLimitPerIndex"),
        ({"podFailurePolicy": {"rules": [{"action": "Ignore"}]}}, "spec.podFailurePolicy.rules[0]"),
    ],
)
def test_an_invalid_job_is_refused_with_the_field(batch: client.BatchV1Api, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiException) as refused:
        batch.create_namespaced_job("default", job("bad", 2, **change))
    assert status_of(refused) == (422, "Invalid")
    assert field in {cause["field"] for cause in json.loads(refused.value.body)["details"]["causes"]}


def test_a_job_needs_a_restart_policy_and_a_container_an_image(batch: client.BatchV1Api) -> None:
    bad = job("bad", 2, pod_spec={"restartPolicy": "Always", "containers": [{"name": "a"}]})
    with pytest.raises(ApiException) as refused:
        batch.create_namespaced_job("default", bad)
    fields = {cause["field"] for cause in json.loads(refused.value.body)["details"]["causes"]}
    assert fields == {"spec.template.spec.restartPolicy", "spec.template.spec.containers[0].image"}


def test_a_value_of_the_wrong_type_cannot_be_decoded(batch: client.BatchV1Api) -> None:
    with pytest.raises(ApiException) as refused:
        batch.create_namespaced_job("default", job("bad", 2, backoffLimit="none"))
    assert status_of(refused) == (400, "BadRequest")
    assert "spec.backoffLimit" in refused.value.body


def test_a_number_of_gpus_must_be_the_same_in_requests_and_limits(core: client.CoreV1Api) -> None:
    bad = pod("bad")
    resources = {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}
    bad["spec"]["containers"][0]["resources"] = resources
    with pytest.raises(ApiException) as refused:
        core.create_namespaced_pod("default", bad)
    assert status_of(refused) == (422, "Invalid")


@pytest.mark.parametrize(("validation", "status"), [("Strict", 400), ("Warn", 201), ("Ignore", 201)])
def test_unknown_fields_are_refused_warned_of_or_dropped(kube: KubeServer, validation: str, status: int) -> None:
    body = config_map("a") | {"colour": "blue"}
    url = f"{kube.url}/api/v1/namespaces/default/configmaps?fieldValidation={validation}"
    answer = httpx2.post(url, json=body)
    assert answer.status_code == status
    assert ("Warning" in answer.headers) is (validation == "Warn")
    assert status == 400 or "colour" not in answer.json()


def test_the_status_is_written_through_its_subresource_alone(core: client.CoreV1Api) -> None:
    core.create_namespaced_pod("default", pod("a") | {"status": {"phase": "Running"}})
    assert core.read_namespaced_pod("a", "default").status.phase == "Pending"
    patched = core.patch_namespaced_pod_status("a", "default", {"status": {"message": "hello"}})
    assert patched.status.message == "hello"
    assert core.patch_namespaced_pod("a", "default", {"status": {"message": "no"}}).status.message == "hello"


def test_generations_count_changes_of_the_wish(batch: client.BatchV1Api) -> None:
    made = batch.create_namespaced_job("default", job("a", 2))
    assert made.metadata.generation == 1
    labelled = batch.patch_namespaced_job("a", "default", {"metadata": {"labels": {"x": "y"}}})
    assert labelled.metadata.generation == 1
    resized = batch.patch_namespaced_job("a", "default", {"spec": {"completions": 3, "parallelism": 3}})
    assert resized.metadata.generation == 2


def test_what_a_job_may_not_change(batch: client.BatchV1Api) -> None:
    batch.create_namespaced_job("default", job("a", 2))
    for change in (
        {"completions": 3},
        {"completionMode": "NonIndexed"},
        {"template": {"spec": {"terminationGracePeriodSeconds": 1}}},
    ):
        with pytest.raises(ApiException) as refused:
            batch.patch_namespaced_job("a", "default", {"spec": change})
        assert status_of(refused) == (422, "Invalid")


def test_a_strategic_patch_merges_lists_by_their_key(core: client.CoreV1Api) -> None:
    body = pod("a")
    body["spec"]["containers"].append({"name": "second", "image": "two"})
    core.create_namespaced_pod("default", body)
    change = {"spec": {"containers": [{"name": "second", "image": "three"}]}}
    images = {c.name: c.image for c in core.patch_namespaced_pod("a", "default", change).spec.containers}
    assert images == {"main": "any", "second": "three"}


def test_a_json_patch_tests_before_it_changes(kube: KubeServer) -> None:
    kube.create(config_map("a", x="1"))
    url = f"{kube.url}/api/v1/namespaces/default/configmaps/a"
    headers = {"Content-Type": "application/json-patch+json"}
    test = {"op": "test", "path": "/data/x", "value": "2"}
    change = {"op": "replace", "path": "/data/x", "value": "3"}
    assert httpx2.patch(url, content=json.dumps([test, change]), headers=headers).status_code == 422
    test["value"] = "1"
    assert httpx2.patch(url, content=json.dumps([test, change]), headers=headers).json()["data"] == {"x": "3"}


def apply(kube: KubeServer, body: dict[str, Any], manager: str, force: bool = False) -> httpx2.Response:
    url = f"{kube.url}/api/v1/namespaces/default/configmaps/{body['metadata']['name']}"
    query = {"fieldManager": manager, "force": str(force).lower()}
    headers = {"Content-Type": "application/apply-patch+yaml"}
    return httpx2.patch(url, params=query, content=json.dumps(body), headers=headers)


def test_an_apply_takes_back_what_its_manager_says_no_more(kube: KubeServer) -> None:
    assert apply(kube, config_map("a", x="1", y="2"), "me").status_code == 201
    assert apply(kube, config_map("a", z="9"), "you").json()["data"] == {"x": "1", "y": "2", "z": "9"}
    last = apply(kube, config_map("a", x="1"), "me")
    assert last.json()["data"] == {"x": "1", "z": "9"}
    assert {entry["manager"] for entry in last.json()["metadata"]["managedFields"]} == {"me", "you"}


def test_an_apply_over_another_manager_needs_force(kube: KubeServer) -> None:
    apply(kube, config_map("a", x="1"), "me")
    assert apply(kube, config_map("a", x="2"), "you").status_code == 409
    assert apply(kube, config_map("a", x="2"), "you", force=True).json()["data"] == {"x": "2"}
    assert apply(kube, config_map("b"), "").status_code == 400


def test_selectors_choose(kube: KubeServer, core: client.CoreV1Api) -> None:
    for name, labels in (("a", {"app": "x", "tier": "1"}), ("b", {"app": "y"}), ("c", {})):
        body = config_map(name)
        body["metadata"]["labels"] = labels
        kube.create(body)

    def names(**selectors: str) -> list[str]:
        return [item.metadata.name for item in core.list_namespaced_config_map("default", **selectors).items]

    assert names(label_selector="app=x") == ["a"]
    assert names(label_selector="app in (x,y),!tier") == ["b"]
    assert names(label_selector="app!=x") == ["b", "c"]
    assert names(field_selector="metadata.name=c") == ["c"]
    with pytest.raises(ApiException) as refused:
        names(field_selector="data.x=1")
    assert refused.value.status == 400


def test_pods_are_found_by_phase_and_node(kube: KubeServer, core: client.CoreV1Api) -> None:
    kube.create(pod("a"))
    kube.create(pod("b", nodeSelector={"gpu": "yes"}))
    kube.wait_for(lambda: core.list_namespaced_pod("default", field_selector="status.phase=Running").items)
    assert [p.metadata.name for p in core.list_pod_for_all_namespaces(field_selector="spec.nodeName=node-0").items] == [
        "a"
    ]


def test_a_list_in_pages_is_one_snapshot(kube: KubeServer, core: client.CoreV1Api) -> None:
    for n in range(5):
        kube.create(pod(f"p{n}"))
    first = core.list_namespaced_pod("default", limit=2)
    assert first.metadata.remaining_item_count == 3
    kube.create(pod("p9"))
    second = core.list_namespaced_pod("default", limit=2, _continue=first.metadata._continue)
    last = core.list_namespaced_pod("default", limit=2, _continue=second.metadata._continue)
    assert [p.metadata.name for p in (*first.items, *second.items, *last.items)] == [f"p{n}" for n in range(5)]
    assert last.metadata._continue is None


def test_a_page_of_a_forgotten_list_is_gone(kube: KubeServer, core: client.CoreV1Api) -> None:
    for n in range(3):
        kube.create(pod(f"p{n}"))
    first = core.list_namespaced_pod("default", limit=1)
    kube.compact()
    with pytest.raises(ApiException) as refused:
        core.list_namespaced_pod("default", limit=1, _continue=first.metadata._continue)
    assert status_of(refused) == (410, "Expired")


def test_a_finalizer_holds_an_object(core: client.CoreV1Api) -> None:
    body = config_map("a")
    body["metadata"]["finalizers"] = ["basilica.dev/hold"]
    core.create_namespaced_config_map("default", body)
    core.delete_namespaced_config_map("a", "default")
    held = core.read_namespaced_config_map("a", "default")
    assert held.metadata.deletion_timestamp is not None
    more = {"metadata": {"finalizers": ["basilica.dev/hold", "basilica.dev/late"]}}
    with pytest.raises(ApiException) as refused:
        core.patch_namespaced_config_map("a", "default", more)
    assert refused.value.status == 403
    core.patch_namespaced_config_map("a", "default", [{"op": "remove", "path": "/metadata/finalizers"}])
    with pytest.raises(ApiException) as refused:
        core.read_namespaced_config_map("a", "default")
    assert refused.value.status == 404


def test_a_deletion_of_another_object_by_that_name_is_refused(core: client.CoreV1Api) -> None:
    core.create_namespaced_config_map("default", config_map("a"))
    body = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="another"))
    with pytest.raises(ApiException) as refused:
        core.delete_namespaced_config_map("a", "default", body=body)
    assert status_of(refused) == (409, "Conflict")


def test_two_deletions_at_once_meet_with_a_conflict() -> None:
    with KubeServer(processes=False, timing=Timing(storage=0.2)) as kube:
        kube.create(job("a", 1))
        url = f"{kube.url}/apis/batch/v1/namespaces/default/jobs/a?propagationPolicy=Background"
        statuses: list[int] = []
        threads = [threading.Thread(target=lambda: statuses.append(httpx2.delete(url).status_code)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200, 409]
        assert httpx2.delete(url).status_code == 404


def test_dependents_go_with_their_last_owner(kube: KubeServer) -> None:
    first, second = kube.create(config_map("first")), kube.create(config_map("second"))
    kube.create(owned(config_map("child"), first))
    both = owned(config_map("both"), first)
    both["metadata"]["ownerReferences"] += owned(config_map("x"), second)["metadata"]["ownerReferences"]
    kube.create(both)
    with kube.api_client() as api:
        client.CoreV1Api(api).delete_namespaced_config_map("first", "default")
    kube.wait_for(lambda: kube.get("configmaps", "child") is None)
    kube.wait_for(lambda: len(kube.get("configmaps", "both")["metadata"]["ownerReferences"]) == 1)  # type: ignore[index]


def test_what_is_born_after_its_owner_died_is_collected(kube: KubeServer) -> None:
    owner = kube.create(config_map("owner"))
    with kube.api_client() as api:
        client.CoreV1Api(api).delete_namespaced_config_map("owner", "default")
    kube.create(owned(config_map("late"), owner))
    kube.wait_for(lambda: kube.get("configmaps", "late") is None)


def test_foreground_deletion_waits_for_dependents_that_block(kube: KubeServer, core: client.CoreV1Api) -> None:
    owner = kube.create(config_map("owner"))
    child = owned(config_map("child"), owner, blocks=True)
    child["metadata"]["finalizers"] = ["basilica.dev/hold"]
    kube.create(child)
    core.delete_namespaced_config_map("owner", "default", propagation_policy="Foreground")
    kube.wait_for(lambda: "deletionTimestamp" in kube.get("configmaps", "child")["metadata"])  # type: ignore[index]
    assert kube.get("configmaps", "owner")["metadata"]["finalizers"] == ["foregroundDeletion"]  # type: ignore[index]
    core.patch_namespaced_config_map("child", "default", {"metadata": {"finalizers": None}})
    kube.wait_for(lambda: kube.get("configmaps", "owner") is None)


@pytest.mark.parametrize(("propagation", "goes"), [("Foreground", True), ("Background", False)])
def test_a_finalizer_of_the_owner_holds_its_dependents_only_in_the_background(
    kube: KubeServer, core: client.CoreV1Api, propagation: str, goes: bool
) -> None:
    body = config_map("owner")
    body["metadata"]["finalizers"] = ["basilica.dev/stop"]
    kube.create(owned(config_map("child"), kube.create(body)))
    core.delete_namespaced_config_map("owner", "default", propagation_policy=propagation)
    kube.advance(10)
    assert (kube.get("configmaps", "child") is None) is goes
    assert kube.get("configmaps", "owner") is not None
    core.patch_namespaced_config_map("owner", "default", {"metadata": {"finalizers": None}})
    kube.wait_for(lambda: kube.get("configmaps", "child") is None and kube.get("configmaps", "owner") is None)


def test_orphans_stay(kube: KubeServer, core: client.CoreV1Api) -> None:
    owner = kube.create(config_map("owner"))
    kube.create(owned(config_map("child"), owner))
    core.delete_namespaced_config_map("owner", "default", propagation_policy="Orphan")
    kube.wait_for(lambda: kube.get("configmaps", "owner") is None)
    assert "ownerReferences" not in kube.get("configmaps", "child")["metadata"]  # type: ignore[index]


def test_a_namespace_goes_with_all_that_is_in_it(kube: KubeServer, core: client.CoreV1Api) -> None:
    core.create_namespace({"metadata": {"name": "team"}})
    kube.create(config_map("a"), namespace="team")
    kube.create(pod("p"), namespace="team")
    kube.wait_for(lambda: kube.get("pods", "p", "team")["status"]["phase"] == "Running")  # type: ignore[index]
    core.delete_namespace("team")
    with pytest.raises(ApiException) as refused:
        core.create_namespaced_config_map("team", config_map("late"))
    assert refused.value.status == 403
    kube.wait_for(lambda: kube.get("namespaces", "team") is None)
    assert kube.objects("pods", "team") == []


def test_a_kubeconfig_and_the_dynamic_client_work(kube: KubeServer, tmp_path: Path) -> None:
    path = kube.kubeconfig(tmp_path / "config")
    with config.new_client_from_config(str(path)) as api:
        found = dynamic.DynamicClient(api, cache_file=str(tmp_path / "cache"))
        jobs = found.resources.get(api_version="batch/v1", kind="Job")
        jobs.create(job("a", 1), namespace="default")
        assert [item.metadata.name for item in jobs.get(namespace="default").items] == ["a"]
        assert client.VersionApi(api).get_code().git_version.startswith("v1.")


def test_requests_are_counted_by_verb_and_resource(kube: KubeServer, core: client.CoreV1Api) -> None:
    before = kube.requests.copy()
    core.list_namespaced_pod("default")
    core.list_namespaced_pod("default")
    core.create_namespaced_pod("default", pod("a"))
    asked = kube.requests.since(before)
    assert (asked["list", "pods"], asked["create", "pods"], asked.total) == (2, 1, 3)


def test_faults_strike_as_often_as_they_are_told(kube: KubeServer) -> None:
    url = f"{kube.url}/api/v1/pods"
    kube.fail("list", "pods", status=429, times=1, retry_after=3)
    refused = httpx2.get(url)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "3")
    assert httpx2.get(url).status_code == 200
    kube.fail("*", "*", status=0)
    with pytest.raises(httpx2.TransportError):
        httpx2.get(url)
    assert httpx2.get(url).status_code == 200
    with kube.outage(), pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    assert httpx2.get(url).status_code == 200
