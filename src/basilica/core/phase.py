"""The phases of a run, of its ranks and of its bench probe: enums that know what is terminal."""

from enum import StrEnum


class Phase(StrEnum):
    """The phase of a run. The last three are final: no run ever leaves them."""

    PENDING = "pending"
    SCHEDULING = "scheduling"
    PULLING = "pulling"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


class RankPhase(StrEnum):
    """The phase of one rank in the status; `WAITING` and `LAUNCHED` differ by a saved Launch."""

    WAITING = "waiting"  # wanted, and not launched yet: new, or in its restart back-off
    LAUNCHED = "launched"  # the launch is decided and saved; the runtime may or may not have acted on it
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"  # exited 0 by itself
    LOST = "lost"  # failed, with no restart left
    DROPPED = "dropped"  # ended because we stopped it; a wanted one comes back as a new attempt

    @property
    def may_run(self) -> bool:
        """True while a process of this rank may exist."""
        return self in (RankPhase.LAUNCHED, RankPhase.RUNNING, RankPhase.STOPPING)


class BenchPhase(StrEnum):
    """The probe's own lifecycle, independent of the run's."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    TIMED_OUT = "TimedOut"
    SKIPPED = "Skipped"

    @property
    def terminal(self) -> bool:
        return self not in (BenchPhase.PENDING, BenchPhase.RUNNING)
