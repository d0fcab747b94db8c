"""The EKS executor with clients that were given to it: plain objects, as other people's tests have them."""

import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from basilica.executors import EKSExecutor, ReplicaHandle
from basilica.executors.eks.evidence import GangEvidence
from basilica.kube.manifests.gang import COMPLETION_INDEX


class ApiError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def status(**fields: Any) -> SimpleNamespace:
    known = {"active": None, "completed_indexes": None, "failed_indexes": None, "conditions": None}
    return SimpleNamespace(status=SimpleNamespace(**{**known, **fields}))


def failed(reason: str = "BackoffLimitExceeded") -> list[SimpleNamespace]:
    return [SimpleNamespace(type="Failed", status="True", reason=reason, message="over")]


class Batch:
    """Answers reads of a Job's status from a list, the last one for ever."""

    def __init__(self, *answers: SimpleNamespace | Exception) -> None:
        self.answers = list(answers)
        self.reads = 0
        self.deleted: list[dict[str, Any]] = []
        self.refusal: Exception | None = None

    def create_namespaced_job(self, namespace: str, body: dict[str, Any]) -> None:
        self.body = body

    def read_namespaced_job_status(self, name: str, namespace: str) -> SimpleNamespace:
        self.reads += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def delete_namespaced_job(self, **given: Any) -> None:
        self.deleted.append(given)
        if self.refusal is not None:
            raise self.refusal


def pod(name: str, rank: int | None = None, *, label: bool = False, **more: Any) -> SimpleNamespace:
    found = {} if rank is None else {COMPLETION_INDEX: str(rank)}
    annotations, labels = (None, found) if label else (found, None)
    metadata = SimpleNamespace(
        name=name, annotations=annotations, labels=labels, creation_timestamp="2026-01-01", deletion_timestamp=None
    )
    return SimpleNamespace(
        metadata=metadata, status=SimpleNamespace(**{"container_statuses": None, "phase": "Running", **more})
    )


class Core:
    def __init__(
        self, *pods: SimpleNamespace, log: str | Exception = "a\nb\n", listing: Exception | None = None
    ) -> None:
        self.pods, self.log, self.listing = list(pods), log, listing
        self.asked: list[tuple[str, str, int]] = []

    def list_namespaced_pod(self, namespace: str, label_selector: str) -> SimpleNamespace:
        if self.listing is not None:
            raise self.listing
        return SimpleNamespace(items=self.pods)

    def read_namespaced_pod_log(self, name: str, namespace: str, container: str, tail_lines: int) -> str:
        self.asked.append((name, container, tail_lines))
        if isinstance(self.log, Exception):
            raise self.log
        return self.log


def executor(batch: Batch | None = None, core: Core | None = None) -> EKSExecutor:
    return EKSExecutor("image", batch_api=batch or Batch(status()), core_api=core or Core())


def handle(rank: int = 0) -> ReplicaHandle:
    return ReplicaHandle(
        rank, "eks", {"job_name": "gang-1", "namespace": "default", "rank": rank, "rendezvous_uri": None}
    )


def test_handles_share_the_job_and_know_their_rank() -> None:
    batch = Batch(status())
    handles = executor(batch).launch_replicas(3, "a.b:c", {"rendezvous_uri": "s3://bucket/run"})
    name = batch.body["metadata"]["name"]
    assert name.startswith("diloco-")
    for rank, each in enumerate(handles):
        assert (each.rank, each.backend_name) == (rank, "eks")
        expected = {"job_name": name, "namespace": "default", "rank": rank, "rendezvous_uri": "s3://bucket/run"}
        assert dict(each.metadata) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (status(), "pending"),
        (status(active=3), "running"),
        (status(active=1, completed_indexes="0-1"), "running"),
        (status(active=1, completed_indexes="1-2"), "succeeded"),
        (status(failed_indexes="2", active=1), "failed"),
        (status(conditions=failed()), "failed"),
        (status(conditions=failed(), completed_indexes="2"), "succeeded"),
        (ApiError(404), "cancelled"),
    ],
)
def test_poll_reads_the_job_once(answer: SimpleNamespace | Exception, expected: str) -> None:
    batch = Batch(answer)
    assert executor(batch).poll(handle(2)) == expected
    assert batch.reads == 1


def test_any_other_error_of_a_poll_is_raised() -> None:
    with pytest.raises(ApiError):
        executor(Batch(ApiError(403))).poll(handle())


@pytest.mark.parametrize(
    ("seen", "expected"), [(status(completed_indexes="0"), "succeeded"), (status(conditions=failed()), "failed")]
)
def test_an_end_that_was_seen_is_no_cancellation_later(seen: SimpleNamespace, expected: str) -> None:
    given = executor(Batch(seen, ApiError(404)))
    assert [given.poll(handle()), given.poll(handle())] == [expected, expected]


@pytest.mark.parametrize("by", ["annotation", "label", "name"])
def test_logs_are_of_the_pod_of_the_rank(by: str) -> None:
    name = "gang-1-2-abcde"
    others = [pod("gang-1-0-aaaaa", 0), pod("gang-1-12-bbbbb", 12)]
    core = Core(*others, pod(name, None if by == "name" else 2, label=by == "label"))
    assert executor(core=core).stream_logs(handle(2), n_lines=7) == "a\nb\n"
    assert core.asked == [(name, "replica", 7)]


