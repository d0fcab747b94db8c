"""The runtime's state of each run: its open connections, and its memory until the next look."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from basilica.core.seen import Ended
from basilica.runtimes.kubernetes.keyspace import RunKeys
from basilica.runtimes.kubernetes.pod_ledger import Ledger

Doing = tuple[str, object]  # an action, and its object


@dataclass(slots=True)
class RunState:
    """`marks`: min and target of a run that is driven here; None where it is only read.

    `buried`: attempts that were stopped before anything could run them. `doing`: actions on pods that are under way.
    `made`: the objects that pods need exist. `closed`: no pod is to be created or end recorded for the run any more.
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
        """The ranks whose pods are being created."""
        return {what for kind, what in self.doing if kind == "create" and isinstance(what, int)}

    def notify_readers(self) -> None:
        for event in self.readers:
            event.set()

    def set_alarm(self, alarm: asyncio.TimerHandle | None) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
        self.alarm = alarm


class RunStates:
    """The state of each run, by instance."""

    def __init__(self) -> None:
        self._runs: dict[str, RunState] = {}

    def of(self, instance: str) -> RunState:
        return self._runs.setdefault(instance, RunState())

    def find(self, instance: str) -> RunState | None:
        """Return the state of a run, if it has one already."""
        return self._runs.get(instance)

    def all(self) -> Collection[RunState]:
        return self._runs.values()

    def forget(self, instance: str) -> None:
        state = self._runs.pop(instance, None)
        if state is not None:
            state.set_alarm(None)

    def forget_idle(self, instance: str) -> None:
        """Drop the state of a run that was only read, and is read no more."""
        state = self._runs.get(instance)
        if state is not None and state.marks is None and not state.readers and state.keys is None:
            self.forget(instance)

    @asynccontextmanager
    async def subscribe(self, instance: str) -> AsyncIterator[asyncio.Event]:
        """Yield an event that is set at each change of the run."""
        changed = asyncio.Event()
        self.of(instance).readers.add(changed)
        try:
            yield changed
        finally:
            state = self._runs.get(instance)
            if state is not None:
                state.readers.discard(changed)
                self.forget_idle(instance)

    async def wait_until(self, instance: str, condition: Callable[[], bool], within: float) -> bool:
        """Wait for changes of the run until `condition` is true; False if it is not within that time."""
        try:
            async with asyncio.timeout(within), self.subscribe(instance) as changed:
                while not condition():
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return False
        return True
