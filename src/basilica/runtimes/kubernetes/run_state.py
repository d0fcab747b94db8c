"""The state of one run in the runtime: what it has open for the run, and what it remembers until the next look."""

import asyncio
from dataclasses import dataclass, field

from basilica.core.seen import Ended
from basilica.runtimes.kubernetes.keyspace import RunKeys
from basilica.runtimes.kubernetes.pod_ledger import Ledger

Doing = tuple[str, object]  # an action, and on what


@dataclass(slots=True)
class RunState:
    """`marks`: min and target of a run that a controller looks at here; None where it is only read.

    `buried`: attempts that were stopped before anything could run them. `doing`: actions on pods that are under way.
    `made`: all that pods need is there. `closed`: nothing of the run is to be made or recorded any more.
    """

    keys: RunKeys | None = None
    marks: tuple[int, int] | None = None
    ledger: Ledger = field(default_factory=Ledger)
    buried: dict[tuple[int, int], Ended] = field(default_factory=dict)
    doing: set[Doing] = field(default_factory=set)
    readers: set[asyncio.Event] = field(default_factory=set)
    alarm: asyncio.TimerHandle | None = None
    archive_parts: int | None = None
    made: bool = False
    closed: bool = False

    @property
    def creating(self) -> set[int]:
        """Ranks whose pods are being made."""
        return {what for kind, what in self.doing if kind == "create" and isinstance(what, int)}

    def tell_readers(self) -> None:
        for event in self.readers:
            event.set()

    def set_alarm(self, alarm: asyncio.TimerHandle | None) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
        self.alarm = alarm
