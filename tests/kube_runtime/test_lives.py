"""Runs on a cluster, from their launch to their end; ranks are real processes."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from basilica.controller.step import run_of
from basilica.core.errors import DeploymentNotFound, DistributedError
from basilica.core.spec import BenchOnStart, Exec, Resources, Wanted
from basilica.kube.client.api import KubeApi
from basilica.runtimes.kubernetes.runtime import KubernetesRuntime
from basilica_testkube import KubeServer, NodeSpec, Timing
from tests.kube_runtime.plane import NAMESPACE, PATIENCE_S, QUICK_FENCE, SETTINGS, Plane, control_plane, sh, with_env

SLEEP = sh("echo up; exec sleep 1000")
OURS = ("pods", "jobs", "services", "deployments", "networkpolicies", "secrets")


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


def living(plane: Plane, run: str) -> list[str]:
    """The pods of the run in which something may run, by rank."""
    return [pod["metadata"]["name"] for pod in plane.pods(run) if pod["status"]["phase"] in ("Pending", "Running")]


def test_two_ranks_run_and_succeed(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("echo hello from $RANK of $WORLD_SIZE"), (2, 2, 4))
            done = await plane.settled(run)
            assert done.status.phase == "succeeded"
            found = {(e.rank, e.exit_code, e.termination_reason, e.log_tail) for e in done.status.exits}
            assert found == {
                (0, 0, "Completed", ("hello from 0 of 2",)),
                (1, 0, "Completed", ("hello from 1 of 2",)),
            }
            assert "hello from 1 of 2" in await plane.log(run, 1)
            assert [pod["status"]["phase"] for pod in plane.pods(run)] == ["Succeeded", "Succeeded"]

    asyncio.run(story())


def test_a_rank_that_fails_is_restarted_in_its_pod_and_then_lost(kube: KubeServer, tmp_path: Path) -> None:
    """Three failures are three attempts of one container; their pod is not replaced."""

    async def story() -> None:
        async with control_plane(kube) as plane:
            script = f"echo attempt $BASILICA_ATTEMPT; echo x >>{tmp_path}/tries; echo it broke >&2; exit 7"
            run = await plane.deploy(sh(script), max_restarts=2)
            done = await plane.settled(run)
            assert done.status.phase == "failed"
            [exit] = done.status.exits
            assert (exit.exit_code, exit.termination_reason, exit.restart_count) == (7, "Error", 2)
            assert exit.log_tail[-1] == "it broke"
            assert (tmp_path / "tries").read_text() == "x\n" * 3
            [pod] = plane.pods(run)
            [status] = pod["status"]["containerStatuses"]
            assert status["state"]["terminated"]["exitCode"] == 7
            assert [line for line in await plane.log(run, 0) if line.startswith("attempt")] == [
                "attempt 0",
                "attempt 1",
                "attempt 2",
            ]

    asyncio.run(story())


def test_what_cannot_be_executed_fails_the_run_at_once(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(Exec(("/no/such/program",)), max_restarts=3)
            done = await plane.settled(run)
            assert done.status.phase == "failed"
            assert "cannot execute /no/such/program: No such file or directory" in done.status.message

    asyncio.run(story())


def test_an_image_without_our_entrypoint_says_so(kube: KubeServer) -> None:
    async def story() -> None:
        broken = replace(SETTINGS, entrypoint=("python", "-m", "no_such_module"))
        async with control_plane(kube, settings=broken) as plane:
            run = await plane.deploy(SLEEP)
            done = await plane.settled(run)
            assert done.status.phase == "failed"
            assert "before the rank was started" in done.status.message
            assert "no_such_module" in done.status.message

    asyncio.run(story())


def test_a_kill_for_memory_is_named_as_such(kube: KubeServer) -> None:
    """The kernel takes the whole container, the entrypoint included: the pod's status is what tells."""

    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(SLEEP, (2, 2, 2))
            await plane.until_ready(run, 2)
            kube.oom_kill(plane.pods(run)[1]["metadata"]["name"], namespace=NAMESPACE)
            done = await plane.settled(run)
            assert done.status.phase == "failed"
            exits = {e.rank: (e.exit_code, e.termination_reason) for e in done.status.exits}
            assert exits == {1: (137, "OOMKilled"), 0: (143, "Cancelled")}

    asyncio.run(story())