@pytest.mark.parametrize(
    ("core", "text"),
    [
        (Core(), "<rank 2: job not found / no pods yet>"),
        (Core(listing=ApiError(404)), "<rank 2: job not found / no pods yet>"),
        (Core(pod("p", 2), log=ApiError(400)), "<rank 2: pod not started / no logs yet>"),
        (Core(pod("p", 2), log=ApiError(404)), "<rank 2: pod not started / no logs yet>"),
    ],
)
def test_a_placeholder_stands_for_logs(core: Core, text: str) -> None:
    assert executor(core=core).stream_logs(handle(2)) == text


@pytest.mark.parametrize("core", [Core(listing=ApiError(403)), Core(pod("p", 2), log=ApiError(500))])
def test_any_other_error_of_logs_is_raised(core: Core) -> None:
    with pytest.raises(ApiError):
        executor(core=core).stream_logs(handle(2))


def test_cancel_deletes_the_job_with_its_pods() -> None:
    batch = Batch(status())
    executor(batch).cancel(handle(1))
    expected = {"name": "gang-1", "namespace": "default", "propagation_policy": "Background", "grace_period_seconds": 0}
    assert batch.deleted == [expected]


def test_a_handle_without_a_namespace_means_the_executors_own() -> None:
    batch = Batch(status())
    own = EKSExecutor("image", namespace="training", batch_api=batch, core_api=Core())
    own.cancel(ReplicaHandle(0, "eks", {"job_name": "gang-1"}))
    assert [(gone["namespace"], gone["name"]) for gone in batch.deleted] == [("training", "gang-1")]


@pytest.mark.parametrize("metadata", [{}, {"namespace": "default"}, {"job_name": ""}, {"job_name": None}])
def test_a_handle_that_names_no_job_is_nothing_to_cancel_and_an_error_elsewhere(metadata: dict[str, Any]) -> None:
    batch, nobody = Batch(status()), ReplicaHandle(0, "eks", metadata)
    executor(batch).cancel(nobody)
    assert batch.deleted == []
    for use in (executor(batch).poll, executor(batch).stream_logs, lambda handle: executor(batch).collect([handle])):
        with pytest.raises(ValueError, match=r"rank 0 has no 'job_name' in its metadata.*launch_replicas\(\) returned"):
            use(nobody)


def test_tolerations_may_be_dictionaries_or_the_clients_models() -> None:
    models = pytest.importorskip("kubernetes.client")
    batch = Batch(status(active=1))
    spot = {"key": "spot", "operator": "Exists", "tolerationSeconds": 30}
    model = models.V1Toleration(key="spot", operator="Exists", toleration_seconds=30)
    mixed = EKSExecutor("image", tolerations=[spot, model], batch_api=batch, core_api=Core())
    mixed.launch_replicas(1, "json:dumps", {})
    assert batch.body["spec"]["template"]["spec"]["tolerations"] == [spot, spot]
    for wrong in ("spot", 7, models.V1Taint(key="spot", effect="NoSchedule")):
        with pytest.raises(TypeError, match="tolerations are dictionaries or V1Toleration models, not"):
            EKSExecutor("image", tolerations=[wrong], batch_api=batch, core_api=Core())


@pytest.mark.parametrize(("code", "raises"), [(404, False), (409, False), (403, True), (500, True)])
def test_a_teardown_that_failed_is_seen(code: int, raises: bool) -> None:
    batch = Batch(status())
    batch.refusal = ApiError(code)
    if raises:
        with pytest.raises(ApiError):
            executor(batch).cancel(handle())
    else:
        executor(batch).cancel(handle())


def test_collect_reads_one_status_a_round_whatever_the_number_of_ranks() -> None:
    batch = Batch(status(active=50), status(completed_indexes="0-49"))
    results = executor(batch).collect([handle(rank) for rank in range(50)], timeout=30)
    assert {r["status"] for r in results} == {"succeeded"}
    assert batch.reads == 2


def test_collect_tells_the_real_code_of_the_pods_that_are_left() -> None:
    ended = SimpleNamespace(exit_code=137, reason="OOMKilled", message="last words\n", finished_at=None)
    state = SimpleNamespace(terminated=ended, running=None)
    core = Core(pod("gang-1-1-x", 1, phase="Failed", container_statuses=[SimpleNamespace(name="replica", state=state)]))
    batch = Batch(status(conditions=failed(), completed_indexes="2"))
    results = executor(batch, core).collect([handle(0), handle(1), handle(2)], timeout=30)
    assert [(r["status"], r["exit_code"]) for r in results] == [("failed", 1), ("failed", 137), ("succeeded", 0)]
    assert "rank 1 failed first" in (results[0]["error"] or "")
    assert "OOMKilled" in (results[1]["error"] or "")
    assert results[2]["error"] is None


def test_a_deadline_tells_how_it_stands() -> None:
    (result,) = executor(Batch(status(active=1))).collect([handle()], timeout=0)
    assert (result["status"], result["exit_code"], result["error"]) == ("running", None, "still running after 0 s")


