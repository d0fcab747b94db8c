"""Calls to the API of Kubernetes: objects in and out as plain JSON, whatever client was given.

The official client returns the raw response here. Its models are slow to build for thousands of pods, and its own
parser changes logs (a line of JSON comes back as Python).
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from basilica.executors.eks.evidence import CONTAINER
from basilica.kube.manifests.gang import COMPLETION_INDEX
from basilica.kube.manifests.refused import last_refusal, refusals_of

Json = dict[str, Any]
TRANSIENT = frozenset({429, 500, 502, 503, 504})
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0  # a server that sends nothing for so long is dead
LAST_ANSWER_SECONDS = 1.0  # for requests after the caller's deadline
SILENCE_SECONDS = 150.0  # the server sends a bookmark each minute: a watch without any event for so long is dead


class WatchExpired(Exception):
    """The resource version to continue from is too old: list the pods again."""


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an API error, whichever client raised it."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: throttling, a failing server, a broken connection."""
    status = status_of(error)
    if status:
        return status in TRANSIENT
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "urllib3"


def is_silence(error: BaseException) -> bool:
    """Return whether a watch ended by its read timeout: no event came, which is no failure."""
    return type(error).__module__.partition(".")[0] == "urllib3" and type(error).__name__ == "ReadTimeoutError"


def retry_after(error: BaseException) -> float | None:
    """Return the seconds that the server asked to wait, if it did."""
    headers = getattr(error, "headers", None)
    text = None if headers is None else headers.get("Retry-After")
    return float(text) if isinstance(text, str) and text.isdecimal() else None


class Calls:
    """Calls to one cluster, through a `BatchV1Api` and a `CoreV1Api` or objects with their methods.

    With the official client, no request lasts much longer than the deadline, and none for ever.
    """

    def __init__(self, batch: Any, core: Any, deadline: float = math.inf) -> None:
        self._batch, self._core, self._deadline = batch, core, deadline
        self.can_watch = _is_official(core)

    def until(self, deadline: float) -> "Calls":
        """Return the same calls with another deadline."""
        return Calls(self._batch, self._core, deadline)

    def _options(self, api: Any, *, raw: bool = True) -> dict[str, Any]:
        """Return the options that only the official client takes: request timeouts, and the raw response."""
        if not _is_official(api):
            return {}
        patience = max(LAST_ANSWER_SECONDS, min(ANSWER_SECONDS, self._deadline - time.monotonic()))
        found: dict[str, Any] = {"_request_timeout": (min(CONNECT_SECONDS, patience), patience)}
        return {**found, "_preload_content": False} if raw else found

    def create_job(self, namespace: str, manifest: Json) -> None:
        options = self._options(self._batch, raw=False)
        self._batch.create_namespaced_job(namespace=namespace, body=manifest, **options)

    def delete_job(self, namespace: str, name: str) -> None:
        """Delete the Job with its pods: the default propagation would leave them running."""
        self._batch.delete_namespaced_job(
            name=name,
            namespace=namespace,
            propagation_policy="Background",
            grace_period_seconds=0,
            **self._options(self._batch, raw=False),
        )

    def read_job(self, namespace: str, name: str) -> Json | None:
        """Return the Job with its status; None if it does not exist."""
        try:
            options = self._options(self._batch)
            answer = self._batch.read_namespaced_job_status(name=name, namespace=namespace, **options)
        except Exception as error:
            if status_of(error) == 404:
                return None
            raise
        return _whole(answer) if options else job_json(answer)

    def list_pods(self, namespace: str, job_name: str, rank: int | None = None) -> list[Json]:
        """Return the pods of a Job, or of one index of it."""
        options = self._options(self._core)
        found = self._core.list_namespaced_pod(
            namespace=namespace, label_selector=selector_of(job_name, rank), **options
        )
        if options:
            return list(_whole(found)["items"])
        return [pod_json(pod) for pod in _items(getattr(found, "items", found))]

    def list_to_watch(self, namespace: str, job_name: str, *, cached: bool) -> tuple[list[Json], str]:
        """Return all pods of the Job and the version to watch from; `cached` is cheap for the server, maybe stale."""
        options = self._options(self._core) | ({"resource_version": "0"} if cached else {})
        selector = selector_of(job_name)
        answer = self._core.list_namespaced_pod(namespace=namespace, label_selector=selector, **options)
        found = _whole(answer)
        return list(found["items"]), str(found["metadata"]["resourceVersion"])

    def read_log(self, namespace: str, pod: str, n_lines: int) -> str:
        options = self._options(self._core)
        answer = self._core.read_namespaced_pod_log(
            name=pod, namespace=namespace, container=CONTAINER, tail_lines=n_lines, **options
        )
        text = answer.data if options else answer
        if options:
            answer.release_conn()
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)

    def read_refusal(self, namespace: str, job_name: str) -> str:
        """Return why Kubernetes last refused a pod of the Job; empty if it did not, or if events are forbidden."""
        list_events = getattr(self._core, "list_namespaced_event", None)
        if list_events is None:  # a client with only the methods that a healthy gang needs
            return ""
        options = self._options(self._core)
        try:
            found = list_events(namespace=namespace, field_selector=refusals_of(job_name), **options)
        except Exception as error:
            if status_of(error) not in (403, 404):
                raise
            return ""
        if options:
            return last_refusal(_whole(found)["items"])
        return last_refusal([event_json(event) for event in _items(getattr(found, "items", found))])

    def watch_pods(
        self, namespace: str, job_name: str, version: str, seconds: float, silence: float = SILENCE_SECONDS
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Watch the Job's pods: yield their changes after a version.

        The watch ends after about `seconds`, or with an error that `is_silence` after `silence`. Any other error is
        raised; a version that is too old as `WatchExpired`.
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
                _request_timeout=(CONNECT_SECONDS, max(0.05, min(seconds, silence))),
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
    """An error of the server that ended a watch."""

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


# ---- responses of other clients: objects with attributes, or plain dictionaries ------------------------------------


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


def event_json(event: Any) -> Json:
    if isinstance(event, dict):
        return event
    times = {"lastTimestamp": "last_timestamp", "eventTime": "event_time"}
    found = {key: _time(getattr(event, name, None)) for key, name in times.items()}
    return {**found, "message": _text(getattr(event, "message", None))}


def _container(status: Any) -> Json:
    state = getattr(status, "state", None)
    ended = getattr(state, "terminated", None)
    found: Json = {}
    code = getattr(ended, "exit_code", None)
    if isinstance(code, int):
        texts = {key: _text(getattr(ended, key, None)) for key in ("reason", "message")}
        found["terminated"] = {"exitCode": code, "finishedAt": _time(getattr(ended, "finished_at", None)), **texts}
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
