"""Commands beside ranks on a cluster: what is refused, and what happens when something in between goes away."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from basilica.controller.step import run_of
from basilica.core.errors import Conflict, RuntimeUnavailable
from basilica.kube.client.api import KubeApi
from basilica.ports import Exited, Output, Run
from basilica.runtimes.kubernetes import execute as beside
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica_testkube import KubeServer
from tests.kube_runtime.plane import NAMESPACE, SETTINGS, Plane, control_plane, sh

SLEEP = sh("trap 'exit 0' TERM; while :; do sleep 0.05; done")
SECONDS = 60.0


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


def tell(kube: KubeServer, story: Callable[[Plane, Run], Awaitable[None]], **more: Any) -> None:
    """A story with a run of one rank that is up."""

    async def told() -> None:
        async with asyncio.timeout(SECONDS), control_plane(kube, **more) as plane:
            instance = await plane.deploy(SLEEP)
            await plane.until_ready(instance, 1)
            await story(plane, run_of(await plane.store.get(instance)))

    asyncio.run(told())


async def output(runtime: KubernetesRuntime, run: Run, *argv: str, rank: int = 0) -> list[Output | Exited]:
    async with aclosing(runtime.execute(run, rank, argv)) as found:
        return [chunk async for chunk in found]


def test_one_command_is_one_look_at_the_pod_and_one_connection(kube: KubeServer) -> None:
    async def story(plane: Plane, run: Run) -> None:
        before = kube.requests.copy()
        found = await output(plane.runtime, run, "echo", "hello")
        assert found == [Output("stdout", ""), Output("stdout", "hello\n"), Exited(0)]
        asked = kube.requests.since(before)
        assert (asked["get", "pods/exec"], asked["get", "pods"]) == (1, 1)

    tell(kube, story)


def test_the_control_plane_needs_the_right_and_says_which(kube: KubeServer) -> None:
    async def story(plane: Plane, run: Run) -> None:
        kube.fail("get", "pods/exec", status=403)
        with pytest.raises(RuntimeUnavailable, match="the right to `create` and `get` pods/exec: apply what"):
            await output(plane.runtime, run, "true")

    tell(kube, story)


def test_a_pod_that_is_gone_meanwhile_is_a_conflict(kube: KubeServer) -> None:
    async def story(plane: Plane, run: Run) -> None:
        for resource in ("pods", "pods/exec"):
            kube.fail("get", resource, status=404)
            with pytest.raises(Conflict, match=f"rank 0 of {run.instance} does not run any more"):
                await output(plane.runtime, run, "true")

    tell(kube, story)


def test_a_container_that_has_ended_unnoticed_is_a_conflict(kube: KubeServer) -> None:
    """Its kubelet knows; the API server's answer is a status on the error channel."""

    async def story(plane: Plane, run: Run) -> None:
        pod = plane.pods(run.instance)[0]
        facts = plane.runtime._pods_of_rank(run, 0)  # as they are seen now
        async with KubeApi(kube.url) as api:
            await api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", grace=0)
            running = replace(facts[0], state="running")
            with pytest.raises(Conflict, match="does not run any more"):
                await anext(beside.execute_beside(api, run, 0, [running], ["true"]))

    tell(kube, story)


def test_beside_a_rank_whose_pod_has_ended_there_are_no_commands(kube: KubeServer) -> None:
    async def story() -> None:
        async with asyncio.timeout(SECONDS), control_plane(kube) as plane:
            instance = await plane.deploy(sh("exit 0"))
            deployment = await plane.settled(instance)
            await plane.happens(lambda: plane.runtime._pods_of_rank(run_of(deployment), 0)[-1].over)
            with pytest.raises(Conflict, match=f"rank 0 of {instance} does not run: its pod .* has ended"):
                await output(plane.runtime, run_of(deployment), "true")

    asyncio.run(story())


def test_a_node_that_does_not_answer_is_told(kube: KubeServer) -> None:
    async def story(plane: Plane, run: Run) -> None:
        kube.lose_node("node-0")
        with pytest.raises(RuntimeUnavailable, match="no route to host"):
            await output(plane.runtime, run, "true")

    tell(kube, story)


