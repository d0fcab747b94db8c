"""What goes wrong on the way: nothing is lost, nothing is doubled, and what is not known is no verdict."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from basilica.controller.step import run_of
from basilica.core.errors import RuntimeUnavailable
from basilica.core.spec import Resources, Wanted
from basilica.kube.manifests.run import POD_FINALIZER
from basilica.operator.release import release_finalizers
from basilica.runtimes.kubernetes.pod_plan import GANG_RELEASED, Patience
from basilica.stores.memory import MemoryStore
from basilica_testkube import KubeServer, NodeSpec
from tests.kube_runtime.plane import NAMESPACE, SETTINGS, Plane, control_plane, sh

SLEEP = sh("echo up; exec sleep 1000")


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


def rendezvous_pods(kube: KubeServer) -> list[str]:
    pods = kube.objects("pods", NAMESPACE)
    return [pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"]["basilica.dev/role"] == "rendezvous"]


def test_watches_that_are_cut_and_history_that_is_forgotten(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(SLEEP, (1, 1, 3))
            await plane.until_ready(run, 1)
            kube.cut_watches()
            await plane.scale(run, 2)
            await plane.until_ready(run, 2)
            kube.compact()
            kube.expire_watches()
            await plane.scale(run, 3)
            await plane.until_ready(run, 3)
            await plane.end(run)
            assert (await plane.settled(run)).status.phase == "cancelled"

    asyncio.run(story())


def test_an_api_server_that_is_away_changes_nothing_and_what_happened_meanwhile_is_seen(kube: KubeServer) -> None:
    """Ranks end while nobody can look; when the API answers again, their ends are known as they were."""

    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("trap 'exit 5' USR1; echo up; while :; do sleep 0.05; done"), (1, 2, 2))
            up = await plane.until_ready(run, 2)
            with kube.outage():
                await plane.happens(lambda: _is_blind(plane))
                with pytest.raises(RuntimeUnavailable):
                    await plane.runtime.observe(run_of(up))
                assert (await plane.store.get(run)).status.phase == "ready"
                kube.oom_kill(plane.pods(run)[1]["metadata"]["name"], namespace=NAMESPACE)
                await plane.happens(lambda: "OOMKilled" in str(plane.pods(run)[1]["status"]))
            seen = await plane.until(run, lambda d: any(e.rank == 1 for e in d.status.exits))
            [exit] = seen.status.exits
            assert (exit.rank, exit.exit_code, exit.termination_reason) == (1, 137, "OOMKilled")
            assert seen.status.phase == "ready"
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def _is_blind(plane: Plane) -> bool:
    try:
        plane.runtime._cluster.check()
    except RuntimeUnavailable:
        return True
    return False


def test_throttling_and_errors_of_the_api_are_waited_out(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            kube.fail("create", "pods", status=429, times=2, retry_after=0)
            kube.fail("patch", "services", status=503, times=2)
            kube.fail("patch", "deployments", status=0, times=1)
            run = await plane.deploy(sh("exit 0"), (2, 2, 2))
            assert (await plane.settled(run)).status.phase == "succeeded"
            assert len(plane.pods(run)) == 2

    asyncio.run(story())


def test_a_control_plane_that_was_killed_is_succeeded_by_another(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        store = MemoryStore()
        script = f"echo x >>{tmp_path}/starts; trap 'exit 0' TERM; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
        async with control_plane(kube, store) as plane:
            run = await plane.deploy(sh(script), (2, 2, 2))
            await plane.until_ready(run, 2)
        (tmp_path / "go").touch()
        await asyncio.sleep(0.5)
        async with control_plane(kube, store) as plane:
            assert (await plane.settled(run)).status.phase == "succeeded"
            assert (tmp_path / "starts").read_text() == "x\n" * 2
        await store.close()

    asyncio.run(story())


def test_control_planes_that_are_killed_at_random_lose_and_double_nothing(kube: KubeServer, tmp_path: Path) -> None:
    """Deploy, scale up and down, restart and end, with a new control plane every fraction of a second."""

    async def story() -> None:
        store = MemoryStore()
        chance = random.Random(7)
        script = f"echo $RANK.$BASILICA_ATTEMPT >>{tmp_path}/starts; trap 'exit 0' TERM; while :; do sleep 0.05; done"
        run = ""
        for turn in range(14):
            async with control_plane(kube, store) as plane:
                if turn == 0:
                    run = await plane.deploy(sh(script), (1, 2, 4))
                elif turn in (4, 8):
                    await plane.scale(run, 4 if turn == 4 else 2)
                await asyncio.sleep(chance.uniform(0.05, 0.6))
        async with control_plane(kube, store) as plane:
            await plane.until_ready(run, 2)
            await plane.end(run)
            assert (await plane.settled(run)).status.phase == "cancelled"
        starts = (tmp_path / "starts").read_text().split()
        assert len(starts) == len(set(starts)), "an attempt was started twice"
        await store.close()

    asyncio.run(story())


def test_a_rendezvous_that_is_lost_with_all_its_keys_is_filled_again(kube: KubeServer) -> None:
    """Ranks go on, and tell the new one what they told the old one; a restart and an end work as before."""

    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("trap 'exit 9' USR1; echo up; while :; do sleep 0.05; done"), (2, 2, 2))
            before = await plane.until_ready(run, 2)
            [pod] = rendezvous_pods(kube)
            assert await plane.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}", grace=0)
            await plane.happens(lambda: rendezvous_pods(kube) not in ([pod], []))

            async def says_it_all() -> bool:
                seen = await plane.runtime.observe(run_of(before))
                told = seen.rendezvous is not None and seen.rendezvous.says is not None
                return bool(told and len(seen.ranks) == 2 and seen.rendezvous.says.released)  # type: ignore[union-attr]

            async with asyncio.timeout(30):
                while not await says_it_all():
                    await asyncio.sleep(0.1)
            after = await plane.store.get(run)
            assert [rank.attempt for rank in after.status.ranks] == [0, 0]
            assert after.status.phase == "ready"
            await plane.end(run)
            done = await plane.settled(run)
            assert done.status.phase == "cancelled"
            assert len(done.status.exits) == 2

    asyncio.run(story())


def test_a_run_can_be_cancelled_although_its_rendezvous_never_comes(kube: KubeServer) -> None:
    async def story() -> None:
        absent = replace(SETTINGS, rendezvous_image="pull-fails/keys")
        async with control_plane(kube, settings=absent) as plane:
            run = await plane.deploy(SLEEP)
            await plane.happens(lambda: any(p["status"].get("phase") == "Running" for p in plane.pods(run)))
            await plane.end(run)
            await plane.until(run, lambda d: d.status.phase == "cancelled")
            await plane.happens(lambda: not any(p["status"].get("phase") == "Running" for p in plane.pods(run)))

    asyncio.run(story())


def test_a_run_that_never_began_is_deleted_at_once_although_its_rendezvous_never_comes(kube: KubeServer) -> None:
    """Nothing can have been started, and nothing is to be kept: there is nothing to wait for."""

    async def story() -> None:
        absent = replace(SETTINGS, rendezvous_image="pull-fails/keys")
        async with control_plane(kube, settings=absent, patience=Patience(keyspace_seconds=1000.0)) as plane:
            run = await plane.deploy(SLEEP, (2, 2, 2), image="pull-fails/basilica")
            await plane.until(run, lambda d: all("ErrImagePull" in r.note for r in d.status.ranks) and d.status.ranks)
            await plane.end(run, Wanted.DELETE)
            await plane.happens(lambda: not kube.objects("pods", NAMESPACE) and not kube.objects("services", NAMESPACE))

    asyncio.run(story())


def test_pods_that_somebody_deletes_all_at_once_are_made_again(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(SLEEP, (2, 2, 2))
            await plane.until_ready(run, 2)
            which = f"basilica.dev/instance={run},basilica.dev/role=worker"
            await plane.api.delete_collection(f"/api/v1/namespaces/{NAMESPACE}/pods", label_selector=which)
            again = await plane.until(
                run, lambda d: [r.attempt for r in d.status.ranks] == [1, 1] and d.status.ready == 2
            )
            assert [rank.restarts for rank in again.status.ranks] == [0, 0]
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_half_of_a_gang_gives_its_nodes_back_and_tries_again() -> None:
    async def story() -> None:
        with KubeServer(nodes=[NodeSpec("node-0", capacity={"cpu": "1"})]) as kube:
            quick = Patience(placement_seconds=1.0, back_off_seconds=0.5)
            async with control_plane(kube, patience=quick) as plane:
                run = await plane.deploy(SLEEP, (2, 2, 2), resources=Resources(cpu=0.6))
                await plane.until(run, lambda d: GANG_RELEASED in d.status.warned)
                before = {pod["metadata"]["uid"] for pod in plane.pods(run)}
                await plane.happens(lambda: before.isdisjoint(pod["metadata"]["uid"] for pod in plane.pods(run)))
                kube.add_node(NodeSpec("node-1"))
                await plane.until_ready(run, 2)
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def test_pods_that_we_held_can_be_let_go_for_good(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(SLEEP, (2, 2, 2))
            await plane.until_ready(run, 2)
            assert all(POD_FINALIZER in pod["metadata"]["finalizers"] for pod in plane.pods(run))
            assert len(await release_finalizers(plane.api)) == 2
            assert not any(POD_FINALIZER in pod["metadata"].get("finalizers", []) for pod in plane.pods(run))
            await plane.end(run, Wanted.CANCEL)
            await plane.settled(run)

    asyncio.run(story())
