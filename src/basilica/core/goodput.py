"""The ledger of a run: every second of every wanted rank has exactly one cause. Pure.

A place is one of the `target` ranks that the run wants. While the run lives, each place has one open segment: a cause
and the moment since when it holds, both in its `RankStatus`. A segment that ends moves its length to the `Ledger`.
Segments follow each other without a gap, and lengths are whole microseconds, so that at every moment

    closed segments + open segments  =  wall time x target, exactly.

A cause is booked on evidence only. A program that runs and has not reported a step is `UNATTRIBUTED`; its first report
turns the open segment since its start into `STARTING`. No closed segment is ever changed. The time for which snapshots
blocked a rank is known as an amount, not as moments: it is a part of the segment that it was seen in, and charged as
`SNAPSHOTTING` in its place.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum


class Cause(StrEnum):
    """The cause of a segment. Every member but the last three is a loss."""

    QUEUED = "queued"  # waits for room, or to be launched
    STARTING = "starting"  # image, process, imports: until the rendezvous or the first step
    RENDEZVOUS = "rendezvous"  # waits for the other agents
    RESTORING = "restoring"  # reads its state from a snapshot
    RECOMPUTING = "recomputing"  # takes steps that were taken before
    SNAPSHOTTING = "snapshotting"  # blocked by a snapshot
    STALLED = "stalled"
    DEGRADED = "degraded"  # failed, and not running yet or any more
    CHANGING = "changing"  # ready for a planned change, or stopping for it
    FINISHED = "finished"  # exited 0; the others go on
    TRAINING = "training"
    UNATTRIBUTED = "unattributed"  # runs, and nobody knows what it does


AT_WORK = frozenset({Cause.FINISHED, Cause.TRAINING, Cause.UNATTRIBUTED})
BLOCKABLE = frozenset({Cause.TRAINING, Cause.RECOMPUTING, Cause.STALLED, Cause.UNATTRIBUTED})
"""The causes of segments of which snapshots may have blocked a part."""
LOSSES = tuple(cause for cause in Cause if cause not in AT_WORK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The closed segments by cause, in microseconds. `steps_recomputed`: steps that were taken more than once."""

    queued: int = 0
    starting: int = 0
    rendezvous: int = 0
    restoring: int = 0
    recomputing: int = 0
    snapshotting: int = 0
    stalled: int = 0
    degraded: int = 0
    changing: int = 0
    finished: int = 0
    training: int = 0
    unattributed: int = 0
    steps_recomputed: int = 0

    def add(self, cause: Cause, microseconds: int) -> "Ledger":
        return replace(self, **{cause.value: getattr(self, cause.value) + microseconds})


EMPTY = Ledger()

assert {field.name for field in fields(Ledger)} == {*Cause, "steps_recomputed"}


@dataclass(frozen=True, slots=True)
class Segment:
    """The open segment of a place. `resolvable`: it began with a program of which no step is known yet.

    `blocked`: microseconds of it that are charged to snapshots.
    """

    cause: Cause
    since: float
    resolvable: bool = False
    blocked: int = 0


def microseconds(moment: float) -> int:
    return round(moment * 1_000_000)


def length(segment: Segment, until: float) -> int:
    """Return the microseconds of a segment up to then; none for one that began later, by a clock that was set back."""
    return max(0, microseconds(until) - microseconds(segment.since))


def enter(
    ledger: Ledger, segment: Segment, cause: Cause, at: float, *, resolvable: bool = False
) -> tuple[Ledger, Segment]:
    """End the segment at that moment and begin one of another cause; not before the old one began."""
    at = max(at, segment.since)
    own, blocked = parts(segment, at)
    # It was blocked after that moment: in the next segment, or in one of those that follow at the same moment.
    later = at == segment.since or (cause in BLOCKABLE and segment.cause in BLOCKABLE)
    left = segment.blocked - blocked if later else 0
    return charge(ledger, segment.cause, own, blocked), Segment(cause, at, resolvable, left)


def parts(segment: Segment, until: float) -> tuple[int, int]:
    """Return the microseconds of a segment up to then that its cause and that snapshots are charged with."""
    whole = length(segment, until)
    blocked = min(segment.blocked, whole) if segment.cause in BLOCKABLE else 0
    return whole - blocked, blocked


def charge(ledger: Ledger, cause: Cause, own: int, blocked: int) -> Ledger:
    ledger = ledger.add(cause, own)
    return ledger.add(Cause.SNAPSHOTTING, blocked) if blocked else ledger


def block(segment: Segment, amount: int, until: float) -> Segment:
    """Charge a part of an open segment to snapshots; never more than the segment has by then."""
    return replace(segment, blocked=max(segment.blocked, min(segment.blocked + amount, length(segment, until))))


def resolve(segment: Segment, cause: Cause) -> Segment:
    """Name the cause of an open segment that was not known so far."""
    return replace(segment, cause=cause, resolvable=False) if segment.resolvable else segment


def totals(ledger: Ledger, open_segments: Iterable[Segment], until: float) -> dict[Cause, int]:
    """Return the microseconds of every cause, open segments counted up to then."""
    found = {cause: int(getattr(ledger, cause.value)) for cause in Cause}
    for segment in open_segments:
        own, blocked = parts(segment, until)
        found[segment.cause] += own
        found[Cause.SNAPSHOTTING] += blocked
    return found


def lost(amounts: Mapping[Cause, int]) -> int:
    """Return the microseconds of all losses together."""
    return sum(amounts[cause] for cause in LOSSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The ledger as it is shown: seconds by cause. `least` and `most` bound the share of time that trained.

    They differ by the time of which no cause is known: programs that report no steps.
    """

    seconds: Mapping[Cause, float]
    wall_seconds: float
    gpus_per_rank: int
    steps_recomputed: int
    least: float
    most: float

    @property
    def rank_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def largest_loss(self) -> tuple[Cause, float] | None:
        """The cause that cost most, with its seconds; None if nothing was lost."""
        cause = max(LOSSES, key=lambda each: self.seconds[each])
        return (cause, self.seconds[cause]) if self.seconds[cause] > 0 else None


def goodput(amounts: Mapping[Cause, int], *, wall_seconds: float, gpus: int, steps_recomputed: int) -> Goodput:
    """Return the ledger as it is shown; `gpus` are those of one rank."""
    counted, known = sum(amounts.values()), amounts[Cause.TRAINING]
    return Goodput(
        seconds={cause: amounts[cause] / 1e6 for cause in Cause},
        wall_seconds=wall_seconds,
        gpus_per_rank=gpus,
        steps_recomputed=steps_recomputed,
        least=known / counted if counted else 0.0,
        most=(known + amounts[Cause.UNATTRIBUTED]) / counted if counted else 1.0,
    )
