"""The GPU queue: which attempts have which GPUs, which wait, and whose turn it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from basilica.core.actions import Launch
from basilica.machine.layout import Key
from basilica.ports import Run
from basilica.runtimes.local.gpus import GpuInventory, Waiting, allocate


@dataclass(frozen=True, slots=True)
class Turn:
    """Launches of one run that got their GPUs, by uuid."""

    run: Run
    granted: Mapping[Launch, tuple[str, ...]]


class GpuLine:
    """The queue. `moved` is called when waiting attempts may advance: GPUs were freed, or an attempt was withdrawn."""

    def __init__(self, inventory: GpuInventory) -> None:
        self.inventory = inventory
        self.moved: Callable[[], None] = lambda: None
        self._assigned: dict[Key, tuple[str, ...]] = {}
        self._waiting: dict[str, tuple[Run, dict[Key, Launch]]] = {}

    def enqueue(self, run: Run, launches: Mapping[Key, Launch]) -> None:
        """Add launches of a run to the queue; a run keeps its place."""
        _, before = self._waiting.get(run.instance, (run, {}))
        self._waiting[run.instance] = (run, before | dict(launches))

    def withdraw(self, key: Key) -> None:
        """Remove the attempt from the queue, if it waits."""
        if self._remove(key):
            self.moved()

    def _remove(self, key: Key) -> bool:
        """Remove the attempt from the queue; return False if it did not wait."""
        run, launches = self._waiting.get(key.instance, (None, {}))
        if run is None or key not in launches:
            return False
        del launches[key]
        if not launches:
            del self._waiting[key.instance]
        return True

    def assign(self, key: Key, uuids: tuple[str, ...]) -> None:
        """Record the GPUs that an attempt has."""
        if uuids:
            self._assigned[key] = uuids

    def free(self, key: Key) -> None:
        """Free the attempt's GPUs, if it has any."""
        if self._assigned.pop(key, None) is not None:
            self.moved()

    def serve(self) -> tuple[list[Turn], dict[Key, str]]:
        """Grant the free GPUs. Return the launches that may start, and a note for each attempt that still waits."""
        queue = [Waiting(run=run, keys=tuple(launches)) for run, launches in self._waiting.values()]
        allocation = allocate(self.inventory, self._assigned, queue)
        self._assigned |= allocation.granted
        turns = []
        for run, launches in tuple(self._waiting.values()):
            granted = {launch: allocation.granted[key] for key, launch in launches.items() if key in allocation.granted}
            for launch in granted:
                self._remove(Key(run.instance, launch.rank, launch.attempt))
            if granted:
                turns.append(Turn(run, granted))
        return turns, dict(allocation.notes)
