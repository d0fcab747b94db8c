"""The Job controller does what a real one was measured to do. Time stands still here, unless a test moves it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from basilica_testkube import IGNORES_SIGTERM, KubeServer
from manifests import job

Json = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
TRACKING = "batch.kubernetes.io/job-tracking"
IGNORE_DISRUPTIONS = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}


class Cluster:
    """A cluster whose time the test moves."""

    def __init__(self, kube: KubeServer) -> None:
        self.kube = kube

    def start(self, manifest: Json) -> None:
        self.kube.create(manifest)
        self.kube.advance(1)

    def pod(self, index: int) -> Json:
        """The pod of an index that is not over and not being deleted."""
        found = [p for p in self.pods() if p["metadata"]["annotations"][INDEX] == str(index)]
        alive = [
            p
            for p in found
            if p["status"]["phase"] in ("Pending", "Running") and "deletionTimestamp" not in p["metadata"]
        ]
        assert len(alive) == 1, f"{len(alive)} pods of index {index} are alive"
        return alive[0]

    def alive(self) -> list[int]:
        pods = [
            p for p in self.pods() if p["status"]["phase"] == "Running" and "deletionTimestamp" not in p["metadata"]
        ]
        return [int(p["metadata"]["annotations"][INDEX]) for p in pods]

    def pods(self) -> list[Json]:
        return self.kube.pods("gang")

    def end(self, index: int, code: int = 0, settle: float = 1) -> None:
        self.kube.end_container(self.pod(index)["metadata"]["name"], code)
        self.kube.advance(settle)

    def finalizers(self, pod: str) -> list[str]:
        found = self.kube.get("pods", pod)
        assert found is not None
        return list(found["metadata"].get("finalizers", []))

    def job(self) -> Json:
        found = self.kube.get("jobs", "gang")
        assert found is not None
        return found

    def status(self) -> Json:
        found: Json = self.job()["status"]
        return found

    def conditions(self) -> list[tuple[str, str]]:
        return [(c["type"], c.get("reason", "")) for c in self.status().get("conditions", []) if c["status"] == "True"]

    def patch(self, **spec: Any) -> None:
        with self.kube.api_client() as api:
            client.BatchV1Api(api).patch_namespaced_job("gang", "default", {"spec": spec})
        self.kube.advance(1)

    def resize(self, size: int) -> None:
        self.patch(completions=size, parallelism=size)

    def delete(self, propagation: str | None = None) -> None:
        more = {} if propagation is None else {"propagation_policy": propagation}
        with self.kube.api_client() as api:
            client.BatchV1Api(api).delete_namespaced_job("gang", "default", **more)
        self.kube.advance(1)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with KubeServer(processes=False, speed=0) as kube:
        yield Cluster(kube)


def test_pods_have_the_names_labels_and_finalizers_of_their_index(cluster: Cluster) -> None:
    cluster.start(job("gang", 3))
    pods = cluster.pods()
    assert [p["metadata"]["name"][:-5] for p in pods] == ["gang-0-", "gang-1-", "gang-2-"]
    for n, pod in enumerate(pods):
        assert pod["metadata"]["annotations"][INDEX] == pod["metadata"]["labels"][INDEX] == str(n)
        assert pod["metadata"]["finalizers"] == [TRACKING]
        assert pod["metadata"]["labels"]["job-name"] == "gang"
        assert pod["spec"]["hostname"] == f"gang-{n}"
    assert (cluster.status()["active"], cluster.status()["ready"]) == (3, 3)


def test_a_job_completes_when_its_indexes_have(cluster: Cluster) -> None:
    cluster.start(job("gang", 5))
    for index in (0, 2, 3, 4):
        cluster.end(index)
    assert cluster.status()["completedIndexes"] == "0,2-4"
    assert cluster.conditions() == []
    cluster.end(1)
    assert cluster.conditions() == [("SuccessCriteriaMet", "CompletionsReached"), ("Complete", "CompletionsReached")]
    assert "completionTime" in cluster.status()
    assert all("finalizers" not in p["metadata"] for p in cluster.pods())


def test_no_more_pods_run_at_once_than_the_parallelism(cluster: Cluster) -> None:
    cluster.start(job("gang", 4, parallelism=2))
    assert cluster.alive() == [0, 1]
    cluster.end(0)
    assert cluster.alive() == [1, 2]


def test_one_failure_removes_the_siblings_and_names_no_index(cluster: Cluster) -> None:
    cluster.start(job("gang", 4))
    failed = cluster.pod(2)["metadata"]["name"]
    cluster.end(2, 3)
    assert [p["metadata"]["name"] for p in cluster.pods()] == [failed]  # the others, their codes and logs are gone
    assert cluster.conditions() == [("FailureTarget", "BackoffLimitExceeded"), ("Failed", "BackoffLimitExceeded")]
    assert "failedIndexes" not in cluster.status()


def test_the_target_to_fail_comes_before_the_failure(cluster: Cluster) -> None:
    manifest = job("gang", 2)
    manifest["spec"]["template"]["metadata"] = {"annotations": {IGNORES_SIGTERM: ""}}
    cluster.start(manifest)
    cluster.end(0, 1)
    assert cluster.conditions() == [("FailureTarget", "BackoffLimitExceeded")]  # a pod is still terminating
    assert cluster.status()["terminating"] == 1
    cluster.kube.advance(31)
    assert cluster.conditions()[-1] == ("Failed", "BackoffLimitExceeded")


def test_what_is_seen_first_and_what_last(cluster: Cluster) -> None:
    """The container's end, then the pod's phase, then the Job's status: three moments."""
    cluster.start(job("gang", 2))
    name = cluster.pod(0)["metadata"]["name"]
    cluster.kube.end_container(name)

    def seen() -> tuple[bool, str, str]:
        pod = cluster.kube.get("pods", name) or {}
        state = pod["status"]["containerStatuses"][0]["state"]
        return "terminated" in state, pod["status"]["phase"], cluster.status().get("completedIndexes", "")

    steps = [seen()]
    for _ in range(200):
        cluster.kube.advance(0.001)
        if seen() != steps[-1]:
            steps.append(seen())
    assert steps == [(False, "Running", ""), (True, "Running", ""), (True, "Succeeded", ""), (True, "Succeeded", "0")]


