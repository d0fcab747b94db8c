"""Whatever is sent, the server answers as an API server does, and never with a bug of its own."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from basilica_testkube import KubeServer
from exploring import examples
from manifests import config_map, job, pod
from test_definitions import DEFINITION

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "a", "spec"]), inner, max_size=2)
    ),
    max_leaves=4,
)
MANIFESTS = {
    "/apis/batch/v1/namespaces/default/jobs": job("x", 2, backoffLimitPerIndex=1, podFailurePolicy={"rules": []}),
    "/api/v1/namespaces/default/pods": pod("x", tolerations=[{"key": "a"}], initContainers=[]),
    "/api/v1/namespaces/default/configmaps": config_map("x", a="b"),
    "/api/v1/namespaces": {"metadata": {"name": "x"}},
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions": DEFINITION,
    "/apis/example.org/v1/namespaces/default/gangs": {"metadata": {"name": "x"}, "spec": {"size": 1, "names": ["a"]}},
    "/apis/coordination.k8s.io/v1/namespaces/default/leases": {
        "metadata": {"name": "x"},
        "spec": {"holderIdentity": "me"},
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


def broken(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """`value` with something else at one place."""
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    inner = copy
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = new
    return copy


@pytest.fixture(scope="module")
def kube() -> Iterator[KubeServer]:
    with KubeServer(processes=False) as server:
        server.create(DEFINITION)
        yield server


@given(data=st.data())
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_broken_manifests_are_refused_or_taken(kube: KubeServer, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(MANIFESTS)))
    manifest = MANIFESTS[path]
    body = broken(manifest, data.draw(st.sampled_from(list(places(manifest)))), data.draw(JSON))
    answer = httpx2.post(kube.url + path, json=body)
    assert answer.status_code in (201, 400, 403, 404, 409, 422), (body, answer.text)
    if answer.status_code == 201:
        name = answer.json()["metadata"]["name"]
        if path.endswith("customresourcedefinitions") or name in ("default", "kube-system"):
            return
        deleted = httpx2.delete(f"{kube.url}{path}/{name}?propagationPolicy=Background")
        assert deleted.status_code == 200, deleted.text


@given(data=st.data())
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_patches_of_all_kinds_are_refused_or_taken(kube: KubeServer, data: st.DataObject) -> None:
    path = "/apis/batch/v1/namespaces/default/jobs"
    httpx2.post(kube.url + path, json=job("patched", 1))
    media = data.draw(
        st.sampled_from(["json-patch+json", "merge-patch+json", "strategic-merge-patch+json", "apply-patch+yaml"])
    )
    body = data.draw(JSON | st.fixed_dictionaries({"spec": JSON}) | st.fixed_dictionaries({"metadata": JSON}))
    if media == "json-patch+json":
        where = data.draw(st.sampled_from(["/spec/parallelism", "/metadata/labels", "/nowhere/at/all", "", "/spec"]))
        body = [
            {
                "op": data.draw(st.sampled_from(["add", "remove", "replace", "test", "odd"])),
                "path": where,
                "value": body,
            }
        ]
    url = f"{kube.url}{path}/patched?fieldManager=me"
    answer = httpx2.patch(url, content=json.dumps(body), headers={"Content-Type": f"application/{media}"})
    assert answer.status_code in (200, 201, 400, 403, 409, 415, 422), (media, body, answer.text)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/api/v2/pods", 404),
        ("GET", "/apis/nobody.org/v1/things", 404),
        ("GET", "/api/v1/namespaces/default/pods/a/b/c", 404),
        ("GET", "/api/v1/pods?labelSelector=a(b", 400),
        ("GET", "/api/v1/pods?limit=-1", 400),
        ("GET", "/api/v1/pods?resourceVersion=x", 400),
        ("GET", "/api/v1/pods?watch=1&resourceVersion=x", 400),
        ("POST", "/api/v1/pods", 405),
        ("PUT", "/api/v1/namespaces/default/pods", 405),
        ("POST", "/api/v1/namespaces/default/pods", 400),
        ("DELETE", "/api/v1/namespaces/default/pods/nobody", 404),
        ("DELETE", "/api/v1/namespaces/default/pods/nobody?propagationPolicy=Odd", 400),
        ("OPTIONS", "/api/v1/pods", 404),
    ],
)
def test_requests_that_mean_nothing(kube: KubeServer, method: str, path: str, status: int) -> None:
    answer = httpx2.request(method, kube.url + path)
    assert answer.status_code == status
    assert answer.json()["kind"] == "Status"