def test_an_image_whose_entrypoint_knows_no_commands_says_so(kube: KubeServer, tmp_path: Path) -> None:
    script = tmp_path / "entrypoint"
    script.write_text('#!/bin/sh\n[ "$1" = -- ] && exec python -m basilica.entrypoint "$@"\necho what is $1\nexit 9\n')
    script.chmod(0o755)

    async def story(plane: Plane, run: Run) -> None:
        with pytest.raises(Conflict, match="does not know how, and said what is --beside"):
            await output(plane.runtime, run, "true")

    tell(kube, story, settings=replace(SETTINGS, entrypoint=(str(script),)))


def test_a_container_that_ends_while_a_command_begins_is_a_conflict(kube: KubeServer, tmp_path: Path) -> None:
    script = tmp_path / "entrypoint"
    script.write_text('#!/bin/sh\n[ "$1" = -- ] && exec python -m basilica.entrypoint "$@"\nkill -KILL $$\n')
    script.chmod(0o755)

    async def story(plane: Plane, run: Run) -> None:
        with pytest.raises(Conflict, match="does not run any more: its container was ended as the command began"):
            await output(plane.runtime, run, "true")

    tell(kube, story, settings=replace(SETTINGS, entrypoint=(str(script),)))


def test_a_command_that_does_not_begin_is_given_up(
    kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "START_WITHIN_S", 0.3)
    script = tmp_path / "entrypoint"
    script.write_text('#!/bin/sh\n[ "$1" = -- ] && exec python -m basilica.entrypoint "$@"\nexec cat\n')
    script.chmod(0o755)

    async def story(plane: Plane, run: Run) -> None:
        with pytest.raises(RuntimeUnavailable, match=r"no command was started beside rank 0 of .* within 0.3 s"):
            await output(plane.runtime, run, "true")

    tell(kube, story, settings=replace(SETTINGS, entrypoint=(str(script),)))


def test_a_connection_that_is_cut_tells_no_exit_code_and_ends_the_command(kube: KubeServer, tmp_path: Path) -> None:
    async def story(plane: Plane, run: Run) -> None:
        os.mkfifo(tmp_path / "held")
        holding = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
        async with aclosing(
            plane.runtime.execute(run, 0, ["sh", "-c", f"exec 9>{tmp_path}/held; sleep 1000"])
        ) as found:
            assert await anext(found) == Output("stdout", "")
            reading = asyncio.ensure_future(anext(found))
            await plane.happens(lambda: _is_held(holding))
            with kube.outage(), pytest.raises(RuntimeUnavailable, match="how the command ends is not known"):
                await reading
        await plane.happens(lambda: not _is_held(holding))
        os.close(holding)

    tell(kube, story)


def _is_held(fifo: int) -> bool:
    try:
        return bool(os.read(fifo, 1))
    except BlockingIOError:
        return True


def test_a_command_ends_with_the_pod_of_its_rank(kube: KubeServer) -> None:
    async def story(plane: Plane, run: Run) -> None:
        async with aclosing(plane.runtime.execute(run, 0, ["sh", "-c", "echo up; exec sleep 1000"])) as found:
            assert [await anext(found), await anext(found)] == [Output("stdout", ""), Output("stdout", "up\n")]
            await plane.end(run.instance)
            assert await anext(found) == Exited(137)

    tell(kube, story)


def test_a_command_has_the_environment_of_the_newest_attempt(kube: KubeServer, tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(SECONDS), control_plane(kube) as plane:
            script = f"[ $BASILICA_ATTEMPT = 0 ] && exit 3; touch {tmp_path}/again; sleep 1000"
            instance = await plane.deploy(sh(script), max_restarts=3)
            await plane.happens((tmp_path / "again").exists)
            run = run_of(await plane.store.get(instance))
            found = await output(plane.runtime, run, "sh", "-c", "echo $BASILICA_ATTEMPT; ls $BASILICA_RESULT_FILE*")
            assert found[1] == Output("stdout", "1\n")

    asyncio.run(story())
