"""Replicas that nobody would know of: of callers and wardens that were killed, and of launches that were broken off."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from basilica.executors import LocalProcessExecutor, ReplicaHandle
from basilica.executors.launch import start_each
from basilica.executors.protocol import CANCELLED, RUNNING
from basilica.testing.executor_contract import until
from basilica_testkube import KubeServer
from tests.executors.test_eks import make_executor
from tests.executors.test_local import WAIT, is_gone, pid_of, script, warden_of


def handle_of(directory: Path) -> ReplicaHandle:
    """The handle of the gang that is in this state directory."""
    (gang,) = (directory / "state").iterdir()
    return ReplicaHandle(0, "local", {"job_name": gang.name, "directory": str(gang)})


def launch_another(directory: Path) -> None:
    with LocalProcessExecutor(state_dir=directory / "state", grace_seconds=2) as executor:
        executor.collect(executor.launch_replicas(1, "basilica.testing.replicas:tell", {}), timeout=60)


def test_the_next_launch_ends_a_gang_whose_caller_and_warden_were_killed(tmp_path: Path) -> None:
    with script("kept = launch()\ntime.sleep(100)\n", tmp_path) as process:
        pid, handle = pid_of(tmp_path), handle_of(tmp_path)
        warden = warden_of(handle)
        os.kill(warden, signal.SIGKILL)
        until(lambda: is_gone(warden))
        process.kill()
    assert not is_gone(pid)
    launch_another(tmp_path)
    until(lambda: is_gone(pid))
    assert LocalProcessExecutor(state_dir=tmp_path / "state").poll(handle) == CANCELLED


def test_a_gang_whose_caller_lives_is_left_alone(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        (handle,) = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})
        pid_of(tmp_path)
        warden = warden_of(handle)
        os.kill(warden, signal.SIGKILL)
        until(lambda: is_gone(warden))
        launch_another(tmp_path)
        assert executor.poll(handle) == RUNNING


def test_a_gang_that_was_let_go_is_left_alone_and_found_by_its_directory(tmp_path: Path) -> None:
    with script("kept = launch(detach=True)\n", tmp_path) as process:
        assert process.wait(60) == 0
    pid, handle = pid_of(tmp_path), handle_of(tmp_path)
    warden = warden_of(handle)
    os.kill(warden, signal.SIGKILL)
    until(lambda: is_gone(warden))
    launch_another(tmp_path)
    executor = LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2)
    assert executor.poll(handle) == RUNNING
    executor.cancel(handle)
    until(lambda: is_gone(pid))


class Backend:
    """Starts replicas one by one, until something comes between."""

    def __init__(self, trouble: BaseException, *, stubborn: int | None = None) -> None:
        self.trouble, self.stubborn = trouble, stubborn
        self.cancelled: list[int] = []

    def start(self, rank: int) -> ReplicaHandle:
        if rank == 3:
            raise self.trouble
        return ReplicaHandle(rank, "mine", {"job_name": f"job-{rank}"})

    def cancel(self, handle: ReplicaHandle) -> None:
        if handle.rank == self.stubborn:
            raise ConnectionError("not now")
        self.cancelled.append(handle.rank)


@pytest.mark.parametrize("trouble", [RuntimeError("no capacity"), KeyboardInterrupt()])
def test_a_launch_that_is_broken_off_cancels_what_it_started(trouble: BaseException) -> None:
    backend = Backend(trouble, stubborn=1)
    with pytest.raises(type(trouble)) as raised:
        start_each(5, backend.start, backend.cancel, known_as="job_name")
    assert backend.cancelled == [0, 2]
    assert raised.value.__notes__ == ["still there, and to be ended by hand: job-1"]


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), ConnectionResetError("the answer is lost")])
def test_a_job_that_may_have_been_created_is_deleted(monkeypatch: pytest.MonkeyPatch, trouble: BaseException) -> None:
    monkeypatch.setattr("basilica.executors.eks.executor.FIRST_PAUSE_SECONDS", 0.0)
    with KubeServer(processes=False) as kube:
        executor = make_executor(kube.url)
        batch = executor._calls()._batch
        real = batch.create_namespaced_job
        created: list[str] = []

        def create(**given: Any) -> None:
            if not created:
                created.append(real(**given).metadata.name)
            raise trouble

        monkeypatch.setattr(batch, "create_namespaced_job", create)
        with pytest.raises(type(trouble)):
            executor.launch_replicas(2, "any.module:main", {})
        assert created
        kube.wait_for(lambda: not kube.objects("jobs") and not kube.pods())


def test_a_job_that_could_not_be_deleted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basilica.executors.eks.executor.FIRST_PAUSE_SECONDS", 0.0)
    with KubeServer(processes=False) as kube:
        kube.fail("create", "jobs", status=503, times=4)
        kube.fail("delete", "jobs", status=503)
        executor = make_executor(kube.url, run_id="mine")
        with pytest.raises(client.ApiException) as raised:
            executor.launch_replicas(2, "any.module:main", {})
    (note,) = raised.value.__notes__
    assert note.startswith("the Job mine-")
    assert "may be there all the same, in the namespace default" in note
