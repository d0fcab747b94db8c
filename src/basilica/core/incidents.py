"""Incidents: what interrupted the training of a run, from its beginning until every rank is at work again. Pure.

At most one incident is open at a time: a failure makes its peers fail, too, and the time until all of them train again
is lost to one cause. Its cost is the growth of the ledger's losses while it was open.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

INCIDENTS_KEPT = 50


class IncidentKind(StrEnum):
    FAILURE = "failure"
    STALL = "stall"
    LOSS = "loss"  # the platform took a rank
    RESIZE = "resize"
    RESTART = "restart"


PLANNED = frozenset({IncidentKind.RESIZE, IncidentKind.RESTART})


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One incident. `cost` is in microseconds of ranks; while it is open, `over_at` is None and `cost` has the losses
    of the run from before it. `what` is a sentence without its subject's times; `failures` counts exits that it saw.
    """

    number: int
    kind: IncidentKind
    at: float
    what: str
    rank: int | None = None
    worker: int | None = None
    torch_rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    reason: str = ""
    failures: int = 0
    seen_at: float = 0.0
    over_at: float | None = None
    cost: int = 0
    steps_recomputed: int = 0

    @property
    def is_open(self) -> bool:
        return self.over_at is None

    def costs(self, lost: int) -> int:
        """Return what it has cost when the run has lost that much in all."""
        return self.cost if self.over_at is not None else max(0, lost - self.cost)


def opened(incidents: tuple[Incident, ...], new: Incident, *, lost: int, steps: int) -> tuple[Incident, ...]:
    """Return the incidents with a new one that is open, under the next number."""
    number = incidents[-1].number + 1 if incidents else 1
    return (*incidents, replace(new, number=number, cost=lost, steps_recomputed=steps))[-INCIDENTS_KEPT:]


def closed(incidents: tuple[Incident, ...], at: float, *, lost: int, steps: int) -> tuple[Incident, ...]:
    """Return the incidents with the last one over."""
    last = incidents[-1]
    over = replace(
        last,
        over_at=max(at, last.at),
        cost=last.costs(lost),
        steps_recomputed=max(0, steps - last.steps_recomputed),
    )
    return (*incidents[:-1], over)


def changed(incidents: tuple[Incident, ...], **facts: object) -> tuple[Incident, ...]:
    """Return the incidents with other facts of the last one."""
    return (*incidents[:-1], replace(incidents[-1], **facts))  # type: ignore[arg-type]
