"""A whole control plane in one process, on a fake runtime: stories are told on it in milliseconds."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from basilica.controller.loop import Controller
from basilica.controller.plane import ControlPlane, Settings
from basilica.core.deployment import Deployment
from basilica.core.phase import Phase
from basilica.core.spec import DeploymentSpec, Exec
from basilica.core.world import WorldSize
from basilica.machine.clocks import SteadyClock
from basilica.stores.memory import MemoryStore
from basilica.testing.fake_runtime import FakeRuntime

USER = "ann"


class World:
    def __init__(self, store: MemoryStore, runtime: FakeRuntime, controller: Controller, plane: ControlPlane) -> None:
        self.store, self.runtime, self.controller, self.plane = store, runtime, controller, plane

    def now(self) -> float:
        return self.controller._clock.now()

    async def deploy(self, name: str = "run", low: int = 1, target: int = 2, high: int = 4, **more: object) -> str:
        spec = DeploymentSpec(
            name=name,
            program=Exec(("train",)),
            world=WorldSize(low, target, high),
            **more,  # type: ignore[arg-type]
        )
        return (await self.plane.create(USER, spec, None)).instance

    async def until(self, instance: str, done: Callable[[Deployment], bool]) -> Deployment:
        """The first state that satisfies `done`; woken by changes."""
        deployment = await self.store.get(instance)
        while not done(deployment):
            changed = await self.store.wait_change(instance, deployment.version, 10)
            assert changed is not None, f"still waiting: {deployment.status}"
            deployment = changed
        return deployment

    async def until_phase(self, instance: str, phase: Phase) -> Deployment:
        return await self.until(instance, lambda d: d.status.phase is phase)

    async def until_settled(self, instance: str) -> Deployment:
        return await self.until(instance, lambda d: d.status.settled)

    async def reasons(self, instance: str) -> list[str]:
        return [e.reason for e in reversed(await self.store.events(instance))]


@asynccontextmanager
async def world(runtime: FakeRuntime | None = None, store: MemoryStore | None = None) -> AsyncIterator[World]:
    store = store or MemoryStore()
    runtime = runtime or FakeRuntime()
    clock = SteadyClock()
    controller = Controller(store, runtime, clock)
    await controller.start()
    try:
        yield World(store, runtime, controller, ControlPlane(store, runtime, clock, Settings()))
    finally:
        await controller.close()
