"""The EKS executor when Kubernetes makes no pods, or says nothing at all: what it is told, and that it ends in time."""

import logging
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from basilica.executors import EKSExecutor, ReplicaHandle
from basilica.kube.manifests.refused import ASK_EVERY_S, PODS_WITHIN_S, AwaitedPods, last_refusal
from basilica.testing.executor_contract import SECONDS, until
from basilica_testkube import KubeServer
from tests.executors.test_eks import Collecting, Gang, make_executor
from tests.executors.test_eks_injected import Batch, Core, status

REFUSED = "exceeded quota: small"


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    monkeypatch.setattr("basilica.kube.manifests.refused.PODS_WITHIN_S", 0.3)
    monkeypatch.setattr("basilica.executors.eks.follow.READ_JOB_SECONDS", 1.0)
    with KubeServer(processes=False) as server:
        yield server


def allow_pods(kube: KubeServer, number: int) -> None:
    kube.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "small"},
            "spec": {"hard": {"pods": str(number)}},
        }
    )


def lift_quota(kube: KubeServer) -> None:
    from kubernetes import client

    with kube.api_client() as api:
        # As it comes: newer clients insist on the deleted object, and the test cluster answers with a Status.
        client.CoreV1Api(api).delete_namespaced_resource_quota("small", "default", _preload_content=False)


def test_a_gang_that_gets_too_few_pods_says_why(kube: KubeServer, caplog: pytest.LogCaptureFixture) -> None:
    allow_pods(kube, 2)
    gang = Gang(kube, 4)
    with caplog.at_level(logging.WARNING, "basilica"):
        results = gang.executor.collect(gang.handles, timeout=3)
    assert [r["status"] for r in results] == ["running", "running", "pending", "pending"]
    assert results[0]["error"] == "still running after 3 s"
    for result in results[2:]:
        assert (result["error"] or "").startswith("still pending after 3 s: Kubernetes refuses its pod: ")
        assert REFUSED in (result["error"] or "")
    assert [record for record in caplog.records if REFUSED in record.getMessage() and "2 ranks" in record.getMessage()]
    assert len(caplog.records) == 1  # told once, while it stays the same
    assert gang.executor.stream_logs(gang.handles[3]).startswith("<rank 3: job not found / no pods yet: exceeded quota")


def test_a_rank_that_had_a_pod_was_not_refused(kube: KubeServer) -> None:
    allow_pods(kube, 1)
    executor = make_executor(kube.url)
    handles = executor.launch_replicas(2, "any.module:main", {}, timeout=2)
    executor.collect(handles, timeout=SECONDS)
    kube.wait_for(lambda: not kube.pods())
    assert executor.stream_logs(handles[0]) == "<rank 0: job not found / no pods yet>"
    assert REFUSED in executor.stream_logs(handles[1])


def test_a_gang_that_gets_its_pods_at_last_has_nothing_to_complain_of(kube: KubeServer) -> None:
    allow_pods(kube, 1)
    gang = Gang(kube, 2)
    collecting = gang.collecting()
    kube.wait_for(lambda: kube.requests["list", "events"])
    lift_quota(kube)
    for name in gang.up().values():
        kube.end_container(name)
    assert [(r["status"], r["error"]) for r in collecting.done()] == [("succeeded", None)] * 2


@pytest.mark.parametrize("later", [False, True])
def test_the_end_of_a_gang_that_never_had_pods_is_explained(kube: KubeServer, later: bool) -> None:
    allow_pods(kube, 0)
    executor = make_executor(kube.url)
    handles = executor.launch_replicas(2, "any.module:main", {}, timeout=2)
    if later:  # by another process, after it is all over
        until(lambda: executor.poll(handles[0]) == "failed")
        executor = make_executor(kube.url)
    for result in executor.collect(handles, timeout=SECONDS):
        error = result["error"] or ""
        assert result["status"] == "failed"
        assert "DeadlineExceeded" in error
        assert "it never ran: Kubernetes refuses its pod: exceeded quota: small" in error


def test_a_gang_that_is_given_up_says_what_was_against_it(kube: KubeServer) -> None:
    allow_pods(kube, 1)
    gang = Gang(kube, 3, start_seconds=1)
    results = gang.executor.collect(gang.handles, timeout=SECONDS)
    assert {r["status"] for r in results} == {"cancelled"}
    assert "2 ranks were not running after 1 s" in (results[0]["error"] or "")
    assert REFUSED in (results[0]["error"] or "")


