"""The EKS executor against an API server: the contract with real processes, failures, faults, and what it costs."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from basilica.executors import EKSExecutor, ReplicaHandle, ReplicaResult, ServerlessExecutor
from basilica.testing.executor_contract import REPLICAS, SECONDS, ExecutorContract, until
from basilica_testkube import KubeServer, NodeSpec, Timing


def make_executor(url: str, **settings: Any) -> EKSExecutor:
    configuration = client.Configuration()
    configuration.host = url
    api = client.ApiClient(configuration)
    return EKSExecutor("trainer:1", batch_api=client.BatchV1Api(api), core_api=client.CoreV1Api(api), **settings)


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubeServer]:
    with KubeServer() as kube:
        yield kube


class TestEKSExecutor(ExecutorContract):
    cancels_gang = True
    fails_together = True
    cluster: KubeServer

    @pytest.fixture(autouse=True)
    def _on_a_cluster(self, cluster: KubeServer, tmp_path: Path) -> None:
        self.cluster = cluster
        self.arguments = {"rendezvous_uri": f"file://{tmp_path}/run"}

    def maker(self, directory: Path) -> Callable[[], ServerlessExecutor]:
        return partial(make_executor, self.cluster.url)


# ---- gangs of puppets: the test ends them --------------------------------------------------------------------------


class Gang:
    """A gang whose ranks the test moves, and an executor that has launched it."""

    def __init__(self, kube: KubeServer, size: int, **settings: Any) -> None:
        self.kube = kube
        self.executor = make_executor(kube.url, **settings)
        self.handles = self.executor.launch_replicas(size, "any.module:main", {})
        self.job_name = str(self.handles[0].metadata["job_name"])

    def pods(self) -> dict[int, str]:
        """The names of running pods by rank."""
        found = {}
        for pod in self.kube.pods(self.job_name):
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
                rank = int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
                found[rank] = pod["metadata"]["name"]
        return found

    def up(self) -> dict[int, str]:
        return self.kube.wait_for(lambda: pods if len(pods := self.pods()) == len(self.handles) else None)

    def collecting(self, **options: Any) -> "Collecting":
        return Collecting(self.executor, self.handles, options)


class Collecting:
    """`collect` in a thread, while the test goes on."""

    def __init__(self, executor: EKSExecutor, handles: list[ReplicaHandle], options: dict[str, Any]) -> None:
        self.results: list[ReplicaResult] = []
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(executor, handles, {"timeout": SECONDS, **options}))
        self._thread.start()

    def _run(self, executor: EKSExecutor, handles: list[ReplicaHandle], options: dict[str, Any]) -> None:
        try:
            self.results = executor.collect(handles, **options)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self.problem = error

    def done(self) -> list[ReplicaResult]:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "collect did not return"
        if self.problem is not None:
            raise self.problem
        return self.results


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer(processes=False) as server:
        yield server


def test_the_rank_that_the_kernel_killed_is_named_and_the_others_are_stopped_for_it(tmp_path: Path) -> None:
    with KubeServer() as machines:
        executor = make_executor(machines.url)
        handles = executor.launch_replicas(8, f"{REPLICAS}:wait", {"directory": str(tmp_path)})
        collecting = Collecting(executor, handles, {})
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 8)
        (culprit,) = [
            p for p in machines.pods() if p["metadata"]["name"].startswith(f"{handles[5].metadata['job_name']}-5-")
        ]
        machines.oom_kill(culprit["metadata"]["name"])
        results = collecting.done()
        assert (results[5]["status"], results[5]["exit_code"]) == ("failed", 137)
        assert "OOMKilled" in (results[5]["error"] or "")
        assert "rank 5 waits" in (results[5]["error"] or "")  # its last lines
        for rank in (0, 1, 2, 3, 4, 6, 7):
            assert results[rank]["status"] == "failed"
            assert results[rank]["exit_code"] == 143
            assert results[rank]["error"] == "stopped because rank 5 failed first (exit code 137 (OOMKilled))"
        executor.cancel(handles[0])
        machines.wait_for(lambda: not machines.pods())
        assert "rank 5 waits" in executor.stream_logs(handles[5])  # kept, although the pod is gone


def test_cancelling_leaves_nothing_behind(tmp_path: Path) -> None:
    from basilica.machine.places import start_of

    with KubeServer() as machines:
        executor = make_executor(machines.url)
        handles = executor.launch_replicas(4, f"{REPLICAS}:wait", {"directory": str(tmp_path)})
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 4)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
        executor.cancel(handles[2])
        assert {r["status"] for r in executor.collect(handles, timeout=SECONDS)} == {"cancelled"}
        machines.wait_for(lambda: not machines.pods() and not machines.objects("jobs"))
        assert [pid for pid in pids if start_of(pid) is not None] == []


def test_a_cancellation_that_failed_is_seen(kube: KubeServer) -> None:
    gang = Gang(kube, 1)
    kube.fail("delete", "jobs", status=403)
    with pytest.raises(client.ApiException) as refused:
        gang.executor.cancel(gang.handles[0])
    assert refused.value.status == 403
    kube.fail("delete", "jobs", status=409)
    gang.executor.cancel(gang.handles[0])  # somebody else is at it


def test_four_thousand_ranks_cost_the_api_server_no_more_than_four(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {}
    for size in (4, 4000):
        with KubeServer(processes=False, timing=Timing(job_sync=0.3)) as kube:
            before = kube.requests.copy()
            begun = time.monotonic()
            gang = Gang(kube, size)
            told: list[tuple[int, str]] = []
            collecting = gang.collecting(on_change=lambda handle, status: told.append((handle.rank, status)))  # noqa: B023
            kube.wait_for(lambda: kube.get("jobs", gang.job_name)["status"].get("ready") == size, timeout=60)  # type: ignore[index] # noqa: B023
            kube.end_containers(gang.pods().values())
            results = collecting.done()
            assert {r["status"] for r in results} == {"succeeded"}
            assert [r["rank"] for r in results] == list(range(size))
            assert len(told) <= 3 * size
            asked = kube.requests.since(before)
            counts[size] = asked.total
            print(f"{size} ranks: {asked.total} requests ({asked}), {time.monotonic() - begun:.1f} s")
    assert max(counts.values()) < 20, capsys.readouterr().out


def test_the_failure_of_a_thousand_is_judged_in_a_few_requests() -> None:
    with KubeServer(processes=False, timing=Timing(job_sync=0.3)) as kube:
        gang = Gang(kube, 1000)
        kube.wait_for(lambda: kube.get("jobs", gang.job_name)["status"].get("ready") == 1000, timeout=60)  # type: ignore[index]
        before = kube.requests.copy()
        collecting = gang.collecting()
        names = gang.pods()
        kube.end_container(names[7], 3, log="seven")
        results = collecting.done()
        assert results[7]["exit_code"] == 3
        assert sum("because rank 7 failed" in (r["error"] or "") for r in results) == 999
        assert kube.requests.since(before).total < 20


@pytest.mark.parametrize("when", ["cut", "expired", "gone", "throttled", "unwell", "outage"])
def test_collect_lives_through_what_happens_to_its_watch(kube: KubeServer, when: str) -> None:
    gang = Gang(kube, 3)
    pods = gang.up()
    collecting = gang.collecting()
    kube.wait_for(lambda: kube.requests["watch", "pods"])
    if when == "cut":
        kube.wait_for(lambda: kube.cut_watches("pods"))
    elif when == "expired":
        kube.wait_for(lambda: kube.expire_watches("pods"))
    elif when == "gone":
        kube.compact()
        kube.fail("watch", "pods", status=410)
        kube.wait_for(lambda: kube.cut_watches("pods"))
    elif when == "throttled":
        kube.fail("watch", "pods", status=429, times=2, retry_after=1)
        kube.wait_for(lambda: kube.cut_watches("pods"))
    elif when == "unwell":
        kube.fail("*", "*", status=500, times=2)
        kube.wait_for(lambda: kube.cut_watches("pods"))
    else:
        with kube.outage():
            kube.end_container(pods[2])
    for rank in (0, 1) if when == "outage" else (0, 1, 2):
        kube.end_container(pods[rank])
    assert [r["status"] for r in collecting.done()] == ["succeeded"] * 3


def test_the_evidence_of_a_failure_during_an_outage_is_what_is_left_of_it(kube: KubeServer) -> None:
    gang = Gang(kube, 3)
    pods = gang.up()
    collecting = gang.collecting()
    kube.wait_for(lambda: kube.requests["watch", "pods"])
    with kube.outage():
        kube.end_container(pods[1], 4)
        kube.wait_for(lambda: len(kube.pods(gang.job_name)) == 1)
        kube.compact()
    results = collecting.done()
    assert [r["status"] for r in results] == ["failed"] * 3
    assert results[1]["exit_code"] == 4
    assert results[0]["exit_code"] == 1  # nobody saw its code: it was removed meanwhile
    assert "because rank 1 failed first (exit code 4)" in (results[0]["error"] or "")


def test_an_api_that_refuses_us_is_no_reason_to_wait(kube: KubeServer) -> None:
    gang = Gang(kube, 1)
    kube.fail("watch", "pods", status=403)
    with pytest.raises(client.ApiException):
        gang.executor.collect(gang.handles, timeout=SECONDS)


def test_a_lost_answer_does_not_make_two_jobs(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(kube.url)
    batch = executor._calls()._batch
    real = batch.create_namespaced_job

    def create_and_lose_the_answer(**given: Any) -> Any:
        monkeypatch.setattr(batch, "create_namespaced_job", real)
        real(**given)
        raise ConnectionResetError("the answer is lost")

    monkeypatch.setattr(batch, "create_namespaced_job", create_and_lose_the_answer)
    handles = executor.launch_replicas(2, "any.module:main", {})
    assert [job["metadata"]["name"] for job in kube.objects("jobs")] == [handles[0].metadata["job_name"]]


def test_ends_that_were_seen_are_not_forgotten_when_the_job_expires() -> None:
    with KubeServer(processes=False, speed=0) as kube:
        gang = Gang(kube, 2, ttl_seconds_after_finished=60)
        kube.advance(1)
        for name in gang.pods().values():
            kube.end_container(name)
        kube.advance(1)
        assert [gang.executor.poll(handle) for handle in gang.handles] == ["succeeded", "succeeded"]
        kube.advance(100)
        assert kube.objects("jobs") == []
        assert [gang.executor.poll(handle) for handle in gang.handles] == ["succeeded", "succeeded"]
        assert gang.executor.collect(gang.handles, timeout=SECONDS)[0]["exit_code"] == 0
        assert make_executor(kube.url).poll(gang.handles[0]) == "cancelled"  # who never saw it cannot know


def test_a_rank_that_may_fail_again_is_not_judged_by_its_first_failure(kube: KubeServer) -> None:
    gang = Gang(kube, 2, backoff_limit=1)
    first = gang.up()
    collecting = gang.collecting()
    kube.wait_for(lambda: kube.requests["watch", "pods"])
    kube.end_container(first[1], 5)
    kube.wait_for(lambda: 1 not in gang.pods())
    kube.wait_for(lambda: kube.get("jobs", gang.job_name)["status"].get("failed") == 1)  # type: ignore[index]
    kube.advance(11)
    second = gang.up()
    assert second[1] != first[1]
    for name in second.values():
        kube.end_container(name)
    assert [(r["status"], r["exit_code"]) for r in collecting.done()] == [("succeeded", 0), ("succeeded", 0)]


def test_a_gang_that_is_not_placed_in_time_is_given_up() -> None:
    with KubeServer(processes=False, nodes=[NodeSpec("one", capacity={"nvidia.com/gpu": "2"})]) as kube:
        executor = make_executor(kube.url, start_seconds=2)
        handles = executor.launch_replicas(3, "any.module:main", {}, gpu="any")
        results = executor.collect(handles, timeout=SECONDS)
        assert [r["status"] for r in results] == ["cancelled"] * 3
        assert "1 ranks were not running after 2 s" in (results[0]["error"] or "")
        assert "Insufficient nvidia.com/gpu" in (results[0]["error"] or "")
        kube.wait_for(lambda: not kube.pods() and not kube.objects("jobs"))  # the GPUs are free again


def test_a_rank_that_waits_says_what_for(kube: KubeServer) -> None:
    executor = make_executor(kube.url)
    handles = executor.launch_replicas(1, "any.module:main", {}, gpu="H100")
    kube.wait_for(lambda: kube.objects("events"))
    (result,) = executor.collect(handles, timeout=0.5)
    assert result["status"] == "pending"
    assert "didn't match Pod's node affinity/selector" in (result["error"] or "")
    executor.cancel(handles[0])


def test_two_gangs_are_collected_together(kube: KubeServer) -> None:
    gangs = [Gang(kube, 2) for _ in range(2)]
    for gang in gangs:
        for name in gang.up().values():
            kube.end_container(name)
    handles = [gangs[1].handles[0], gangs[0].handles[1], gangs[1].handles[1]]
    results = gangs[0].executor.collect(handles, timeout=SECONDS)
    assert [r["job_name"] for r in results] == [gangs[1].job_name, gangs[0].job_name, gangs[1].job_name]
    assert {r["status"] for r in results} == {"succeeded"}


def test_the_trouble_of_one_gang_does_not_wait_for_the_others(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("basilica.executors.eks.executor.READ_JOB_SECONDS", 0.3)
    gangs = [Gang(kube, 1) for _ in range(2)]
    for gang in gangs:
        gang.up()
    kube.fail("watch", "pods", status=403)
    with pytest.raises(client.ApiException):
        gangs[0].executor.collect([*gangs[0].handles, *gangs[1].handles], timeout=SECONDS)


def test_clients_are_built_from_kubeconfig_when_none_are_given(kube: KubeServer, tmp_path: Path) -> None:
    config = kube.kubeconfig(tmp_path / "config")
    code = (
        "from basilica.executors import EKSExecutor\n"
        "executor = EKSExecutor('trainer:1')\n"
        "(handle,) = executor.launch_replicas(1, 'any.module:main', {})\n"
        "print(executor.poll(handle))\n"
        "executor.cancel(handle)\n"
        "print(executor.poll(handle))\n"
        "executor.close()\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    environment = {**os.environ, "KUBECONFIG": str(config)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "cancelled"


def test_the_deadline_of_the_job_is_told_as_the_reason() -> None:
    with KubeServer(processes=False, speed=0) as kube:
        executor = make_executor(kube.url)
        handles = executor.launch_replicas(2, "any.module:main", {}, timeout=60)
        kube.advance(1)
        collecting = Collecting(executor, handles, {})
        kube.wait_for(lambda: kube.requests["watch", "pods"])
        kube.advance(70)
        for result in collecting.done():
            assert (result["status"], result["exit_code"]) == ("failed", 143)
            assert "DeadlineExceeded" in (result["error"] or "")


def test_lines_of_json_come_back_as_they_were_written(tmp_path: Path) -> None:
    with KubeServer() as machines:
        executor = make_executor(machines.url, command=["sh", "-c", """echo '{"step": 1}'"""])
        handles = executor.launch_replicas(1, "any.module:main", {})
        executor.collect(handles, timeout=SECONDS)
        assert executor.stream_logs(handles[0]) == '{"step": 1}\n'


def test_dollars_in_arguments_reach_the_replica_unchanged() -> None:
    with KubeServer() as machines:
        executor = make_executor(machines.url, command=["printenv", "TEXT"])
        handles = executor.launch_replicas(1, "any.module:main", {"text": "$(HOME) $$ $x"})
        executor.collect(handles, timeout=SECONDS)
        assert executor.stream_logs(handles[0]) == "$(HOME) $$ $x\n"
