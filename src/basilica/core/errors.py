"""The exception tree. Each has a wire code, and its facts are attributes; `args` mirror the signature (picklable).

BasilicaError
├── ValidationError(field, value, problem)          400
│   └── WorldSizeOutOfBounds(requested, min, max)    400   a DistributedError too
├── AuthenticationError(problem)                     401
├── AuthorizationError(problem)                      403
│   └── QuotaExceeded(what, limit, current, requested)     a DistributedError too
├── DeploymentNotFound(name)                         404
├── Conflict(problem)                                409
│   └── NameInUse(name, instance)
├── DistributedError(problem)                        409
│   ├── UDTerminalState(phase, requested_target, name)
│   ├── WorldClosed(name, requested_target)
│   ├── RendezvousUnavailable(problem)
│   ├── BadResult(rank, problem)                     never raised: it stands for the result of one rank
│   └── BelowMinimumWorld(name, phase, ready, required_min, timeout, rank_exits, waited_for, target)   by waits only
├── RateLimitError(retry_after)                      429
├── NetworkError(problem)                            raised by clients only: no answer within the time
├── ServerError(status, message)                     raised by clients only: an answer that is none of these
├── StoreUnavailable(problem)                        503   the state cannot be written or read now; nothing was changed
│   ├── DeploymentDamaged(run)                       409   this run's record cannot be read; others are not concerned
│   └── DiskFull(problem)                            507   no space for something new; what ends things still works
└── RuntimeUnavailable(problem)                      503   the runtime could not be asked; nothing is known
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from basilica.core.damage import DamagedRun


class BasilicaError(Exception):
    """Root of all. `code` is what travels on the wire; `retryable` says whether the same call may work later."""

    code: ClassVar[str] = "BASILICA_API_INTERNAL_ERROR"
    retryable: ClassVar[bool] = False
    training: Any = None  # the handle of the run, where a deploy had made one before it failed

    @property
    def message(self) -> str:
        """The text of the error."""
        return str(self)


class ValidationError(BasilicaError, ValueError):
    code = "BASILICA_API_INVALID_REQUEST"

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(field, value, problem)
        self.field, self.value, self.problem = field, value, problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem} (got {_short(self.value)})"


class DistributedError(BasilicaError):
    code = "DistributedError"


class WorldSizeOutOfBounds(ValidationError, DistributedError):
    code = "WorldSizeOutOfBounds"

    def __init__(self, requested: int, min: int, max: int) -> None:
        ValidationError.__init__(self, "worldSize", requested, f"not within {min}..{max}")
        self.args = (requested, min, max)
        self.requested, self.min, self.max = requested, min, max

    def __str__(self) -> str:
        return f"world size {self.requested} is not within {self.min}..{self.max} (1 <= min <= target <= max)"


class AuthenticationError(BasilicaError):
    code = "BASILICA_API_AUTH_ERROR"


class AuthorizationError(BasilicaError):
    code = "BASILICA_API_AUTHZ_ERROR"


class QuotaExceeded(AuthorizationError, DistributedError):
    code = "QuotaExceeded"

    def __init__(self, what: str, limit: int, current: int, requested: int) -> None:
        super().__init__(what, limit, current, requested)
        self.what, self.limit, self.current, self.requested = what, limit, current, requested

    def __str__(self) -> str:
        return (
            f"quota of {self.what} exceeded: current={self.current}, requested={self.requested}, limit={self.limit}; "
            "end a run or ask whoever runs this server for more"
        )


class DeploymentNotFound(BasilicaError, KeyError):
    code = "BASILICA_API_NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"deployment {_short(self.name)} not found"


class Conflict(BasilicaError):
    code = "Conflict"


class NameInUse(Conflict):
    code = "NameInUse"

    def __init__(self, name: str, instance: str) -> None:
        super().__init__(name, instance)
        self.name, self.instance = name, instance

    def __str__(self) -> str:
        return f"a live run is called {self.name!r} already ({self.instance}); cancel it or choose another name"


class StaleVersion(Conflict):
    """Somebody else wrote in between: load again. Never leaves the control plane."""


class UDTerminalState(DistributedError):
    code = "UDTerminalState"

    def __init__(self, phase: str, requested_target: int | None = None, name: str = "") -> None:
        super().__init__(phase, requested_target, name)
        self.phase, self.requested_target, self.name = phase, requested_target, name

    def __str__(self) -> str:
        run = f"run {self.name!r}" if self.name else "the run"
        refused = "" if self.requested_target is None else f"; it cannot be scaled to {self.requested_target}"
        return f"{run} has ended ({self.phase}){refused}"


class WorldClosed(DistributedError):
    code = "WorldClosed"

    def __init__(self, name: str, requested_target: int) -> None:
        super().__init__(name, requested_target)
        self.name, self.requested_target = name, requested_target

    def __str__(self) -> str:
        return f"a rank of {self.name!r} has finished already: training is ending, and the world stays as it is"


class ExitLike(Protocol):
    """As much of a rank's exit as an error text needs."""

    @property
    def rank(self) -> int: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def termination_reason(self) -> str: ...
    @property
    def error(self) -> str: ...
    @property
    def cause(self) -> str: ...


