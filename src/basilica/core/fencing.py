"""The times of the fence: when an agent that is cut off stops its rank, and when the controller may replace it. Pure.

The agent sends heartbeats to the run's rendezvous and counts from the moment at which it sent the last one that was
answered. The rendezvous counts from the moment at which the last one arrived, which is never earlier. So if

    rendezvous_back  <  fence_after  <  fence_after + fence_grace + margin  <=  lost_after

then a rendezvous that only restarts or moves stops nobody, and the old attempt has ended before a new one is launched.
Both sides take their numbers from here: the pod's manifest carries the agent's.
"""

from dataclasses import dataclass

BEATS_PER_SECOND = 200.0  # of all ranks of a run together, so that a large world does not occupy its rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceTimes:
    """The times of the fence, in seconds.

    `rendezvous_back`: how long a rendezvous may be away that is lost with its node (50 s until Kubernetes gives the
    node up, 5 s of toleration, 10 s to be placed and to start). `fence_after`: without an answer for so long an agent
    ends its rank, within `fence_grace`. `margin`: for clocks that run at different rates and for a busy agent.
    """

    heartbeat: float = 5.0
    rendezvous_back: float = 65.0
    fence_after: float = 75.0
    fence_grace: float = 10.0
    margin: float = 5.0

    def __post_init__(self) -> None:
        if not 0.0 < 2.0 * self.heartbeat <= self.rendezvous_back < self.fence_after:
            raise ValueError(f"a fence after {self.fence_after:g} s would stop ranks whose rendezvous only moves")
        if min(self.fence_grace, self.margin) <= 0.0:
            raise ValueError("a rank needs time to end before it is replaced")

    @property
    def lost_after(self) -> float:
        """The silence of an agent, at the rendezvous, after which its rank may be replaced."""
        return self.fence_after + self.fence_grace + self.margin

    def heartbeat_every(self, world: int) -> float:
        """Seconds between two heartbeats of a rank: more in a large world, up to a quarter of the fence's time."""
        return min(max(self.heartbeat, world / BEATS_PER_SECOND), self.fence_after / 4.0)

    def for_agents(self, world: int) -> str:
        """The agent's share, for the variable `BASILICA_FENCE`."""
        return f"{self.heartbeat_every(world):g} {self.fence_after:g} {self.fence_grace:g}"

    def scaled(self, factor: float) -> "FenceTimes":
        """The same proportions, for tests that do not wait for minutes."""
        return FenceTimes(
            heartbeat=self.heartbeat * factor,
            rendezvous_back=self.rendezvous_back * factor,
            fence_after=self.fence_after * factor,
            fence_grace=self.fence_grace * factor,
            margin=self.margin * factor,
        )


@dataclass(slots=True)
class Fence:
    """The agent's side: whether its rank may go on. Times are of one clock that only ever goes forward.

    Before the first answer, and where the rendezvous knows no heartbeats, there is nothing to fence: nobody counts on
    it.
    """

    heartbeat: float
    fence_after: float
    grace: float
    word_at: float | None = None

    @classmethod
    def of(cls, text: str) -> "Fence | None":
        """Parse the text of `FenceTimes.for_agents`; None for any other: without times there is no fence."""
        try:
            heartbeat, fence_after, grace = map(float, text.split())
        except ValueError:
            return None
        return cls(heartbeat, fence_after, grace) if 0.0 < heartbeat < fence_after and grace > 0.0 else None

    def answered(self, sent_at: float) -> None:
        """A heartbeat that was sent at that moment has been answered."""
        self.word_at = sent_at if self.word_at is None else max(self.word_at, sent_at)

    def not_supported(self) -> None:
        self.word_at = None

    def silence(self, now: float) -> float | None:
        """Seconds since the last word; None if there never was one."""
        return None if self.word_at is None else max(0.0, now - self.word_at)

    def ends_at(self) -> float | None:
        """The time at which the rank is to end."""
        return None if self.word_at is None else self.word_at + self.fence_after

    def closed(self, now: float) -> bool:
        end = self.ends_at()
        return end is not None and now >= end
