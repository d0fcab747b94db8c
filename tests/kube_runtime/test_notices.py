"""Planned changes on a cluster: ranks that read notices are ready before anything happens to them."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.notices import NoticeKind
from basilica.core.seen import SeenProgress
from basilica.core.spec import Exec
from basilica_testkube import KubeServer, Timing
from tests.kube_runtime.plane import NAMESPACE, PATIENCE_S, Plane, control_plane

LISTENS = """
import os, signal, sys, time
import basilica
folder, rank = sys.argv[1], os.environ["RANK"]
me = f"{rank}.{os.environ['BASILICA_ATTEMPT']}"
def write(name, value=None):
    with open(os.path.join(folder, f"{name}-{me}.part"), "w") as file:
        file.write(str(value or time.monotonic()))
    os.rename(file.name, os.path.join(folder, f"{name}-{me}"))
def step_of(other):
    try:
        with open(os.path.join(folder, f"step-{other}.0")) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0
def ended(*_):
    write("term")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
step = 0
while True:
    step += 1
    write("step", step)
    if me in ("0.0", "1.0"):  # as an all-reduce has it: nobody is more than a step ahead
        while step_of(1 - int(rank)) < step and not os.path.exists(os.path.join(folder, "alone")):
            time.sleep(0.002)
    basilica.report(step=step)
    found = basilica.notice()
    if found is not None:
        write("stopped-at", step)
        write(f"told-{found.kind}")
        while not os.path.exists(os.path.join(folder, "save")):
            time.sleep(0.01)
        write("ready")
        found.ready()
        write("goes-on")
    time.sleep(0.02)
"""


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer(timing=Timing(restart_backoff=10 * PATIENCE_S)) as server:
        yield server


def program(folder: Path) -> Exec:
    return Exec((sys.executable, "-c", LISTENS, str(folder)))


def at(folder: Path, name: str) -> float:
    return float((folder / name).read_text())


async def until_all_listen(plane: Plane, run: str) -> Deployment:
    return await plane.until(run, lambda d: all(rank.listens for rank in d.status.ranks) and d.status.ready == 2)


def steps(plane: Plane, run: str) -> list[SeenProgress | None]:
    """The steps of the first two ranks, as their agents have published them."""
    keys = plane.runtime._states.of(run).keys
    known = {} if keys is None else keys.activities.by_attempt
    return [known[rank, 0].activity.progress if (rank, 0) in known else None for rank in (0, 1)]


async def until_written(plane: Plane, folder: Path, *names: str) -> None:
    await plane.happens(lambda: all((folder / name).exists() for name in names))


def test_ranks_are_ready_before_a_planned_scale_lets_a_new_one_in(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(program(tmp_path), (1, 2, 4), notice_seconds=600.0)
            await until_all_listen(plane, run)
            await plane.happens(lambda: all(step is not None and step.step_seconds for step in steps(plane, run)))
            await plane.scale(run, 3)
            await until_written(plane, tmp_path, "told-scale-0.0", "told-scale-1.0")
            assert at(tmp_path, "stopped-at-0.0") == at(tmp_path, "stopped-at-1.0")
            found = await plane.store.get(run)
            assert found.status.notice is not None
            assert (found.status.notice.kind, found.status.notice.target) == (NoticeKind.SCALE, 3)
            assert found.status.notice.step is not None, "they report steps, so they stop at one and the same"
            assert found.status.admitted == 2, "the new rank starts meanwhile, and is not let in yet"
            (tmp_path / "alone").touch()
            (tmp_path / "save").touch()
            await plane.until(run, lambda d: d.status.admitted is None)
            assert (tmp_path / "ready-0.0").exists()
            assert (tmp_path / "ready-1.0").exists()
            grown = await plane.until(run, lambda d: d.status.ready == 3 and d.status.notice is None)
            assert [rank.attempt for rank in grown.status.ranks] == [0, 0, 0]
            await until_written(plane, tmp_path, "goes-on-0.0", "goes-on-1.0")
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_a_rank_whose_pod_is_drained_is_ready_before_it_gets_sigterm(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(program(tmp_path), (1, 2, 2), notice_seconds=600.0, max_restarts=0)
            await until_all_listen(plane, run)
            victim = plane.pods(run)[1]["metadata"]["name"]
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": victim}}
            await plane.api.create(f"/api/v1/namespaces/{NAMESPACE}/pods/{victim}/eviction", eviction)
            await until_written(plane, tmp_path, "told-preemption-0.0", "told-preemption-1.0")
            assert not (tmp_path / "term-1.0").exists()
            (tmp_path / "alone").touch()
            (tmp_path / "save").touch()
            again = await plane.until(run, lambda d: d.status.ranks[1].attempt == 1 and d.status.ready == 2)
            assert at(tmp_path, "ready-0.0") < at(tmp_path, "term-1.0")
            assert at(tmp_path, "ready-1.0") < at(tmp_path, "term-1.0")
            assert [rank.restarts for rank in again.status.ranks] == [0, 0]
            assert again.status.ranks[0].attempt == 0
            await until_written(plane, tmp_path, "goes-on-0.0")
            assert not (tmp_path / "term-0.0").exists()
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_ranks_that_report_do_not_wake_the_controller_at_every_step(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(program(tmp_path), (1, 2, 2))
            await until_all_listen(plane, run)
            await plane.until(run, lambda d: all(rank.steps is not None for rank in d.status.ranks))
            looks = 0
            observe = plane.runtime.observe

            async def counting(about: Any) -> Any:
                nonlocal looks
                looks += 1
                return await observe(about)

            await asyncio.sleep(1.5)  # what the start has set off is over
            plane.runtime.observe = counting  # type: ignore[method-assign, assignment]
            before, published = steps(plane, run), 0
            async with asyncio.timeout(PATIENCE_S):
                while published < 4:
                    if (now := steps(plane, run)) != before:
                        before, published = now, published + 1
                    await asyncio.sleep(0.05)
            assert looks == 0
            about = run_of(await plane.store.get(run))
            await observe(replace(about, fresh_steps=frozenset({1})))
            await plane.happens(lambda: looks > 0)
            (tmp_path / "save").touch()
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())
