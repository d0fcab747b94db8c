"""Views of runs: the answers of a server, ours or another, parsed once."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any

from basilica.core import accounts
from basilica.core.seen import BenchPoint
from basilica.core.waits import Snapshot
from basilica.core.world import ERROR_MAX, WorldStatus, last_line, worker_name
from basilica.wire.views import read, wire_field

_TERMINAL = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The last report of a rank. `step_seconds` is its usual step time, once that is known."""

    at: datetime | None
    step: int | None = None
    step_seconds: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A stall: the rank has not reported since then, though its usual step is much shorter.

    `where` is the innermost frame of its main thread, `stack` has all threads; empty where they could not be read.
    """

    since: datetime | None
    usual_step_seconds: float = field(metadata=wire_field(absent=0.0))
    where: str = ""
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPoint:
    """One report, or `count` neighbouring ones: `value` is their mean, step and time are those of the last."""

    at: datetime | None
    value: float
    min: float
    max: float
    step: int | None = None
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of one rank over time. `worker` distinguishes its processes, where a launcher started several."""

    rank: int
    worker: int = field(metadata=wire_field(absent=0))
    metric: str
    points: tuple[SeriesPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAgent:
    """The torchrun agent of a rank. Worker `i` has torch's rank `torch_ranks[i]`, in a world of `world`.

    `round` counts the starts of its workers; before the first it has none.
    """

    round: int = 0
    group_rank: int = 0
    world: int = 0
    torch_ranks: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashLoop:
    """Failures of a rank, or of its `worker`, that follow each other closely; `error` is that of the last one."""

    count: int = field(metadata=wire_field(absent=0))
    since: datetime | None
    at: datetime | None
    worker: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank as last observed. `cause` is what its time is charged with since `cause_since` (`Goodput.seconds`).

    `agent` is None for a program that is no torchrun agent. `step` is the highest that the rank has reported.
    """

    rank: int
    pod_name: str = field(metadata=wire_field(absent=""))
    phase: str = field(metadata=wire_field(absent="Unknown"))
    restarts: int = field(metadata=wire_field(absent=0))
    node: str | None = field(default=None, metadata=wire_field("nodeName"))
    provider: str | None = None
    region: str | None = None
    state: str = ""
    note: str = ""
    report: RankReport | None = None
    stalled: Stalled | None = None
    cause: str = ""
    cause_since: datetime | None = None
    agent: RankAgent | None = None
    crashes: CrashLoop | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RankExit:
    """The exit of a rank. `exit_code` -1 with reason `Unknown`: it could not be observed.

    That of a worker of its torchrun agent has the worker's local rank in `worker`, and torch's rank in `torch_rank`.
    `cause`: the worker whose failure made the agent exit, in words. `message`: the exception, where only that is known.
    """

    rank: int
    exit_code: int
    termination_reason: str = field(metadata=wire_field(absent="Unknown"))
    restart_count: int = 0
    _: KW_ONLY
    signal: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    node: str | None = None
    role: str | None = None
    log_tail: tuple[str, ...] = ()
    traceback: str = ""
    worker: int | None = None
    torch_rank: int | None = None
    pid: int | None = None
    cause: str = ""
    message: str = ""

    @property
    def error(self) -> str:
        """The Python exception of the failure, in a line; empty where there was none."""
        return last_line(self.traceback) or self.message[:ERROR_MAX]

    @property
    def place(self) -> str:
        """The rank, or the worker of it, in words."""
        return _place(self.rank, self.worker, self.torch_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The rank that failed first, or its worker, with the evidence for it."""

    rank: int
    exit_code: int
    termination_reason: str
    evidence: str
    confidence: str
    log_tail: tuple[str, ...] = ()
    traceback: str = ""
    worker: int | None = None
    torch_rank: int | None = None
    pid: int | None = None
    cause: str = ""
    message: str = ""

    @property
    def place(self) -> str:
        """The rank, or the worker of it, in words."""
        return _place(self.rank, self.worker, self.torch_rank)


def _place(rank: int, worker: int | None, torch_rank: int | None) -> str:
    return f"rank {rank}" if worker is None else worker_name(rank, worker, torch_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The cause that cost most, in seconds of ranks."""

    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The account of a run's time: every second of every wanted rank has one cause, and `training` is one of them.

    `seconds` has those of all ranks by cause, together `rank_seconds`: the wall time for each wanted rank. `least`
    and `most` bound the share that trained, from 0 to 1. They are equal for a program that reports its steps
    (`basilica.report`); time of which no cause is known is `unattributed`, and lies between them.
    """

    wall_seconds: float = 0.0
    rank_seconds: float = 0.0
    gpus_per_rank: int = 0
    least: float = 0.0
    most: float = 1.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    steps_recomputed: int = 0
    largest_loss: Loss | None = None

    @property
    def figures(self) -> accounts.Figures:
        return accounts.Figures(seconds=self.seconds, wall_seconds=self.wall_seconds, least=self.least, most=self.most)

    def __str__(self) -> str:
        return accounts.describe(self.figures)

    def _repr_html_(self) -> str:
        from basilica.client.notebook import goodput_table  # noqa: PLC0415 (it draws these views)

        return goodput_table(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """An interruption of the training: a `failure`, a `stall`, a `loss` of a rank, a `resize` or a `restart`.

    It is over when every rank is at work again; `over_at` is None until then. Its cost is what the run lost meanwhile,
    in seconds of ranks and of their GPUs; while it is open, so far.
    """

    number: int
    kind: str = field(metadata=wire_field(absent=""))
    at: datetime | None
    over_at: datetime | None = None
    what: str = ""
    rank: int | None = None
    worker: int | None = None
    torch_rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    reason: str = ""
    failures: int = 0
    cost_seconds: float = 0.0
    cost_gpu_seconds: float = 0.0
    steps_recomputed: int = 0

    @property
    def is_open(self) -> bool:
        return self.over_at is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """A planned change that ranks were told of (`basilica.notice`). It happens once they are ready, at `until` at the
    latest.

    `kind` is `scale`, `restart`, `cancel`, `deadline`, `preemption` or `drain`. `target`: the size of the world after
    it. `step`: the last step before it, where the ranks have one in common. `waiting_for`: the ranks that are not ready
    yet. `done_at`: when the change was made; ranks wait until it reaches them.
    """

    number: int
    kind: str = field(metadata=wire_field(absent=""))
    since: datetime | None
    until: datetime | None
    reason: str = ""
    target: int | None = None
    step: int | None = None
    waiting_for: tuple[int, ...] = ()
    done_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The figures of the probe in GB/s of 10^9 bytes, and microseconds; None where it could not be measured.

    The bandwidths are those of the largest size swept; `sweep` has every size. `method` is the transport of the
    measurement: `nccl`, `gloo`, or `tcp`, which moves the bytes of an all-reduce and adds nothing up.
    """

    measured_at: datetime = field(metadata=wire_field(absent=datetime.fromtimestamp(0, UTC)))
    probe_node_a: str = field(metadata=wire_field(absent=""))
    probe_node_b: str = field(metadata=wire_field(absent=""))
    busbw_gbps_p10: float | None = None
    busbw_gbps_p50: float | None = None
    busbw_gbps_p90: float | None = None
    algbw_gbps_p50: float | None = None
    latency_us_at_1mib: float | None = None
    size_bytes_swept: tuple[int, ...] = ()
    method: str | None = None
    sweep: tuple[BenchPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStatus:
    """The probe's own lifecycle: Pending, Running, and then Succeeded, Failed, TimedOut or Skipped."""

    phase: str = field(metadata=wire_field(absent="Pending"))
    message: str = ""
    started_at: datetime | None = None
    completed_at: datetime | None = None
    on_worker_nodes: bool = True
    result: BenchResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str = field(metadata=wire_field("type", absent="Normal"))
    reason: str = field(metadata=wire_field(absent=""))
    message: str = field(metadata=wire_field(absent=""))
    count: int = field(metadata=wire_field(absent=1))
    first_at: datetime | None = field(metadata=wire_field("first_timestamp"))
    last_at: datetime | None = field(metadata=wire_field("last_timestamp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One step in one tier: `memory`, `peer` or `disk`. `ranks` of the `world` ranks have a snapshot of it there."""

    step: int
    tier: str
    ranks: int
    world: int
    complete: bool
    bytes: int
    sealed_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One answer of the server about a run. Unknown phases are passed through and are not terminal."""

    instance: str = field(metadata=wire_field("instanceName"))
    name: str = field(metadata=wire_field("friendlyName"))
    namespace: str = field(metadata=wire_field(absent=""))
    phase: str = field(metadata=wire_field(absent=""))
    message: str = field(metadata=wire_field(absent=""))
    world: WorldStatus = field(metadata=wire_field("worldSize"))
    version: int = 0
    generation: int = 0
    observed_generation: int = 0
    settled: bool = False
    blocked_on: str = ""
    created_at: datetime | None = None
    ranks: tuple[RankStatus, ...] = ()
    exits: tuple[RankExit, ...] = field(default=(), metadata=wire_field("rankExits"))
    culprit: Culprit | None = None
    worker_exits: tuple[RankExit, ...] = ()
    goodput: Goodput | None = None
    incidents: tuple[Incident, ...] = ()
    notice: PlannedChange | None = None
    bench: BenchStatus | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_terminal(self) -> bool:
        return self.phase in _TERMINAL

    @property
    def reported_at(self) -> datetime | None:
        """The time of the newest report of any rank."""
        return max((r.report.at for r in self.ranks if r.report is not None and r.report.at is not None), default=None)

    @property
    def tells_changes(self) -> bool:
        """Whether the server has generations, and with them the watch; another server has to be polled."""
        return self.generation > 0

    def snapshot(self, requested_target: int | None) -> Snapshot:
        """Return the facts that the waits decide on."""
        running = [r for r in self.ranks if r.rank >= self.world.target and r.phase == "Running"]
        return Snapshot(
            name=self.name,
            phase=self.phase,
            world=self.world,
            generation=self.generation,
            observed_generation=self.observed_generation,
            surplus=len(running) if self.tells_changes else 0,
            requested_target=requested_target,
            rank_exits=self.exits,
            bench_phase=None if self.bench is None else self.bench.phase,
        )


def parse_run(body: Mapping[str, Any]) -> RunView:
    """Parse a DeploymentResponse; a field that the server does not send has its neutral value."""
    return _run(body, {**(body.get("distributed") or {}), **body})


def parse_summary(body: Mapping[str, Any]) -> RunView:
    """Parse one row of a listing; a server without phases has the state."""
    return _run(body, body, phase=str(body.get("state", "")).lower())


def _run(raw: Mapping[str, Any], body: Mapping[str, Any], **absent: Any) -> RunView:
    instance = raw["instanceName"]
    if not isinstance(instance, str):
        raise TypeError(f"instanceName is {instance!r}, not a text")
    given = {
        "world": parse_world(body.get("worldSize") or {}),
        "ranks": tuple(_rank(r) for r in body.get("ranks") or ()),
        "bench": _bench(body.get("bench")),
        "raw": raw,
    }
    return read(RunView, body, given, name=instance, **absent)


def parse_world(body: Mapping[str, Any]) -> WorldStatus:
    return read(WorldStatus, body, ready=0, target=0, min=0, max=0, below_minimum=False)


def parse_event(body: Mapping[str, Any]) -> Event:
    return read(Event, body)


def parse_checkpoint(body: Mapping[str, Any]) -> Checkpoint:
    return read(Checkpoint, body)


def parse_series(body: Mapping[str, Any]) -> Series:
    return read(Series, body)


def _rank(body: Mapping[str, Any]) -> RankStatus:
    return read(RankStatus, body, state=str(body.get("phase") or "").lower())


def _bench(body: Mapping[str, Any] | None) -> BenchStatus | None:
    return None if body is None or body.get("mode") == "off" else read(BenchStatus, body)
