"""What is particular to the local executor: whom it outlives, what it survives, and what replicas find."""

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from basilica.core.errors import BasilicaError
from basilica.executors import LocalProcessExecutor, gather_logs
from basilica.executors.local.gang import CHANGES, Gang, State
from basilica.executors.protocol import CANCELLED, FAILED, RUNNING, SUCCEEDED, ReplicaHandle
from basilica.machine.layout import Key, Layout
from basilica.machine.places import start_of
from basilica.machine.strays import with_environment
from basilica.runtimes.local.records import read_record
from basilica.testing.executor_contract import SECONDS, until

ROOT = Path(__file__).parents[2]
WAIT = "basilica.testing.replicas:wait"
OURS = "tests.executors.replicas"


def pid_of(directory: Path, rank: int = 0) -> int:
    """Of a replica that waits at the gate."""
    path = directory / f"pid-{rank}"
    until(path.exists)
    return int(path.read_text())


def supervisor_of(handle: ReplicaHandle) -> int:
    layout = Layout(Path(handle.metadata["directory"]))
    record = read_record(layout.record(Key(handle.metadata["job_name"], handle.rank, 0)))
    assert record is not None
    return record.claim.pid


def kill_supervisor(handle: ReplicaHandle) -> None:
    pid = supervisor_of(handle)
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid))


def warden_of(handle: ReplicaHandle) -> int:
    gang = Gang(Path(handle.metadata["directory"]), handle.metadata["job_name"])
    pid = gang._warden()
    assert pid is not None
    return pid


def is_gone(pid: int) -> bool:
    return start_of(pid) is None


def script(text: str, directory: Path) -> "subprocess.Popen[str]":
    """A program that launches a waiting replica, prints a word, and does what `text` says."""
    begin = (
        "import os, signal, sys, time\n"
        "from basilica.executors import LocalProcessExecutor\n"
        f"directory = {str(directory)!r}\n"
        "def launch(**options):\n"
        "    executor = LocalProcessExecutor(state_dir=directory + '/state', grace_seconds=2, **options)\n"
        f"    handles = executor.launch_replicas(1, {WAIT!r}, {{'directory': directory}})\n"
        "    return executor, handles\n"
    )
    return subprocess.Popen([sys.executable, "-c", begin + text], stdout=subprocess.PIPE, text=True, cwd=ROOT)


# ---- whom it outlives --------------------------------------------------------------------------------------------


def test_nothing_outlives_the_block(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        (handle,) = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})
        pid = pid_of(tmp_path)
        warden = warden_of(handle)
    assert is_gone(pid)
    assert is_gone(warden)
    assert executor.poll(handle) == CANCELLED


def test_a_closed_executor_launches_nothing_and_may_be_closed_again(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(state_dir=tmp_path / "state")
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="is closed"):
        executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})


def test_nothing_outlives_a_script_that_forgot_to_close(tmp_path: Path) -> None:
    with script("kept = launch()\nopen(directory + '/launched', 'w')\n", tmp_path) as process:
        assert process.wait(SECONDS) == 0
    if (tmp_path / "pid-0").exists():  # it may have been stopped before it came so far
        assert is_gone(pid_of(tmp_path))
    assert (tmp_path / "launched").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_process_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    with script("kept = launch()\ntime.sleep(100)\n", tmp_path) as process:
        pid = pid_of(tmp_path)
        process.send_signal(number)
        process.wait(SECONDS)
    until(lambda: is_gone(pid))


def test_nothing_outlives_a_process_that_is_killed_while_it_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_OF_TEST", str(tmp_path))
    for step in range(10):
        with script("kept = launch()\ntime.sleep(100)\n", tmp_path) as process:
            time.sleep(0.15 + 0.04 * step)
            process.kill()
        until(lambda: not with_environment({f"STATE_OF_TEST={tmp_path}".encode()}))