def test_a_rank_that_outlives_a_memory_kill_of_its_child_ends_by_its_own_code(kube: KubeServer, tmp_path: Path) -> None:
    """The kernel's counter in the container's cgroup is no evidence that the kill ended it."""

    async def story() -> None:
        counter = tmp_path / "memory.events"
        counter.write_text("oom 0\noom_kill 0\n")
        async with control_plane(kube, settings=with_env(SETTINGS, BASILICA_MEMORY_EVENTS=str(counter))) as plane:
            run = await plane.deploy(sh(f"printf 'oom 1\\noom_kill 1\\n' >{counter}; exit 3"))
            done = await plane.settled(run)
            [exit] = done.status.exits
            assert (exit.exit_code, exit.termination_reason) == (3, "Error")

    asyncio.run(story())


def test_cancel_stops_ranks_in_band_and_their_logs_stay(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            script = "trap 'echo goodbye; exit 0' TERM; echo up; while :; do sleep 0.05; done"
            run = await plane.deploy(sh(script), (2, 2, 2))
            await plane.until_ready(run, 2)
            await plane.end(run)
            done = await plane.settled(run)
            assert done.status.phase == "cancelled"
            assert {(e.rank, e.exit_code, e.termination_reason) for e in done.status.exits} == {
                (0, 0, "Cancelled"),
                (1, 0, "Cancelled"),
            }
            assert await plane.log(run, 1) == ("up", "goodbye")
            assert living(plane, run) == []

    asyncio.run(story())


def test_a_rank_that_ignores_sigterm_is_killed_when_its_grace_is_over(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("trap '' TERM; echo up; while :; do sleep 0.05; done"), grace_seconds=0.5)
            await plane.until_ready(run, 1)
            await plane.end(run)
            done = await plane.settled(run)
            [exit] = done.status.exits
            assert (exit.exit_code, exit.signal, exit.termination_reason) == (137, "SIGKILL", "Cancelled")

    asyncio.run(story())


def test_a_run_that_is_cancelled_before_it_started_leaves_nothing(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(SLEEP, image="pull-fails/basilica")
            await plane.until(run, lambda d: "ErrImagePull" in d.status.ranks[0].note if d.status.ranks else False)
            await plane.end(run)
            done = await plane.settled(run)
            assert done.status.phase == "cancelled"
            assert done.status.exits == ()

    asyncio.run(story())


def test_the_world_grows_and_shrinks_and_grows_again(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("echo up; trap 'exit 0' TERM; while :; do sleep 0.05; done"), (1, 2, 4))
            await plane.until_ready(run, 2)
            kept = [pod["metadata"]["uid"] for pod in plane.pods(run)]
            await plane.scale(run, 4)
            await plane.until_ready(run, 4)
            await plane.scale(run, 2)
            await plane.until_ready(run, 2)
            await plane.until(run, lambda d: not any(r.phase.may_run for r in d.status.ranks if r.rank > 1))
            assert "up" in await plane.log(run, 3), "a drained rank keeps its log"

            def running() -> list[str]:
                return [p["metadata"]["uid"] for p in plane.pods(run) if p["status"]["phase"] == "Running"]

            await plane.happens(lambda: running() == kept)
            assert len(living(plane, run)) == 2
            await plane.scale(run, 4)
            await plane.until_ready(run, 4)
            await plane.end(run)
            assert (await plane.settled(run)).status.phase == "cancelled"

    asyncio.run(story())


def test_a_rank_that_was_told_to_leave_comes_back_without_a_pause() -> None:
    """Whatever Kubernetes thinks of pods that end with a code other than 0."""

    async def story() -> None:
        with KubeServer(timing=Timing(restart_backoff=10 * PATIENCE_S)) as kube:
            async with control_plane(kube) as plane:
                run = await plane.deploy(sh("trap 'exit 0' TERM; while :; do sleep 0.05; done"), (1, 3, 3))
                await plane.until_ready(run, 3)
                for _ in range(2):
                    await plane.scale(run, 1)
                    await plane.until(run, lambda d: not any(r.phase.may_run for r in d.status.ranks if r.rank > 0))
                    await plane.scale(run, 3)
                    await plane.until_ready(run, 3)
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def test_a_path_of_the_rank_is_not_that_of_its_entrypoint(kube: KubeServer, tmp_path: Path) -> None:
    """Neither `python` nor anything else of ours is looked for there."""
    (tmp_path / "python").write_text("#!/bin/sh\necho the python of the rank\n")
    (tmp_path / "python").chmod(0o755)

    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(Exec(("python",)), env={"PATH": str(tmp_path)})
            done = await plane.settled(run)
            assert done.status.phase == "succeeded"
            assert await plane.log(run, 0) == ("the python of the rank",)

    asyncio.run(story())


def test_a_gang_that_restarts_for_a_new_size_keeps_its_pods(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("echo size $WORLD_SIZE; exec sleep 1000"), (1, 2, 3), resize="restart")
            await plane.until_ready(run, 2)
            await plane.scale(run, 3)
            await plane.until_ready(run, 3)
            assert [line for line in await plane.log(run, 0) if line.startswith("size")] == ["size 2", "size 3"]
            assert len(plane.pods(run)) == 3
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_an_evicted_rank_starts_again_and_it_costs_no_restart() -> None:
    async def story() -> None:
        with KubeServer() as kube:
            async with control_plane(kube) as plane:
                run = await plane.deploy(SLEEP)
                await plane.until_ready(run, 1)
                kube.evict(plane.pods(run)[0]["metadata"]["name"], namespace=NAMESPACE)
                await plane.until(run, lambda d: d.status.ranks[0].attempt == 1)
                again = await plane.until_ready(run, 1)
                assert again.status.ranks[0].restarts == 0
                assert "RankRestarted" in await plane.events(run)
                events = await plane.store.events(run)
                assert any("Evicted" in event.message for event in events), events
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def test_a_pod_that_somebody_deletes_tells_its_end_and_comes_back(kube: KubeServer) -> None:
    """By the eviction API and by hand: the rank gets SIGTERM, its end is recorded, and it runs again."""

    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"))
            await plane.until_ready(run, 1)
            [pod] = plane.pods(run)
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
            assert await plane.api.delete(path)
            await plane.until(run, lambda d: d.status.ranks[0].attempt == 1)
            await plane.happens(lambda: pod["metadata"]["uid"] not in [p["metadata"]["uid"] for p in plane.pods(run)])
            again = await plane.until_ready(run, 1)
            assert again.status.ranks[0].restarts == 0
            assert again.status.exits == (), "that it ended well is no success: it had to"
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_a_node_that_disappears_costs_no_restart_and_the_rank_moves() -> None:
    async def story() -> None:
        nodes = [NodeSpec("node-a", labels={"basilica.dev/provider": "acme"}), NodeSpec("node-b")]
        with KubeServer(nodes=nodes) as kube:
            async with control_plane(kube, settings=QUICK_FENCE) as plane:
                run = await plane.deploy(SLEEP)
                up = await plane.until_ready(run, 1)
                assert (up.status.ranks[0].node, up.status.ranks[0].provider) == ("node-a", "acme")
                kube.lose_node("node-a")
                await asyncio.sleep(0.3)
                assert (await plane.store.get(run)).status.ready == 1, "unknown is no verdict"
                kube.advance(60)
                await plane.until(run, lambda d: d.status.ranks[0].attempt == 1)
                again = await plane.until_ready(run, 1)
                assert (again.status.ranks[0].node, again.status.ranks[0].restarts) == ("node-b", 0)
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def test_deleting_a_run_leaves_nothing(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(SLEEP, (2, 2, 2), secrets={"TOKEN": "hush"})
            await plane.until_ready(run, 2)
            await plane.end(run, Wanted.DELETE)

            async def gone() -> bool:
                try:
                    await plane.store.get(run)
                except DeploymentNotFound:
                    return True
                return False

            while not await gone():
                await asyncio.sleep(0.05)
            await plane.happens(lambda: not any(kube.objects(kind, NAMESPACE) for kind in OURS))

    asyncio.run(story())


def test_secrets_reach_the_rank_and_no_manifest(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh('echo "got $TOKEN and $PLAIN"'), secrets={"TOKEN": "hush"}, env={"PLAIN": "$x"})
            await plane.settled(run)
            assert "got hush and $x" in await plane.log(run, 0)
            assert "hush" not in str([pod["spec"] for pod in plane.pods(run)])

    asyncio.run(story())


def test_two_runs_do_not_touch_each_other(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            one = await plane.deploy(SLEEP, name="one")
            two = await plane.deploy(sh("exit 4"), name="two")
            await plane.until_ready(one, 1)
            assert (await plane.settled(two)).status.phase == "failed"
            assert (await plane.store.get(one)).status.phase == "ready"
            await plane.end(one)
            assert (await plane.settled(one)).status.phase == "cancelled"

    asyncio.run(story())


def test_results_are_there_after_the_end(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh('printf "r$RANK" >"$BASILICA_RESULT_FILE"'), (2, 2, 2))
            done = await plane.settled(run)
            assert await plane.runtime.results(run_of(done)) == {0: b"r0", 1: b"r1"}

    asyncio.run(story())


def test_results_that_are_too_large_together_are_told_of(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            run = await plane.deploy(sh('head -c 400000 /dev/zero >"$BASILICA_RESULT_FILE"'), (2, 2, 2))
            done = await plane.settled(run)

            async def refused() -> bool:
                try:
                    return not await plane.runtime.results(run_of(done))
                except DistributedError as error:
                    return "have 800000 bytes" in str(error)

            async with asyncio.timeout(30):
                while not await refused():  # while the rendezvous is there, it has them all
                    await asyncio.sleep(0.05)
            with pytest.raises(DistributedError, match="can be kept"):
                await plane.runtime.results(run_of(done))

    asyncio.run(story())


def test_the_last_report_of_a_rank_is_passed_on(kube: KubeServer) -> None:
    async def story() -> None:
        async with control_plane(kube) as plane:
            script = "import basilica, time; basilica.report(step=3, loss=0.5); time.sleep(1000)"
            run = await plane.deploy(Exec(("python", "-c", script)))
            deployment = await plane.until_ready(run, 1)
            only_reads = KubernetesRuntime(KubeApi(kube.url), SETTINGS)  # as the API does, which drives no run
            await only_reads.start(lambda _: None)
            for runtime in (plane.runtime, only_reads):
                async with asyncio.timeout(20):
                    await runtime.next_report(run_of(deployment), 0.0)
                report = (await runtime.reports(run_of(deployment)))[0]
                assert (report.step, report.values) == (3, {"loss": 0.5})
            await only_reads.close()
            await plane.end(run)
            await plane.settled(run)

    asyncio.run(story())


def test_ranks_on_several_nodes_go_when_every_one_reaches_every_other() -> None:
    async def story() -> None:
        nodes = [NodeSpec(f"node-{n}", capacity={"cpu": "1"}) for n in range(3)]
        with KubeServer(nodes=nodes) as kube:
            async with control_plane(kube) as plane:
                run = await plane.deploy(SLEEP, (3, 3, 3), resources=Resources(cpu=0.7))
                up = await plane.until_ready(run, 3)
                assert len({rank.node for rank in up.status.ranks}) == 3
                assert up.status.mesh is not None
                assert up.status.mesh.ready
                assert "MeshReady" in await plane.events(run)
                assert await plane.log(run, 2) == ("up",), "a gate that opens soon is not worth a line"
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())


def test_the_bench_probe_measures_the_link_between_the_ranks_nodes() -> None:
    async def story() -> None:
        with KubeServer(nodes=[NodeSpec("node-0"), NodeSpec("node-1")]) as kube:
            async with control_plane(kube) as plane:
                run = await plane.deploy(SLEEP, (2, 2, 2), bench=BenchOnStart())
                seen = await plane.until(
                    run, lambda d: d.status.bench is not None and d.status.bench.phase.terminal, 90
                )
                assert seen.status.bench is not None
                assert seen.status.bench.phase == "Succeeded", seen.status.bench
                assert seen.status.bench.on_worker_nodes
                assert seen.status.bench.message == "measured within node-0: no network is between pods of one node"
                assert seen.status.bench.result is not None
                assert (seen.status.bench.result.busbw_gbps_p50 or 0) > 0
                await plane.end(run)
                await plane.settled(run)

    asyncio.run(story())
