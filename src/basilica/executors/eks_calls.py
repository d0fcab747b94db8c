"""Calls to Kubernetes: objects in and out as plain JSON, whatever client was given.

The official client is asked for the raw answer. Its models are slow to build for thousands of pods, and its own reading
of logs changes them (a line of JSON comes back as Python).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from basilica.executors.eks_evidence import CONTAINER
from basilica.kube.render import COMPLETION_INDEX

Json = dict[str, Any]
TRANSIENT = frozenset({429, 500, 502, 503, 504})
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 150.0  # a watch gets a bookmark each minute: one that says nothing for so long is dead


class WatchExpired(Exception):
    """The version to go on from is too old: begin anew."""


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an API error, by whichever client it was raised."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def is_transient(error: BaseException) -> bool:
    """Whether it may go well the next time: throttling, an unwell server, a connection that broke."""
    status = status_of(error)
    if status:
        return status in TRANSIENT
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "urllib3"


def is_silence(error: BaseException) -> bool:
    """Whether a watch ended because nothing was said for as long as it was meant to last: that is no trouble."""
    return type(error).__module__.partition(".")[0] == "urllib3" and type(error).__name__ == "ReadTimeoutError"


def retry_after(error: BaseException) -> float | None:
    """How long the server asked to wait."""
    headers = getattr(error, "headers", None)
    text = None if headers is None else headers.get("Retry-After")
    return float(text) if isinstance(text, str) and text.isdecimal() else None


class Calls:
    """One cluster, through a `BatchV1Api` and a `CoreV1Api` or what looks like them."""

    def __init__(self, batch: Any, core: Any) -> None:
        self._batch, self._core = batch, core
        self.can_watch = _is_official(core)

    def create_job(self, namespace: str, manifest: Json) -> None:
        self._batch.create_namespaced_job(namespace=namespace, body=manifest)

    def delete_job(self, namespace: str, name: str) -> None:
        """With its pods: the default would leave them running."""
        self._batch.delete_namespaced_job(
            name=name, namespace=namespace, propagation_policy="Background", grace_period_seconds=0
        )

    def read_job(self, namespace: str, name: str) -> Json | None:
        """The Job with its status; None if there is none."""
        try:
            if not _is_official(self._batch):
                return job_json(self._batch.read_namespaced_job_status(name=name, namespace=namespace))
            answer = self._batch.read_namespaced_job_status(name=name, namespace=namespace, _preload_content=False)
        except Exception as error:
            if status_of(error) == 404:
                return None
            raise
        return _whole(answer)

    def list_pods(self, namespace: str, job_name: str, rank: int | None = None) -> list[Json]:
        """The pods of a Job, or of one index of it."""
        selector = selector_of(job_name, rank)
        if not self.can_watch:
            found = self._core.list_namespaced_pod(namespace=namespace, label_selector=selector)
            return [pod_json(pod) for pod in _items(getattr(found, "items", found))]
        answer = self._core.list_namespaced_pod(namespace=namespace, label_selector=selector, _preload_content=False)
        return list(_whole(answer)["items"])

    def list_to_watch(self, namespace: str, job_name: str, *, cached: bool) -> tuple[list[Json], str]:
        """All pods of the Job and the version to watch from; `cached` is cheap for the server, and may be a bit old."""
        version = {"resource_version": "0"} if cached else {}
        selector = selector_of(job_name)
        answer = self._core.list_namespaced_pod(
            namespace=namespace, label_selector=selector, _preload_content=False, **version
        )
        found = _whole(answer)
        return list(found["items"]), str(found["metadata"]["resourceVersion"])

    def read_log(self, namespace: str, pod: str, n_lines: int) -> str:
        more = {"_preload_content": False} if self.can_watch else {}
        answer = self._core.read_namespaced_pod_log(
            name=pod, namespace=namespace, container=CONTAINER, tail_lines=n_lines, **more
        )
        text = answer.data if self.can_watch else answer
        if self.can_watch:
            answer.release_conn()
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)

    def watch_pods(
        self, namespace: str, job_name: str, version: str, seconds: float
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Changes of the Job's pods after a version.

        It ends after about `seconds`. What breaks it is raised; a version that is too old as `WatchExpired`.
        """
        try:
            answer = self._core.list_namespaced_pod(
                namespace=namespace,
                label_selector=selector_of(job_name),
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=max(1, int(seconds)),
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, max(0.05, min(seconds, SILENCE_SECONDS))),
            )
        except Exception as error:
            if status_of(error) == 410:
                raise WatchExpired from error
            raise
        try:
            for line in _lines(answer):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error_of(event["object"])
                yield event["type"], event["object"]
        finally:
            answer.close()


