"""A control plane whose ranks are on three hosts, and a network that is cut, delayed and healed under them.

Run by test_partition.py in a network namespace: `unshare --net --mount python -m tests.mesh.partition STATE_DIR`.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from basilica.controller.loop import Controller
from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.spec import DeploymentSpec, Exec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.why import why
from basilica.core.world import WorldSize
from basilica.machine.clocks import SteadyClock
from basilica.runtimes.local.gpus import GpuInventory
from basilica.runtimes.local.runtime import LocalRuntime
from basilica.stores.memory import MemoryStore
from basilica.wire.render import render_deployment
from tests.mesh.namespaces import CONTROL, Network

PATIENCE_S = 60.0
LIMIT_S = 2.0
WAIT_AT_THE_GATE = f"{sys.executable} -m basilica.mesh --timeout 60; echo trains; sleep 1000"


class Story:
    def __init__(self, state_dir: Path) -> None:
        self.network = Network(("anna", "bert", "carl"))
        self.store = MemoryStore()
        self.runtime = LocalRuntime(
            state_dir,
            hosts=self.network.hosts(),
            rendezvous_address=CONTROL,
            mesh_limit_seconds=LIMIT_S,
            gpus=GpuInventory(),
        )
        self.controller = Controller(self.store, self.runtime, SteadyClock())

    async def deploy(self, name: str) -> str:
        spec = DeploymentSpec(name=name, program=Exec(("sh", "-c", WAIT_AT_THE_GATE)), world=WorldSize(3, 3, 3))
        status = DeploymentStatus(created_at=time.time())
        run = Deployment(instance=f"{name}-x", user="ann", namespace="u-ann", version=0, spec=spec, status=status)
        return (await self.store.create(run)).instance

    async def until(self, instance: str, holds: Callable[[DeploymentStatus], bool]) -> Deployment:
        found = await self.store.get(instance)
        async with asyncio.timeout(PATIENCE_S):
            while not holds(found.status):
                found = await self.store.wait_change(instance, found.version, PATIENCE_S) or found
        return found

    async def until_logged(self, instance: str, rank: int, text: str) -> str:
        run = run_of(await self.store.get(instance))
        log = ""
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in self.runtime.follow(run, rank, None):
                log += "\n".join((*chunk.lines, ""))
                if text in log:
                    return log
        raise AssertionError(log)

    async def events(self, instance: str) -> list[tuple[str, str]]:
        return [(event.reason, event.message) for event in reversed(await self.store.events(instance))]


def is_ready(status: DeploymentStatus) -> bool:
    return status.mesh is not None and bool(status.mesh.hosts) and status.mesh.ready


def is_degraded(status: DeploymentStatus) -> bool:
    return status.mesh is not None and status.mesh.degraded


def condition(status: DeploymentStatus) -> tuple[str, str]:
    [found] = [c for c in status.conditions if c.type == "DegradedMesh"]
    return found.status, found.message


async def a_partition_in_the_middle_of_a_run(story: Story) -> None:
    instance = await story.deploy("whole")
    run = await story.until(instance, is_ready)
    assert condition(run.status) == ("False", "")
    assert run.status.mesh is not None
    assert run.status.mesh.transport == "direct-mesh"
    for rank in range(3):
        assert "mesh-wait: OK" in await story.until_logged(instance, rank, "trains")

    story.network.cut("anna", "bert")
    run = await story.until(instance, is_degraded)
    held, problem = condition(run.status)
    assert held == "True"
    assert "anna cannot reach bert" in problem or "bert cannot reach anna" in problem, problem
    assert "carl" not in problem, problem
    assert problem in why(run.spec, run.status, time.time())
    shown = render_deployment(run, time.time()).distributed
    assert shown.transport == "mixed"
    assert shown.rendezvous.endpoint.startswith(CONTROL)

    story.network.heal("anna", "bert")
    run = await story.until(instance, is_ready)
    assert condition(run.status) == ("False", "")
    assert why(run.spec, run.status, time.time()) == "3 of 3 ranks are up: nothing to wait for"
    told = [reason for reason, _ in await story.events(instance) if "Mesh" in reason]
    assert set(told) == {"MeshReady", "DegradedMesh"}, told


async def a_run_that_starts_in_a_partition(story: Story) -> None:
    story.network.cut("anna", "bert")
    story.network.delay("anna", "carl")
    instance = await story.deploy("torn")
    wanted = {"anna": "degraded", "bert": "degraded", "carl": "ready"}
    await story.until(instance, lambda status: status.mesh is not None and dict(status.mesh.released) == wanted)
    assert "mesh-wait: OK" in await story.until_logged(instance, 2, "trains"), "a delay is no partition"
    for rank in range(2):
        assert "mesh-wait: DEGRADED" in await story.until_logged(instance, rank, "trains")
    story.network.heal("anna", "bert")
    await story.until(instance, is_ready)


async def main(state_dir: Path) -> None:
    story = Story(state_dir)
    await story.controller.start()
    try:
        for chapter in (a_partition_in_the_middle_of_a_run, a_run_that_starts_in_a_partition):
            print(chapter.__name__, flush=True)
            await chapter(story)
        for run in await story.store.deployments():
            await story.store.change_spec(run.instance, lambda d: d.spec.ended_by(Wanted.CANCEL))
            await story.until(run.instance, lambda status: status.settled)
    finally:
        await story.controller.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
    print("done")
