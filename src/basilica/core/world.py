"""The wanted and the observed size of a run, and the state of each of its ranks."""

from dataclasses import dataclass

from basilica.core.errors import WorldSizeOutOfBounds
from basilica.core.phase import RankPhase
from basilica.core.seen import Stalled

WORLD_LIMIT = 100_000
ERROR_MAX = 200
STALLED = "Stalled"  # the reason of the exit of a rank that was stopped because it had stalled


@dataclass(frozen=True, slots=True)
class WorldSize:
    """`target` ranks are wanted now, training can go on with `min`, and `scale()` goes up to `max`."""

    min: int
    target: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise WorldSizeOutOfBounds(self.min, 1, self.max)
        if not self.min <= self.target <= self.max:
            raise WorldSizeOutOfBounds(self.target, self.min, self.max)
        if self.max > WORLD_LIMIT:
            raise WorldSizeOutOfBounds(self.max, self.min, WORLD_LIMIT)

    def scaled(self, target: int) -> "WorldSize":
        """The same world with another target, or `WorldSizeOutOfBounds`."""
        return WorldSize(self.min, target, self.max)


@dataclass(frozen=True, slots=True)
class WorldStatus:
    """The observed counterpart of WorldSize. `ready` counts ranks that are up and those that exited 0."""

    ready: int
    target: int
    min: int
    max: int
    below_minimum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The exit of a rank; once written it never changes. `exit_code` None: it is unknown."""

    rank: int
    attempt: int
    exit_code: int | None
    termination_reason: str
    restart_count: int
    finished_at: float
    seen_at: float
    started_at: float | None = None
    signal: str | None = None
    node: str = ""
    stopped: bool = False
    log_tail: tuple[str, ...] = ()
    traceback: str = ""

    @property
    def error(self) -> str:
        """The Python exception that it failed with, in a line."""
        return last_line(self.traceback)

    @property
    def failed(self) -> bool:
        """It ended badly by itself: neither a clean exit nor one that we asked for. To stall counts as that."""
        return not self.stopped and (self.exit_code != 0 or self.termination_reason == STALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank in the controller's book.

    `attempt` names one process of this rank and only ever grows. `restarts` counts the failures charged to its
    budget. `metered_until` is how far its running time is accounted for.
    """

    rank: int
    attempt: int = 0
    phase: RankPhase = RankPhase.WAITING
    restarts: int = 0
    world_size: int = 0  # what it was launched with, as is `gang`
    gang: int = 0
    pod_name: str = ""
    node: str = ""
    provider: str | None = None
    region: str | None = None
    gpus: int = 0
    launched_at: float | None = None  # by the controller's clock, as is all but `started_at`
    started_at: float | None = None
    metered_until: float | None = None
    restart_at: float | None = None
    missing_since: float | None = None
    stop_reason: str = ""  # what the exit of a rank that we stopped is called
    note: str = ""
    stalled: Stalled | None = None
    silent_since: float | None = None  # nothing has been heard of its agent since then

    def next_attempt(self, *, restarts: int, restart_at: float | None) -> "RankStatus":
        """The same rank before its next start; nothing of this attempt is kept but where it ran."""
        return RankStatus(
            rank=self.rank, attempt=self.attempt + 1, restarts=restarts, restart_at=restart_at, node=self.node
        )


def last_line(traceback: str) -> str:
    """Return the end of a Python traceback: the exception itself. Cut if it is long."""
    line = traceback.strip().rpartition("\n")[2].strip()
    return line if len(line) <= ERROR_MAX else line[: ERROR_MAX - 1] + "…"
