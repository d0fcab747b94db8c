"""A run as clients see it: the answers of a server, ours or another, parsed once."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any

from basilica.core.seen import BenchPoint
from basilica.core.waits import Snapshot
from basilica.core.world import WorldStatus, last_line

_TERMINAL = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The last that a rank reported. `step_seconds` is its usual step time, once that is known."""

    at: datetime | None
    step: int | None = None
    step_seconds: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A rank has reported nothing since then, though it usually reports that often.

    `where` is the innermost frame of its main thread, `stack` has all threads; empty where nobody could tell.
    """

    since: datetime | None
    usual_step_seconds: float
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
    """One number of one rank over time. `worker` tells its processes apart, where a launcher started several."""

    rank: int
    worker: int
    metric: str
    points: tuple[SeriesPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank as last observed."""

    rank: int
    pod_name: str
    phase: str
    restarts: int
    node: str | None = None
    provider: str | None = None
    region: str | None = None
    state: str = ""
    note: str = ""
    report: RankReport | None = None
    stalled: Stalled | None = None


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended. `exit_code` -1 with reason `Unknown`: nobody knows."""

    rank: int
    exit_code: int
    termination_reason: str
    restart_count: int = 0
    _: KW_ONLY
    signal: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    node: str | None = None
    role: str | None = None
    log_tail: tuple[str, ...] = ()
    traceback: str = ""

    @property
    def error(self) -> str:
        """The Python exception that it failed with, in a line; empty where there was none."""
        return last_line(self.traceback)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The rank that failed first, and why we think so."""

    rank: int
    exit_code: int
    termination_reason: str
    evidence: str
    confidence: str
    log_tail: tuple[str, ...] = ()
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """GB/s of 10^9 bytes, and microseconds; None where it could not be measured.

    The bandwidths are those of the largest size swept; `sweep` has every size. `method` says what was measured with:
    `nccl`, `gloo`, or `tcp`, which moves the bytes of an all-reduce and adds nothing up.
    """

    measured_at: datetime
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
class BenchStatus:
    """The probe's own lifecycle: Pending, Running, and then Succeeded, Failed, TimedOut or Skipped."""

    phase: str
    message: str = ""
    started_at: datetime | None = None
    completed_at: datetime | None = None
    on_worker_nodes: bool = True
    result: BenchResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str
    reason: str
    message: str
    count: int
    first_at: datetime | None
    last_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One answer of the server about a run. Unknown phases are passed through and are not terminal."""

    instance: str
    name: str
    namespace: str
    phase: str
    message: str
    world: WorldStatus
    version: int = 0
    generation: int = 0
    observed_generation: int = 0
    settled: bool = False
    blocked_on: str = ""
    created_at: datetime | None = None
    ranks: tuple[RankStatus, ...] = ()
    exits: tuple[RankExit, ...] = ()
    culprit: Culprit | None = None
    bench: BenchStatus | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_terminal(self) -> bool:
        return self.phase in _TERMINAL

    @property
    def reported_at(self) -> datetime | None:
        """When a rank last reported."""
        return max((r.report.at for r in self.ranks if r.report is not None and r.report.at is not None), default=None)

    @property
    def tells_changes(self) -> bool:
        """The server has generations, and with them the watch; another one has to be polled."""
        return self.generation > 0

    def snapshot(self, requested_target: int | None) -> Snapshot:
        """What the waits look at."""
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
    """A DeploymentResponse; what a server does not tell has its neutral value."""
    gang = body.get("distributed") or {}
    return RunView(
        instance=_name(body),
        name=body.get("friendlyName") or _name(body),
        namespace=body.get("namespace", ""),
        phase=body.get("phase") or "",
        message=body.get("message") or "",
        world=parse_world(gang.get("worldSize") or {}),
        version=_count(body, "version"),
        generation=_count(gang, "generation"),
        observed_generation=_count(gang, "observedGeneration"),
        settled=gang.get("settled", False),
        blocked_on=gang.get("blockedOn", ""),
        created_at=moment(body.get("createdAt")),
        ranks=tuple(_rank(r) for r in gang.get("ranks") or ()),
        exits=tuple(_exit(e) for e in gang.get("rankExits") or ()),
        culprit=None if gang.get("culprit") is None else _culprit(gang["culprit"]),
        bench=_bench(gang.get("bench")),
        raw=body,
    )


def parse_summary(body: Mapping[str, Any]) -> RunView:
    """One row of a listing."""
    return RunView(
        instance=_name(body),
        name=body.get("friendlyName") or _name(body),
        namespace=body.get("namespace", ""),
        phase=body.get("phase") or str(body.get("state", "")).lower(),
        message=body.get("message") or "",
        world=parse_world(body.get("worldSize") or {}),
        version=_count(body, "version"),
        created_at=moment(body.get("createdAt")),
        raw=body,
    )


def parse_world(body: Mapping[str, Any]) -> WorldStatus:
    return WorldStatus(
        _count(body, "ready"),
        _count(body, "target"),
        _count(body, "min"),
        _count(body, "max"),
        bool(body.get("belowMinimum", False)),
    )


def parse_event(body: Mapping[str, Any]) -> Event:
    return Event(
        kind=body.get("type", "Normal"),
        reason=body.get("reason", ""),
        message=body.get("message", ""),
        count=body.get("count") or 1,
        first_at=moment(body.get("first_timestamp")),
        last_at=moment(body.get("last_timestamp")),
    )


def parse_series(body: Mapping[str, Any]) -> Series:
    points = [
        SeriesPoint(
            at=moment(point.get("at")),
            value=float(point["value"]),
            min=float(point["min"]),
            max=float(point["max"]),
            step=point.get("step"),
            count=point.get("count", 1),
        )
        for point in body["points"]
    ]
    return Series(rank=body["rank"], worker=body.get("worker", 0), metric=body["metric"], points=tuple(points))


def _name(body: Mapping[str, Any]) -> str:
    if not isinstance(body["instanceName"], str):
        raise TypeError(f"instanceName is {body['instanceName']!r}, not a text")
    return body["instanceName"]


def _count(body: Mapping[str, Any], key: str, default: int | None = 0) -> int:
    """A whole number, which waits compare; anything else in its place is an answer of another shape."""
    value = body.get(key, default)
    if not isinstance(value, int):
        raise TypeError(f"{key} is {value!r}, not a whole number")
    return value


def moment(text: str | None) -> datetime | None:
    """RFC 3339; another server's free text is no time."""
    try:
        return None if not text else datetime.fromisoformat(text)
    except ValueError:
        return None


