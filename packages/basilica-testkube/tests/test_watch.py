"""Watches: what they tell, and how they end."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from kubernetes import client, watch
from kubernetes.client import ApiException

from basilica_testkube import KubeServer
from manifests import config_map, pod

Json = dict[str, Any]


class Lines:
    """The events of one watch, as they come."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.iter_lines()

    def next(self) -> tuple[str, Json]:
        event = json.loads(next(self._lines))
        return event["type"], event["object"]

    def rest(self) -> list[tuple[str, Json]]:
        return [(event["type"], event["object"]) for event in map(json.loads, self._lines)]


@contextmanager
def watching(kube: KubeServer, resource: str = "configmaps", **query: Any) -> Iterator[Lines]:
    url = f"{kube.url}/api/v1/namespaces/default/{resource}"
    with httpx2.stream("GET", url, params={"watch": "true", **query}, timeout=20) as response:
        assert response.status_code == 200
        yield Lines(response)


def names(events: list[tuple[str, Json]]) -> list[tuple[str, str]]:
    return [(kind, obj["metadata"]["name"]) for kind, obj in events]


def version(kube: KubeServer) -> str:
    listed = httpx2.get(f"{kube.url}/api/v1/namespaces/default/configmaps").json()
    return str(listed["metadata"]["resourceVersion"])


def patch(kube: KubeServer, name: str, **body: Any) -> None:
    url = f"{kube.url}/api/v1/namespaces/default/configmaps/{name}"
    headers = {"Content-Type": "application/merge-patch+json"}
    httpx2.patch(url, content=json.dumps(body), headers=headers).raise_for_status()


def test_the_official_watch_sees_a_life(kube: KubeServer, core: client.CoreV1Api) -> None:
    kube.create(pod("a"))
    told = []
    for event in watch.Watch().stream(core.list_namespaced_pod, "default", timeout_seconds=20):
        told.append((event["type"], event["object"].status.phase))
        if told[-1] == ("MODIFIED", "Running") and told.count(told[-1]) == 1:
            kube.end_container("a")
        if event["object"].status.phase == "Succeeded" and event["type"] == "MODIFIED":
            core.delete_namespaced_pod("a", "default")
        if event["type"] == "DELETED":
            break
    assert told[0][0] == "ADDED"
    assert told[-1] == ("DELETED", "Succeeded")


def test_a_watch_goes_on_from_a_version(kube: KubeServer) -> None:
    kube.create(config_map("before"))
    since = version(kube)
    kube.create(config_map("after"))
    patch(kube, "before", data={"x": "1"})
    with watching(kube, resourceVersion=since, timeoutSeconds=1) as lines:
        assert names(lines.rest()) == [("ADDED", "after"), ("MODIFIED", "before")]


def test_a_watch_without_a_version_begins_with_what_is_there(kube: KubeServer) -> None:
    kube.create(config_map("a"))
    with watching(kube, timeoutSeconds=1) as lines:
        assert ("ADDED", "a") in names(lines.rest())


def test_an_object_enters_and_leaves_the_view_of_a_selector(kube: KubeServer) -> None:
    since = version(kube)
    kube.create(config_map("a"))
    patch(kube, "a", metadata={"labels": {"app": "x"}})
    patch(kube, "a", data={"k": "v"})
    patch(kube, "a", metadata={"labels": {"app": "y"}})
    with watching(kube, resourceVersion=since, timeoutSeconds=1, labelSelector="app=x") as lines:
        assert [kind for kind, _ in lines.rest()] == ["ADDED", "MODIFIED", "DELETED"]


def test_bookmarks_come_to_those_who_want_them(kube: KubeServer) -> None:
    kube.bookmark_every(0.05)
    since = version(kube)
    kube.create(pod("elsewhere"))  # moves the version, but not what is watched
    with watching(kube, resourceVersion=since, timeoutSeconds=10, allowWatchBookmarks="true") as lines:
        kind, obj = lines.next()
    assert kind == "BOOKMARK"
    assert int(obj["metadata"]["resourceVersion"]) > int(since)


def test_initial_events_end_with_a_bookmark(kube: KubeServer) -> None:
    query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
    kube.create(config_map("a"))
    with watching(kube, timeoutSeconds=10, **query) as lines:
        assert lines.next()[0] == "ADDED"
        kind, obj = lines.next()
    assert (kind, obj["metadata"]["annotations"]) == ("BOOKMARK", {"k8s.io/initial-events-end": "true"})


def test_a_version_that_is_forgotten_is_gone(kube: KubeServer) -> None:
    since = version(kube)
    kube.compact()
    with watching(kube, resourceVersion=since) as lines:
        kind, status = lines.next()
        assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")
        assert lines.rest() == []


def test_gone_can_also_be_the_answer_itself(kube: KubeServer, core: client.CoreV1Api) -> None:
    kube.fail("watch", "configmaps", status=410)
    with pytest.raises(ApiException) as refused:
        next(iter(watch.Watch().stream(core.list_namespaced_config_map, "default", resource_version="1000")))
    assert refused.value.status == 410


def test_history_is_as_long_as_it_was_told() -> None:
    with KubeServer(processes=False, history=3) as kube:
        since = version(kube)
        for n in range(12):
            kube.create(config_map(f"c{n}"))
        with watching(kube, resourceVersion=since) as lines:
            assert lines.next()[1]["code"] == 410


def test_a_version_from_the_future_is_refused(kube: KubeServer) -> None:
    url = f"{kube.url}/api/v1/namespaces/default/configmaps?resourceVersion=999999"
    answer = httpx2.get(url)
    assert (answer.status_code, answer.headers["Retry-After"]) == (504, "1")


def test_an_open_watch_lives_through_a_compaction(kube: KubeServer) -> None:
    with watching(kube, resourceVersion=version(kube)) as lines:
        kube.compact()
        kube.create(config_map("after"))
        assert names([lines.next()]) == [("ADDED", "after")]


def test_watches_can_be_cut_and_told_that_they_are_too_old(kube: KubeServer) -> None:
    with watching(kube, resourceVersion=version(kube)) as lines:
        kube.wait_for(lambda: kube.expire_watches("configmaps"))
        assert lines.next()[1]["code"] == 410
    with watching(kube, resourceVersion=version(kube)) as lines:
        kube.wait_for(lambda: kube.cut_watches("configmaps"))
        with pytest.raises(httpx2.TransportError):
            lines.rest()


def test_a_client_that_leaves_is_forgotten(kube: KubeServer) -> None:
    with watching(kube, resourceVersion=version(kube)):
        pass
    kube.wait_for(lambda: kube.cut_watches() == 0)


def test_many_watches_are_told_the_same(kube: KubeServer) -> None:
    since = version(kube)
    told: list[list[tuple[str, str]]] = []

    def look() -> None:
        with watching(kube, resourceVersion=since, timeoutSeconds=2) as lines:
            told.append(names(lines.rest()))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for n in range(20):
        kube.create(config_map(f"c{n}"))
    for thread in threads:
        thread.join()
    assert told == [[("ADDED", f"c{n}") for n in range(20)]] * 8