def test_what_is_detached_goes_on_and_is_found_again(tmp_path: Path) -> None:
    text = "import pickle\n_, handles = launch(detach=True)\nsys.stdout.write(pickle.dumps(handles).hex())\n"
    with script(text, tmp_path) as process:
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0
    handles: list[ReplicaHandle] = pickle.loads(bytes.fromhex(said))
    pid = pid_of(tmp_path)
    executor = LocalProcessExecutor(detach=True)
    assert executor.poll(handles[0]) == RUNNING
    assert not is_gone(pid)
    (tmp_path / "gate").touch()
    (result,) = executor.collect(handles, timeout=SECONDS)
    assert result["result"] == "rank 0 was here"
    executor.close()


def test_a_forked_child_that_ends_stops_nothing(tmp_path: Path) -> None:
    text = (
        "executor, handles = launch()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"  # with all that happens at an exit
        "os.waitpid(child, 0)\n"
        "open(directory + '/gate', 'w').close()\n"
        "print(executor.collect(handles, timeout=60)[0]['status'])\n"
    )
    with script(text, tmp_path) as process:
        said, _ = process.communicate(timeout=SECONDS)
    assert said.strip() == SUCCEEDED


def test_a_stubborn_replica_and_its_children_are_killed_after_the_grace(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=0.3) as executor:
        handles = executor.launch_replicas(1, f"{OURS}:stubborn", {"directory": str(tmp_path)})
        pid = pid_of(tmp_path)
        child = int((tmp_path / "child").read_text())
        executor.cancel(handles[0])
        assert executor.collect(handles, timeout=SECONDS)[0]["status"] == CANCELLED
        assert is_gone(pid)
        assert is_gone(child)


# ---- what it survives --------------------------------------------------------------------------------------------


def test_replicas_go_on_without_their_warden(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        handles = executor.launch_replicas(2, WAIT, {"directory": str(tmp_path)})
        pid_of(tmp_path, 0), pid_of(tmp_path, 1)
        os.kill(warden_of(handles[0]), signal.SIGKILL)
        assert executor.poll(handles[0]) == RUNNING
        executor.cancel(handles[1])
        assert executor.collect(handles[1:], timeout=SECONDS)[0]["status"] == CANCELLED

        def open_gate(handle: ReplicaHandle, status: str) -> None:
            (tmp_path / "gate").touch()

        results = executor.collect(handles, timeout=SECONDS, on_change=open_gate)
        assert [result["status"] for result in results] == [SUCCEEDED, CANCELLED]


def test_a_replica_whose_supervisor_is_killed(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        handles = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})
        pid = pid_of(tmp_path)
        kill_supervisor(handles[0])
        assert executor.poll(handles[0]) == RUNNING  # it does run
        os.kill(pid, signal.SIGKILL)
        (result,) = executor.collect(handles, timeout=SECONDS)
        assert (result["status"], result["exit_code"]) == (FAILED, 1)
        assert "nobody knows how it ended" in (result["error"] or "")


def test_a_replica_without_a_supervisor_can_be_cancelled(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        handles = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})
        pid = pid_of(tmp_path)
        kill_supervisor(handles[0])
        executor.cancel(handles[0])
        assert executor.collect(handles, timeout=SECONDS)[0]["status"] == CANCELLED
        until(lambda: is_gone(pid))


def test_everybody_is_killed_at_once(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        handles = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})
        pid = pid_of(tmp_path)
        for victim in (warden_of(handles[0]), supervisor_of(handles[0]), pid):
            os.kill(victim, signal.SIGKILL)
        (result,) = executor.collect(handles, timeout=SECONDS)
        assert result["status"] == FAILED
        assert "nobody knows how it ended" in (result["error"] or "")


