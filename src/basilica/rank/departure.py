"""The departure of a rank whose container the platform has told to end: an eviction, a drain, a preemption. Pure.

A rank that reads notices is told of it first. It goes on until the control plane, which knows when the whole gang is
ready, orders it to stop; at most for the time that the run gives to notices. Only then it gets SIGTERM, and its grace.
Any other rank gets SIGTERM at once. The pod's time to end has room for all of that (`kube.manifests.run`).
"""

from basilica.core.seen import Leaving

REASON = "the platform takes the rank's place away"


class Departure:
    """The end of one container. Times are of a clock that only goes forward."""

    def __init__(self, notice_seconds: float) -> None:
        self._notice_seconds = notice_seconds
        self._until: float | None = None
        self.told = False  # by the platform

    def tell(self, now: float, *, listens: bool) -> bool:
        """Note the platform's signal; return whether the rank goes on for a while. A second signal ends that."""
        goes_on = not self.told and listens and self._notice_seconds > 0
        self.told, self._until = True, now + self._notice_seconds if goes_on else None
        return goes_on

    def is_due(self, now: float, *, listens: bool) -> bool:
        """Whether the rank has to end now."""
        return self.told and (self._until is None or not listens or now >= self._until)

    def due_in(self, now: float) -> float | None:
        """Return the seconds that the rank has left at most; None if the platform has not told it to end, or it is
        ending.
        """
        return None if self._until is None or self._until <= now else self._until - now

    def leaving(self, now: float) -> Leaving:
        """Return what the control plane is told, with `now` on its time line."""
        return Leaving(kind="preemption", until=round(now + self._notice_seconds, 3), reason=REASON)
