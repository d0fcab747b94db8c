"""Ranks, their output and their exit codes outlive the control plane, the fork server and the supervisor."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from basilica.core.errors import RuntimeUnavailable
from basilica.core.seen import Sight
from basilica.machine.proc import boot
from basilica.ports import Run
from basilica.runtimes.local.rendezvous import LINGER_S
from basilica.runtimes.local.runtime import LocalRuntime
from tests.runtime_local.machine import SLEEP, Machine, python, sh, until_gone

ROOT = Path(__file__).parents[2]
# Each rank ends when its gate is opened, with the code that is written into it.
GATED = (
    'gate="$BASILICA_CHECKPOINT_DIR/$RANK"; mkfifo "$gate"; echo up $RANK; read code < "$gate"; echo bye; exit $code'
)


@contextmanager
def killed_control_plane(machine: Machine, name: str, script: str, ranks: int) -> Iterator[None]:
    """A control plane in a process of its own that has started ranks; killed without warning on the way out."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.runtime_local.control_plane",
            str(machine.state_dir),
            machine.mark,
            name,
            script,
            str(ranks),
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
        yield
        process.kill()
        process.wait()


def open_gate(machine: Machine, instance: str, rank: int, code: int) -> None:
    gate = machine.layout.checkpoints(instance) / str(rank)
    deadline = time.monotonic() + 10
    while not gate.is_fifo():
        assert time.monotonic() < deadline, "the rank did not come as far as its gate"
        time.sleep(0.001)
    gate.write_text(f"{code}\n")


def kill_supervisor_and_rank(machine: Machine, run: Run) -> None:
    record = machine.record(run)
    assert record.running is not None
    for pid in (record.claim.pid, record.running.pid):
        os.kill(pid, signal.SIGKILL)


async def test_a_killed_control_plane_loses_no_rank_no_output_and_no_exit_code(machine: Machine) -> None:
    run = machine.run(sh(GATED), name="gated")
    with killed_control_plane(machine, "gated", GATED, 3):
        pass
    open_gate(machine, run.instance, 0, 5)  # ends while nobody looks
    await until_gone(machine.record(run, 0).claim.pid)
    async with machine.control_plane():
        assert (await machine.until_ended(run, 0)).exit_code == 5
        for rank in (1, 2):
            assert (await machine.until_running(run, rank)).started_at is not None
        open_gate(machine, run.instance, 1, 0)
        open_gate(machine, run.instance, 2, 137)
        ends = [await machine.until_ended(run, rank) for rank in (0, 1, 2)]
        assert [(end.exit_code, end.reason) for end in ends] == [(5, "Error"), (0, "Completed"), (137, "Error")]
        for rank in (0, 1, 2):
            assert (await machine.runtime.tail(run, rank, None)).lines == (f"up {rank}", "bye")
        await machine.launch(run, 0, 1, 2)  # all are there: nothing starts
        assert machine.ranks() == []


async def test_an_adopted_rank_can_be_stopped(machine: Machine) -> None:
    run = machine.run(SLEEP, name="sleeper")
    with killed_control_plane(machine, "sleeper", "exec sleep 1000", 1):
        pass
    async with machine.control_plane():
        await machine.stop(run)
        ended = await machine.until_ended(run)
    assert (ended.exit_code, ended.reason) == (143, "Cancelled")


async def test_a_stop_that_nobody_lived_to_see_is_obeyed(machine: Machine) -> None:
    run = machine.run(SLEEP, name="sleeper")
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_running(run)
        await machine.stop(run)
    async with machine.control_plane():
        assert (await machine.until_ended(run)).stopped


