"""Outcomes of replicas, with the rules that all executors share."""

from typing import Any, NamedTuple

from basilica.executors.protocol import ENDED, FAILED, SUCCEEDED, OnChange, ReplicaHandle, ReplicaResult


class Outcome(NamedTuple):
    """The status of one replica. `exit_code` is the real one, where it is known; `error` is the reason of the status;
    `role` is the part of a failed replica in the failure of its gang, where that is known."""

    status: str
    exit_code: int | None = None
    error: str | None = None
    result: Any = None
    role: str | None = None


def replica_result(handle: ReplicaHandle, outcome: Outcome, waited_seconds: float) -> ReplicaResult:
    """Return the result that `collect` gives after the wait, by the rules of exit codes and deadlines.

    The name of its job is `job_name` of the handle's metadata.
    """
    status, exit_code, error, result, role = outcome
    if status not in ENDED:
        error = ": ".join(filter(None, (f"still {status} after {waited_seconds:g} s", error)))
    found = ReplicaResult(
        rank=handle.rank,
        status=status,
        exit_code={SUCCEEDED: 0, FAILED: exit_code or 1}.get(status),
        error=error,
        job_name=str(handle.metadata.get("job_name", "")),
        result=result,
    )
    if status == FAILED and role is not None:
        found["role"] = role
    return found


def placeholder(rank: int, *why: str) -> str:
    """Return the placeholder of missing logs; empty reasons are left out."""
    return f"<rank {rank}: {': '.join(filter(None, why))}>"


class Changes:
    """Notifications of `on_change`, once for each new status."""

    def __init__(self, on_change: OnChange | None) -> None:
        self._on_change = on_change
        self._notified: dict[tuple[int, int], str] = {}

    def notify(self, place: int, handle: ReplicaHandle, status: str) -> None:
        """Call `on_change` if the status is new. `place` distinguishes handles of equal rank, of several gangs."""
        if self._on_change is not None and self._notified.get((place, handle.rank)) != status:
            self._notified[place, handle.rank] = status
            self._on_change(handle, status)