def test_a_replica_that_is_left_quite_alone_runs_on_and_can_be_cancelled(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        handles = executor.launch_replicas(2, WAIT, {"directory": str(tmp_path)})
        pids = [pid_of(tmp_path, rank) for rank in (0, 1)]
        for victim in (warden_of(handles[0]), *(supervisor_of(handle) for handle in handles)):
            os.kill(victim, signal.SIGKILL)
            until(lambda victim=victim: is_gone(victim))  # type: ignore[misc]
        assert [executor.poll(handle) for handle in handles] == [RUNNING, RUNNING]
        executor.cancel(handles[0])
        (tmp_path / "gate").touch()
        results = executor.collect(handles, timeout=SECONDS)
        assert [result["status"] for result in results] == [CANCELLED, FAILED]  # how the second ended nobody saw
        assert [is_gone(pid) for pid in pids] == [True, True]


def test_a_warden_killed_at_any_moment_of_a_launch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_OF_TEST", str(tmp_path))  # by which replicas are found, whoever started them
    delay = 0.0
    popen = subprocess.Popen

    def doomed(*given: Any, **options: Any) -> Any:
        process = popen(*given, **options)

        def kill() -> None:
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the warden's own session

        killer = threading.Thread(target=kill)
        killer.start()
        killers.append(killer)
        return process

    rmtree = shutil.rmtree

    def slowly(directory: Path, **options: Any) -> None:
        """What says that a replica was cancelled goes first, and a supervisor that comes late has time to come."""
        for path in [*directory.rglob("*.record"), *directory.rglob("*.stop")]:
            path.unlink()
        time.sleep(0.2)
        rmtree(directory, **options)

    monkeypatch.setattr("basilica.executors.local.executor.subprocess.Popen", doomed)
    monkeypatch.setattr("basilica.executors.local.executor.shutil.rmtree", slowly)
    killers: list[threading.Thread] = []
    launched = 0
    delays = [*(0.02 * step for step in range(15)), 3.0]
    for delay in delays:  # noqa: B007  `doomed` reads it
        with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=0.2) as executor:
            try:
                handles = executor.launch_replicas(2, WAIT, {"directory": str(tmp_path)})
                launched += 1
            except BasilicaError as error:
                assert "could not launch the replicas" in str(error)  # noqa: PT017  it may or may not come so far
                handles = []
            killers[-1].join()
        assert {executor.poll(handle) for handle in handles} <= {CANCELLED, FAILED}
        until(lambda: not with_environment({f"STATE_OF_TEST={tmp_path}".encode()}))
    assert 0 < launched < len(delays)


# ---- who failed first --------------------------------------------------------------------------------------------


