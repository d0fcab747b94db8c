"""Volumes of the test cluster: folders that stand for mounts, and objects that are as strict as the real ones."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from basilica_testkube import KubeServer

Json = dict[str, Any]


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


def config_map(name: str, **more: Any) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, **more}


def pod(script: str, volumes: list[Json], mounts: list[Json], **more: Any) -> Json:
    container = {"name": "main", "image": "any", "command": ["sh", "-c", script], "volumeMounts": mounts, **more}
    spec = {"restartPolicy": "OnFailure", "containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def log_of(kube: KubeServer) -> str:
    return httpx2.get(f"{kube.url}/api/v1/namespaces/default/pods/pod/log").text


def ended(kube: KubeServer) -> bool:
    found = kube.get("pods", "pod")
    return found is not None and found["status"].get("phase") in ("Succeeded", "Failed")


def test_objects_are_mounted_as_files(kube: KubeServer) -> None:
    kube.create(config_map("texts", data={"a": "one"}, binaryData={"b": base64.b64encode(b"two").decode()}))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "word"}}
    kube.create(secret | {"data": {"c": base64.b64encode(b"three").decode()}})
    sources = [
        {"configMap": {"name": "texts", "items": [{"key": "a", "path": "deep/a"}, {"key": "b", "path": "b"}]}},
        {"configMap": {"name": "missing", "optional": True}},
        {"secret": {"name": "word"}},
    ]
    volumes = [{"name": "all", "projected": {"sources": sources}}, {"name": "one", "configMap": {"name": "texts"}}]
    mounts: list[Json] = [
        {"name": "all", "mountPath": "/mnt/all", "readOnly": True},
        {"name": "one", "mountPath": "/mnt/all/one"},
    ]
    script = 'cat "$ALL/deep/a" "$ALL/b" "$ALL/c" "$ONE/a"; ls "$ALL"; pwd'
    env = [{"name": "ALL", "value": "/mnt/all"}, {"name": "ONE", "value": "/mnt/all/one"}]
    kube.create(pod(script, volumes, mounts, env=env, workingDir="/mnt/all/deep"))
    kube.wait_for(lambda: ended(kube))
    told = log_of(kube)
    assert told.startswith("onetwothreeoneb\nc\ndeep\n/")
    assert told.endswith("/all/deep\n")


def test_an_empty_directory_outlives_the_container_and_is_the_pods_own(kube: KubeServer) -> None:
    script = 'if [ -e "$0" ]; then cat "$0"; else echo kept >"$0"; exit 1; fi'
    body = pod(script, [{"name": "data", "emptyDir": {}}], [{"name": "data", "mountPath": "/data"}])
    body["spec"]["containers"][0]["command"].append("/data/file")
    kube.create(body)
    kube.wait_for(lambda: ended(kube))
    assert kube.get("pods", "pod")["status"]["phase"] == "Succeeded"  # type: ignore[index]
    assert log_of(kube) == "kept\n"


def test_a_container_waits_for_its_volume(kube: KubeServer) -> None:
    volumes = [{"name": "late", "configMap": {"name": "late"}}]
    kube.create(pod('cat "$0"', volumes, [{"name": "late", "mountPath": "/late"}]))
    kube.wait_for(lambda: "late" in str((kube.get("pods", "pod") or {})["status"].get("containerStatuses")))
    [status] = kube.get("pods", "pod")["status"]["containerStatuses"]  # type: ignore[index]
    assert status["state"]["waiting"]["reason"] == "ContainerCreating"


def test_what_is_immutable_or_too_large_is_refused(kube: KubeServer) -> None:
    url = f"{kube.url}/api/v1/namespaces/default/configmaps"
    large = config_map("large", binaryData={"x": base64.b64encode(bytes((1 << 20) + 1)).decode()})
    assert httpx2.post(url, json=large).status_code == 422
    fits = config_map("fits", binaryData={"x": base64.b64encode(bytes(1 << 20)).decode()}, immutable=True)
    assert httpx2.post(url, json=fits).status_code == 201
    patch = {"headers": {"Content-Type": "application/merge-patch+json"}}
    for change in ({"data": {"a": "b"}}, {"binaryData": {"x": ""}}, {"immutable": False}):
        assert httpx2.patch(f"{url}/fits", json=change, **patch).status_code == 422, change  # type: ignore[arg-type]
    touched = httpx2.patch(f"{url}/fits", json={"metadata": {"annotations": {"a": "b"}}}, **patch)  # type: ignore[arg-type]
    assert touched.status_code == 200
    assert httpx2.post(url, json=config_map("bad", binaryData={"x": "?"})).status_code == 422


def test_a_list_of_metadata_holds_nothing_else(kube: KubeServer) -> None:
    kube.create(config_map("a", data={"x": "y"}))
    accept = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
    found = httpx2.get(f"{kube.url}/api/v1/namespaces/default/configmaps", headers=accept).json()
    assert found["kind"] == "PartialObjectMetadataList"
    assert [item.keys() for item in found["items"] if item["metadata"]["name"] == "a"] == [{"metadata": 0}.keys()]