def test_scaling_down_and_up_again_forgets_what_had_completed(cluster: Cluster) -> None:
    cluster.start(job("gang", 4))
    cluster.end(3)
    cluster.end(2)
    assert cluster.status()["completedIndexes"] == "2,3"
    cluster.resize(2)
    assert "completedIndexes" not in cluster.status()
    cluster.resize(4)
    assert cluster.alive() == [0, 1, 2, 3]  # finished ranks run again


def test_scaling_down_and_up_again_forgets_what_had_failed(cluster: Cluster) -> None:
    cluster.start(job("gang", 4, backoffLimitPerIndex=0))
    cluster.end(3, 1)
    assert cluster.status()["failedIndexes"] == "3"
    cluster.resize(2)
    assert cluster.status()["failedIndexes"] == ""
    cluster.resize(4)
    cluster.kube.advance(11)
    assert cluster.alive() == [0, 1, 2, 3]


def test_scaling_down_and_up_again_forgets_the_wait_of_an_index(cluster: Cluster) -> None:
    """The failed pod is tracked until it is replaced or its index is not wanted any more, and its failures with it."""
    cluster.start(job("gang", 2, backoffLimitPerIndex=5))
    failed = cluster.pod(1)["metadata"]["name"]
    cluster.end(1, 1)
    cluster.kube.advance(5)
    assert cluster.alive() == [0]
    assert cluster.finalizers(failed) == [TRACKING]
    cluster.resize(1)
    assert cluster.finalizers(failed) == []
    cluster.resize(2)
    assert cluster.alive() == [0, 1]


def test_scaling_down_deletes_the_pods_above(cluster: Cluster) -> None:
    cluster.start(job("gang", 4))
    cluster.resize(2)
    assert cluster.alive() == [0, 1]
    cluster.kube.advance(5)
    assert len(cluster.pods()) == 2


def test_a_job_can_fail_although_most_of_it_is_done(cluster: Cluster) -> None:
    cluster.start(job("gang", 2, backoffLimitPerIndex=0))
    cluster.end(0)
    cluster.end(1, 1)
    assert cluster.conditions()[-1] == ("Failed", "FailedIndexes")
    assert (cluster.status()["completedIndexes"], cluster.status()["failedIndexes"]) == ("0", "1")


def test_a_resize_of_a_finished_job_is_accepted_and_does_nothing(cluster: Cluster) -> None:
    cluster.start(job("gang", 1))
    cluster.end(0)
    cluster.resize(3)
    assert cluster.job()["spec"]["completions"] == 3
    assert cluster.alive() == []
    assert cluster.status()["completedIndexes"] == "0"


