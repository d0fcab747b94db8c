"""How replicas ended, in the words of every executor."""

from typing import Any

from basilica.executors.protocol import FAILED, SUCCEEDED, OnChange, ReplicaHandle, ReplicaResult


def replica_result(
    handle: ReplicaHandle,
    status: str,
    *,
    exit_code: int | None = None,
    error: str | None = None,
    job_name: str = "",
    result: Any = None,
) -> ReplicaResult:
    """A result that keeps the rule of exit codes, whatever the backend could tell."""
    code = {SUCCEEDED: 0, FAILED: exit_code or 1}.get(status)
    return ReplicaResult(rank=handle.rank, status=status, exit_code=code, error=error, job_name=job_name, result=result)


def not_ended(status: str, timeout: float) -> str:
    """What `error` says of a replica that had not ended at the deadline."""
    return f"still {status} after {timeout:g} s"


def placeholder(rank: int, why: str) -> str:
    """What stands for logs where there are none."""
    return f"<rank {rank}: {why}>"


class Changes:
    """Tells `on_change` of each status that is new."""

    def __init__(self, on_change: OnChange | None) -> None:
        self._on_change = on_change
        self._told: dict[tuple[int, int], str] = {}

    def tell(self, place: int, handle: ReplicaHandle, status: str) -> None:
        """`place` tells handles of equal rank apart: those of two gangs may be collected together."""
        if self._on_change is not None and self._told.get((place, handle.rank)) != status:
            self._told[place, handle.rank] = status
            self._on_change(handle, status)
