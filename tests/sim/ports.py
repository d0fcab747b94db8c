"""The ports of the controller over a simulation: they do at once what they are told, and the controller may die."""

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from basilica.core.actions import (
    Action,
    Announce,
    EndProbe,
    EndRendezvous,
    Launch,
    PersistSnapshots,
    Probe,
    Remove,
    Stop,
)
from basilica.core.deployment import Deployment
from basilica.core.errors import StaleVersion
from basilica.core.events import Event
from basilica.core.mesh import Announcement
from basilica.core.seen import Sighting
from basilica.core.status import DeploymentStatus
from basilica.ports import Clock, Run, Runtime, Store

if TYPE_CHECKING:
    from .simulation import Simulation

T = TypeVar("T")


class Died(BaseException):
    """The controller was killed. No handler of its own may see that."""


def drive(turn: Coroutine[Any, Any, T]) -> T:
    """Run a turn that never has to wait for anybody."""
    try:
        turn.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    raise AssertionError("the turn waits for something that nobody does")


def ports_of(sim: "Simulation", *, conflict: bool, dies_after: int | None) -> tuple[Store, Runtime, Clock]:
    left = [dies_after]

    def spend() -> None:
        """One write more; the controller dies before it if it has had its share."""
        if left[0] is not None:
            if left[0] == 0:
                raise Died
            left[0] -= 1

    ports = SimPorts(sim, spend, conflict)
    return cast(Store, ports), cast(Runtime, ports), cast(Clock, ports)


class SimPorts:
    """Store, runtime and clock in one, as far as a turn needs them."""

    def __init__(self, sim: "Simulation", spend: Callable[[], None], conflict: bool) -> None:
        self._sim, self._spend, self._conflict = sim, spend, conflict

    def now(self) -> float:
        return self._sim.now

    # ---- the store -------------------------------------------------------------------------------------------------

    async def get(self, instance: str) -> Deployment:
        sim = self._sim
        return Deployment(
            instance=instance, user="ann", namespace="u-ann", spec=sim.spec, status=sim.status, version=sim.turns
        )

    async def save_status(
        self, before: Deployment, status: DeploymentStatus, events: Sequence[Event] = (), *, now: float
    ) -> Deployment:
        if self._conflict:
            raise StaleVersion
        self._spend()
        self._sim.save(status)
        return Deployment(
            instance=before.instance,
            user=before.user,
            namespace=before.namespace,
            spec=before.spec,
            status=status,
            version=before.version + 1,
        )

    async def delete(self, instance: str) -> None:
        self._spend()

    # ---- the runtime -----------------------------------------------------------------------------------------------

    async def observe(self, run: Run) -> Sighting:
        return self._sim.delivered

    def _do(self, action: Action) -> None:
        self._spend()
        self._sim.apply(action)

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._do(launch)

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None:
        for stop in stops:
            self._do(stop)

    async def announce(self, run: Run, announcement: Announcement) -> None:
        self._do(Announce(announcement))

    async def end_rendezvous(self, run: Run) -> None:
        self._do(EndRendezvous())

    async def probe(self, run: Run, probe: Probe) -> None:
        self._do(probe)

    async def end_probe(self, run: Run) -> None:
        self._do(EndProbe())

    async def persist_snapshots(self, run: Run) -> None:
        self._do(PersistSnapshots())

    async def remove(self, run: Run) -> None:
        self._do(Remove())
