"""Events of a run, in words for people, with reasons that are a stable contract."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    CREATED = "Created"
    WORLD_READY = "WorldReady"
    WORLD_SHRUNK_BELOW_MIN = "WorldShrunkBelowMin"
    WORLD_RECOVERED = "WorldRecovered"
    RANK_FAILED = "RankFailed"
    RANK_RESTARTED = "RankRestarted"
    RANK_LOST = "RankLost"
    RANK_STALLED = "RankStalled"
    RANK_RESUMED = "RankResumed"
    WORKER_FAILED = "WorkerFailed"
    WORKER_DONE = "WorkerDone"
    WORKERS_RESTARTED = "WorkersRestarted"
    RESTORED = "Restored"
    SNAPSHOT_REFUSED = "SnapshotRefused"
    NOTICE_PUBLISHED = "NoticePublished"
    NOTICE_OVER = "NoticeOver"
    SCALE_REQUESTED = "ScaleRequested"
    SCALE_OBSERVED = "ScaleObserved"
    SCALE_IGNORED = "WorldClosed"
    MESH_READY = "MeshReady"
    DEGRADED_MESH = "DegradedMesh"
    BENCH_STARTED = "BenchStarted"
    BENCH_SUCCEEDED = "BenchSucceeded"
    BENCH_FAILED = "BenchFailed"
    BENCH_TIMED_OUT = "BenchTimedOut"
    BENCH_SKIPPED = "BenchSkipped"
    UNATTENDED = "Unattended"
    UD_TERMINAL_STATE = "UDTerminalState"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `kind` is Normal or Warning. The store folds equal (reason, message), so a message has no times."""

    reason: str
    message: str
    warning: bool = False

    @property
    def kind(self) -> str:
        return "Warning" if self.warning else "Normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """An event as the store keeps it. `version` orders it among all changes of the store."""

    kind: str
    reason: str
    message: str
    count: int
    first_at: float
    last_at: float
    version: int = 0