class BelowMinimumWorld(DistributedError):
    """A wait was not fulfilled: the run failed, was cancelled, or the time was up (`phase` tells).

    `waited_for` names the goal of the wait, and `target` the world that was wanted when it ended.
    """

    code = "BelowMinimumWorld"

    def __init__(  # noqa: PLR0917 (`args` must mirror the signature)
        self,
        name: str,
        phase: str,
        ready: int,
        required_min: int,
        timeout: float,
        rank_exits: Sequence[ExitLike] = (),
        waited_for: str = "",
        target: int | None = None,
    ) -> None:
        super().__init__(name, phase, ready, required_min, timeout, rank_exits, waited_for, target)
        self.name, self.phase, self.ready, self.required_min = name, phase, ready, required_min
        self.timeout, self.rank_exits = timeout, tuple(rank_exits)
        self.waited_for, self.target = waited_for, target

    def __str__(self) -> str:
        return self._end() if self.phase in ("failed", "cancelled") else self._time_out()

    def _time_out(self) -> str:
        goal = self.waited_for or f"{self.required_min} ranks to be up"
        target = "" if self.target is None else f", target {self.target}"
        return (
            f"UD {self.name!r}: waited {self.timeout:g} s for {goal}; "
            f"phase {self.phase or 'not yet observed'!r}, {self.ready} ready of {self.required_min} required{target}"
        )

    def _end(self) -> str:
        bad = "; ".join(
            f"rank {e.rank}: exit_code={e.exit_code} reason={e.termination_reason}"
            + (f", since {e.cause}" if e.cause else f" {e.error}" if e.error else "")
            for e in self.rank_exits
            if e.exit_code != 0
        )
        return (
            f"{self.ready} of {self.required_min} ranks ready; UD {self.name!r} reached terminal phase {self.phase!r} "
            f"({bad or 'no per-rank exits recorded'})"
        )


class BadResult(DistributedError):
    """What one rank wrote to its result file cannot be given; it stands in the place of that rank's result alone."""

    code = "BadResult"

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(rank, problem)
        self.rank, self.problem = rank, problem

    def __str__(self) -> str:
        return f"the result of rank {self.rank} {self.problem}"


class RendezvousUnavailable(DistributedError):
    """The run's rendezvous cannot be reached: ranks could not find each other."""

    code = "RendezvousUnavailable"


class RateLimitError(BasilicaError):
    code = "BASILICA_API_RATE_LIMIT"
    retryable = True

    def __init__(self, retry_after: float) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"too many requests; try again in {self.retry_after:g} s"


class NetworkError(BasilicaError):
    """The server could not be reached within the time; the run, if there is one, goes on."""

    code = "NetworkError"
    retryable = True


class ServerError(BasilicaError):
    code = "ServerError"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status

    @property
    def message(self) -> str:
        """The server's own text."""
        return str(self.args[1])

    def __str__(self) -> str:
        return f"the server answered {self.status}: {self.message}"


class StoreUnavailable(BasilicaError):
    code = "BASILICA_API_SERVICE_UNAVAILABLE"
    retryable = True


class DeploymentDamaged(StoreUnavailable):
    """The stored record of one run cannot be read. Asking again does not help; deleting the run does."""

    code = "DeploymentDamaged"
    retryable = False

    def __init__(self, run: DamagedRun) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return (
            f"the stored record of {_short(self.run.instance)} cannot be read: {self.run.problem}; delete the run, or "
            "have whoever runs this server repair it with 'basilica doctor --repair'"
        )


class DiskFull(StoreUnavailable):
    """The disk has no space for what is new. Cancelling and deleting need none."""


class RuntimeUnavailable(BasilicaError):
    code = "BASILICA_API_SERVICE_UNAVAILABLE"
    retryable = True


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
