"""The actions of the controller: a closed union of values, and the Plan that carries them."""

from dataclasses import dataclass
from typing import Literal

from basilica.core.events import Event
from basilica.core.mesh import Announcement
from basilica.core.status import DeploymentStatus


@dataclass(frozen=True, slots=True)
class Launch:
    """Start this attempt of this rank. Already there: done. An older attempt still alive: refused, tried again."""

    rank: int
    attempt: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End this attempt: SIGTERM, grace, SIGKILL of all it started. If it never started, it never will."""

    rank: int
    attempt: int
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Announce:
    """Open the run's rendezvous if it is not, and have it say this and nothing else."""

    announcement: Announcement


@dataclass(frozen=True, slots=True)
class EndRendezvous:
    """Take the run's rendezvous down with all its keys. Gone already: done."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Start the bench probe. Already there: done."""

    placement: Literal["preferred", "strict"]


@dataclass(frozen=True, slots=True)
class EndProbe:
    """Take the bench probe down, whatever it was doing."""


@dataclass(frozen=True, slots=True)
class PersistSnapshots:
    """Move the snapshots of an ended run from memory to its checkpoint directory. None there: done."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove all that the runtime keeps of this run: nothing of it runs any more and the user deleted it."""


Action = Announce | Launch | Stop | EndRendezvous | Probe | EndProbe | PersistSnapshots | Remove


@dataclass(frozen=True, slots=True)
class Plan:
    """One decided step: save `status`, then apply `actions`, then emit `events`; look again at `wake_at`."""

    status: DeploymentStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float | None = None
