"""The probe of a run: it measures beside the ranks, outlives the control plane, is never there twice, and ends with
the run."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from basilica.core.actions import Probe
from basilica.core.phase import BenchPhase
from basilica.core.seen import SeenBench, Sight
from basilica.core.spec import BenchOnStart
from basilica.core.world import WorldSize
from basilica.machine.strays import with_environment
from basilica.ports import Run
from basilica.runtimes.local.bench import HOME
from basilica.runtimes.local.hosts import Host
from basilica.runtimes.local.records import Record, read_record
from tests.runtime_local.machine import SLEEP, Machine
from tests.support import probes

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes measure little, and without torch."""
    monkeypatch.setenv("PYTHONPATH", probes.path_with(probes.QUICK, tmp_path / "quick")["PYTHONPATH"])


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that have started stay until they are ended."""
    monkeypatch.setenv("PYTHONPATH", probes.path_with(probes.ENDLESS, tmp_path / "endless")["PYTHONPATH"])


@pytest.fixture
def let_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Probes that have started measure once this was called."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("PYTHONPATH", probes.path_with(probes.waiting_for(gate), tmp_path / "gated")["PYTHONPATH"])
    return gate.touch


def benched(machine: Machine, name: str = "train") -> Run:
    return machine.run(SLEEP, name=name, bench=BenchOnStart())


async def seen(machine: Machine, run: Run) -> SeenBench | None:
    return (await machine.runtime.observe(run)).bench


async def until(machine: Machine, run: Run, *phases: BenchPhase) -> SeenBench:
    """Look whenever the runtime calls, until the probe is in one of the phases."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            machine.woken.clear()
            bench = await seen(machine, run)
            if bench is not None and bench.phase in phases:
                return bench
            await machine.woken.wait()


async def begin(machine: Machine, run: Run) -> None:
    """Have the probe started, and wait until both of its ends are there."""
    await machine.runtime.probe(run, Probe("preferred"))
    await ends(machine, run)


async def ends(machine: Machine, run: Run) -> list[int]:
    """The pids of the pair and its two ends, once all three are there."""
    async with asyncio.timeout(PATIENCE_S):
        while len(pids := processes(machine, run)) != 3:
            await asyncio.sleep(0.01)
    return pids


def processes(machine: Machine, run: Run) -> list[int]:
    return with_environment({f"{HOME}={machine.layout.bench(run.instance)}".encode()})


def record_of(machine: Machine, run: Run) -> Record:
    record = read_record(f"{machine.layout.bench(run.instance)}/1.record")
    assert record is not None
    return record


def told(pid: int, kind: str) -> list[bytes]:
    """Its `environ` or its `cmdline`."""
    return Path(f"/proc/{pid}/{kind}").read_bytes().split(b"\0")


async def test_the_loopback_is_measured_beside_the_ranks(machine: Machine) -> None:
    async with machine.control_plane(node="here"):
        run = benched(machine)
        await machine.launch(run)
        await machine.until_running(run)
        assert await seen(machine, run) is None
        await machine.runtime.probe(run, Probe("strict"))
        running = await seen(machine, run)
        assert running is not None
        assert running.phase is BenchPhase.RUNNING
        done = await until(machine, run, *(phase for phase in BenchPhase if phase.terminal))
        assert (done.phase, done.on_worker_nodes) == (BenchPhase.SUCCEEDED, True)
        assert done.message == "measured over the loopback of here: no network is between ranks of one machine"
        found = done.result
        assert found is not None
        assert (found.probe_node_a, found.probe_node_b) == ("here", "here")
        assert found.method == "gloo"  # torch is installed where the tests run
        assert found.busbw_gbps_p50 is not None
        assert found.busbw_gbps_p50 > 0
        assert found.size_bytes_swept == tuple(point.size_bytes for point in found.sweep)
        rank = await machine.seen(run)
        assert rank is not None
        assert rank.sight is Sight.RUNNING
        assert processes(machine, run) == []
        await machine.runtime.probe(run, Probe("strict"))  # it was there: done
        assert await seen(machine, run) == done
        await machine.stop(run)
        await machine.until_ended(run)
    async with machine.control_plane(node="here"):
        assert await seen(machine, run) == done


