"""Replicas as SageMaker training jobs, one job each.

Tried against moto's server over HTTP, with the containers run as local processes: requests, states, CloudWatch logs,
stopping, failure reasons, results through S3. Not tried against AWS itself: instance capacity, IAM, VPC, image pulls,
spot interruptions, throttling by the service (it is left to botocore's adaptive retries).

SageMaker does not push changes of jobs, so `collect` polls: one `ListTrainingJobs` page per hundred replicas and
round, with growing pauses, and one `DescribeTrainingJob` for each job that did not succeed.
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from basilica.executors.arguments import (
    allow_unknown_handle,
    check_launch,
    check_lines,
    check_run_id,
    check_timeout,
    named_in,
    new_gang_name,
)
from basilica.executors.environment import replica_environment
from basilica.executors.launch import gang_metadata, replica_command, start_each
from basilica.executors.outcomes import Changes, Outcome, placeholder, replica_result
from basilica.executors.protocol import (
    CANCELLED,
    ENDED,
    FAILED,
    LAUNCH_SECONDS,
    LOG_LINES,
    PENDING,
    RUNNING,
    SUCCEEDED,
    Entrypoint,
    OnChange,
    ReplicaHandle,
    ReplicaResult,
)
from basilica.executors.results import add_stored_results
from basilica.version import pip_install

INSTANCE_TYPES = {
    "A100": "ml.p4d.24xlarge",
    "H100": "ml.p5.48xlarge",
    "A10G": "ml.g5.xlarge",
    "T4": "ml.g4dn.xlarge",
}
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
FAILURE_FILE = "/opt/ml/output/failure"  # SageMaker shows its content as the reason
VALUE_CHARACTERS_MAX = 512  # of one variable: the limit of SageMaker
VARIABLES_MAX = 100
PAGE = 100
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 30.0
WAITING_STAGES = frozenset({
    "Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Downloading", "DownloadingTrainingImage",
    "Restarting",
})  # fmt: skip
OUT_OF_TIME = frozenset({"MaxRuntimeExceeded", "MaxWaitTimeExceeded"})

_RUN_ID = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,40}")
_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)


class SageMakerExecutor:
    """Replicas as training jobs of SageMaker.

    `image` must have Python, basilica and the module of the entrypoint in it. `role_arn` is the role of the jobs, with
    S3 access to `output_path` and to the rendezvous. Clients are made with boto3's own configuration unless injected.
    """

    backend_name = "sagemaker"
    supports_inter_replica_network = False

    def __init__(
        self,
        image: str,
        role_arn: str,
        output_path: str,
        *,
        instance_type: str = "ml.m5.xlarge",
        volume_size_gb: int = 30,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        subnets: Sequence[str] = (),
        security_group_ids: Sequence[str] = (),
        run_id: str | None = None,
        region_name: str | None = None,
        sagemaker_client: Any = None,
        logs_client: Any = None,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        try:
            import boto3  # noqa: PLC0415  each optional package is loaded by its executor
            from botocore.config import Config  # noqa: PLC0415
            from botocore.exceptions import ClientError  # noqa: PLC0415
        except ImportError:
            raise RuntimeError(f"SageMakerExecutor needs boto3: {pip_install('sagemaker')}") from None
        self._run_id = check_run_id(run_id, _RUN_ID, "SageMaker takes letters, digits and '-', at most 41 of them")
        if not output_path.startswith("s3://"):
            raise ValueError(f"output_path {output_path!r} must be an s3:// URI: SageMaker asks for one")
        retries = Config(retries={"mode": "adaptive", "max_attempts": 10})
        self._error = ClientError
        self._sagemaker = sagemaker_client or boto3.client("sagemaker", region_name=region_name, config=retries)
        self._logs = logs_client or boto3.client("logs", region_name=region_name, config=retries)
        self._image = image
        self._role = role_arn
        self._output = output_path
        self._instance_type = instance_type
        self._volume_gb = volume_size_gb
        self._command = list(command or replica_command())
        self._environment = dict(environment or {})
        self._vpc = {"Subnets": list(subnets), "SecurityGroupIds": list(security_group_ids)} if subnets else None
        self._first_pause = first_pause_seconds

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = LAUNCH_SECONDS,
    ) -> list[ReplicaHandle]:
        """Create the jobs. `gpu` chooses the instance: A100, H100, A10G or T4, or the name of one (`ml.…`).

        If one cannot be created, those before it are stopped, and the error is raised.
        """
        check_launch(n_replicas, entrypoint, entrypoint_args, timeout, callables=False)
        gang = new_gang_name(self._run_id)
        environment = self._common_environment(n_replicas, str(entrypoint), entrypoint_args, gang)
        instance_type = self._instance(gpu)
        metadata = gang_metadata(entrypoint_args, gang=gang)

        def start(rank: int) -> ReplicaHandle:
            job = f"{gang}-{rank}"
            handle = ReplicaHandle(rank, self.backend_name, {**metadata, "job_name": job, "rank": rank})
            variables = {**environment, "REPLICA_RANK": str(rank)}
            try:
                self._sagemaker.create_training_job(**self._request(job, variables, instance_type, timeout))
            except KeyboardInterrupt:  # the job may be there all the same
                with suppress(self._error):
                    self.cancel(handle)
                raise
            return handle

        return start_each(n_replicas, start, self.cancel, known_as="job_name")

    def poll(self, handle: ReplicaHandle) -> str:
        return str(self._describe(handle)["status"])

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        check_lines(n_lines)
        job = _job(handle)
        try:
            found = self._logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/")
        except self._error as error:
            if _code(error) != "ResourceNotFoundException":
                raise
            found = {}
        streams = [stream["logStreamName"] for stream in found.get("logStreams", ())]
        lines: list[str] = []
        for stream in streams:
            events = self._logs.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, limit=n_lines, startFromHead=False
            )
            lines += [event["message"].rstrip("\n") for event in events["events"]]
        if not lines:
            return placeholder(handle.rank, "training job not started / no logs yet")
        return "".join(f"{line}\n" for line in lines[-n_lines:])

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stop this replica's job; the others go on."""
        with allow_unknown_handle():
            try:
                self._sagemaker.stop_training_job(TrainingJobName=_job(handle))
            except self._error as error:
                # SageMaker answers both "no such job" and "it has ended already" with a validation error.
                if _code(error) not in ("ValidationException", "ResourceNotFound"):
                    raise

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None, on_change: OnChange | None = None
    ) -> list[ReplicaResult]:
        """Wait until every job has ended; `timeout=None` waits a day."""
        seconds = check_timeout(timeout)
        deadline = time.monotonic() + seconds
        changes = Changes(on_change)
        results: dict[int, ReplicaResult] = {}
        pause = self._first_pause
        while True:
            waiting = [place for place in range(len(handles)) if place not in results]
            statuses = self._list([handles[place] for place in waiting])
            left = deadline - time.monotonic()
            for place, status in zip(waiting, statuses, strict=True):
                if status in ENDED:
                    results[place] = replica_result(handles[place], self._ended(handles[place], status), seconds)
                    changes.notify(place, handles[place], results[place]["status"])
                    continue
                changes.notify(place, handles[place], status)
                if left <= 0:
                    results[place] = replica_result(handles[place], Outcome(status), seconds)
            if len(results) == len(handles):
                ordered = [results[place] for place in range(len(handles))]
                add_stored_results(handles, ordered, gang_key="gang")
                return ordered
            time.sleep(max(0.0, min(pause, left)))
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)

    # ---- calls to SageMaker --------------------------------------------------------------------------------------

    def _list(self, handles: Sequence[ReplicaHandle]) -> list[str]:
        """Return the status of each job, by a listing per gang; a job in no listing is read by its name."""
        found: dict[str, str] = {}
        names = [_job(handle) for handle in handles]
        for gang in dict.fromkeys(handle.metadata.get("gang") for handle in handles):
            if not gang:
                continue
            pages = self._sagemaker.get_paginator("list_training_jobs").paginate(
                NameContains=f"{gang}-", PaginationConfig={"PageSize": PAGE}
            )
            for page in pages:
                for job in page["TrainingJobSummaries"]:
                    found[job["TrainingJobName"]] = _status(job)
        return [
            found.get(name) or self._describe(handle)["status"] for name, handle in zip(names, handles, strict=True)
        ]

    def _describe(self, handle: ReplicaHandle) -> dict[str, Any]:
        try:
            job = self._sagemaker.describe_training_job(TrainingJobName=_job(handle))
        except self._error as error:
            if _code(error) not in ("ValidationException", "ResourceNotFound"):
                raise
            return {"status": CANCELLED, "reason": f"there is no training job {_job(handle)!r}"}
        status = _status(job)
        reason = job.get("FailureReason") or ""
        if job.get("SecondaryStatus") in OUT_OF_TIME:
            limit = job.get("StoppingCondition", {}).get("MaxRuntimeInSeconds", 0)
            reason = f"stopped, since it had not ended within {limit:g} s"
        return {"status": status, "reason": reason}

    def _ended(self, handle: ReplicaHandle, status: str) -> Outcome:
        if status == SUCCEEDED:
            return Outcome(status)
        described = self._describe(handle)
        reason = described["reason"] or ("cancelled" if described["status"] == CANCELLED else "the training job failed")
        code = _EXIT_CODE.search(reason)
        return Outcome(described["status"], None if code is None else int(code[1]), reason)

    # ---- requests ------------------------------------------------------------------------------------------------

    def _request(self, job: str, variables: Mapping[str, str], instance_type: str, timeout: float) -> dict[str, Any]:
        request: dict[str, Any] = {
            "TrainingJobName": job,
            "AlgorithmSpecification": {
                "TrainingImage": self._image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": self._command,
            },
            "RoleArn": self._role,
            "OutputDataConfig": {"S3OutputPath": self._output},
            "ResourceConfig": {
                "InstanceType": instance_type,
                "InstanceCount": 1,
                "VolumeSizeInGB": self._volume_gb,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": math.ceil(timeout)},
            "Environment": dict(variables),
            "Tags": [{"Key": "app", "Value": "basilica"}],
        }
        return request if self._vpc is None else request | {"VpcConfig": self._vpc}

    def _common_environment(
        self, n_replicas: int, entrypoint: str, arguments: Mapping[str, Any], gang: str
    ) -> dict[str, str]:
        found = replica_environment(n_replicas, entrypoint, arguments, remote=True)
        found |= {**self._environment, "REPLICA_JOB": gang, "REPLICA_FAILURE_FILE": FAILURE_FILE}
        text = found["ENTRYPOINT_ARGS"]
        if len(text) > VALUE_CHARACTERS_MAX:
            del found["ENTRYPOINT_ARGS"]
            starts = range(0, len(text), VALUE_CHARACTERS_MAX)
            pieces = [text[start : start + VALUE_CHARACTERS_MAX] for start in starts]
            found |= {f"ENTRYPOINT_ARGS_{number}": piece for number, piece in enumerate(pieces)}
            found = {name: value for name, value in found.items() if len(value) <= VALUE_CHARACTERS_MAX}
        if len(found) >= VARIABLES_MAX:
            raise ValueError(
                f"entrypoint_args are {len(text)} characters as JSON, more than SageMaker takes: "
                "keep them in the object store and pass where they are"
            )
        return found

    def _instance(self, gpu: str | None) -> str:
        if gpu is None:
            return self._instance_type
        if gpu.startswith("ml."):
            return gpu
        if gpu not in INSTANCE_TYPES:
            raise ValueError(f"gpu {gpu!r}: say {', '.join(INSTANCE_TYPES)}, or an instance type such as ml.g6.xlarge")
        return INSTANCE_TYPES[gpu]


def _job(handle: ReplicaHandle) -> str:
    return named_in(handle, SageMakerExecutor.backend_name, "job_name")


def _status(job: Mapping[str, Any]) -> str:
    """Return the status from a description or a row of a listing. SageMaker has `Stopped` for a job out of time."""
    stage = job.get("SecondaryStatus", "")
    match job["TrainingJobStatus"]:
        case "Completed":
            return SUCCEEDED
        case "Failed":
            return FAILED
        case "Stopped":
            return FAILED if stage in OUT_OF_TIME else CANCELLED
        case "Stopping":
            return RUNNING
        case _:
            return PENDING if stage in WAITING_STAGES else RUNNING


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
