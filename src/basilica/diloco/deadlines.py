"""The deadlines of a round, and the pace of its polls."""

from dataclasses import dataclass

from basilica.diloco.effects import Flow, Now, Pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds. While nothing changes the pause between two polls grows, `first_pause` to `longest_pause`."""

    timeout: float = 600.0
    quorum: int | None = None
    grace: float = 5.0
    first_pause: float = 0.05
    longest_pause: float = 2.0
    piece_bytes: int = 16 << 20
    """How much of an object is read at a time, so that memory stays bounded."""


class Patience:
    """Pauses that grow while nothing happens, so that a long wait costs few requests."""

    GROWTH = 1.5

    def __init__(self, settings: Settings, prefix: str) -> None:
        self._settings, self._prefix = settings, prefix
        self._next = settings.first_pause
        self.waited = 0.0

    def reset(self) -> None:
        """Something happened: more may follow soon."""
        self._next = self._settings.first_pause

    def pause(self) -> Flow[None]:
        began = yield Now()
        yield Pause(self._prefix, self._next)
        self._next = min(self._next * self.GROWTH, self._settings.longest_pause)
        self.waited += (yield Now()) - began