class WatchError(Exception):
    """The stream ended with an error of the server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


def _error_of(status: Mapping[str, Any]) -> Exception:
    if status.get("code") == 410:
        return WatchExpired()
    return WatchError(int(status.get("code") or 500), str(status.get("message")))


def selector_of(job_name: str, rank: int | None = None) -> str:
    index = "" if rank is None else f",{COMPLETION_INDEX}={rank}"
    return f"job-name={job_name}{index}"


def _is_official(api: Any) -> bool:
    return type(api).__module__.partition(".")[0] == "kubernetes"


def _whole(answer: Any) -> Json:
    found: Json = json.loads(answer.data)
    answer.release_conn()
    return found


def _lines(answer: Any) -> Iterator[bytes]:
    rest = b""
    for piece in answer.stream(amt=None, decode_content=False):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line for line in whole if line)


# ---- what other clients give: objects with attributes, or plain dictionaries ---------------------------------------


def job_json(job: Any) -> Json:
    if isinstance(job, dict):
        return job
    status = getattr(job, "status", None)
    limit = getattr(getattr(job, "spec", None), "backoff_limit", None)
    return {
        "spec": {"backoffLimit": limit if isinstance(limit, int) else 0},
        "status": {
            "active": _number(getattr(status, "active", None)),
            "completedIndexes": _text(getattr(status, "completed_indexes", None)),
            "failedIndexes": _text(getattr(status, "failed_indexes", None)),
            "conditions": [_condition(found) for found in _items(getattr(status, "conditions", None))],
        },
    }


def pod_json(pod: Any) -> Json:
    if isinstance(pod, dict):
        return pod
    metadata, status = getattr(pod, "metadata", None), getattr(pod, "status", None)
    found: Json = {
        "name": _text(getattr(metadata, "name", None)) or "",
        "annotations": _texts(getattr(metadata, "annotations", None)),
        "labels": _texts(getattr(metadata, "labels", None)),
        "creationTimestamp": str(getattr(metadata, "creation_timestamp", "")),
    }
    if _time(getattr(metadata, "deletion_timestamp", None)):
        found["deletionTimestamp"] = _time(metadata.deletion_timestamp)  # type: ignore[union-attr]
    statuses = [_container(each) for each in _items(getattr(status, "container_statuses", None))]
    known = {key: _text(getattr(status, key, None)) for key in ("phase", "reason", "message")}
    return {"metadata": found, "status": {**known, "containerStatuses": statuses}}


def _container(status: Any) -> Json:
    state = getattr(status, "state", None)
    ended = getattr(state, "terminated", None)
    found: Json = {}
    code = getattr(ended, "exit_code", None)
    if isinstance(code, int):
        told = {key: _text(getattr(ended, key, None)) for key in ("reason", "message")}
        found["terminated"] = {"exitCode": code, "finishedAt": _time(getattr(ended, "finished_at", None)), **told}
    elif getattr(state, "running", None) is not None:
        found["running"] = {}
    return {"name": _text(getattr(status, "name", None)), "state": found}


def _condition(found: Any) -> Json:
    if isinstance(found, dict):
        return found
    return {key: _text(getattr(found, key, None)) for key in ("type", "status", "reason", "message")}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _texts(value: Any) -> dict[str, str]:
    return dict(value) if isinstance(value, Mapping) else {}


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _time(value: Any) -> str:
    if isinstance(value, str):
        return value
    return value.isoformat() if hasattr(value, "isoformat") and hasattr(value, "year") else ""