def _rank(body: Mapping[str, Any]) -> RankStatus:
    return RankStatus(
        rank=_count(body, "rank", None),
        pod_name=body.get("podName", ""),
        phase=body.get("phase", "Unknown"),
        restarts=_count(body, "restarts"),
        node=body.get("nodeName"),
        provider=body.get("provider"),
        region=body.get("region"),
        state=body.get("state") or str(body.get("phase", "")).lower(),
        note=body.get("note", ""),
        report=None if body.get("report") is None else _report(body["report"]),
        stalled=None if body.get("stalled") is None else _stalled(body["stalled"]),
    )


def _report(body: Mapping[str, Any]) -> RankReport:
    return RankReport(
        at=moment(body.get("at")),
        step=body.get("step"),
        step_seconds=body.get("stepSeconds"),
        values={name: float(value) for name, value in (body.get("values") or {}).items()},
    )


def _stalled(body: Mapping[str, Any]) -> Stalled:
    return Stalled(
        since=moment(body.get("since")),
        usual_step_seconds=body.get("usualStepSeconds", 0.0),
        where=body.get("where", ""),
        stack=body.get("stack", ""),
    )


def _exit(body: Mapping[str, Any]) -> RankExit:
    return RankExit(
        rank=_count(body, "rank", None),
        exit_code=_count(body, "exitCode", None),
        termination_reason=body.get("terminationReason") or "Unknown",
        restart_count=_count(body, "restartCount"),
        signal=body.get("signal"),
        started_at=moment(body.get("startedAt")),
        finished_at=moment(body.get("finishedAt")),
        node=body.get("node"),
        role=body.get("role"),
        log_tail=tuple(body.get("logTail") or ()),
        traceback=body.get("traceback") or "",
    )


def _culprit(body: Mapping[str, Any]) -> Culprit:
    return Culprit(
        rank=body["rank"],
        exit_code=body["exitCode"],
        termination_reason=body["terminationReason"],
        evidence=body["evidence"],
        confidence=body["confidence"],
        log_tail=tuple(body.get("logTail") or ()),
        traceback=body.get("traceback") or "",
    )


def _bench(body: Mapping[str, Any] | None) -> BenchStatus | None:
    if body is None or body.get("mode") == "off":
        return None
    result = body.get("result")
    return BenchStatus(
        phase=body.get("phase") or "Pending",
        message=body.get("message") or "",
        started_at=moment(body.get("startedAt")),
        completed_at=moment(body.get("completedAt")),
        on_worker_nodes=body.get("onWorkerNodes", True),
        result=None if result is None else _bench_result(result),
    )


def _bench_result(body: Mapping[str, Any]) -> BenchResult:
    measured = moment(body.get("measuredAt"))
    return BenchResult(
        measured_at=measured or datetime.fromtimestamp(0).astimezone(),
        probe_node_a=body.get("probeNodeA", ""),
        probe_node_b=body.get("probeNodeB", ""),
        busbw_gbps_p10=body.get("busbwGbpsP10"),
        busbw_gbps_p50=body.get("busbwGbpsP50"),
        busbw_gbps_p90=body.get("busbwGbpsP90"),
        algbw_gbps_p50=body.get("algbwGbpsP50"),
        latency_us_at_1mib=body.get("latencyUsAt1mib"),
        size_bytes_swept=tuple(body.get("sizeBytesSwept") or ()),
        method=body.get("method"),
        sweep=tuple(
            BenchPoint(
                size_bytes=point["sizeBytes"],
                algbw_gbps=point["algbwGbps"],
                busbw_gbps=point["busbwGbps"],
                latency_us=point["latencyUs"],
                repeats=point.get("repeats", 0),
            )
            for point in body.get("sweep") or ()
        ),
    )
