"""The ledger of a run's pods: the runtime's memory of them between two looks. Pure.

A ledger has nothing that matters for longer than a pause lasts. An operator that takes over begins with an empty one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FRUITLESS_S = 1.0  # a pod that ended within that time has done nothing, whatever it claimed
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """The newest pod of a rank. `fruitless`: how many in a row, up to it, ended before they had claimed an attempt.

    `next_at`: when the rank may get another pod; None while this one is all that it needs.
    """

    at: float
    uid: str
    fruitless: int = 0
    next_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal of a pod by the API server. `living`: how many pods the run had, since fewer may make room."""

    message: str
    retry_at: float
    living: int
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """`terminating`: the namespace is being deleted, so that no pod can be created any more.

    `resume_at`: when a gang that gave its nodes back tries again. `homeless_since`: since when too few of its ranks
    have a node. `leaving`: since when pods, by uid, were to end by themselves. `shown`: pods that were over in an
    earlier look, so that its caller has had time to record their ends. `outrun_since`: since when ranks need pods while
    their rendezvous has none.
    """

    births: Mapping[int, Birth] = field(default_factory=dict)
    refusal: Refusal | None = None
    terminating: bool = False
    homeless_since: float | None = None
    resume_at: float | None = None
    leaving: Mapping[str, float] = field(default_factory=dict)
    shown: frozenset[str] = frozenset()
    outrun_since: float | None = None
    warnings: tuple[tuple[str, str], ...] = ()

    def born(self, rank: int, uid: str, now: float) -> "Ledger":
        """Record a created pod."""
        before = self.births.get(rank)
        birth = Birth(at=now, uid=uid, fruitless=0 if before is None else before.fruitless)
        return replace(self, births={**self.births, rank: birth}, refusal=None)

    def missed(self, rank: int, now: float, *, claimed: bool) -> "Ledger":
        """Record that a rank has no pod any more and needs one. `claimed`: the last one claimed an attempt."""
        birth = self.births.get(rank)
        if birth is None or birth.next_at is not None:
            return self
        fruitless = 0 if claimed and now - birth.at >= FRUITLESS_S else birth.fruitless + 1
        after = replace(birth, fruitless=fruitless, next_at=now + pause_after(fruitless))
        return replace(self, births={**self.births, rank: after})

    def refused(self, message: str, now: float, living: int) -> "Ledger":
        """Record a refused pod; many refusals at once cost one pause."""
        known = self.refusal
        if known is not None and now < known.retry_at:
            return replace(self, refusal=replace(known, message=message, living=living))
        tries = 0 if known is None else known.tries + 1
        retry_at = now + min(LONGEST_PAUSE_S, 2.0 ** min(tries, 10))
        return replace(self, refusal=Refusal(message=message, retry_at=retry_at, living=living, tries=tries))

    def next_pod_at(self, rank: int) -> float:
        birth = self.births.get(rank)
        return 0.0 if birth is None or birth.next_at is None else birth.next_at

    # ---- texts for status

    def waiting_for(self) -> str:
        """The object of "waiting for", of a rank without a pod."""
        if self.terminating:
            return "a pod, and none can be made: the namespace is being deleted"
        if self.refusal is not None:
            return f"a pod, which Kubernetes refuses: {self.refusal.message}"
        if self.resume_at is not None:
            return "a pod: its gang gave its nodes back, and tries again after a pause"
        if self.outrun_since is not None:
            return "a pod, which the run's rendezvous gets first"
        return "a pod"

    def held_back(self, now: float) -> dict[int, str]:
        """Return the same text for ranks whose pods end as soon as they are created."""
        if self.terminating or self.refusal is not None:
            return {}
        return {
            rank: f"a pod: {birth.fruitless} in a row ended before they took anything up, so that the next one is made "
            f"after {pause_after(birth.fruitless):g} s"
            for rank, birth in self.births.items()
            if birth.next_at is not None and birth.next_at > now
        }


def pause_after(fruitless: int) -> float:
    """Return the pause before the next pod; the first fruitless pod costs none, as it may have been chance."""
    return 0.0 if fruitless <= 1 else min(LONGEST_PAUSE_S, 2.0 ** min(fruitless - 2, 10))