def test_collect_waits_through_throttling() -> None:
    batch = Batch(ApiError(429), ApiError(503), status(completed_indexes="0"))
    (result,) = executor(batch).collect([handle()], timeout=30)
    assert result["status"] == "succeeded"


def test_without_the_package_both_clients_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    EKSExecutor("image", batch_api=Batch(status()), core_api=Core())
    for given in ({}, {"batch_api": Batch(status())}, {"core_api": Core()}):
        with pytest.raises(RuntimeError, match=r"basilica-train\[kubernetes\]"):
            EKSExecutor("image", **given)


def test_an_argument_that_is_no_json_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'thing'"):
        executor().launch_replicas(1, "a.b:c", {"thing": object()})


# ---- what was seen, and what it means ------------------------------------------------------------------------------


def pod_of(rank: int, code: int | None = None, *, at: str = "", deleting: bool = False, **more: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": f"gang-1-{rank}-abcde", "annotations": {COMPLETION_INDEX: str(rank)}}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": at}}
    return {"metadata": metadata, "status": {"containerStatuses": [{"name": "replica", "state": state}], **more}}


def gang(*pods: dict[str, Any], job: dict[str, Any] | None = None) -> GangEvidence:
    evidence = GangEvidence("gang-1")
    evidence.see_job({"spec": {"backoffLimit": 0}, "status": {}})
    for each in pods:
        evidence.see_pod(each)
    if job is not None:
        evidence.see_job(job)
    return evidence


def job(*conditions: str, **fields: Any) -> dict[str, Any]:
    listed = [
        {"type": kind, "status": "True", "reason": "DeadlineExceeded", "message": "too long"} for kind in conditions
    ]
    return {"spec": {"backoffLimit": 0}, "status": {"conditions": listed, **fields}}


def test_the_first_failure_is_the_earliest_and_not_the_first_that_was_seen() -> None:
    seen = gang(
        pod_of(3, 1, at="2026-01-01T00:00:05Z"), pod_of(1, 2, at="2026-01-01T00:00:04Z"), pod_of(0, 143, deleting=True)
    )
    assert seen.culprit() == 1
    assert seen.error(3) == "failed with exit code 1, after rank 1 had failed first"
    assert seen.error(0) == "stopped because rank 1 failed first (exit code 2)"


def test_a_rank_that_was_stopped_is_never_the_culprit() -> None:
    seen = gang(pod_of(0, 143, at="2026-01-01T00:00:01Z", deleting=True), pod_of(1, 9, at="2026-01-01T00:00:02Z"))
    assert seen.culprit() == 1


def test_a_failure_judges_its_rank_at_once_and_the_others_when_they_end() -> None:
    seen = gang(pod_of(0), pod_of(1), pod_of(1, 9))
    assert [seen.status(0), seen.status(1)] == ["running", "failed"]
    seen.see_pod(pod_of(0, 143, deleting=True))
    assert seen.status(0) == "failed"


def test_a_success_stands_whatever_comes_later() -> None:
    seen = gang(pod_of(0, 0), pod_of(1, 1), job=job("Failed"))
    assert [seen.status(0), seen.status(1)] == ["succeeded", "failed"]
    seen.see_job(None)
    assert [seen.status(0), seen.status(1)] == ["succeeded", "failed"]


def test_a_deadline_is_nobodys_fault() -> None:
    seen = gang(pod_of(0), pod_of(0, 143, deleting=True), job=job("FailureTarget"))
    assert seen.culprit() is None
    assert seen.error(0) == "stopped by Kubernetes: DeadlineExceeded: too long (exit code 143)"


def test_a_job_that_was_deleted_is_cancelled_unless_a_rank_had_failed() -> None:
    for pods, expected in ((pod_of(0, 143, deleting=True),), "cancelled"), ((pod_of(0, 7), pod_of(1)), "failed"):
        seen = gang(*pods)
        seen.see_job(None)
        assert seen.status(0) == seen.status(1) == expected


def test_an_evicted_pod_says_so() -> None:
    seen = gang(pod_of(0, 137, phase="Failed", reason="Evicted", message="The node was low on memory."))
    assert "Evicted: The node was low on memory." in (seen.error(0) or "")


def test_a_pod_that_failed_without_a_container_has_failed() -> None:
    lost = {"metadata": pod_of(0)["metadata"], "status": {"phase": "Failed", "reason": "UnexpectedAdmissionError"}}
    seen = gang(lost)
    assert (seen.status(0), seen.exit_code(0)) == ("failed", 1)
    assert "UnexpectedAdmissionError" in (seen.error(0) or "")


def test_a_container_beside_ours_decides_nothing() -> None:
    beside = pod_of(0)
    beside["status"]["containerStatuses"].insert(0, {"name": "proxy", "state": {"terminated": {"exitCode": 1}}})
    assert gang(beside).status(0) == "running"


def test_nothing_here_warns() -> None:
    makers: list[Callable[[], object]] = [lambda: executor().poll(handle()), lambda: executor().stream_logs(handle())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in makers:
            make()
