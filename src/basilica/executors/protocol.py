"""What every executor promises, and the rules that all of them share: arguments, environment, results, logs.

Standard library only. An executor starts N replicas somewhere, and needs no control plane for that.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict, runtime_checkable

PENDING = "pending"
RUNNING = "running"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"
STATUSES = (PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED)
ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED})

DAY_SECONDS = 86400.0
LAUNCH_SECONDS = 3600.0
LOG_LINES = 200
REPLICA_MODULE = "basilica.diloco.replica_entrypoint"
RANK_ENV = "rank_env"  # the argument that names one more variable for the rank; a local convention
RENDEZVOUS_URI = "rendezvous_uri"  # the argument that says where replicas meet and where results are stored

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENTRYPOINT = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*(?::[^\W\d]\w*(?:\.[^\W\d]\w*)*)?")
# What the contract sets itself; an argument of that name must not replace it.
_OURS = frozenset({"REPLICA_RANK", "WORLD_SIZE", "ENTRYPOINT", "ENTRYPOINT_ARGS"})
# An argument called `path` is common, and a replica whose PATH it replaced would find no program any more.
_THE_MACHINES = frozenset({"PATH", "HOME", "USER", "SHELL", "LANG", "TMPDIR", "PWD", "PYTHONPATH", "LD_LIBRARY_PATH"})

Entrypoint = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ReplicaHandle:
    """One replica. It can be pickled: another process can poll, follow and cancel by it.

    `metadata` is the backend's own: what it needs in order to find the replica again, plain data only.
    """

    rank: int
    backend_name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class ReplicaResult(TypedDict):
    """How one replica ended, or how it stood when the time was up.

    `exit_code` is 0 for succeeded, not 0 for failed (the real one where it can be had, else 1), None otherwise. `error`
    is None unless there is something to say. `result` is what the entrypoint returned, where the backend can tell.
    """

    rank: int
    status: str
    exit_code: int | None
    error: str | None
    job_name: str
    result: Any


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
        """One of pending, running, succeeded, failed, cancelled."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        """The last lines that the replica wrote; where there are none, a placeholder in angle brackets says why."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """End the replica (on some backends, its whole gang). A replica that is gone, or unknown, is fine."""
        ...

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None, on_change: OnChange | None = None
    ) -> list[ReplicaResult]:
        """Wait until every replica has ended or the time is up; in the order of the handles."""
        ...


# ---- results -----------------------------------------------------------------------------------------------------


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


def gather_logs(executor: ServerlessExecutor, handles: Sequence[ReplicaHandle], *, n_lines: int = LOG_LINES) -> str:
    """The last lines of all replicas, by rank, each line with its rank in front: `2| step 10`."""
    parts = []
    for handle in sorted(handles, key=lambda handle: handle.rank):
        text = executor.stream_logs(handle, n_lines=n_lines)
        parts += [f"{handle.rank}| {line}" for line in text.splitlines()]
    return "".join(f"{part}\n" for part in parts)


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


# ---- arguments ---------------------------------------------------------------------------------------------------


def check_launch(
    n_replicas: int, entrypoint: object, entrypoint_args: object, timeout: float, *, callables: bool
) -> None:
    """`ValueError` for a number, a text or a time that cannot be meant; `TypeError` for a wrong kind of thing."""
    if isinstance(n_replicas, bool) or not isinstance(n_replicas, int):
        raise TypeError(f"n_replicas must be a whole number, not {n_replicas!r}")
    if n_replicas < 1:
        raise ValueError(f"n_replicas must be at least 1, not {n_replicas}")
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if not isinstance(entrypoint_args, Mapping):
        raise TypeError(f"entrypoint_args must be a mapping of keyword arguments, not {type(entrypoint_args).__name__}")
    for name in entrypoint_args:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"entrypoint_args: {name!r} is no name of an argument")
    rank_env = entrypoint_args.get(RANK_ENV)
    if rank_env is not None and not (isinstance(rank_env, str) and _VARIABLE.fullmatch(rank_env)):
        raise ValueError(f"{RANK_ENV}={rank_env!r} is no name of a variable")
    if callable(entrypoint):
        if not callables:
            raise ValueError(
                f"this backend runs {_name(entrypoint)} from an image of its own: "
                'give "package.module:function" and have the module in the image'
            )
    elif not isinstance(entrypoint, str):
        raise TypeError(f'entrypoint must be "package.module:function" or a module, not {type(entrypoint).__name__}')
    elif not _ENTRYPOINT.fullmatch(entrypoint):
        raise ValueError(f'entrypoint {entrypoint!r} is not of the form "package.module:function" or "package.module"')


def check_timeout(timeout: float | None, default: float) -> float:
    """How long `collect` waits."""
    if timeout is None:
        return default
    if not timeout >= 0:  # false for NaN too
        raise ValueError(f"timeout must be a number of seconds, not {timeout!r}")
    return timeout


def check_backend(handle: ReplicaHandle, backend_name: str) -> None:
    if handle.backend_name != backend_name:
        raise ValueError(f"a handle of {handle.backend_name!r} was given to the executor {backend_name!r}")


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


# ---- environment -------------------------------------------------------------------------------------------------


def replica_environment(
    n_replicas: int, entrypoint: str, entrypoint_args: Mapping[str, Any], *, remote: bool
) -> dict[str, str]:
    """What all replicas of a gang find in their environment; `REPLICA_RANK` is each one's own and not in here.

    On remote backends an argument that is no JSON is left out with a warning, and `rank_env` is not passed on.
    """
    passed = _json_only(entrypoint_args, entrypoint) if remote else dict(entrypoint_args)
    environment = {
        name.upper(): _text(value)
        for name, value in passed.items()
        if isinstance(value, str | int | float) and name.upper() not in _OURS | _THE_MACHINES
    }
    return environment | {
        "WORLD_SIZE": str(n_replicas),
        "ENTRYPOINT": entrypoint,
        "ENTRYPOINT_ARGS": json.dumps(passed),
    }


def _json_only(arguments: Mapping[str, Any], entrypoint: str) -> dict[str, Any]:
    passed = {}
    for name, value in arguments.items():
        if name == RANK_ENV:
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            kind = type(value).__name__
            warnings.warn(
                f"the argument {name!r} of {entrypoint} ({kind}) is no JSON and does not reach the replicas",
                stacklevel=4,
            )
            continue
        passed[name] = value
    return passed


def _text(value: str | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
