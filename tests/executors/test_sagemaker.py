"""The SageMaker executor keeps the contract, against moto's server over HTTP."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.sagemaker.exceptions import AWSValidationException

from basilica.diloco.replica_entrypoint import arguments_of
from basilica.executors import ReplicaHandle, SageMakerExecutor, ServerlessExecutor
from basilica.executors.sagemaker import _status
from basilica.testing.executor_contract import SECONDS, ExecutorContract, until
from tests.executors.sagemaker_cloud import BUCKET, Cloud, Machine, make_executor, sagemaker_cloud


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    before = dict(os.environ)
    with sagemaker_cloud(tmp_path_factory.mktemp("machines")) as running:
        os.environ.update(running.credentials)
        yield running
    os.environ.clear()
    os.environ.update(before)


class TestSageMakerExecutor(ExecutorContract):
    cloud: Cloud
    arguments: dict[str, Any] = {"rendezvous_uri": f"s3://{BUCKET}/run"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _on_a_cloud(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def maker(self, directory: Path) -> Callable[[], ServerlessExecutor]:
        return partial(make_executor, self.cloud.credentials)


@pytest.fixture
def executor(cloud: Cloud) -> SageMakerExecutor:
    return make_executor(cloud.credentials)


@pytest.fixture
def no_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs whose containers end as soon as they are created."""
    monkeypatch.setattr(Machine, "start", lambda self: self.end(0, out_of_time=False))


@pytest.mark.usefixtures("no_machines")
def test_collect_asks_by_pages_and_not_by_replicas(cloud: Cloud, executor: SageMakerExecutor) -> None:
    handles = executor.launch_replicas(250, "m:f", {})
    cloud.requests.clear()
    results = executor.collect(handles, timeout=SECONDS)
    assert {result["status"] for result in results} == {"succeeded"}
    assert set(cloud.requests) == {"list"}
    jobs = len(cloud.machines)
    assert len(cloud.requests) <= -(-jobs // 100)  # moto gives pages of all jobs and then looks at their names


@pytest.mark.usefixtures("no_machines")
def test_long_arguments_travel_in_pieces(cloud: Cloud, executor: SageMakerExecutor) -> None:
    (handle,) = executor.launch_replicas(1, "m:f", {"text": "x" * 3000, "steps": 3})
    environment = cloud.machines[handle.metadata["job_name"]].environment
    assert max(len(environment[name]) for name in environment if name.startswith("ENTRYPOINT_ARGS")) <= 512
    assert arguments_of(environment) == {"text": "x" * 3000, "steps": 3}
    assert environment["STEPS"] == "3"
    assert "TEXT" not in environment
    with pytest.raises(ValueError, match="keep them in the object store"):
        executor.launch_replicas(1, "m:f", {"text": "x" * 60_000})


def test_if_one_job_cannot_be_created_the_others_are_stopped(
    cloud: Cloud, executor: SageMakerExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Machine) -> None:
        if self.job.training_job_name.endswith("-2"):
            raise AWSValidationException("The account-level service limit is 2 instances")
        start(self)

    start = Machine.start
    monkeypatch.setattr(Machine, "start", refuse)
    before = set(cloud.machines)
    with pytest.raises(ClientError, match="service limit"):
        executor.launch_replicas(3, "basilica.testing.replicas:wait", {"directory": str(tmp_path)})
    created = [machine for name, machine in cloud.machines.items() if name not in before and name[-2:] != "-2"]
    assert len(created) == 2
    until(lambda: {machine.job.training_job_status for machine in created} == {"Stopped"})


@pytest.mark.usefixtures("no_machines")
def test_a_gpu_chooses_the_instance(cloud: Cloud, executor: SageMakerExecutor) -> None:
    def instance(gpu: str | None) -> str:
        (handle,) = executor.launch_replicas(1, "m:f", {}, gpu=gpu)
        return str(cloud.machines[handle.metadata["job_name"]].job.resource_config["InstanceType"])

    kinds = [instance(gpu) for gpu in (None, "A100", "T4", "ml.g6.xlarge")]
    assert kinds == ["ml.m5.xlarge", "ml.p4d.24xlarge", "ml.g4dn.xlarge", "ml.g6.xlarge"]
    with pytest.raises(ValueError, match="say A100, H100"):
        executor.launch_replicas(1, "m:f", {}, gpu="B9000")


class Refusing:
    """A client whose every answer is that it may not."""

    def __getattr__(self, name: str) -> Any:
        def refuse(**_: Any) -> None:
            raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, name)

        return refuse


@pytest.mark.parametrize("method", ["cancel", "poll", "stream_logs"])
def test_trouble_is_raised_and_no_state(method: str) -> None:
    executor = SageMakerExecutor("i", "r", "s3://x", sagemaker_client=Refusing(), logs_client=Refusing())
    handle = ReplicaHandle(0, "sagemaker", {"job_name": "x-0", "gang": "x"})
    with pytest.raises(ClientError, match="AccessDenied"):
        getattr(executor, method)(handle)


@pytest.mark.parametrize(
    ("job", "status"),
    [
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"}, "pending"),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "DownloadingTrainingImage"}, "pending"),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}, "running"),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "Uploading"}, "running"),
        ({"TrainingJobStatus": "InProgress"}, "running"),
        ({"TrainingJobStatus": "Stopping", "SecondaryStatus": "Stopping"}, "running"),
        ({"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped"}, "cancelled"),
        ({"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"}, "failed"),
        ({"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed"}, "failed"),
        ({"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}, "succeeded"),
    ],
)
def test_states(job: dict[str, str], status: str) -> None:
    assert _status(job) == status


def test_options_that_sagemaker_would_refuse() -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        SageMakerExecutor("i", "r", "s3://x", run_id="under_score")
    with pytest.raises(ValueError, match="s3:// URI"):
        SageMakerExecutor("i", "r", "/tmp")
