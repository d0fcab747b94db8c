"""Nodes that are not heard from while their ranks are well, and ranks that are cut off from everything."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from basilica.core.deployment import Deployment
from basilica.core.fencing import FenceTimes
from basilica.core.phase import RankPhase
from basilica.core.spec import ProviderFilter
from basilica.core.why import why
from basilica.stores.memory import MemoryStore
from basilica_testkube import KubeServer, NodeSpec
from tests.kube_runtime.plane import QUICK_FENCE, SETTINGS, Plane, control_plane, sh

NODES = (NodeSpec("node-a"), NodeSpec("node-b"))
RENDEZVOUS_APART = (
    NodeSpec("node-0"),
    NodeSpec("node-a", labels={"basilica.dev/provider": "acme"}),
    NodeSpec("node-c", labels={"basilica.dev/provider": "acme"}),
)
APART = sh("while :; do echo $BASILICA_ATTEMPT $(date +%s.%N) >> $LIFE/$RANK; sleep 0.05; done")


def attempts(deployment: Deployment) -> list[int]:
    return [rank.attempt for rank in deployment.status.ranks]


async def nothing_is_launched_for(plane: Plane, run: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        found = await plane.store.get(run)
        assert attempts(found) == [0, 0]
        assert [rank.phase for rank in found.status.ranks] == [RankPhase.RUNNING] * 2
        await plane.store.wait_change(run, found.version, left)


def test_an_api_server_that_was_away_and_finds_no_node_ready_costs_nobody_anything(tmp_path: Path) -> None:
    """Ours waits a second for a node here, and Kubernetes one for a pod: both would have acted several times over."""

    async def story() -> None:
        with KubeServer(nodes=NODES) as kube:
            async with control_plane(kube) as plane:
                run = await plane.deploy(APART, (2, 2, 2), env={"LIFE": str(tmp_path)})
                await plane.until_ready(run, 2)
                with kube.outage():
                    for node in NODES:
                        kube.cut_node(node.name)
                    kube.advance(60)
                await plane.happens(lambda: _ready(kube) == [])
                await nothing_is_launched_for(plane, run, 3.0)
                kube.rejoin_node("node-b")
                await nothing_is_launched_for(plane, run, 3.0)
                kube.rejoin_node("node-a")
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def _ready(kube: KubeServer) -> list[str]:
    return [
        node["metadata"]["name"]
        for node in kube.objects("nodes")
        if any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])
    ]


def test_a_node_that_is_not_ready_is_no_evidence_while_its_agent_is_heard_from(tmp_path: Path) -> None:
    """Even where it is the only one, and for longer than a rank that is silent is waited for."""

    async def story() -> None:
        settings = replace(QUICK_FENCE, node_seconds=1000)  # so that Kubernetes evicts nobody
        with KubeServer(nodes=NODES) as kube:
            async with control_plane(kube, settings=settings) as plane:
                plane.runtime._node_seconds = 1
                run = await plane.deploy(
                    APART, (2, 2, 2), env={"LIFE": str(tmp_path)}, topology_spread="provider-aware"
                )
                up = await plane.until_ready(run, 2)
                kube.cut_node(up.status.ranks[0].node)
                kube.advance(60)
                await plane.happens(lambda: len(_ready(kube)) == 1)
                await nothing_is_launched_for(plane, run, 8.0)
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


class Cable:
    """Between the agents of one node and the rendezvous. Cut, it swallows what is sent and ends no connection."""

    def __init__(self, folder: Path) -> None:
        self._target, self.cut = folder / "endpoint", False
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far: asyncio.StreamWriter | None = None
        try:
            while self.cut:
                await asyncio.sleep(0.02)
            host, _, port = (await asyncio.to_thread(self._target.read_text)).strip().rpartition(":")
            back, far = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._carry(reader, far), self._carry(back, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the connection has ended, or the test has
        finally:
            for each in (far, writer):
                if each is not None:
                    each.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            if not self.cut:
                writer.write(piece)
                await writer.drain()
        writer.close()


ENTRYPOINT = """#!/bin/sh
if [ "$NODE_NAME" = node-a ]; then
    echo "$BASILICA_RDZV_ENDPOINT" > {folder}/new && mv {folder}/new {folder}/endpoint
    export BASILICA_RDZV_ENDPOINT=127.0.0.1:{port}