def test_the_rank_that_failed_first_is_named(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        handles = executor.launch_replicas(3, f"{OURS}:fail_in_turn", {"directory": str(tmp_path)})
        results = executor.collect(handles, timeout=SECONDS)
    assert [result["exit_code"] for result in results] == [10, 11, 12]
    assert results[2]["error"] == "exited with code 12; it failed first"
    assert results[0]["error"] == "exited with code 10; rank 2 failed first"


def test_gangs_that_are_collected_together_do_not_blame_each_other(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        failing = executor.launch_replicas(1, "basilica.testing.replicas:break_down", {"culprit": 0})
        fine = executor.launch_replicas(2, "basilica.testing.replicas:tell", {})
        killed = executor.launch_replicas(1, "basilica.testing.replicas:be_killed", {"culprit": 0})
        results = executor.collect([*failing, *fine, *killed], timeout=SECONDS)
    assert [result["status"] for result in results] == [FAILED, SUCCEEDED, SUCCEEDED, FAILED]
    assert not any("first" in (result["error"] or "") for result in results)
    assert len({result["job_name"] for result in results}) == 3


# ---- what replicas find ------------------------------------------------------------------------------------------


def test_replicas_run_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("from tests.executors.replicas import where\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARKER", "seen")
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        (result,) = executor.collect(executor.launch_replicas(1, "only_here:where", {}), timeout=SECONDS)
    assert result["result"] == {"directory": str(tmp_path), "marker": "seen", "python": sys.executable}


def test_long_arguments_travel_by_file(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        arguments = {"text": "x" * 300_000, "numbers": [float("inf")] * 7}
        (result,) = executor.collect(executor.launch_replicas(1, f"{OURS}:length", arguments), timeout=SECONDS)
    assert result["result"] == 300_007


def test_an_argument_that_cannot_travel_is_refused_by_name(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        with pytest.raises(ValueError, match=r"'text' \(lock\) cannot travel"):
            executor.launch_replicas(1, f"{OURS}:length", {"text": threading.Lock(), "numbers": []})
        assert list((tmp_path / "state").iterdir()) == []


def test_a_checkpoint_is_written_before_a_cancelled_replica_ends(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        handles = executor.launch_replicas(1, f"{OURS}:checkpointing", {"directory": str(tmp_path)})
        pid_of(tmp_path)
        executor.cancel(handles[0])
        assert executor.collect(handles, timeout=SECONDS)[0]["status"] == CANCELLED
    assert (tmp_path / "checkpoint").read_text() == "saved"


def test_a_cancelled_replica_that_finishes_its_work_has_succeeded(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        handles = executor.launch_replicas(1, f"{OURS}:finishing", {"directory": str(tmp_path)})
        pid_of(tmp_path)
        executor.cancel(handles[0])
        (result,) = executor.collect(handles, timeout=SECONDS)
        assert (result["status"], result["result"]) == (SUCCEEDED, "finished")


def test_a_time_limit_says_so(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        handles = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)}, timeout=0.5)
        (result,) = executor.collect(handles, timeout=SECONDS)
    assert result["error"] == "stopped, since it had not ended within 0.5 s"
    assert result["exit_code"] == 143


# ---- how it waits ------------------------------------------------------------------------------------------------


def test_it_works_where_an_event_loop_runs(tmp_path: Path) -> None:
    async def notebook() -> str:
        with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
            handles = executor.launch_replicas(1, "basilica.testing.replicas:tell", {})
            return executor.collect(handles, timeout=SECONDS)[0]["status"]

    assert asyncio.run(notebook()) == SUCCEEDED


def test_collect_is_woken_and_does_not_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    state = Gang.state

    def counted(self: Gang, rank: int) -> State:
        looks.append(rank)
        return state(self, rank)

    monkeypatch.setattr(Gang, "state", counted)
    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        handles = executor.launch_replicas(2, WAIT, {"directory": str(tmp_path)})
        pid_of(tmp_path, 0), pid_of(tmp_path, 1)
        looks.clear()
        executor.collect(handles, timeout=1.0)
        assert len(looks) <= 6  # once each at the beginning and the end, and once more for news that came late
        (tmp_path / "gate").touch()
        executor.collect(handles, timeout=SECONDS)
        executor.close()


def test_old_gangs_are_forgotten_and_live_ones_kept(tmp_path: Path) -> None:
    long_ago = time.time() - 8 * 86400
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        old = executor.launch_replicas(1, "basilica.testing.replicas:tell", {})
        executor.collect(old, timeout=SECONDS)
        live = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})
        pid_of(tmp_path)
        until(lambda: not Gang(Path(old[0].metadata["directory"]), old[0].metadata["job_name"]).is_supervised)
        for handle in (*old, *live):
            os.utime(Path(handle.metadata["directory"]) / CHANGES, (long_ago, long_ago))
        new = executor.launch_replicas(1, "basilica.testing.replicas:tell", {})
        assert executor.poll(live[0]) == RUNNING
        assert not Path(old[0].metadata["directory"]).exists()
        (result,) = executor.collect(old, timeout=SECONDS)
        assert result["status"] == CANCELLED
        assert "nothing is known" in (result["error"] or "")
        assert "rank 0" in gather_logs(executor, live)
        executor.collect(new, timeout=SECONDS)


# ---- replicas that put something else in the place of their files ---------------------------------------------------


def test_fifos_in_the_place_of_files_stop_nobody_and_are_named(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path, grace_seconds=1) as executor:
        handles = executor.launch_replicas(2, f"{OURS}:put_fifos", {})
        results = executor.collect(handles, timeout=SECONDS)
        assert [result["exit_code"] for result in results] == [0, 1]
        for result in results:
            assert "is a FIFO, not a regular file" in (result["error"] or "")
        for handle in handles:
            assert "0.log is a FIFO, not a regular file" in executor.stream_logs(handle)


def test_a_supervisor_that_is_stopped_does_not_keep_a_replica_from_being_cancelled(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(state_dir=tmp_path, grace_seconds=0.5)
    [handle] = executor.launch_replicas(1, WAIT, {"directory": str(tmp_path)})
    pid = pid_of(tmp_path)
    os.kill(supervisor_of(handle), signal.SIGSTOP)
    executor.close()
    until(lambda: is_gone(pid))
    assert executor.poll(handle) == CANCELLED