@pytest.mark.usefixtures("quick")
async def test_between_two_hosts_it_is_their_link(machine: Machine) -> None:
    async with machine.control_plane(hosts=(Host("north"), Host("south"))):
        run = machine.run(SLEEP, world=WorldSize(2, 2, 2), bench=BenchOnStart("strict"))
        await machine.runtime.probe(run, Probe("strict"))
        done = await until(machine, run, BenchPhase.SUCCEEDED)
        assert done.message == "measured between north and south"
        assert done.result is not None
        assert (done.result.probe_node_a, done.result.probe_node_b) == ("north", "south")
        alone = machine.run(SLEEP, name="alone", world=WorldSize(1, 1, 2), bench=BenchOnStart())
        await machine.runtime.probe(alone, Probe("preferred"))  # it has no rank on the other host
        done = await until(machine, alone, BenchPhase.SUCCEEDED)
        assert done.message.startswith("measured over the loopback of north")


async def test_a_run_without_a_bench_has_none(machine: Machine) -> None:
    async with machine.control_plane():
        assert await seen(machine, machine.run(SLEEP)) is None


@pytest.mark.usefixtures("endless")
async def test_it_steps_back_behind_the_ranks_and_takes_no_gpu(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await begin(machine, run)
        for pid in processes(machine, run):
            assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
        async with asyncio.timeout(PATIENCE_S):  # one in the middle of its exec is not there yet
            while len(ends := [pid for pid in processes(machine, run) if b"--rank" in told(pid, "cmdline")]) != 2:
                await asyncio.sleep(0.01)
        assert [b"CUDA_VISIBLE_DEVICES=" in told(pid, "environ") for pid in ends] == [True, True]
        await machine.runtime.end_probe(run)
        await until(machine, run, BenchPhase.SKIPPED)


@pytest.mark.usefixtures("endless")
async def test_to_end_it_ends_both_and_leaves_nothing(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await begin(machine, run)
        await machine.runtime.end_probe(run)
        await machine.runtime.end_probe(run)
        done = await until(machine, run, BenchPhase.SKIPPED)
        assert done.message == "the probe was taken down before it was done"
        assert processes(machine, run) == []
        await machine.runtime.probe(run, Probe("preferred"))
        assert await seen(machine, run) == done  # one that was ended does not come back


@pytest.mark.usefixtures("endless")
async def test_it_is_ended_even_if_the_wish_cannot_be_written_down(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await begin(machine, run)
        (machine.layout.bench(run.instance) / "1.stop").mkdir()  # as good as a full disk
        await machine.runtime.end_probe(run)
        await until(machine, run, BenchPhase.SKIPPED)
        assert processes(machine, run) == []


async def test_one_that_is_ended_before_it_began_never_begins(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await machine.runtime.end_probe(run)
        await machine.runtime.probe(run, Probe("preferred"))
        bench = await seen(machine, run)
        assert bench is not None
        assert bench.phase is BenchPhase.SKIPPED
        assert processes(machine, run) == []


@pytest.mark.usefixtures("endless")
async def test_it_does_not_outlive_the_removal_of_its_run(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await begin(machine, run)
        await machine.runtime.end_probe(run)
        await machine.runtime.remove(run)
        assert processes(machine, run) == []
        assert not machine.layout.run(run.instance).exists()


@pytest.mark.usefixtures("endless")
async def test_an_end_that_is_killed_fails_the_probe_and_not_the_run(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await machine.launch(run)
        await machine.until_running(run)
        await begin(machine, run)
        one_end = next(pid for pid in processes(machine, run) if b"--peer" in told(pid, "cmdline"))
        os.kill(one_end, signal.SIGKILL)
        done = await until(machine, run, BenchPhase.FAILED)
        assert done.message == "probe 1 was ended by SIGKILL"
        rank = await machine.seen(run)
        assert rank is not None
        assert rank.sight is Sight.RUNNING
        await machine.stop(run)
        await machine.until_ended(run)


@pytest.mark.usefixtures("endless")
async def test_a_probe_whose_supervisor_is_killed_is_cleared_away(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await begin(machine, run)
        os.kill(record_of(machine, run).claim.pid, signal.SIGKILL)
        done = await until(machine, run, BenchPhase.FAILED)
        assert "its supervisor was killed" in done.message
        assert processes(machine, run) == []
        assert await seen(machine, run) == done


async def test_a_python_that_is_not_there_fails_the_probe(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        runtime._benches._python = "/no/such/python"
        run = benched(machine)
        await machine.runtime.probe(run, Probe("preferred"))
        done = await until(machine, run, BenchPhase.FAILED)
        assert done.message == "no such program: /no/such/python"


async def test_a_probe_that_cannot_even_be_started_fails_and_does_not_raise(machine: Machine) -> None:
    async with machine.control_plane():
        run = benched(machine)
        machine.layout.run(run.instance).mkdir(parents=True)
        machine.layout.bench(run.instance).write_text("in the way")
        await machine.runtime.probe(run, Probe("preferred"))
        bench = await seen(machine, run)
        assert bench is not None
        assert bench.phase is BenchPhase.FAILED
        assert "bench is a regular file, not a directory" in bench.message


@pytest.mark.parametrize("damage", ["", "{", '{"format": 99}'])
async def test_a_result_that_cannot_be_read_is_a_failure(machine: Machine, damage: str) -> None:
    async with machine.control_plane():
        run = benched(machine)
        await machine.runtime.end_probe(run)
        (machine.layout.bench(run.instance) / "result.json").write_text(damage)
        bench = await seen(machine, run)
        assert bench is not None
        assert bench.phase is BenchPhase.FAILED


# ---- the control plane is killed -----------------------------------------------------------------------------------

CONTROL_PLANE = """
import asyncio, sys
from pathlib import Path
from basilica.core.actions import Probe
from tests.runtime_local.machine import Machine
from tests.runtime_local.test_bench import begin, benched

async def main() -> None:
    machine = Machine(Path(sys.argv[1]))
    machine.mark = sys.argv[2]
    async with machine.control_plane():
        run = benched(machine)
        if "launch" in sys.argv:
            await machine.launch(run)
            await machine.until_running(run)
        await begin(machine, run)
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def kill_a_control_plane(machine: Machine, *arguments: str) -> None:
    """One that has started a probe, killed while that is under way."""
    command = [sys.executable, "-c", CONTROL_PLANE, str(machine.state_dir), machine.mark, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()


async def test_it_outlives_the_control_plane_and_its_result_is_found(
    machine: Machine, let_measure: Callable[[], None]
) -> None:
    run = benched(machine)
    kill_a_control_plane(machine, "launch")
    before = sorted(processes(machine, run))
    async with machine.control_plane():
        bench = await seen(machine, run)
        assert bench is not None
        assert bench.phase is BenchPhase.RUNNING
        await machine.runtime.probe(run, Probe("preferred"))
        assert sorted(processes(machine, run)) == before  # no second pair
        let_measure()
        done = await until(machine, run, BenchPhase.SUCCEEDED)
        assert done.result is not None
        await machine.stop(run)
        await machine.until_ended(run)


async def test_a_result_that_came_while_nobody_looked_is_found(
    machine: Machine, let_measure: Callable[[], None]
) -> None:
    run = benched(machine)
    kill_a_control_plane(machine, "launch")
    let_measure()
    async with asyncio.timeout(PATIENCE_S):
        while record_of(machine, run).exit is None:
            await asyncio.sleep(0.05)
    async with machine.control_plane():
        bench = await seen(machine, run)
        assert bench is not None
        assert bench.phase is BenchPhase.SUCCEEDED
        await machine.stop(run)
        await machine.until_ended(run)


@pytest.mark.usefixtures("endless")
async def test_one_that_an_earlier_control_plane_started_can_be_ended(machine: Machine) -> None:
    run = benched(machine)
    kill_a_control_plane(machine, "launch")
    async with machine.control_plane():
        await machine.runtime.end_probe(run)
        await until(machine, run, BenchPhase.SKIPPED)
        assert processes(machine, run) == []
        await machine.stop(run)
        await machine.until_ended(run)


@pytest.mark.usefixtures("endless")
async def test_one_that_outlived_its_run_is_ended_at_the_next_start(machine: Machine) -> None:
    """The end of the run was saved, and the control plane died before it could end the probe."""
    run = benched(machine)
    kill_a_control_plane(machine)
    async with machine.control_plane():
        await until(machine, run, BenchPhase.SKIPPED)
        assert processes(machine, run) == []


@pytest.mark.usefixtures("endless")
async def test_two_control_planes_one_after_the_other_start_one_pair(machine: Machine) -> None:
    """The second may ask before the first one's supervisor has claimed: the claim decides."""
    run = benched(machine)
    async with machine.control_plane() as runtime:
        request = runtime._benches._request(run.instance, (runtime._hosts.of_rank(0),) * 2)
        machine.layout.bench(run.instance).mkdir(parents=True)
        for _ in range(2):
            await runtime._fork_server.start_ranks(request)
        async with asyncio.timeout(PATIENCE_S):
            while await seen(machine, run) is None:
                await asyncio.sleep(0.01)
        pids = await ends(machine, run)
        assert len(pids) == 3
        await runtime.end_probe(run)
        await until(machine, run, BenchPhase.SKIPPED)
        assert processes(machine, run) == []