fi
exec python -m basilica.entrypoint "$@"
"""


def test_a_rank_that_is_cut_off_has_ended_before_its_successor_starts(tmp_path: Path) -> None:
    async def story() -> None:
        cable = Cable(tmp_path)
        script, life = tmp_path / "entrypoint", tmp_path / "life"
        await asyncio.to_thread(life.mkdir)
        async with cable.laid() as port:
            await asyncio.to_thread(script.write_text, ENTRYPOINT.format(folder=tmp_path, port=port))
            await asyncio.to_thread(script.chmod, 0o755)
            with KubeServer(nodes=RENDEZVOUS_APART) as kube:
                async with control_plane(kube, settings=replace(QUICK_FENCE, entrypoint=(str(script),))) as plane:
                    only = ProviderFilter(include=("acme",))
                    run = await plane.deploy(APART, (1, 1, 1), env={"LIFE": str(life)}, provider_filter=only)
                    up = await plane.until_ready(run, 1)
                    assert up.status.ranks[0].node == "node-a"
                    cable.cut = True
                    kube.cut_node("node-a")
                    silent = await plane.until(run, lambda d: d.status.ranks[0].silent_since is not None)
                    assert "rank 0 on node node-a, which has not been heard from for" in why(
                        silent.spec, silent.status, time.time()
                    )
                    kube.advance(60)
                    await plane.until(run, lambda d: d.status.ranks[0].attempt == 1)
                    kube.advance(60)
                    moved = await plane.until_ready(run, 1)
                    assert (moved.status.ranks[0].node, moved.status.ranks[0].restarts) == ("node-c", 0)
                    assert moved.status.ranks[0].silent_since is None
                    await plane.happens(lambda: "1 " in (life / "0").read_text())
                    cable.cut = False  # what was cut off comes back, and changes nothing
                    await asyncio.sleep(1.0)
                    assert attempts(await plane.store.get(run)) == [1]
                    await plane.end(run)
                    await plane.settled(run)
        lines = [line.split() for line in (await asyncio.to_thread((life / "0").read_text)).splitlines()]
        last = max(float(moment) for attempt, moment in lines if attempt == "0")
        first = min(float(moment) for attempt, moment in lines if attempt == "1")
        assert last < first, f"two of one rank for {last - first:.2f} s"

    asyncio.run(story())


def test_a_rendezvous_that_is_lost_with_all_its_keys_stops_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        with KubeServer(nodes=NODES) as kube:
            async with control_plane(kube, settings=SETTINGS) as plane:
                run = await plane.deploy(APART, (2, 2, 2), env={"LIFE": str(tmp_path)})
                await plane.until_ready(run, 2)
                [pod] = [p for p in kube.objects("pods", "u-ada") if "rendezvous" in p["metadata"]["name"]]
                await plane.api.delete(f"/api/v1/namespaces/u-ada/pods/{pod['metadata']['name']}", grace=0)
                await nothing_is_launched_for(plane, run, 4.0)
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


# ---- a node that is lost together with the run's rendezvous ----------------------------------------------------------

FULL = (NodeSpec("node-a", capacity={"pods": "2"}), NodeSpec("node-b"))  # the rendezvous and rank 0 are on node-a
SLOWER = replace(SETTINGS, fence=FenceTimes().scaled(1 / 7.5))  # so that a silence can be read before all is over


async def up_on_both_nodes(plane: Plane, life: Path) -> str:
    run = await plane.deploy(APART, (1, 1, 2), env={"LIFE": str(life)})
    await plane.until_ready(run, 1)  # pods that are made at once are placed in any order
    await plane.scale(run, 2)
    up = await plane.until_ready(run, 2)
    assert [rank.node for rank in up.status.ranks] == ["node-a", "node-b"]
    [rendezvous] = [p for p in plane.kube.objects("pods", "u-ada") if "rendezvous" in p["metadata"]["name"]]
    assert rendezvous["spec"]["nodeName"] == "node-a"
    return run


async def given_up(plane: Plane, run: str, since: float) -> None:
    """Rank 0 starts again on the other node as soon as nothing can run on the lost one, and rank 1 is left alone."""
    found = await plane.until(run, lambda d: d.status.ranks[0].attempt == 1)
    took, lost_after = time.monotonic() - since, SLOWER.fence.lost_after
    assert lost_after - 1.0 < took < lost_after + 4.0, f"given up after {took:.1f} s"
    assert (found.status.ranks[0].restarts, found.status.ranks[1].attempt) == (0, 0)
    moved = await plane.until_ready(run, 2)
    assert [rank.node for rank in moved.status.ranks] == ["node-b", "node-b"]
    assert (moved.status.failing, moved.status.rendezvous_silent_since) == (None, None)


def test_a_rank_that_is_lost_with_its_rendezvous_is_given_up_in_time_and_the_silence_named(tmp_path: Path) -> None:
    async def story() -> None:
        with KubeServer(nodes=FULL) as kube:
            async with control_plane(kube, settings=SLOWER) as plane:
                run = await up_on_both_nodes(plane, tmp_path)
                kube.lose_node("node-a")
                lost_at = time.monotonic()
                silent = await plane.until(run, lambda d: d.status.rendezvous_silent_since is not None)
                assert time.monotonic() - lost_at < 5.0
                assert "waiting for a sign of the run's rendezvous, which has not answered for" in why(
                    silent.spec, silent.status, time.time()
                )
                kube.advance(60)
                await given_up(plane, run, lost_at)
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def test_an_operator_that_takes_over_without_a_rendezvous_says_so_and_gives_the_rank_up_in_time(tmp_path: Path) -> None:
    """Nobody has a record of the lost rank: which attempt of it ran there is not known, only that it is over."""

    async def story() -> None:
        store = MemoryStore()
        with KubeServer(nodes=FULL) as kube:
            async with control_plane(kube, store, settings=SLOWER) as plane:
                run = await up_on_both_nodes(plane, tmp_path)
            kube.lose_node("node-a")
            lost_at = time.monotonic()
            async with control_plane(kube, store, settings=SLOWER) as plane:
                blind = await plane.until(run, lambda d: d.status.failing is not None)
                assert time.monotonic() - lost_at < 8.0
                sentence = why(blind.spec, blind.status, time.time())
                assert f"(the rendezvous of {run} does not answer, and only it knows its ranks)" in sentence
                assert sentence.endswith("this is what was seen before: 2 of 2 ranks are up")
                kube.advance(60)
                await given_up(plane, run, lost_at)
                assert "Unattended" in await plane.events(run)
                await plane.end(run)
                await plane.settled(run)
        await store.close()

    asyncio.run(story())