def test_restarts_of_an_index_wait_ten_twenty_and_forty_seconds(cluster: Cluster) -> None:
    cluster.start(job("gang", 1, backoffLimitPerIndex=3))
    for delay in (10, 20, 40):
        cluster.end(0, 1)
        cluster.kube.advance(delay - 3)
        assert cluster.alive() == []
        cluster.kube.advance(3)
        assert cluster.alive() == [0]
    cluster.end(0, 1)
    assert cluster.conditions()[-1] == ("Failed", "FailedIndexes")


def test_an_eviction_costs_no_budget_but_the_same_wait(cluster: Cluster) -> None:
    cluster.start(job("gang", 1, backoffLimitPerIndex=0, podFailurePolicy=IGNORE_DISRUPTIONS))
    for delay in (10, 20):
        cluster.kube.evict(cluster.pod(0)["metadata"]["name"])
        cluster.kube.advance(delay - 2)
        assert cluster.alive() == []
        cluster.kube.advance(4)
        assert cluster.alive() == [0]
    assert "failed" not in cluster.status()
    assert cluster.status()["failedIndexes"] == ""


def test_a_plain_deletion_of_a_pod_is_no_disruption_and_costs_one(cluster: Cluster) -> None:
    cluster.start(job("gang", 2, backoffLimitPerIndex=1, podFailurePolicy=IGNORE_DISRUPTIONS))
    for _ in range(2):
        with cluster.kube.api_client() as api:
            client.CoreV1Api(api).delete_namespaced_pod(cluster.pod(0)["metadata"]["name"], "default")
        cluster.kube.advance(25)
    assert cluster.status()["failedIndexes"] == "0"


@pytest.mark.parametrize(("policy", "waits"), [("Failed", True), ("TerminatingOrFailed", False)])
def test_whether_a_pod_that_ignores_sigterm_is_waited_for(cluster: Cluster, policy: str, waits: bool) -> None:
    manifest = job("gang", 1, backoffLimitPerIndex=5, podReplacementPolicy=policy)
    manifest["spec"]["template"]["metadata"] = {"annotations": {IGNORES_SIGTERM: ""}}
    cluster.start(manifest)
    with cluster.kube.api_client() as api:
        client.CoreV1Api(api).delete_namespaced_pod(cluster.pod(0)["metadata"]["name"], "default")
    cluster.kube.advance(15)
    assert cluster.alive() == ([] if waits else [0])
    cluster.kube.advance(40)
    assert cluster.alive() == [0]


def test_restarts_in_place_do_not_count_against_the_limit_of_an_index(cluster: Cluster) -> None:
    cluster.start(job("gang", 1, backoffLimitPerIndex=0, pod_spec={"restartPolicy": "OnFailure"}))
    for _ in range(3):
        cluster.end(0, 1, settle=100)
    pod = cluster.pod(0)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 3
    assert cluster.conditions() == []


def test_restarts_in_place_count_against_the_limit_of_the_job(cluster: Cluster) -> None:
    cluster.start(job("gang", 1, backoffLimit=1, pod_spec={"restartPolicy": "OnFailure"}))
    cluster.end(0, 1, settle=100)
    assert cluster.conditions()[-1] == ("Failed", "BackoffLimitExceeded")


def test_a_policy_can_fail_the_job_or_the_index_by_an_exit_code(cluster: Cluster) -> None:
    def rule(action: str, code: int) -> Json:
        return {"action": action, "onExitCodes": {"operator": "In", "values": [code]}}

    rules = {"rules": [rule("FailIndex", 7), rule("FailJob", 8)]}
    cluster.start(job("gang", 3, backoffLimitPerIndex=5, podFailurePolicy=rules))
    cluster.end(1, 7)
    assert cluster.status()["failedIndexes"] == "1"
    cluster.end(0, 8)
    assert cluster.conditions()[-1] == ("Failed", "PodFailurePolicy")


def test_too_many_failed_indexes_end_the_job(cluster: Cluster) -> None:
    cluster.start(job("gang", 4, backoffLimitPerIndex=0, maxFailedIndexes=1))
    cluster.end(0, 1)
    assert cluster.conditions() == []
    cluster.end(1, 1)
    assert cluster.conditions()[-1] == ("Failed", "MaxFailedIndexesExceeded")
    assert cluster.alive() == []


def test_the_pods_of_a_job_that_may_fail_again_come_back_later(cluster: Cluster) -> None:
    cluster.start(job("gang", 1, backoffLimit=2))
    for delay in (10, 20):
        cluster.end(0, 1)
        assert cluster.alive() == []
        cluster.kube.advance(delay)
        assert cluster.alive() == [0]
    cluster.end(0, 1)
    assert cluster.conditions()[-1] == ("Failed", "BackoffLimitExceeded")