async def test_a_fork_server_that_is_killed_is_replaced_and_no_rank_notices(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(SLEEP)
        await machine.launch(run, 0)
        before = await machine.until_running(run, 0)
        fork_server = runtime._fork_server.pid
        assert fork_server is not None
        os.kill(fork_server, signal.SIGKILL)
        await machine.launch(run, 1)
        await machine.until_running(run, 1)
        assert await machine.seen(run, 0) == before
        assert runtime._fork_server.pid != fork_server
        await machine.stop(run, 0, 1)
        for rank in (0, 1):
            await machine.until_ended(run, rank)


async def test_the_fork_server_goes_with_the_control_plane_and_the_rendezvous_with_the_last_rank(
    machine: Machine,
) -> None:
    run = machine.run(sh(GATED), name="gated")
    with killed_control_plane(machine, "gated", GATED, 1):
        pass
    supervisor = machine.record(run).claim.pid
    rendezvous = machine.rendezvous_pids()
    assert len(rendezvous) == 2
    others = [pid for pid in machine.supervisors() if pid not in (supervisor, *rendezvous, *machine.ranks())]
    for pid in others:
        await until_gone(pid)
    await asyncio.sleep(1.5 * LINGER_S)  # a rank is left: it must not leave
    assert machine.rendezvous_pids() == rendezvous
    open_gate(machine, run.instance, 0, 0)
    await until_gone(supervisor)
    for pid in rendezvous:
        await until_gone(pid)


async def test_a_rank_whose_supervisor_is_killed_goes_on_and_its_end_is_noticed(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("setsid sleep 1000 & " + GATED))
        await machine.launch(run)
        await machine.until_printed(run, "up 0")
        supervisor = machine.record(run).claim.pid
        os.kill(supervisor, signal.SIGKILL)
        await until_gone(supervisor)
        await asyncio.sleep(0.2)  # time enough to do something rash
        seen = await machine.seen(run)
        assert seen is not None
        assert seen.sight is Sight.RUNNING
        assert machine.ranks_become(2)
        open_gate(machine, run.instance, 0, 3)
        ended = await machine.until_ended(run)
        assert machine.ranks() == []  # what it had left behind was found without the supervisor
    assert (ended.exit_code, ended.reason, ended.by_platform) == (None, "Unknown", False)
    assert ended.log_tail == ("up 0", "bye")
    assert machine.record(run).exit is not None


@pytest.mark.parametrize("grace", [10.0, 0.2])
async def test_a_rank_whose_supervisor_is_killed_can_still_be_stopped(machine: Machine, grace: float) -> None:
    handler = "signal.SIG_IGN" if grace < 1 else "signal.SIG_DFL"
    script = f"import signal, time; signal.signal(15, {handler}); print('ready', flush=True); time.sleep(1000)"
    run = machine.run(python(script))
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_printed(run, "ready")
    supervisor = machine.record(run).claim.pid
    os.kill(supervisor, signal.SIGKILL)
    await until_gone(supervisor)
    async with machine.control_plane():
        await machine.until_running(run)
        await machine.stop(run, grace=grace)
        ended = await machine.until_ended(run)
        assert machine.ranks() == []
    assert (ended.exit_code, ended.reason, ended.stopped) == (None, "Cancelled", True)


async def test_ranks_of_another_server_are_left_alone_whatever_their_names(machine: Machine, tmp_path: Path) -> None:
    other = Machine(tmp_path / "other")
    run = machine.run(SLEEP)
    async with other.control_plane():
        await other.launch(run)
        before = await other.until_running(run)
        async with machine.control_plane():
            await machine.launch(run)
            await machine.until_running(run)
            kill_supervisor_and_rank(machine, run)
            await machine.until_ended(run)
        assert await other.seen(run) == before
        await other.stop(run)
        assert (await other.until_ended(run)).exit_code == 143


async def test_supervisor_and_rank_killed_at_once_is_an_end_that_nobody_knows(machine: Machine) -> None:
    run = machine.run(SLEEP)
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_running(run)
        kill_supervisor_and_rank(machine, run)
        ended = await machine.until_ended(run)
    assert (ended.exit_code, ended.reason, ended.stopped) == (None, "Unknown", False)


async def test_a_supervisor_whose_state_directory_was_deleted_ends_with_its_rank(machine: Machine) -> None:
    """Nobody will ever look for the record that it would try to write."""
    run = machine.run(sh("while [ -e $BASILICA_CHECKPOINT_DIR ]; do sleep 0.02; done; exit 3"))
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_running(run)
        supervisor = machine.record(run).claim.pid
        (machine.state_dir / "runs").rename(machine.state_dir / "deleted")
        await until_gone(supervisor)
    shutil.rmtree(machine.state_dir / "deleted")


async def test_a_reboot_is_the_platforms_doing(machine: Machine) -> None:
    run = machine.run(SLEEP)
    _write_record(machine, {"what": "claim", "boot": "an earlier boot", **_process(os.getpid())})
    async with machine.control_plane():
        ended = await machine.until_ended(run)
    assert (ended.exit_code, ended.reason, ended.by_platform) == (None, "Unknown", True)
    async with machine.control_plane():
        seen = await machine.seen(run)
    assert seen is not None
    assert seen.ended is not None
    assert seen.ended.finished_at == ended.finished_at  # the first finding was written down


async def test_another_process_with_the_same_pid_is_not_the_rank(machine: Machine) -> None:
    run = machine.run(SLEEP)
    mine = {"what": "claim", "boot": boot(), **_process(os.getpid())}
    _write_record(machine, {**mine, "start": 1})
    async with machine.control_plane():
        ended = await machine.until_ended(run)
    assert (ended.exit_code, ended.reason, ended.by_platform) == (None, "Unknown", False)


async def test_a_record_that_a_power_cut_left_empty_is_an_end_and_never_a_second_start(machine: Machine) -> None:
    run = machine.run(SLEEP)
    rank = machine.layout.rank(run.instance, 0)
    rank.mkdir(parents=True)
    (rank / "1.record").touch()
    async with machine.control_plane():
        ended = await machine.until_ended(run)
        await machine.launch(run)
        assert machine.ranks() == []
    assert (ended.reason, ended.by_platform) == ("Unknown", True)


async def test_a_record_of_another_version_hides_only_its_own_run(machine: Machine) -> None:
    strange, other = machine.run(sh("exit 0"), name="strange"), machine.run(sh("exit 0"), name="other")
    _write_record(machine, {"what": "claim", "format": 99}, instance="strange-x")
    async with machine.control_plane() as runtime:
        ended = await machine.until_ended(strange)
        assert (ended.exit_code, ended.reason) == (None, "Unknown")
        assert "another version" in dict((await runtime.observe(strange)).warnings)["RecordDamaged"]
        assert (await machine.outcome(other)).exit_code == 0


async def test_adoption_reads_what_still_runs_and_leaves_the_rest_for_later(machine: Machine) -> None:
    async with machine.control_plane():
        old, live = machine.run(sh("exit 0"), name="old"), machine.run(SLEEP, name="live")
        await machine.outcome(old)
        await machine.launch(live)
        await machine.until_running(live)
    async with machine.control_plane() as runtime:
        assert list(runtime._table) == ["live-x"]
        assert (await machine.until_ended(old)).exit_code == 0
        await machine.stop(live)
        await machine.until_ended(live)


async def test_thirty_two_ranks_end_and_all_are_noticed(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("exit $RANK"))
        await machine.launch(run, *range(32))
        ends = await asyncio.gather(*(machine.until_ended(run, rank) for rank in range(32)))
    assert [end.exit_code for end in ends] == list(range(32))


def _process(pid: int) -> dict[str, object]:
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return {"pid": pid, "start": start, "claimed_at": 1.0, "gpus": [], "cgroups": [], "tombstone": False}


def _write_record(machine: Machine, line: dict[str, object], instance: str = "train-x") -> None:
    rank = machine.layout.rank(instance, 0)
    rank.mkdir(parents=True, exist_ok=True)
    (rank / "1.record").write_text(json.dumps({"format": 1, **line}) + "\n")


async def test_a_runtime_that_could_not_start_says_why_and_can_be_closed(machine: Machine) -> None:
    runtime = LocalRuntime(machine.state_dir, python="/no/such/python")
    with pytest.raises(RuntimeUnavailable, match=r"cannot start the fork server: .*No such file"):
        await runtime.start(lambda _: None)
    await runtime.close()
    with pytest.raises(RuntimeUnavailable, match="is not running"):
        await runtime.observe(machine.run(SLEEP))