def test_who_may_not_read_events_is_told_less_and_waits_all_the_same(kube: KubeServer) -> None:
    allow_pods(kube, 0)
    kube.fail("list", "events", status=403, times=100)
    gang = Gang(kube, 1)
    (result,) = gang.executor.collect(gang.handles, timeout=1.5)
    assert (result["status"], result["error"]) == ("pending", "still pending after 1.5 s")
    assert gang.executor.stream_logs(gang.handles[0]) == "<rank 0: job not found / no pods yet>"


def test_asking_costs_the_same_for_a_thousand_ranks(kube: KubeServer) -> None:
    allow_pods(kube, 0)
    before = kube.requests.copy()
    gang = Gang(kube, 1000)
    results = gang.executor.collect(gang.handles, timeout=3)
    assert all(REFUSED in (r["error"] or "") for r in results)
    assert kube.requests.since(before)["list", "events"] == 1
    assert kube.requests.since(before).total < 20


def test_a_gang_that_its_queue_holds_back_says_so(kube: KubeServer) -> None:
    from kubernetes import client

    allow_pods(kube, 0)
    gang = Gang(kube, 1)
    with kube.api_client() as api:
        client.BatchV1Api(api).patch_namespaced_job(gang.job_name, "default", {"spec": {"suspend": True}})
    (result,) = gang.executor.collect(gang.handles, timeout=1)
    assert result["error"] == "still pending after 1 s: the Job is suspended: its queue has not let it in"


def test_a_pod_that_waits_says_what_for_where_its_logs_would_be(kube: KubeServer) -> None:
    executor = make_executor(kube.url)
    handles = executor.launch_replicas(1, "any.module:main", {}, gpu="H100")
    until(lambda: "node affinity" in executor.stream_logs(handles[0]))
    assert executor.stream_logs(handles[0]).startswith("<rank 0: pod not started / no logs yet: 0/")


def test_given_clients_are_asked_too() -> None:
    class Telling(Core):
        def list_namespaced_event(self, namespace: str, field_selector: str) -> SimpleNamespace:
            assert f"involvedObject.name={handle.metadata['job_name']}" in field_selector
            return SimpleNamespace(items=[SimpleNamespace(message='Error creating: pods "x" is forbidden: too many')])

    executor = EKSExecutor("trainer:1", batch_api=Batch(status(active=0)), core_api=Telling())
    (handle,) = executor.launch_replicas(1, "any.module:main", {})
    assert executor.stream_logs(handle) == "<rank 0: job not found / no pods yet: too many>"


@pytest.mark.parametrize("wrong", ["soon", -1, float("nan"), True])
def test_a_start_deadline_that_is_none_is_refused_before_anything_is_launched(wrong: Any) -> None:
    with pytest.raises(ValueError, match="start_seconds must be a number of seconds"):
        EKSExecutor("trainer:1", start_seconds=wrong, batch_api=Batch(), core_api=Core())


def test_when_to_ask() -> None:
    awaited = AwaitedPods()
    assert not awaited.is_time_to_ask(0, 10.0)
    assert not awaited.is_time_to_ask(1, 10.0 + PODS_WITHIN_S)  # one has come meanwhile
    assert awaited.is_time_to_ask(1, 10.0 + 2 * PODS_WITHIN_S)
    asked = 10.0 + 2 * PODS_WITHIN_S
    assert not awaited.is_time_to_ask(1, asked + ASK_EVERY_S / 2)
    assert awaited.is_time_to_ask(0, asked + ASK_EVERY_S)


def test_the_latest_refusal_counts_and_names_no_pod() -> None:
    older = {"lastTimestamp": "2026-01-01T00:00:00Z", "message": 'Error creating: pods "a" is forbidden: no room'}
    newer = {"eventTime": "2026-01-01T00:00:01.5Z", "message": "Error creating: a webhook says no"}
    assert last_refusal([newer, older]) == "Error creating: a webhook says no"
    assert last_refusal([older]) == "no room"
    assert last_refusal([]) == ""


@pytest.fixture
def silent_server() -> Iterator[str]:
    """It takes connections and never answers, as a network does that loses everything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_api_server_that_says_nothing_does_not_keep_collect_beyond_its_deadline(silent_server: str) -> None:
    executor = make_executor(silent_server)
    handle = ReplicaHandle(0, "eks", {"job_name": "lost-12345678", "namespace": "default"})
    begun = time.monotonic()
    (result,) = Collecting(executor, [handle], {"timeout": 0.5}).done()
    assert result["status"] == "pending"
    assert time.monotonic() - begun < SECONDS / 2
