"""The protocol of executors. The rules that all of them share are in `arguments`, `environment` and `outcomes`.

Standard library only. An executor starts N replicas somewhere, and needs no control plane for that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

PENDING = "pending"
RUNNING = "running"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"
STATUSES = (PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED)
ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED})

CULPRIT = "culprit"  # it failed first
VICTIM = "victim"  # it failed by itself, after another had
STOPPED = "stopped"  # it was ended because another had failed, or because its time was up
ROLES = (CULPRIT, VICTIM, STOPPED)

LAUNCH_SECONDS = 3600.0
LOG_LINES = 200

Entrypoint = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ReplicaHandle:
    """The handle of one replica. It can be pickled: another process can poll, follow and cancel by it.

    `metadata` is the backend's own: plain data by which it finds the replica again.
    """

    rank: int
    backend_name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class ReplicaResult(TypedDict):
    """The end of one replica, or its status when the time was up.

    `exit_code` is 0 for succeeded, not 0 for failed (the real one where it can be had, else 1), None otherwise. `error`
    is None unless there is a problem. `result` is the return value of the entrypoint, where the backend has it.
    `role` is there for a replica that failed, where the backend knows in which order its gang did.
    """

    rank: int
    status: str
    exit_code: int | None
    error: str | None
    job_name: str
    result: Any
    role: NotRequired[str]


OnChange = Callable[[ReplicaHandle, str], None]
"""Called with a handle and its status: once for each replica at first, and again whenever its status has changed."""


@runtime_checkable
class ServerlessExecutor(Protocol):
    """N replicas somewhere. All methods block."""

    backend_name: str
    supports_inter_replica_network: bool

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = LAUNCH_SECONDS,
    ) -> list[ReplicaHandle]:
        """Start the gang; `handles[i].rank == i`. A replica that runs longer than `timeout` seconds is stopped.

        `entrypoint` is "package.module:function", a module, or a function where the backend can run one;
        `entrypoint_args` are its keyword arguments.
        """
        ...

    def poll(self, handle: ReplicaHandle) -> str:
        """Return one of pending, running, succeeded, failed, cancelled."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        """Return the last lines of the replica's output, or a placeholder in angle brackets with the reason."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """End the replica (on some backends, its whole gang). A replica that is gone, or unknown, is fine."""
        ...

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None, on_change: OnChange | None = None
    ) -> list[ReplicaResult]:
        """Wait until every replica has ended or the time is up; return results in the order of the handles."""
        ...


def gather_logs(executor: ServerlessExecutor, handles: Sequence[ReplicaHandle], *, n_lines: int = LOG_LINES) -> str:
    """Return the last lines of all replicas, by rank, each line with its rank in front: `2| step 10`."""
    parts = []
    for handle in sorted(handles, key=lambda handle: handle.rank):
        text = executor.stream_logs(handle, n_lines=n_lines)
        parts += [f"{handle.rank}| {line}" for line in text.splitlines()]
    return "".join(f"{part}\n" for part in parts)
