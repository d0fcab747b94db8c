"""The checkpoints of a run: which steps are kept in which tier, and how many of their ranks are there. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Tier = Literal["memory", "peer", "disk"]
TIERS: tuple[Tier, ...] = ("memory", "peer", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFound:
    """One snapshot file, as its header describes it. `sealed_at`: seconds since 1970, by the rank's wall clock."""

    step: int
    tier: Tier
    world: int
    rank: int
    bytes: int
    sealed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One step in one tier. `ranks`: how many of the `world` ranks have a snapshot of it there."""

    step: int
    tier: Tier
    world: int
    ranks: int
    bytes: int
    sealed_at: float

    @property
    def complete(self) -> bool:
        return self.ranks >= self.world


def checkpoints_of(found: Iterable[SnapshotFound]) -> tuple[Checkpoint, ...]:
    """Gather snapshot files by step and tier, newest step first. A second copy of a rank's snapshot counts once."""
    groups: dict[tuple[int, Tier, int], dict[int, SnapshotFound]] = {}
    for each in found:
        ranks = groups.setdefault((each.step, each.tier, each.world), {})
        if each.rank not in ranks or ranks[each.rank].sealed_at < each.sealed_at:
            ranks[each.rank] = each
    gathered = [
        Checkpoint(
            step=step,
            tier=tier,
            world=world,
            ranks=len(ranks),
            bytes=sum(each.bytes for each in ranks.values()),
            sealed_at=max(each.sealed_at for each in ranks.values()),
        )
        for (step, tier, world), ranks in groups.items()
    ]
    return tuple(sorted(gathered, key=lambda each: (-each.step, TIERS.index(each.tier), each.world)))


def worth_keeping(found: Iterable[SnapshotFound]) -> int:
    """Return the oldest step of an ended run that a resumed run may need: its newest complete one, else any.

    A step may be complete by copies of several tiers.
    """
    ranks: dict[tuple[int, int], set[int]] = {}
    for each in found:
        ranks.setdefault((each.step, each.world), set()).add(each.rank)
    return max((step for (step, world), there in ranks.items() if len(there) >= world), default=0)
