"""What a run costs the API server: a pod for each rank and a few requests more, and none while nothing changes."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from basilica.core.seen import Ended
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.orders import AttemptRecord, attempt_key, orders_in
from basilica.rendezvous.service import Service
from basilica_testkube import KubeServer, Requests
from tests.kube_runtime.plane import NAMESPACE, Plane, control_plane, sh


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer(processes=False) as server:
        yield server


class Puppets:
    """Plays the containers of a cluster whose pods run nothing: the rendezvous, and the entrypoints of all ranks."""

    def __init__(self, plane: Plane, run: str, keys: KeysClient) -> None:
        self._plane, self._run, self._keys = plane, run, keys
        self._records: dict[str, AttemptRecord] = {}

    async def start(self, ranks: int) -> None:
        """Every rank claims its attempt and runs, once it is ordered to and has a pod."""
        async with asyncio.timeout(60):
            while len(orders_in((await self._keys.get("/basilica", recursive=True)).leaves())) < ranks:
                await asyncio.sleep(0.05)
        await self._plane.happens(lambda: len(self._running()) == ranks)
        for pod in self._running():
            rank = int(pod["metadata"]["annotations"]["basilica.dev/rank"])
            now = time.time()
            record = AttemptRecord(pod=pod["metadata"]["uid"], node="node-0", claimed_at=now, started_at=now)
            self._records[attempt_key(rank, 0)] = record
            assert (await self._keys.put(attempt_key(rank, 0), record.dump(), prev_exist=False)).ok

    def _running(self) -> list[dict[str, Any]]:
        return [pod for pod in self._plane.pods(self._run) if pod["status"]["phase"] == "Running"]

    async def succeed(self) -> None:
        for key, record in self._records.items():
            ended = Ended(exit_code=0, reason="Completed", finished_at=time.time())
            await self._keys.put(key, replace(record, ended=ended).dump())
        names = [pod["metadata"]["name"] for pod in self._running()]
        self._plane.kube.end_containers(names, 0, namespace=NAMESPACE)


@asynccontextmanager
async def puppets(plane: Plane, run: str, folder: Path) -> AsyncIterator[Puppets]:
    def rendezvous() -> dict[str, Any] | None:
        pods = plane.kube.objects("pods", NAMESPACE)
        mine = [p for p in pods if p["metadata"]["name"].startswith(f"{run}-rendezvous") and "podIP" in p["status"]]
        return mine[0] if mine else None

    await plane.happens(lambda: rendezvous() is not None)
    address = (rendezvous() or {})["status"]["podIP"]
    service = Service(folder, address)
    await service.start()
    keys = KeysClient(f"{address}:2379")
    try:
        await service.open("default", 2379)
        yield Puppets(plane, run, keys)
    finally:
        await keys.close()
        await service.stop()


async def life_of(plane: Plane, ranks: int, folder: Path) -> Requests:
    before = plane.kube.requests.copy()
    run = await plane.deploy(sh("true"), (ranks, ranks, ranks), name=f"train{ranks}")
    async with puppets(plane, run, folder) as played:
        await played.start(ranks)
        await plane.until_ready(run, ranks)
        idle = plane.kube.requests.copy()
        await asyncio.sleep(0.5)
        assert plane.kube.requests.since(idle).total == 0, "nothing changed, and somebody asked"
        await played.succeed()
        assert (await plane.settled(run)).status.phase == "succeeded"
    return plane.kube.requests.since(before)


def test_a_pod_for_each_rank_is_all_that_grows_with_the_ranks(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            await plane.happens(lambda: kube.requests.by_verb("watch") == 3)
            few = await life_of(plane, 2, tmp_path / "few")
            many = await life_of(plane, 512, tmp_path / "many")
            assert (few["create", "pods"], many["create", "pods"]) == (2, 512)
            assert many.total - 512 == few.total - 2
            assert many.total - 512 <= 11, many

    asyncio.run(story())
