"""The status while it is being decided on, and what every step may do to it."""

from dataclasses import dataclass, replace
from typing import Literal

from basilica.core.actions import Action
from basilica.core.events import Event
from basilica.core.incidents import IncidentKind
from basilica.core.notice_rules import Listener
from basilica.core.seen import Leaving, SeenSaving, Sighting, Stalled
from basilica.core.spec import DeploymentSpec
from basilica.core.status import Condition, DeploymentStatus, Milestone
from basilica.core.world import RankExit, RankStatus


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that this turn saw or did which interrupts training. `exit`: of the rank or worker that failed."""

    kind: IncidentKind
    at: float
    what: str
    rank: int | None = None
    exit: RankExit | None = None


@dataclass(frozen=True, slots=True)
class Blocked:
    """Microseconds for which snapshots blocked a rank between two moments, and which are not booked yet.

    `total`: those of the process from its beginning, of which the book then has all.
    """

    amount: int
    total: int
    since: float
    until: float
    process_at: float


class Turn:
    """It lives for one call of `reconcile`, and nothing outside sees it.

    Steps decide on `ranks` and `exits`, which `write_ranks` puts into the status.
    """

    def __init__(self, spec: DeploymentSpec, status: DeploymentStatus, seen: Sighting, now: float) -> None:
        self.spec, self.before, self.seen, self.now = spec, status, seen, now
        self.status = status
        self.ranks = {r.rank: r for r in status.ranks}
        self.exits = list(status.exits)
        self.actions: list[Action] = []
        self.events: list[Event] = []
        self.wakes: list[float] = []
        self.start_errors: dict[int, str] = {}
        self.running: set[int] = set()  # ranks that this look showed running
        self.present: set[int] = set()  # ranks whose current attempt this look showed at all
        self.stalls: list[tuple[int, Stalled]] = []  # that this look was the first to show
        self.listeners: dict[int, Listener] = {}  # running ranks whose programs read notices
        self.leaving: dict[int, Leaving] = {}  # ranks whose places the platform takes away
        self.ends: dict[int, float] = {}  # when those attempts ended that this look was the first to show so
        self.queued: set[int] = set()  # ranks that wait for room
        self.caught_up: dict[int, int] = {}  # ranks that took a first new step, with the last that they repeated
        self.savings: dict[int, SeenSaving] = {}  # notes of the ranks that this look showed
        self.blocked: dict[int, Blocked] = {}
        self.newly_lost = 0  # microseconds of training that this turn has found to be blocked
        self.troubles: list[Trouble] = []
        self.held = False  # the latest change of the spec waits for ranks that were told of it
        self.strangers = 0
        self.removable = False

    @property
    def ended(self) -> bool:
        return self.status.phase.terminal

    def wanted(self) -> list[RankStatus]:
        return [r for r in self.ranks.values() if r.rank < self.status.world_target]

    def say(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append(Event(reason, message, warning))

    def due(self, moment: float) -> bool:
        """True if it has come; else there is a turn when it does."""
        if self.now >= moment:
            return True
        self.wakes.append(moment)
        return False

    def condition(self, type_: str, holds: bool, reason: str, message: str = "") -> None:
        value: Literal["True", "False"] = "True" if holds else "False"
        old = next((c for c in self.status.conditions if c.type == type_), None)
        if old is not None and (old.status, old.reason, old.message) == (value, reason, message):
            return
        since = old.since if old is not None and old.status == value else self.now
        new = Condition(type=type_, status=value, reason=reason, message=message, since=since)
        others = tuple(c for c in self.status.conditions if c.type != type_)
        self.status = replace(self.status, conditions=(*others, new))

    def milestone(self, name: str) -> None:
        self.status = replace(self.status, milestones=(*self.status.milestones, Milestone(name, self.now)))

    def write_ranks(self) -> None:
        ranks = tuple(self.ranks[n] for n in sorted(self.ranks))
        self.status = replace(self.status, ranks=ranks, exits=tuple(self.exits))
