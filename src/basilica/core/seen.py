"""The observations of a runtime: facts with their evidence, never a verdict."""

from dataclasses import dataclass
from enum import StrEnum

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
class SeenRank:
    """One attempt of one rank, as one look showed it. `silent_since`: its agent has not been heard from since then."""

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
    """

    ranks: tuple[SeenRank, ...] = ()
    bench: SeenBench | None = None
    rendezvous: SeenRendezvous | None = None
    mesh: SeenMesh | None = None
    warnings: tuple[tuple[str, str], ...] = ()
    nodes_lost: frozenset[int] = frozenset()
