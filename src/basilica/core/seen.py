"""The observations of a runtime: facts with their evidence, never a verdict."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from basilica.core.mesh import SeenMesh, SeenRendezvous
from basilica.core.phase import BenchPhase


class Sight(StrEnum):
    """The observed state of one rank."""

    QUEUED = "queued"  # accepted, waiting for room (GPUs); `note` says for what and behind whom
    STARTING = "starting"  # accepted, not yet executing the user's program
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"  # it is there, but the look could not tell: changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of one attempt of a rank, from a record that outlives the control plane.

    `exit_code` is the program's own (128+n for signal n), None where nobody knows it. `reason` is given only with
    evidence, else `Unknown`. `stopped`: we had asked it to stop before it ended. `by_platform`: not the
    program's doing (node lost, evicted, preempted), so it costs no restart. `start_error`: the program was
    never executed, and this sentence says why. `traceback`: of the Python exception that it failed with.
    """

    exit_code: int | None
    reason: str
    finished_at: float
    signal: str | None = None
    stopped: bool = False
    by_platform: bool = False
    start_error: str | None = None
    log_tail: tuple[str, ...] = ()
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A stall: the rank has not reported since then, though its usual step is much shorter.

    `where` is the innermost frame of its main thread, `stack` has all threads, the main one first; both are empty where
    nobody could tell.
    """

    since: float
    usual_step_seconds: float
    where: str = ""
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorkerExit:
    """The end of one worker of a torchrun agent that the agent did not stop itself.

    `number` counts the agent's events: each exit is booked once. `torch_rank` is its rank in the `round` in which it
    ended. `echo`: its error names a lost peer, so it is probably not the cause. `message` is the exception in a line.
    """

    number: int
    worker: int
    torch_rank: int
    pid: int
    exit_code: int
    reason: str
    at: float
    round: int = 0
    signal: str | None = None
    echo: bool = False
    message: str = ""
    traceback: str = ""
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenAgent:
    """The torchrun agent of a rank, by its own journal.

    `round` counts the starts of its workers; 0 before the first. `meeting_since`: it waits for the other agents and has
    no workers. `executing_since`: its workers run. `exits` are the latest, in the order of their numbers.
    """

    pid: int
    nproc: int
    round: int = 0
    group_rank: int = 0
    agents: int = 0
    world: int = 0
    first_torch_rank: int = 0
    pids: tuple[int, ...] = ()
    meeting_since: float | None = None
    executing_since: float | None = None
    exits: tuple[SeenWorkerExit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProgress:
    """The steps that the rank's present process has reported. `step_seconds` is its usual step time, once known."""

    first_at: float
    first_step: int
    at: float
    step: int
    step_seconds: float | None = None


class AnswerState(StrEnum):
    """The state of a rank's answer to a notice."""

    LISTENING = "listening"  # its program reads notices, and has not read this one
    SEEN = "seen"  # it goes on to the common step
    LATE = "late"  # it was beyond the common step when it read the notice
    GIVEN = "given"  # its program has the notice, and prepares for the change
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenAnswer:
    """The answer of a rank whose program reads notices: that of the least advanced of its processes.

    `number` is that of the notice it answers, 0 for none yet.
    """

    state: AnswerState
    number: int = 0
    step: int | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRestore:
    """A restore that is over. `step` None: there was nothing to restore, a fresh start."""

    step: int | None
    tier: str
    seconds: float
    began_at: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSaved:
    """The newest snapshot of a process in one tier."""

    tier: str
    step: int
    size: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRefusal:
    """A corrupt copy that a process refused; `number` counts those of the process from 1."""

    pid: int
    number: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSaving:
    """The notes of the rank's present process about its progress; `refusals` are those of all its processes.

    `process_at` is the moment of its first note, `at` that of its last snapshot. `restoring_since`: it restores its
    state. `blocked_seconds`: snapshots have blocked its training for so long, since it began.
    """

    process_at: float
    at: float
    restoring_since: float | None = None
    restored: SeenRestore | None = None
    blocked_seconds: float = 0.0
    snapshots: int = 0
    every: int | None = None
    saved: tuple[SeenSaved, ...] = ()
    refusals: tuple[SeenRefusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The platform will take the rank's place away: its node is preempted or drained. `until`: not later than then."""

    kind: Literal["preemption", "drain"]
    until: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """One attempt of one rank, as one look showed it. `silent_since`: its agent has not been heard from since then.

    `agent` is None for a program that is no torchrun agent, `progress` for one that has reported no step, `answer`
    for one that reads no notices, `saving` for one that neither restores nor saves through us.
    """

    rank: int
    attempt: int
    sight: Sight
    node: str = ""
    pod_name: str = ""
    provider: str | None = None
    region: str | None = None
    started_at: float | None = None
    gpus: int = 0
    ended: Ended | None = None
    note: str = ""
    stalled: Stalled | None = None
    silent_since: float | None = None
    agent: SeenAgent | None = None
    progress: SeenProgress | None = None
    answer: SeenAnswer | None = None
    saving: SeenSaving | None = None
    leaving: Leaving | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBench:
    """The probe as the runtime saw it. `phase` Skipped with a message: this runtime cannot probe."""

    phase: BenchPhase
    message: str = ""
    on_worker_nodes: bool = True
    result: "BenchResult | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPoint:
    """One size of the sweep: medians over its repeats."""

    size_bytes: int
    algbw_gbps: float
    busbw_gbps: float
    latency_us: float
    repeats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """GB/s of 10^9 bytes, and microseconds; None where it could not be measured.

    The bandwidths are those of the largest size swept; `sweep` has every size. `method` says what was measured with:
    `nccl`, `gloo`, or `tcp`, which moves the bytes of an all-reduce and adds nothing up.
    """

    measured_at: float
    probe_node_a: str
    probe_node_b: str
    busbw_gbps_p10: float | None = None
    busbw_gbps_p50: float | None = None
    busbw_gbps_p90: float | None = None
    algbw_gbps_p50: float | None = None
    latency_us_at_1mib: float | None = None
    size_bytes_swept: tuple[int, ...] = ()
    method: str | None = None
    sweep: tuple[BenchPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One look at a whole run. A rank that is absent from it is not there (yet, or any more).

    A look that failed or is partial is no Sighting at all: the runtime raises, and nothing changes.
    `warnings` are things that the user should know once, as (reason, message). `rendezvous` is None while the run has
    none open, `mesh` where the runtime has neither hosts nor a rendezvous to speak of. `nodes_lost`: ranks of which
    nothing can run any more, since every node that may have run them is lost; no record says which attempt that was.
    `in_memory`: snapshots of the run are in the memory of a host that keeps them after its end.
    """

    ranks: tuple[SeenRank, ...] = ()
    bench: SeenBench | None = None
    rendezvous: SeenRendezvous | None = None
    mesh: SeenMesh | None = None
    warnings: tuple[tuple[str, str], ...] = ()
    nodes_lost: frozenset[int] = frozenset()
    in_memory: bool = False
