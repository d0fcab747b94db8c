"""What ranks report on a cluster stays known: over lost containers and keyspaces, killed operators, and the end."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from basilica.controller.step import run_of
from basilica.core.errors import RuntimeUnavailable
from basilica.core.reports import Series, SeriesQuery
from basilica.kube.client.api import KubeApi
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.names import REPORTS, SERIES
from basilica.reports.points import Point
from basilica.runtimes.kubernetes.kept_results import KEPT_BYTES_MAX, SERIES_LEFT_OUT, Kept, Reported, to_keep
from basilica.runtimes.kubernetes.reports import series_to_keep
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica.stores.memory import MemoryStore
from basilica.testing.runtime_contract import reporting
from basilica_testkube import KubeServer
from tests.kube_runtime.plane import NAMESPACE, SETTINGS, Plane, control_plane, sh

FIRST = "import os, time\na = int(os.environ['BASILICA_ATTEMPT'])\nfor n in range(5): report(step=5 * a + n, loss=n)"


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


def until_file(path: Path) -> str:
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.02)"


async def series(plane: Plane, run: str) -> list[Series]:
    return await plane.runtime.series(run_of(await plane.store.get(run)), SeriesQuery())


async def steps_are(plane: Plane, run: str, steps: list[int]) -> None:
    """Wait until the series of rank 0 has these."""
    found: list[int | None] = []
    async with asyncio.timeout(40):
        while found != steps:
            with suppress(RuntimeUnavailable):  # the rendezvous is not up
                found = [p.step for each in await series(plane, run) for p in each.points if each.rank == 0]
            await asyncio.sleep(0.1)


async def known(plane: Plane, run: str, steps: list[int]) -> None:
    """After the end, by who was not there before."""
    onlooker = KubernetesRuntime(KubeApi(plane.kube.url), SETTINGS)
    await onlooker.start(lambda _: None)
    try:
        about = run_of(await plane.store.get(run))
        [found] = await onlooker.series(about, SeriesQuery())
        assert [p.step for p in found.points] == steps
        before = plane.kube.requests.copy()
        assert (await onlooker.reports(about))[0].step == steps[-1]
        assert await onlooker.series(about, SeriesQuery(metrics=frozenset({"other"}))) == []
        assert plane.kube.requests.since(before)["get", "secrets"] == 0, "it is asked for once"
    finally:
        await onlooker.close()


def test_a_rank_that_gets_another_pod_goes_on_with_its_series(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(reporting(f"{FIRST}\n{until_file(tmp_path / 'go')}"), max_restarts=3)
            await steps_are(plane, run, list(range(5)))
            [pod] = plane.pods(run)
            kube.oom_kill(pod["metadata"]["name"], namespace=NAMESPACE)
            await steps_are(plane, run, list(range(10)))
            (tmp_path / "go").touch()
            assert (await plane.settled(run)).status.phase == "succeeded"
            await known(plane, run, list(range(10)))

    asyncio.run(story())


def test_a_rendezvous_that_was_lost_with_all_its_keys_is_told_again(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            result = "open(os.environ['BASILICA_RESULT_FILE'], 'w').write('7')"
            code = f"{FIRST}\nif a == 0: {result}; exit(3)\n{until_file(tmp_path / 'go')}"
            run = await plane.deploy(reporting(code), max_restarts=1)
            await steps_are(plane, run, list(range(10)))
            [pod] = [
                pod["metadata"]["name"]
                for pod in kube.objects("pods", NAMESPACE)
                if pod["metadata"]["labels"]["basilica.dev/role"] == "rendezvous"
            ]
            await plane.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}", grace=0)
            await plane.happens(lambda: kube.get("pods", pod, NAMESPACE) is None)
            await steps_are(plane, run, list(range(10)))
            about = run_of(await plane.store.get(run))
            async with asyncio.timeout(40):
                while 0 not in await plane.runtime.reports(about) or 0 not in await plane.runtime.results(about):
                    await asyncio.sleep(0.1)
            (tmp_path / "go").touch()
            assert (await plane.settled(run)).status.phase == "succeeded"
            await known(plane, run, list(range(10)))
            assert await plane.runtime.results(about) == {0: b"7"}

    asyncio.run(story())


@pytest.mark.parametrize("killed", ["before it keeps", "after it kept", "when all containers have left"])
def test_an_operator_that_is_killed_at_the_end_is_followed_by_one_that_keeps_all(
    kube: KubeServer, tmp_path: Path, killed: str
) -> None:
    async def story() -> None:
        store = MemoryStore()
        reached = asyncio.Event()

        async def never(*_: Any) -> None:
            reached.set()
            raise RuntimeUnavailable("it goes no further than this")

        async with control_plane(kube, store) as plane:
            runtime = plane.runtime
            if killed == "before it keeps":
                runtime._kept_results._api.apply = _unless_secret(runtime._kept_results._api.apply, never)  # type: ignore[method-assign]
            elif killed == "after it kept":
                runtime._wait_until_gone = never  # type: ignore[assignment]
            else:
                runtime._cluster.end_pods = never  # type: ignore[method-assign, assignment]
            run = await plane.deploy(reporting(FIRST))
            async with asyncio.timeout(40):
                await reached.wait()
        async with control_plane(kube, store) as plane:
            assert (await plane.settled(run)).status.phase == "succeeded"
            await known(plane, run, list(range(5)))
        await store.close()

    asyncio.run(story())


def _unless_secret(apply: Any, never: Any) -> Any:
    async def instead(path: str, body: Any, **more: Any) -> Any:
        return await (never() if body["kind"] == "Secret" else apply(path, body, **more))

    return instead


def test_what_a_rank_writes_for_itself_spoils_nothing(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(reporting(f"{FIRST}\ntime.sleep(1000)"), (1, 1, 2))
            await steps_are(plane, run, list(range(5)))
            endpoint = plane.runtime._cluster.endpoint(run_of(await plane.store.get(run)))
            assert endpoint is not None
            keys = KeysClient(endpoint)
            mine = str((await keys.get(f"{SERIES}/0")).node["value"])
            for key, value in (("1", mine), ("7", mine), ("1/2", mine), ("x", "y")):
                await keys.put(f"{SERIES}/{key}", value)
            await keys.put(f"{REPORTS}/1", "no report")
            await keys.close()
            await asyncio.sleep(1.1)  # what was read is shown again for a second
            assert [each.rank for each in await series(plane, run)] == [0]
            await plane.end(run)
            await plane.settled(run)
            assert [each.rank for each in await series(plane, run)] == [0]

    asyncio.run(story())


def test_ranks_that_report_nothing_cost_nothing(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("true"))
            await plane.settled(run)
            assert kube.get("secrets", f"{run}-results", NAMESPACE) is None
            assert await series(plane, run) == []
            assert await plane.runtime.reports(run_of(await plane.store.get(run))) == {}

    asyncio.run(story())


# ---- how much is kept ------------------------------------------------------------------------------------------------


def noise(count: int, *names: str, seed: int) -> list[Point]:
    value = random.Random(seed).random
    at = 1.7e9 + seed
    return [
        Point(n, at + n, 0.0, n, None, {name: (value(),) * 3 + (1,) for name in names}, {}) for n in range(1, count)
    ]


def size(kept: Kept) -> int:
    return sum(map(len, kept.data.values()))


def test_the_series_of_many_ranks_are_thinned_until_they_fit() -> None:
    ranks = {(rank, 0): noise(65, "loss", "lr", "norm", "tokens", seed=rank) for rank in range(512)}
    reports = {rank: '{"at": 1.0, "step": 7, "values": {"loss": 0.5}}' for rank in range(512)}
    results = {rank: random.Random(rank).randbytes(1200) for rank in range(512)}
    kept = to_keep(results, Reported(reports, ranks))
    assert size(kept) <= KEPT_BYTES_MAX
    assert kept.results("x") == results
    assert len(kept.reports()) == 512
    found = kept.series()
    assert found.keys() == ranks.keys()
    assert all(len(points) >= 4 and points[-1].step == 64 for points in found.values())
    assert all(points[0].values.keys() == {"loss", "lr", "norm", "tokens"} for points in found.values())
    assert kept.annotations == {}


def test_what_cannot_be_kept_is_counted_and_results_go_before_it() -> None:
    names = [f"a rather long name of a number {n}" for n in range(64)]
    ranks = {(rank, 0): noise(2, *names, seed=rank) for rank in range(1024)}
    results = {0: random.Random(0).randbytes(699 << 10)}
    kept = to_keep(results, Reported({}, ranks))
    assert size(kept) <= KEPT_BYTES_MAX
    assert kept.results("x") == results
    shown = sum(len(point.values) for points in kept.series().values() for point in points)
    assert shown + int(kept.annotations[SERIES_LEFT_OUT]) == 64 * 1024
    assert shown > 64


def test_what_is_no_series_is_not_kept() -> None:
    assert series_to_keep({0: "", 1: "?"}) == {}
