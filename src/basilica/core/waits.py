"""The conditions of the waits: the only such rules in the project.

A rule looks at a Snapshot and says whether the wait is over; a run that is lost raises, whoever asks and however late.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from basilica.core.errors import BelowMinimumWorld, ExitLike, UDTerminalState
from basilica.core.phase import BenchPhase
from basilica.core.world import WorldStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """As much of a run as the waits need, from our server or another.

    `phase` is text: a value that we do not know is passed through and is not terminal. A server without generations
    leaves both at 0; then `requested_target`, what this client last asked for, stands in.
    """

    name: str
    phase: str
    world: WorldStatus
    generation: int = 0
    observed_generation: int = 0
    surplus: int = 0  # ranks at or above the target that still run
    requested_target: int | None = None
    rank_exits: Sequence[ExitLike] = ()
    bench_phase: str | None = None

    @property
    def lost(self) -> bool:
        return self.phase in ("failed", "cancelled")

    @property
    def succeeded(self) -> bool:
        return self.phase == "succeeded"


Rule = Callable[[Snapshot, float], bool]


def min_world(seen: Snapshot, timeout: float) -> bool:
    """`ready >= min`, or the run has succeeded."""
    _refuse_lost(seen, seen.world.min, timeout)
    return seen.succeeded or 0 < seen.world.min <= seen.world.ready


def target_world(seen: Snapshot, timeout: float) -> bool:
    """The requested target is up and nothing above it runs, or the run has succeeded."""
    wanted = wanted_target(seen)
    _refuse_lost(seen, wanted, timeout)
    if seen.succeeded:
        return True
    if seen.generation:
        reflected = seen.observed_generation >= seen.generation
    else:
        reflected = seen.requested_target is None or seen.world.target == seen.requested_target
    return reflected and 0 < wanted <= seen.world.ready and seen.surplus == 0


def complete(seen: Snapshot, timeout: float) -> bool:
    """The run has succeeded."""
    _refuse_lost(seen, seen.world.min, timeout)
    return seen.succeeded


def bench_complete(seen: Snapshot, timeout: float) -> bool:
    """The probe has ended, one way or another, or there is none."""
    return seen.bench_phase is None or (seen.bench_phase in set(BenchPhase) and BenchPhase(seen.bench_phase).terminal)


def refuse_ended(seen: Snapshot) -> None:
    """`wait_until_complete` on a run that is over already at entry."""
    if seen.lost or seen.succeeded:
        raise UDTerminalState(seen.phase, name=seen.name)


def timed_out(seen: Snapshot, timeout: float, *, rule: Rule) -> BelowMinimumWorld:
    """The error of a wait whose time is up and whose last look did not end it."""
    required = wanted_target(seen) if rule is target_world else seen.world.min
    goal = "the run to complete" if rule is complete else f"{_ranks(required)} to be up"
    return _unfulfilled(seen, required, timeout, goal)


def wanted_target(seen: Snapshot) -> int:
    if seen.generation or seen.requested_target is None:
        return seen.world.target
    return seen.requested_target


def _refuse_lost(seen: Snapshot, required: int, timeout: float) -> None:
    if seen.lost:
        raise _unfulfilled(seen, required, timeout)


def _unfulfilled(seen: Snapshot, required: int, timeout: float, goal: str = "") -> BelowMinimumWorld:
    target = wanted_target(seen)
    return BelowMinimumWorld(
        seen.name, seen.phase, seen.world.ready, required, timeout, tuple(seen.rank_exits), goal, target
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
