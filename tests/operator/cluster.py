"""A cluster with an operator on it, in the test's own process; ranks are moved by the test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import httpx2

from basilica.core.deployment import Deployment
from basilica.core.errors import DeploymentNotFound
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.crd import definition
from basilica.kube.manifests.userdeployment import path_of
from basilica.machine.clocks import SteadyClock
from basilica.operator.election import Election
from basilica.operator.operator import Operator
from basilica.stores.kubernetes import KubernetesStore, Refusals
from basilica.testing.fake_runtime import FakeRuntime
from basilica_testkube import KubeServer

Json = dict[str, Any]
Found = TypeVar("Found")

STORY_SECONDS = 30.0
LEASE_SECONDS = 2.0  # where operators take over from each other
CALM_SECONDS = 15.0  # where none does: a busy machine must not cost one its lease


@contextmanager
def a_cluster(**settings: Any) -> Iterator[KubeServer]:
    with KubeServer(processes=False, **settings) as kube:
        kube.create(definition())
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "u-ann"}}, "")
        yield kube


def tell(story: Callable[[KubeServer], Awaitable[None]], seconds: float = STORY_SECONDS) -> None:
    """Run a story on a cluster of its own; one that hangs fails."""

    async def told(kube: KubeServer) -> None:
        async with asyncio.timeout(seconds):
            await story(kube)

    with a_cluster() as kube:
        asyncio.run(told(kube))


class Running:
    """An operator at work."""

    def __init__(self, api: KubeApi, store: KubernetesStore, runtime: FakeRuntime, operator: Operator) -> None:
        self.api, self.store, self.runtime, self.operator = api, store, runtime, operator
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] = asyncio.create_task(operator.run(self.stop))

    async def until(self, instance: str, done: Callable[[Deployment], bool]) -> Deployment:
        found = await self.store.get(instance)
        while not done(found):
            changed = await self.store.wait_change(instance, found.version, STORY_SECONDS / 2)
            assert changed is not None, f"nothing happened; the last state is {found}"
            found = changed
        return found

    async def until_forgotten(self, instance: str) -> None:
        with suppress(DeploymentNotFound):
            await self.until(instance, lambda _: False)

    async def ready(self, instance: str, ranks: int) -> Deployment:
        return await self.until(
            instance,
            lambda d: d.status.ready == ranks and d.status.observed_generation == d.spec.generation,
        )


@asynccontextmanager
async def operating(
    kube: KubeServer, runtime: FakeRuntime | None = None, *, identity: str = "one", duration: float = CALM_SECONDS
) -> AsyncIterator[Running]:
    """An operator; at the end it is told to stop, unless it has ended."""
    runtime = runtime or FakeRuntime()
    async with KubeApi(kube.url) as api:
        store = KubernetesStore(api)
        await store.open()
        election = Election(api, namespace="default", identity=identity, duration=duration)
        operator = Operator(store, lambda: runtime, SteadyClock(), election, refusals=Refusals(store))
        running = Running(api, store, runtime, operator)
        try:
            yield running
        finally:
            running.stop.set()
            await asyncio.gather(running.task, return_exceptions=True)
            await store.close()


def by_hand(name: str = "train", *, target: int = 2, namespace: str = "u-ann", **spec: Any) -> Json:
    """What somebody writes for `kubectl apply`."""
    size = {"min": 1, "target": target, "max": 8}
    body = {"image": "trainer", "command": ["python", "train.py"], "distributed": {"worldSize": size}} | spec
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "basilica.dev/v1alpha1", "kind": "UserDeployment", "metadata": metadata, "spec": body}


def the_object(kube: KubeServer, name: str = "train", namespace: str = "u-ann") -> Json:
    found = kube.get("userdeployments", name, namespace)
    assert found is not None, f"there is no {namespace}/{name}"
    return found


def edit(kube: KubeServer, change: Json, name: str = "train", *, subresource: str = "") -> httpx2.Response:
    """As `kubectl patch` does."""
    headers = {"Content-Type": "application/merge-patch+json"}
    return httpx2.patch(kube.url + path_of("u-ann", name, subresource), json=change, headers=headers)


def deleted(kube: KubeServer, name: str = "train") -> None:
    """As `kubectl delete` does."""
    assert httpx2.delete(kube.url + path_of("u-ann", name)).status_code == 200


def scaled(target: int) -> Json:
    return {"spec": {"distributed": {"worldSize": {"target": target}}}}


def kube_events(kube: KubeServer, namespace: str = "u-ann") -> dict[str, Json]:
    """Kubernetes' own events of our objects, by reason."""
    found = [e for e in kube.objects("events", namespace) if e["involvedObject"]["kind"] == "UserDeployment"]
    return {event["reason"]: event for event in found}


async def eventually(look: Callable[[], Found | None], *, every: float = 0.01) -> Found:
    """What a look shows as soon as it shows something; the story's own time limit ends it."""
    while not (found := look()):
        await asyncio.sleep(every)
    return found
