"""The status: the controller's last observation of a run; never a wish of a user."""

from dataclasses import dataclass
from typing import Literal

from basilica.core.goodput import EMPTY, Ledger
from basilica.core.incidents import Incident
from basilica.core.mesh import MeshStatus
from basilica.core.notices import Notice
from basilica.core.phase import BenchPhase, Phase, RankPhase
from basilica.core.seen import BenchResult
from basilica.core.snapshots import Snapshots
from basilica.core.world import RankExit, RankStatus, WorldSize, WorldStatus

HISTORY_MAX = 50
WORLD_READY = "world_ready"  # the milestone of a world that has reached its minimum


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    since: float


@dataclass(frozen=True, slots=True)
class WorldSample:
    at: float
    target: int
    ready: int


@dataclass(frozen=True, slots=True)
class Resize:
    at: float
    from_target: int
    to_target: int
    reason: str


@dataclass(frozen=True, slots=True)
class Milestone:
    name: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStatus:
    phase: BenchPhase = BenchPhase.PENDING
    started_at: float | None = None
    completed_at: float | None = None
    message: str = ""
    on_worker_nodes: bool = True
    result: BenchResult | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of ended attempts; that of running ones is added from the ranks' `metered_until`."""

    rank_seconds: float = 0.0
    gpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingTurns:
    """The controller's turns of a run have failed without a break. `since`: when the first of them began.

    `recorded_at`: when this was written.
    """

    since: float
    problem: str
    recorded_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentStatus:
    """`world_target` is the target that the controller has acted on; `exits` holds what can change no more.

    `failures` are the latest bad exits, restarted ones included: with `whole_at`, the last moment at which every
    wanted rank was up, they tell who failed first. `closed`: a rank exited 0, and the world stays as it is.
    `failing`: what all else here says was seen before (`core.failing`). `rendezvous_silent_since`: what ranks tell
    cannot be read since then, so what is known of them may be old. `incidents` are the latest, the last of which may be
    going on. `notice`: a planned change that ranks were told of, and that is yet to happen.
    """

    created_at: float
    phase: Phase = Phase.PENDING
    message: str = ""
    observed_generation: int = 0
    ignored_generation: int = 0  # of a change that came after the end, and has had its warning
    world_target: int = 0
    admitted: int | None = None  # ranks from this one on wait to be let into the world; None: all are in it
    closed: bool = False
    was_ready: bool = False
    whole_at: float | None = None
    terminal_at: float | None = None
    settled: bool = False
    ranks: tuple[RankStatus, ...] = ()
    exits: tuple[RankExit, ...] = ()
    failures: tuple[RankExit, ...] = ()
    conditions: tuple[Condition, ...] = ()
    bench: BenchStatus | None = None
    mesh: MeshStatus | None = None
    rendezvous_endpoint: str = ""
    rendezvous_silent_since: float | None = None
    usage: Usage = Usage()
    history: tuple[WorldSample, ...] = ()
    last_resize: Resize | None = None
    milestones: tuple[Milestone, ...] = ()
    warned: tuple[str, ...] = ()
    failing: FailingTurns | None = None
    ledger: Ledger = EMPTY
    incidents: tuple[Incident, ...] = ()
    notice: Notice | None = None
    notices: int = 0  # how many there were
    snapshots: Snapshots | None = None  # None while no rank has saved anything

    @property
    def latest(self) -> float:
        """The newest moment that the controller recorded here by its own clock."""
        moments = [self.created_at, self.terminal_at, self.whole_at]
        moments += [sample.at for sample in self.history] + [milestone.at for milestone in self.milestones]
        moments += [condition.since for condition in self.conditions]
        moments += [rank.metered_until for rank in self.ranks]
        moments += [] if self.failing is None else [self.failing.recorded_at]
        return max(moment for moment in moments if moment is not None)

    @property
    def ready(self) -> int:
        """Ranks of the wanted world that are up, and those that have already exited 0."""
        return sum(
            r.phase in (RankPhase.RUNNING, RankPhase.SUCCEEDED) and r.rank < self.world_target for r in self.ranks
        )

    def world(self, size: WorldSize) -> WorldStatus:
        """The world as the API shows it: the spec's own target beside what is up."""
        ready = self.ready
        return WorldStatus(ready, size.target, size.min, size.max, ready < size.min)
