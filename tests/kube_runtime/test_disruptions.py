"""Pods that are taken away, refused, or not needed any more: a rank that is wanted has one again within seconds."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.spec import Resources
from basilica.core.why import why
from basilica.kube.client.api import KubeApi
from basilica.kube.manifests.run import POD_FINALIZER
from basilica.runtimes.kubernetes import cluster
from basilica.runtimes.kubernetes.fair_slots import FairSlots
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica_testkube import KubeServer, NodeSpec, Timing
from tests.kube_runtime.plane import NAMESPACE, PATIENCE_S, SETTINGS, Plane, control_plane, sh

STAYS = sh("trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done")
NEVER_S = 10 * PATIENCE_S
SOON_S = 15.0  # with a busy machine; Kubernetes' own back-off would be minutes by then


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer(timing=Timing(restart_backoff=NEVER_S)) as server:
        yield server


def living(plane: Plane, run: str) -> list[dict[str, Any]]:
    return [pod for pod in plane.pods(run) if pod["status"]["phase"] in ("Pending", "Running")]


def name_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def is_back(rank: int, attempt: int, *, ready: int) -> Callable[[Deployment], bool]:
    return lambda found: found.status.ranks[rank].attempt == attempt and found.status.ready == ready


async def reasons(plane: Plane, run: str) -> str:
    found = await plane.store.get(run)
    return why(found.spec, found.status, 0.0)


async def until_told(plane: Plane, run: str, words: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while words not in await reasons(plane, run):
            await asyncio.sleep(0.05)


def test_a_rank_that_is_disrupted_again_and_again_comes_back_within_seconds(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(STAYS, (1, 2, 2), max_restarts=0)
            await plane.until_ready(run, 2)
            pods = f"/api/v1/namespaces/{NAMESPACE}/pods"

            async def drain(pod: str) -> None:
                eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
                await plane.api.create(f"{pods}/{pod}/eviction", eviction)

            async def delete(pod: str) -> None:
                await plane.api.delete(f"{pods}/{pod}")

            async def evict(pod: str) -> None:
                kube.evict(pod, namespace=NAMESPACE)

            for number, disrupt in enumerate((drain, delete, evict) * 3, start=1):
                [_, victim] = living(plane, run)
                began = time.monotonic()
                await disrupt(name_of(victim))
                again = await plane.until(run, is_back(1, number, ready=2))
                assert time.monotonic() - began < SOON_S
                assert [rank.restarts for rank in again.status.ranks] == [0, 0]
            assert again.status.ranks[0].attempt == 0, "its neighbour has not noticed"
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_a_container_that_is_killed_as_a_whole_gets_another_pod_at_once(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(STAYS, max_restarts=3)
            await plane.until_ready(run, 1)
            for number in (1, 2, 3):
                kube.oom_kill(name_of(living(plane, run)[0]), namespace=NAMESPACE)
                again = await plane.until(run, is_back(0, number, ready=1))
                assert again.status.ranks[0].restarts == number, "that was its own doing"
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_a_rank_that_is_lost_for_good_gives_its_pod_up_and_keeps_its_log(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh('echo up; if [ "$RANK" = 1 ]; then exit 3; fi; sleep 1000'), (1, 2, 2))
            await plane.until(run, lambda d: any(exit.rank == 1 for exit in d.status.exits))
            await plane.happens(lambda: len(living(plane, run)) == 1)
            assert (await plane.store.get(run)).status.phase in ("ready", "degraded")
            assert "up" in await plane.log(run, 1)
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_a_rank_that_has_no_node_and_is_not_wanted_any_more_leaves_no_pod() -> None:
    async def story() -> None:
        with KubeServer(nodes=[NodeSpec("node-0", capacity={"cpu": "1"})]) as kube:
            async with control_plane(kube) as plane:
                run = await plane.deploy(STAYS, (1, 1, 2), resources=Resources(cpu=0.6))
                await plane.until_ready(run, 1)  # else the scheduler may give the node to rank 1
                await plane.scale(run, 2)
                await until_told(plane, run, "Insufficient cpu")
                assert [pod["spec"].get("nodeName") for pod in plane.pods(run)] == ["node-0", None]
                await plane.scale(run, 1)
                await plane.until_ready(run, 1)
                await plane.happens(lambda: len(plane.pods(run)) == 1)
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def test_pods_that_end_as_soon_as_they_are_made_are_made_less_and_less_often() -> None:
    """As where a node refuses what the scheduler gives it. `why` says so, and it ends with the trouble."""

    async def story() -> None:
        trouble = True
        with KubeServer(processes=False) as kube:
            async with control_plane(kube) as plane:
                run = await plane.deploy(STAYS)
                refused: set[str] = set()

                async def refuse() -> None:
                    while True:
                        for pod in living(plane, run):
                            if trouble and pod["spec"].get("nodeName"):
                                kube.evict(name_of(pod), namespace=NAMESPACE)
                                refused.add(name_of(pod))
                        await asyncio.sleep(0.02)

                began = time.monotonic()
                node = asyncio.create_task(refuse())
                await until_told(
                    plane, run, " in a row ended before they took anything up, so that the next one is made"
                )
                assert len(refused) < 4 + (time.monotonic() - began), "after the first ones, one each second at most"
                trouble = False
                await plane.happens(lambda: any(pod["status"]["phase"] == "Running" for pod in living(plane, run)))
                async with asyncio.timeout(PATIENCE_S):
                    while "in a row" in await reasons(plane, run):
                        await asyncio.sleep(0.05)
                node.cancel()

    asyncio.run(story())


def test_pods_that_are_refused_are_told_of_at_once_and_not_asked_for_again_and_again() -> None:
    async def story() -> None:
        with KubeServer(processes=False) as kube:
            async with control_plane(kube) as plane:
                quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "6"}}}
                path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
                await plane.api.create(path, {"apiVersion": "v1", "kind": "ResourceQuota", **quota})
                run = await plane.deploy(STAYS, (1, 300, 300))
                await until_told(plane, run, "a pod, which Kubernetes refuses: exceeded quota: small")
                assert kube.requests["list", "events"] == 0
                assert kube.requests["create", "pods"] < 75, "what one was refused the others need not ask for"
                roles = [pod["metadata"]["labels"]["basilica.dev/role"] for pod in kube.objects("pods", NAMESPACE)]
                assert sorted(roles) == ["rendezvous"] + ["worker"] * 5, "without the one the others are of no use"
                await plane.api.delete(f"{path}/small")
                await plane.happens(lambda: len(living(plane, run)) == 300)

    asyncio.run(story())


def test_a_pod_is_made_once_whoever_tries_it_again(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(STAYS)
            up = await plane.until_ready(run, 1)
            about = run_of(up)
            [pod] = plane.pods(run)
            endpoint = plane.runtime._cluster.endpoint(about)
            assert endpoint is not None
            uid = await plane.runtime._cluster.make_pod(about, 0, 0, endpoint, archive_parts=0, group=None)
            assert uid == pod["metadata"]["uid"]
            assert len(plane.pods(run)) == 1
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


@asynccontextmanager
async def runtime(kube: KubeServer, *, drives: bool) -> AsyncIterator[KubernetesRuntime]:
    found = KubernetesRuntime(KubeApi(kube.url), SETTINGS, drives=drives)
    await found.start(lambda _: None)
    try:
        yield found
    finally:
        await found.close()


def test_a_pod_of_a_run_that_is_gone_is_let_go_of_by_who_drives_runs_and_by_nobody_else(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "UNKNOWN_FOR_S", 0.1)

    async def story() -> None:
        labels = {
            "app.kubernetes.io/managed-by": "basilica",
            "basilica.dev/instance": "gone",
            "basilica.dev/role": "worker",
        }
        metadata = {"name": "gone-0-0", "labels": labels, "finalizers": [POD_FINALIZER]}
        metadata["annotations"] = {"basilica.dev/rank": "0"}
        body = {"metadata": metadata, "spec": {"containers": [{"name": "rank", "image": "x", "command": ["true"]}]}}
        kube.create({"apiVersion": "v1", "kind": "Pod", **body})
        kube.wait_for(lambda: kube.objects("pods", "default")[0]["status"]["phase"] != "Pending")
        async with KubeApi(kube.url) as api:
            await api.delete("/api/v1/namespaces/default/pods/gone-0-0")
        async with runtime(kube, drives=False):
            await asyncio.sleep(0.5)
            assert kube.requests["patch", "pods"] == 0
        async with runtime(kube, drives=True):
            async with asyncio.timeout(PATIENCE_S):
                while kube.objects("pods", "default"):
                    await asyncio.sleep(0.02)

    asyncio.run(story())


def test_a_small_run_does_not_wait_for_a_large_one() -> None:
    async def story() -> None:
        slots, order = FairSlots(2), list[str]()

        async def work(run: str) -> None:
            async with slots.hold(run):
                order.append(run)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(run) for run in ["large"] * 50 + ["small"] * 3))
        assert len(order) == 53
        assert [place for place, run in enumerate(order) if run == "small"][-1] < 10

    asyncio.run(story())


def test_who_stops_waiting_for_a_slot_takes_none_with_it() -> None:
    async def story() -> None:
        slots = FairSlots(1)
        gate = asyncio.Event()

        async def work(run: str) -> None:
            async with slots.hold(run):
                await gate.wait()

        first, second, third = (asyncio.create_task(work(run)) for run in "abc")
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        gate.set()
        async with asyncio.timeout(5):
            await third
            async with slots.hold("d"):
                pass

    asyncio.run(story())
