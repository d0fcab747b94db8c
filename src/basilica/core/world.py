"""The wanted and the observed size of a run, and the state of each of its ranks."""

from dataclasses import dataclass

from basilica.core.errors import WorldSizeOutOfBounds
from basilica.core.goodput import Segment
from basilica.core.phase import RankPhase
from basilica.core.seen import Stalled
from basilica.core.snapshots import RankSaving

WORLD_LIMIT = 100_000
ERROR_MAX = 200
SAME_PROCESS_SECONDS = 0.001  # a store may round times; two processes of a rank do not begin so close to each other
STALLED = "Stalled"  # the reason of the exit of a rank that was stopped because it had stalled
EXITED_EARLY = "ExitedEarly"  # the reason of a worker's exit with code 0 that made its peers fail


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
    """The exit of a rank, or of one of its workers; once written it never changes. `exit_code` None: it is unknown.

    `worker` is the local rank of a worker under the rank's torchrun agent, and `torch_rank` its rank in the round in
    which it ended; both None for the exit of the rank itself. `echo`: the error names a lost peer. `cause`: the worker
    whose failure made the agent exit, in words.
    """

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
    worker: int | None = None
    torch_rank: int | None = None
    pid: int | None = None
    echo: bool = False
    cause: str = ""
    message: str = ""

    @property
    def error(self) -> str:
        """The Python exception that it failed with, in a line."""
        return last_line(self.traceback) or self.message[:ERROR_MAX]

    @property
    def place(self) -> str:
        """The rank, and the worker if it is one's exit, in words."""
        return f"rank {self.rank}" if self.worker is None else worker_name(self.rank, self.worker, self.torch_rank)

    @property
    def failed(self) -> bool:
        """It ended badly by itself: neither a clean exit nor one that we asked for. To stall counts as that."""
        return not self.stopped and (self.exit_code != 0 or self.termination_reason in (STALLED, EXITED_EARLY))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAgent:
    """The torchrun agent of a rank in the controller's book. `booked`: the number of its last booked event.

    Workers of the rank have the torch ranks from `first_torch_rank` on, one for each of `pids`, in a world of `world`.
    `fell_at`: when the first worker of this round failed; None while all of them are at work.
    """

    pid: int
    nproc: int
    booked: int = 0
    round: int = 0
    group_rank: int = 0
    world: int = 0
    first_torch_rank: int = 0
    pids: tuple[int, ...] = ()
    early: tuple[RankExit, ...] = ()  # workers of this round that have exited 0
    early_told: bool = False
    fell_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashLoop:
    """Failures of one rank that follow each other closely. `since` is when the first one happened, `at` the last."""

    since: float
    at: float
    count: int
    worker: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a rank: the highest that it ever reported, and those that its present process repeats.

    `process_at` identifies the process by its first report, of step `first`; its last known one is `step`, told at
    `at`. It repeats steps up to `repeat_to`; None if it repeats none, or none any more.
    """

    reached: int
    process_at: float | None = None
    first: int = 0
    step: int = 0
    at: float = 0.0
    repeat_to: int | None = None

    def is_of(self, first_at: float) -> bool:
        """Return whether they are those of the process that reported first at that time, to the millisecond."""
        return self.process_at is not None and abs(self.process_at - first_at) < SAME_PROCESS_SECONDS

    def reached_before(self, moment: float) -> int:
        """Return the step that had been reached by then, at the pace of the present process; rather less than more."""
        if self.process_at is None:
            return self.reached
        before = self.first - 1 if self.repeat_to is None else self.repeat_to
        if moment <= self.process_at or self.at <= self.process_at:
            return before
        if moment > self.at:
            return self.reached
        share = (moment - self.process_at) / (self.at - self.process_at)
        return max(before, self.first - 1 + int((self.step - self.first) * share))


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
    segment: Segment | None = None  # what its place in the world is charged with; None outside the wanted world
    agent: RankAgent | None = None
    steps: Steps | None = None
    crashes: CrashLoop | None = None
    listens: bool = False  # its program reads notices
    ready_for: int = 0  # the number of the notice that it is ready for
    held_round: int | None = None  # the round of its workers that a change of the world is about to end
    saving: RankSaving | None = None

    def next_attempt(self, *, restarts: int, restart_at: float | None) -> "RankStatus":
        """The same rank before its next start; nothing of this attempt is kept but where it ran and what it reached."""
        return RankStatus(
            rank=self.rank,
            attempt=self.attempt + 1,
            restarts=restarts,
            restart_at=restart_at,
            node=self.node,
            segment=self.segment,
            steps=None if self.steps is None else Steps(reached=self.steps.reached),
            crashes=self.crashes,
            saving=None if self.saving is None else self.saving.next_attempt(),
        )


def worker_name(rank: int, worker: int, torch_rank: int | None) -> str:
    """`worker 1 of rank 0`, with torch's own rank of it where that is another number."""
    torch = "" if torch_rank is None else f" (torch rank {torch_rank})"
    return f"worker {worker} of rank {rank}{torch}"


def last_line(traceback: str) -> str:
    """Return the end of a Python traceback: the exception itself. Cut if it is long."""
    line = traceback.strip().rpartition("\n")[2].strip()
    return line if len(line) <= ERROR_MAX else line[: ERROR_MAX - 1] + "…"
