"""A whole control plane on a test cluster: real decisions, real pods as processes, a store in memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from basilica.controller.loop import Controller
from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.fencing import FenceTimes
from basilica.core.names import instance_name
from basilica.core.spec import DeploymentSpec, Exec, Shell, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.world import WorldSize
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.run import Settings
from basilica.runtimes.kubernetes.pod_plan import Patience
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica.stores.memory import MemoryStore
from basilica_testkube import KubeServer

NAMESPACE = "u-ada"
PATIENCE_S = 40.0
SETTINGS = Settings(
    image="basilica",
    carries=False,  # images are names here: ranks are processes of this machine
    node_seconds=1,
    rendezvous_command=(
        *("python", "-m", "basilica.rendezvous", "--host", "$(POD_IP)"),
        *("--port", "2379", "--data-dir", "rendezvous"),
    ),
)
QUICK = Patience(keyspace_seconds=2.0)
FENCE = FenceTimes().scaled(1 / 15)  # a rank that is cut off ends after 5 s, and is replaced after 6
QUICK_FENCE = replace(SETTINGS, fence=FENCE)


class RealClock:
    def now(self) -> float:
        return time.time()

    def shift(self) -> float:
        return 0.0


def sh(script: str) -> Shell:
    return Shell(script)


class Plane:
    """`deploy`, `scale` and `cancel` as the API would, and waits that are woken by the store."""

    def __init__(self, kube: KubeServer, store: MemoryStore, runtime: KubernetesRuntime) -> None:
        self.kube, self.store, self.runtime = kube, store, runtime
        self.api = KubeApi(kube.url)
        self.controller = Controller(store, runtime, RealClock())
        self._made = 0

    async def deploy(
        self, program: Exec | Shell, world: tuple[int, int, int] = (1, 1, 8), *, name: str = "train", **spec: Any
    ) -> str:
        self._made += 1
        now = time.time()
        wanted = DeploymentSpec(name=name, program=program, world=WorldSize(*world), **spec)
        deployment = Deployment(
            instance=instance_name(name, f"{self._made:04d}"),
            user="ada",
            namespace=NAMESPACE,
            spec=wanted,
            status=DeploymentStatus(created_at=now),
            version=0,
        )
        await self.store.create(deployment)
        return deployment.instance

    async def scale(self, instance: str, target: int) -> None:
        await self.store.change_spec(instance, lambda deployment: deployment.spec.scaled(target))

    async def end(self, instance: str, wanted: Wanted = Wanted.CANCEL) -> None:
        await self.store.change_spec(instance, lambda deployment: deployment.spec.ended_by(wanted))

    async def until(
        self, instance: str, condition: Callable[[Deployment], object], seconds: float = PATIENCE_S
    ) -> Deployment:
        end = time.monotonic() + seconds
        deployment = await self.store.get(instance)
        while not condition(deployment):
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"not so after {seconds:g} s: {deployment.status}")
            deployment = await self.store.wait_change(instance, deployment.version, left) or deployment
        return deployment

    async def until_phase(self, instance: str, *phases: str) -> Deployment:
        return await self.until(instance, lambda deployment: deployment.status.phase in phases)

    async def until_ready(self, instance: str, ranks: int) -> Deployment:
        return await self.until(
            instance, lambda deployment: deployment.status.ready == deployment.status.world_target == ranks
        )

    async def settled(self, instance: str) -> Deployment:
        """At its end, with its rendezvous gone."""
        deployment = await self.until(instance, lambda deployment: deployment.status.settled)
        await self.happens(lambda: self.kube.get("services", f"{instance}-rendezvous", NAMESPACE) is None)
        return deployment

    async def happens(self, condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
        end = time.monotonic() + seconds
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < end, "it did not come about in time"
            await asyncio.sleep(0.02)

    def pods(self, instance: str) -> list[dict[str, Any]]:
        """The pods of its ranks, by rank; of those of one rank the oldest first."""
        mine = {"basilica.dev/instance": instance, "basilica.dev/role": "worker"}
        found = [
            pod for pod in self.kube.objects("pods", NAMESPACE) if mine.items() <= pod["metadata"]["labels"].items()
        ]
        return sorted(found, key=lambda pod: tuple(map(int, pod["metadata"]["name"].split("-")[-2:])))

    async def log(self, instance: str, rank: int) -> Sequence[str]:
        deployment = await self.store.get(instance)
        return (await self.runtime.tail(run_of(deployment), rank, None)).lines

    async def events(self, instance: str) -> list[str]:
        return [event.reason for event in reversed(await self.store.events(instance))]


@asynccontextmanager
async def control_plane(
    kube: KubeServer, store: MemoryStore | None = None, *, settings: Settings = SETTINGS, patience: Patience = QUICK
) -> AsyncIterator[Plane]:
    """With a store, what an earlier control plane left is taken over."""
    if kube.get("namespaces", NAMESPACE, "") is None:
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    ours = store or MemoryStore()
    plane = Plane(kube, ours, KubernetesRuntime(KubeApi(kube.url), settings, patience=patience))
    await plane.controller.start()
    try:
        yield plane
    finally:
        await plane.controller.close()
        await plane.api.close()
        if store is None:
            await ours.close()


def with_env(settings: Settings, **env: str) -> Settings:
    return replace(settings, env={**settings.env, **env})
