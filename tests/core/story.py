"""One run, told look by look: what each look shows is written down, and what the core makes of it is asserted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from basilica.core import metering
from basilica.core.actions import Launch, Plan, Stop
from basilica.core.phase import Phase, RankPhase
from basilica.core.reconcile import reconcile
from basilica.core.seen import Ended, SeenBench, SeenRank, Sight, Sighting
from basilica.core.spec import DeploymentSpec, Exec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.why import why
from basilica.core.world import RankExit, RankStatus, WorldSize

CREATED = 100.0


def spec_of(low: int = 1, target: int = 2, high: int = 4, **settings: Any) -> DeploymentSpec:
    return DeploymentSpec(name="story", program=Exec(("train",)), world=WorldSize(low, target, high), **settings)


def up(rank: int, attempt: int = 0, *, since: float = CREATED, node: str = "here", gpus: int = 0) -> SeenRank:
    return SeenRank(rank=rank, attempt=attempt, sight=Sight.RUNNING, started_at=since, node=node, gpus=gpus)


def starting(rank: int, attempt: int = 0) -> SeenRank:
    return SeenRank(rank=rank, attempt=attempt, sight=Sight.STARTING)


def queued(rank: int, note: str = "behind 'other'", attempt: int = 0) -> SeenRank:
    return SeenRank(rank=rank, attempt=attempt, sight=Sight.QUEUED, note=note)


def unknown(rank: int, attempt: int = 0) -> SeenRank:
    return SeenRank(rank=rank, attempt=attempt, sight=Sight.UNKNOWN)


def done(
    rank: int,
    code: int | None = 0,
    attempt: int = 0,
    *,
    at: float | None = None,
    since: float | None = CREATED,
    node: str = "here",
    gpus: int = 0,
    reason: str | None = None,
    **how: Any,
) -> SeenRank:
    """A rank that has ended. `at` None: the story puts in the time of the look."""
    ended = Ended(
        exit_code=code,
        reason=reason or ("Completed" if code == 0 else "Error"),
        finished_at=-1.0 if at is None else at,
        **how,
    )
    return SeenRank(rank=rank, attempt=attempt, sight=Sight.ENDED, started_at=since, node=node, gpus=gpus, ended=ended)


def stopped(rank: int, attempt: int = 0, *, code: int | None = 143, since: float | None = CREATED) -> SeenRank:
    return done(rank, code, attempt, since=since, signal="SIGTERM", reason="SIGTERM", stopped=True)


def never_started(rank: int, attempt: int = 0) -> SeenRank:
    """What is left of an attempt that was stopped before it came."""
    return done(rank, None, attempt, since=None, reason="Unknown", stopped=True)


@dataclass
class Story:
    spec: DeploymentSpec = field(default_factory=spec_of)
    now: float = CREATED
    status: DeploymentStatus = field(default_factory=lambda: DeploymentStatus(created_at=CREATED))
    plan: Plan = field(default_factory=lambda: Plan(DeploymentStatus(created_at=CREATED)))
    told: list[str] = field(default_factory=list)

    def look(self, *ranks: SeenRank, after: float = 0.0, **sighting: Any) -> Plan:
        """Some time later one look shows these ranks, and the core decides."""
        self.now += after
        seen = tuple(self._stamped(r) for r in ranks)
        self.plan = reconcile(self.spec, self.status, Sighting(ranks=seen, **sighting), self.now)
        self.status = self.plan.status
        self.told += [e.reason for e in self.plan.events]
        return self.plan

    def all_up(self, attempt: int = 0) -> Plan:
        self.look()
        return self.look(*(up(n, attempt) for n in range(self.status.world_target)))

    def scale(self, target: int) -> None:
        self.spec = self.spec.scaled(target)

    def cancel(self) -> None:
        self.spec = self.spec.ended_by(Wanted.CANCEL)

    def delete(self) -> None:
        self.spec = self.spec.ended_by(Wanted.DELETE)

    def _stamped(self, seen: SeenRank) -> SeenRank:
        if seen.ended is None or seen.ended.finished_at >= 0:
            return seen
        return replace(seen, ended=replace(seen.ended, finished_at=self.now))

    # ---- what came of it -----------------------------------------------------------------------------------------

    def phase(self) -> Phase:
        """A method, as is `settled`: a type checker believes that a property stays what it was."""
        return self.status.phase

    def settled(self) -> bool:
        return self.status.settled

    @property
    def launched(self) -> list[tuple[int, int]]:
        return [(a.rank, a.attempt) for a in self.plan.actions if isinstance(a, Launch)]

    @property
    def stopping(self) -> list[tuple[int, int]]:
        return [(a.rank, a.attempt) for a in self.plan.actions if isinstance(a, Stop)]

    @property
    def exits(self) -> list[tuple[int, int | None, str]]:
        return [(e.rank, e.exit_code, e.termination_reason) for e in self.status.exits]

    @property
    def events(self) -> list[str]:
        return [e.reason for e in self.plan.events]

    @property
    def why(self) -> str:
        return why(self.spec, self.status, self.now)

    @property
    def rank_seconds(self) -> float:
        return metering.total(self.status).rank_seconds

    def rank(self, number: int) -> RankStatus:
        return next(r for r in self.status.ranks if r.rank == number)

    def phases(self) -> list[RankPhase]:
        return [r.phase for r in self.status.ranks]


def exit_of(
    rank: int,
    code: int | None = 1,
    at: float = 0.0,
    *,
    seen_at: float | None = None,
    reason: str = "Error",
    signal: str | None = None,
    node: str = "here",
    stopped: bool = False,
    attempt: int = 0,
) -> RankExit:
    return RankExit(
        rank=rank,
        attempt=attempt,
        exit_code=code,
        termination_reason=reason,
        restart_count=0,
        finished_at=at,
        seen_at=at if seen_at is None else seen_at,
        signal=signal,
        node=node,
        stopped=stopped,
    )


def bench(phase: Any, **facts: Any) -> SeenBench:
    return SeenBench(phase=phase, **facts)


def messages(plan: Plan, reason: str) -> Sequence[str]:
    return [e.message for e in plan.events if e.reason == reason]