def test_the_deadline_ends_a_job_and_its_pods(cluster: Cluster) -> None:
    cluster.start(job("gang", 2, activeDeadlineSeconds=60))
    cluster.kube.advance(50)
    assert cluster.alive() == [0, 1]
    cluster.kube.advance(20)
    assert cluster.conditions()[-1] == ("Failed", "DeadlineExceeded")
    assert cluster.pods() == []


def test_a_finished_job_is_removed_after_its_time_to_live(cluster: Cluster) -> None:
    cluster.start(job("gang", 1, ttlSecondsAfterFinished=100))
    cluster.end(0)
    cluster.kube.advance(90)
    assert cluster.kube.get("jobs", "gang") is not None
    cluster.kube.advance(20)
    assert cluster.kube.get("jobs", "gang") is None
    assert cluster.pods() == []


def test_a_suspended_job_has_no_pods_and_no_start(cluster: Cluster) -> None:
    cluster.start(job("gang", 2, suspend=True))
    assert cluster.pods() == []
    assert cluster.conditions() == [("Suspended", "JobSuspended")]
    cluster.resize(3)
    cluster.patch(suspend=False)
    assert cluster.alive() == [0, 1, 2]
    cluster.patch(suspend=True)
    cluster.kube.advance(1)
    assert cluster.pods() == []
    assert "startTime" not in cluster.status()


def everything_goes(cluster: Cluster) -> bool:
    return cluster.kube.get("jobs", "gang") is None and cluster.pods() == []


def job_goes_pods_stay(cluster: Cluster) -> bool:
    return cluster.kube.get("jobs", "gang") is None and cluster.alive() == [0, 1]


@pytest.mark.parametrize(
    ("propagation", "outcome"),
    [
        ("Background", everything_goes),
        ("Foreground", everything_goes),
        ("Orphan", job_goes_pods_stay),
        (None, job_goes_pods_stay),
    ],
)
def test_what_a_deletion_leaves_behind(
    cluster: Cluster, propagation: str | None, outcome: Callable[[Cluster], bool]
) -> None:
    cluster.start(job("gang", 2))
    cluster.delete(propagation)
    assert outcome(cluster)
    assert all("finalizers" not in pod["metadata"] for pod in cluster.pods())


def test_the_job_goes_first_in_the_background_and_last_in_the_foreground(cluster: Cluster) -> None:
    for propagation in ("Background", "Foreground"):
        manifest = job("gang", 1)
        manifest["spec"]["template"]["metadata"] = {"annotations": {IGNORES_SIGTERM: ""}}
        cluster.start(manifest)
        cluster.delete(propagation)
        assert len(cluster.pods()) == 1  # terminating
        assert (cluster.kube.get("jobs", "gang") is None) is (propagation == "Background")
        cluster.kube.advance(40)
        assert everything_goes(cluster)


def test_a_finalizer_of_ours_keeps_the_exit_of_a_pod_that_is_gone(cluster: Cluster) -> None:
    manifest = job("gang", 2)
    manifest["spec"]["template"]["metadata"] = {"finalizers": ["basilica.dev/evidence"]}
    cluster.start(manifest)
    cluster.end(0, 9)
    held = {p["metadata"]["annotations"][INDEX]: p for p in cluster.pods()}
    assert sorted(held) == ["0", "1"]
    assert held["1"]["metadata"]["finalizers"] == ["basilica.dev/evidence"]
    assert held["1"]["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143


def test_a_job_that_is_not_indexed_counts_its_pods(cluster: Cluster) -> None:
    cluster.start(job("gang", 2, completionMode="NonIndexed"))
    for pod in cluster.kube.pods():
        cluster.kube.end_container(pod["metadata"]["name"])
    cluster.kube.advance(1)
    assert cluster.status()["succeeded"] == 2
    assert cluster.conditions()[-1][0] == "Complete"


def test_pods_that_a_quota_refuses_are_tried_again_one_at_a_time(cluster: Cluster) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    cluster.kube.create({**quota, "spec": {"hard": {"pods": "2"}}})
    cluster.start(job("gang", 100))
    cluster.kube.advance(10)
    refused = [event for event in cluster.kube.objects("events") if event["reason"] == "FailedCreate"]
    assert len(cluster.pods()) == 2
    assert 5 <= sum(event["count"] for event in refused) <= 15  # about one a second, however many are missing
    assert "exceeded quota: small" in refused[0]["message"]
