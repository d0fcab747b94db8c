"""A SageMaker to test against: moto's server over HTTP, with machines. moto keeps the jobs and their log streams; here
is what it lacks: containers, as local processes, and stopping them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.models import FakeTrainingJob
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer

from basilica.executors import SageMakerExecutor
from basilica.executors.sagemaker import LOG_GROUP

REGION = "us-east-1"
BUCKET = "basilica-test"
GRACE_SECONDS = 2.0


class Machine(threading.Thread):
    """Runs the container of one training job, and tells SageMaker and CloudWatch how it goes."""

    def __init__(self, cloud: "Cloud", job: FakeTrainingJob, environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.cloud, self.job = cloud, job
        self.place = cloud.directory / job.training_job_name
        self.place.mkdir(parents=True)
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            **cloud.credentials,
            "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
            **environment,
            "REPLICA_FAILURE_FILE": str(self.place / "failure"),  # in a container: /opt/ml/output/failure
        }
        self.stopping = threading.Event()

    def run(self) -> None:
        stage(self.job, "InProgress", "Starting")
        command = self.job.algorithm_specification["ContainerEntrypoint"]
        log = self.place / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.place,
                start_new_session=True,
            )
        stage(self.job, "InProgress", "Training")
        deadline = time.monotonic() + self.job.stopping_condition["MaxRuntimeInSeconds"]
        shown, asked = 0, 0.0
        while (code := process.poll()) is None:
            shown = self.cloud.write_log(self.job.training_job_name, log, shown)
            if (self.stopping.is_set() or time.monotonic() > deadline) and not asked:
                asked = time.monotonic()
                os.killpg(process.pid, signal.SIGTERM)
            if asked and time.monotonic() > asked + GRACE_SECONDS:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.03)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.cloud.write_log(self.job.training_job_name, log, shown)
        self.end(code, out_of_time=bool(asked) and not self.stopping.is_set())

    def end(self, code: int, *, out_of_time: bool) -> None:
        if out_of_time:
            stage(self.job, "Stopped", "MaxRuntimeExceeded")
        elif self.stopping.is_set():
            stage(self.job, "Stopped", "Stopped")
        elif code == 0:
            stage(self.job, "Completed", "Completed")
        else:
            failure = self.place / "failure"
            said = failure.read_text().strip() if failure.exists() else ""
            reason = f"AlgorithmError: {said}, exit code: {code if code > 0 else 128 - code}"
            vars(self.job)["failure_reason"] = reason  # which moto answers as FailureReason
            stage(self.job, "Failed", "Failed")


def stage(job: FakeTrainingJob, status: str, secondary: str) -> None:
    job.secondary_status = secondary
    job.training_job_status = status


class Cloud:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.machines: dict[str, Machine] = {}
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def start(self) -> None:
        self._server.start()
        _, port = self._server.get_host_and_port()
        self.credentials = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "NO_PROXY": "127.0.0.1",
        }
        self.logs = self.client("logs")
        self.logs.create_log_group(logGroupName=LOG_GROUP)
        self.client("s3").create_bucket(Bucket=BUCKET)

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.credentials["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def stop(self) -> None:
        for machine in self.machines.values():
            machine.stopping.set()
        for machine in self.machines.values():
            if machine.is_alive():
                machine.join(GRACE_SECONDS + 10)
        self._server.stop()

    def write_log(self, job: str, log: Path, shown: int) -> int:
        """Pass whole lines on to CloudWatch; returns how far it came."""
        data = log.read_bytes()[shown:]
        data = data[: data.rfind(b"\n") + 1]
        if not data:
            return shown
        stream = f"{job}/algo-1-1700000000"
        with self._lock:
            if shown == 0:
                self.logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
            now = int(time.time() * 1000)
            events = [{"timestamp": now, "message": line.decode()} for line in data.splitlines()]
            self.logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)
        return shown + len(data)


@contextmanager
def sagemaker_cloud(directory: Path) -> Iterator[Cloud]:
    """moto with machines, for the time of the block."""
    cloud = Cloud(directory)
    create, listing = SageMakerResponse.create_training_job, SageMakerResponse.list_training_jobs

    def create_training_job(self: SageMakerResponse) -> Any:
        answer = create(self)
        job = self.sagemaker_backend.training_jobs[self._get_param("TrainingJobName")]
        machine = cloud.machines[job.training_job_name] = Machine(cloud, job, self._get_param("Environment") or {})
        stage(job, "InProgress", "Starting")
        machine.start()
        cloud.requests.append("create")
        return answer

    def stop_training_job(self: SageMakerResponse) -> Any:
        name = self._get_param("TrainingJobName")
        if name not in self.sagemaker_backend.training_jobs:
            raise ValidationError("Requested resource not found.")
        job = self.sagemaker_backend.training_jobs[name]
        if job.training_job_status != "InProgress":
            raise ValidationError(f"The request was rejected because the training job is in status {name}")
        stage(job, "Stopping", "Stopping")
        cloud.machines[name].stopping.set()
        return ActionResult({})

    def list_training_jobs(self: SageMakerResponse) -> Any:
        cloud.requests.append("list")
        return listing(self)

    patched = {
        "create_training_job": create_training_job,
        "stop_training_job": stop_training_job,
        "list_training_jobs": list_training_jobs,
    }
    for name, method in patched.items():
        setattr(SageMakerResponse, name, method)
    cloud.start()
    try:
        yield cloud
    finally:
        cloud.stop()
        SageMakerResponse.create_training_job = create  # type: ignore[method-assign]
        SageMakerResponse.list_training_jobs = listing  # type: ignore[method-assign]
        delattr(SageMakerResponse, "stop_training_job")


def make_executor(credentials: dict[str, str]) -> SageMakerExecutor:
    """An executor on that cloud, from any process."""
    os.environ.update(credentials)
    return SageMakerExecutor(
        "registry.example/train:1",
        "arn:aws:iam::123456789012:role/train",
        f"s3://{BUCKET}/output",
        first_pause_seconds=0.05,
    )
