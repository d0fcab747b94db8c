"""How replicas ended, in the words of every executor."""

from typing import Any, NamedTuple

from basilica.executors.protocol import ENDED, FAILED, SUCCEEDED, OnChange, ReplicaHandle, ReplicaResult


class Outcome(NamedTuple):
    """How one replica stands. `exit_code` is the real one, where it can be had; `error` says why it stands so; `role`,
    what part a replica that failed had in the failure of its gang, where that is known."""

    status: str
    exit_code: int | None = None
    error: str | None = None
    result: Any = None
    role: str | None = None


def replica_result(handle: ReplicaHandle, outcome: Outcome, waited_seconds: float) -> ReplicaResult:
    """What `collect` tells of a replica for which it waited so long, by the rules of exit codes and deadlines.

    The name of its job is what the handle's metadata have as `job_name`.
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
    """What stands for logs where there are none; reasons that are empty are left out."""
    return f"<rank {rank}: {': '.join(filter(None, why))}>"


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
