"""The snapshots of a run in the controller's book: what is booked of each rank's notes, and the newest saved steps.

Ranks save often, perhaps every step. Their notes are booked with other changes of the status, and at most once a
`BOOK_EVERY` by themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from basilica.core.seen import SeenSaving

BOOK_EVERY = 60.0
SAME_PROCESS_SECONDS = 0.001  # a store may round times


@dataclass(frozen=True, slots=True)
class BookedRefusals:
    """The number of the last refusal of a process that is an event of the run."""

    pid: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaving:
    """What is booked of the notes of a rank's processes.

    `process_at` identifies the process whose `blocked` microseconds are booked, by its first note; `at` is the latest
    moment of all booked notes. `restored_at` is the end of the last restore that was announced.
    """

    process_at: float | None = None
    at: float = 0.0
    blocked: int = 0
    restored_at: float | None = None
    refused: tuple[BookedRefusals, ...] = ()

    def is_of(self, process_at: float) -> bool:
        return self.process_at is not None and abs(self.process_at - process_at) < SAME_PROCESS_SECONDS

    def next_attempt(self) -> "RankSaving":
        """Return the book before the rank's next start: its processes count from 0 again."""
        return RankSaving(at=self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """The newest step that the ranks of a run have saved in a tier: all of those that save there. `size`: of all."""

    tier: str
    step: int
    at: float
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """The newest saved steps of a run, as they were booked at `booked_at`. `every`: the interval in steps, if known."""

    booked_at: float
    saved: tuple[SavedStep, ...] = ()
    every: int | None = None


def newest_steps(found: Iterable[SeenSaving]) -> tuple[SavedStep, ...]:
    """Return the newest step of each tier that every rank with snapshots in that tier has saved."""
    tiers: dict[str, SavedStep] = {}
    for saving in found:
        for saved in saving.saved:
            known = tiers.get(saved.tier)
            if known is None:
                tiers[saved.tier] = SavedStep(tier=saved.tier, step=saved.step, at=saved.at, size=saved.size)
            else:
                step, at = min(known.step, saved.step), max(known.at, saved.at)
                tiers[saved.tier] = SavedStep(tier=saved.tier, step=step, at=at, size=known.size + saved.size)
    return tuple(tiers.values())


def is_booking_due(snapshots: Snapshots | None, now: float) -> bool:
    """Return whether the ranks' notes are to be booked though nothing else has changed."""
    return snapshots is None or now >= snapshots.booked_at + BOOK_EVERY


_PLACES = {"memory": "in memory", "peer": "with a peer", "disk": "on disk", "bucket": "in the bucket"}


def place_of(tier: str) -> str:
    """Return the tier in words: `on disk`."""
    return _PLACES.get(tier, f"in {tier}")
