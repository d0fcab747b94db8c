"""Whatever a rank puts in the place of a file, nobody waits for it, nothing leaks, and its end is known."""

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from basilica.core.reports import SeriesQuery
from basilica.core.seen import Ended, Sight
from basilica.core.world import WorldSize
from basilica.machine import files
from basilica.machine.files import UnusableFile
from basilica.machine.layout import Key
from basilica.machine.proc import read_file
from basilica.ports import Run
from basilica.reports.wakeups import Wakeup
from basilica.runtimes.local import stops
from basilica.runtimes.local.logs import read_tail
from basilica.runtimes.local.task import StartReply, StartRequest
from tests.runtime_local.machine import SLEEP, Machine, python, sh, until_gone

SECRET = "nobody-may-read-this"
WITHIN_S = 90.0  # for dozens of processes on a busy machine; what hangs takes for ever

# Where they are, seen from the directory of the run. `{rank}` is a directory, `{pid}` the rank's process.
FILES = {
    "log": "rank-0/1.log",
    "record": "rank-0/1.record",
    "traceback": "rank-0/1.error",
    "stop": "rank-0/1.stop",
    "next log": "rank-0/2.log",
    "result": "results/0.json",
    "report": "reports/0.1.{pid}",
    "stacks": "reports/0.1.{pid}.stack",
    "ports": "ports.json",
    "rank": "rank-0",
    "results": "results",
    "reports": "reports",
    "checkpoints": "checkpoints",
    "bench": "bench",
    "bench-record": "bench/1.record",
    "run": "",
    "wake": "../../wake",
    "complaints": "../../supervisor.log",
}

IMPOSTORS = {
    "fifo": "os.mkfifo(path)",
    "zero": "os.symlink('/dev/zero', path)",
    "secret": "os.symlink(secret, path)",
    "dangling": "os.symlink('nothing', path)",
    "loop": "os.symlink(path, path)",
    "socket": "os.chdir(os.path.dirname(path)); socket.socket(socket.AF_UNIX).bind(os.path.basename(path))",
    "directory": "os.makedirs(path + '/below')",
    "device": "os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))",
    "sparse": "os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 42)",
}
if os.geteuid() != 0:
    del IMPOSTORS["device"]

SCRIPT = """
import os, socket, stat
if os.environ["BASILICA_ATTEMPT"] == "1":
    print("first words", flush=True)
    secret = {secret!r}
    run = os.path.dirname(os.environ["BASILICA_CHECKPOINT_DIR"])
    path = os.path.normpath(os.path.join(run, {path!r}.format(pid=os.getpid())))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.rename(path, path + ".gone")
    {impostor}
    try:
        bell = os.open(os.environ["BASILICA_REPORT_BELL"], os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        os.write(bell, f"half a line\\n{instance} 0 1 reporting {{os.getpid()}}\\nhalf".encode())
    except OSError:  # another rank has put something else there
        pass
    os._exit(7)
"""


def hostile(machine: Machine, name: str, kind: str, secret: Path) -> Run:
    instance = f"{name.replace(' ', '-')}-{kind}"
    script = SCRIPT.format(secret=str(secret), path=FILES[name], impostor=IMPOSTORS[kind], instance=f"{instance}-x")
    return machine.run(python(script), name=instance)


@pytest.mark.parametrize("kind", IMPOSTORS)
async def test_every_file_that_a_rank_can_reach_may_be_anything(machine: Machine, kind: str, tmp_path: Path) -> None:
    """It ends with its own code, also for the next control plane; it can be read, started again and removed; and
    others start and finish beside it."""
    secret = tmp_path / "secret"
    secret.write_text(f'"{SECRET}"\n')
    runs = {name: hostile(machine, name, kind, secret) for name in FILES}
    async with asyncio.timeout(WITHIN_S):
        async with machine.control_plane() as runtime:
            for run in runs.values():
                await machine.launch(run)
            for name, run in runs.items():
                assert (await until_ended(machine, run)).exit_code == 7, name
            await check_readable(machine, runs, kind)
            bystander = machine.run(sh("echo fine"), name="bystander")
            assert (await machine.outcome(bystander)).log_tail == ("fine",)
        async with machine.control_plane() as runtime:
            for name, run in runs.items():
                seen = await machine.seen(run)
                assert seen is not None, name
                assert seen.ended is not None, name
                assert seen.ended.exit_code == 7, name
                await machine.launch(run, attempt=2)
            for name, run in runs.items():
                assert (await until_ended(machine, run, attempt=2)).exit_code == 0, name
                await runtime.remove(run)
            assert machine.layout.instances() == ["bystander-x"]
    assert secret.read_text() == f'"{SECRET}"\n'
    assert stat.S_ISCHR(os.stat("/dev/zero").st_mode)


async def until_ended(machine: Machine, run: Run, attempt: int = 1) -> Ended:
    async with asyncio.timeout(WITHIN_S):
        while True:
            machine.woken.clear()
            seen = await machine.seen(run, attempt=attempt)
            if seen is not None and seen.ended is not None:
                return seen.ended
            if seen is None:  # as the controller does, for what it finds missing
                await machine.launch(run, attempt=attempt)
            await machine.woken.wait()


async def check_readable(machine: Machine, runs: dict[str, Run], kind: str) -> None:
    runtime = machine.runtime
    said: list[object] = []
    for run in runs.values():
        tail = await runtime.tail(run, 0, 100)
        said += [tail, await runtime.tail(run, 0, None)]
        async for chunk in runtime.follow(run, 0, None):
            said.append(chunk)
            if not chunk.lines:
                break
        said += [await runtime.reports(run), await runtime.series(run, SeriesQuery())]
        said.append({rank: str(result)[:100] for rank, result in (await read_results(machine, run)).items()})
        said.append(await runtime.observe(run))
    assert SECRET not in str(said)
    log = runs["log"]
    if kind != "sparse":
        (line,) = (await runtime.tail(log, 0, 100)).lines
        assert line.startswith("<basilica: this output cannot be shown: ")
        assert "rank-0/1.log is a" in line
        warnings = dict((await runtime.observe(log)).warnings)
        assert warnings["UnusableFile"].startswith("the output of rank 0 cannot be read: ")


async def read_results(machine: Machine, run: Run) -> dict[int, object]:
    """One bad file is the result of that rank; a directory that is none is the run's."""
    try:
        return dict(await machine.runtime.results(run))
    except Exception as error:  # noqa: BLE001  whatever it is, it comes at once and names the file
        return {0: error}


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory", "loop"])
async def test_a_record_that_is_replaced_while_the_rank_runs_keeps_nobody_from_stopping_it(
    machine: Machine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a crash: then all that is known of the rank are its processes."""
    monkeypatch.setattr(stops, "OVERDUE_S", 0.1)
    run = machine.run(sh("echo up; exec sleep 1000"))
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_running(run)
    path = machine.layout.record(Key(run.instance, 0, 1))
    os.rename(path, f"{path}.gone")
    exec(IMPOSTORS[kind], {"os": os, "path": path})
    async with machine.control_plane() as runtime:
        seen = await machine.seen(run)
        assert seen is not None
        assert seen.sight is Sight.UNKNOWN
        assert "1.record is a" in dict((await runtime.observe(run)).warnings)["UnusableFile"]
        await machine.stop(run, grace=0.1)
        ended = await until_ended(machine, run)
        assert ended.stopped
        await runtime.remove(run)
    assert machine.ranks() == []


async def test_a_rank_that_died_with_its_supervisor_and_whose_record_is_none_has_ended(machine: Machine) -> None:
    run = machine.run(SLEEP)
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_running(run)
        record = machine.record(run)
    assert record.running is not None
    for pid in (record.claim.pid, record.running.pid):
        os.kill(pid, signal.SIGKILL)
        await until_gone(pid)
    path = machine.layout.record(Key(run.instance, 0, 1))
    os.unlink(path)
    os.mkfifo(path)
    async with machine.control_plane() as runtime:
        ended = await until_ended(machine, run)
        assert (ended.exit_code, ended.reason) == (None, "Unknown")
        await runtime.remove(run)


async def test_a_run_whose_directory_is_removed_ends_all_the_same(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh('rm -rf "$(dirname $BASILICA_CHECKPOINT_DIR)"; exit 4'))
        await machine.launch(run)
        assert (await until_ended(machine, run)).exit_code == 4


async def test_a_log_that_the_disk_cannot_read_hides_no_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = machine.run(sh("echo words; exit 5"))
    real = os.pread

    def fails(fd: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
            raise OSError(5, os.strerror(5))
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", fails)
    async with machine.control_plane():
        ended = await machine.outcome(run)
    assert ended.exit_code == 5
    assert "1.log cannot be used: Input/output error" in ended.log_tail[0]


async def test_a_rank_that_writes_half_a_line_and_foreign_digits_to_the_wake_up_loses_nobody_elses(
    machine: Machine,
) -> None:
    """The digits are some to `isdigit` and none to `int`, and thousands of them are too many for it."""
    async with machine.control_plane():
        bad = machine.run(SLEEP, name="bad")
        await machine.launch(bad)
        await machine.until_running(bad)
        told: list[str] = []
        wakeups = machine.runtime._wakeups
        wakeups._on_wakeup = lambda found: told.append(str(found.key))
        for text in ("bad-x \u00b2 1 ended", "bad-x 0 \u00b2 ended", f"bad-x {'9' * 5000} 1 ended", "../x 0 1 ended"):
            with machine.layout.wake.open("r+b", buffering=0) as wake:
                wake.write(f"{text}\nother-x 0 1 ended\n".encode())
            async with asyncio.timeout(WITHIN_S):
                while told != ["other-x rank 0 attempt 1"]:
                    await asyncio.sleep(0)
            told.clear()
        wakeups._on_wakeup = machine.runtime._told
        await machine.stop(bad)
        await machine.until_ended(bad)


async def test_a_wake_up_that_fails_takes_no_other_with_it(machine: Machine) -> None:
    async with machine.control_plane():
        heard: list[int] = []

        def act(found: Wakeup) -> None:
            heard.append(found.key.rank)
            if found.key.rank == 0:
                raise RuntimeError("no")

        machine.runtime._wakeups._on_wakeup = act
        with machine.layout.wake.open("r+b", buffering=0) as wake:
            wake.write(b"x 0 1 ended\nx 1 1 ended\n")
        async with asyncio.timeout(WITHIN_S):
            while heard != [0, 1]:
                await asyncio.sleep(0)


# ---- a supervisor that is stopped ----------------------------------------------------------------------------------


async def test_a_stopped_supervisor_does_not_keep_its_rank_from_ending(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("trap '' TERM; sleep 1000 & wait; wait"))
        await machine.launch(run)
        await machine.until_running(run)
        os.kill(machine.record(run).claim.pid, signal.SIGSTOP)
        await machine.stop(run, grace=0.1)
        ended = await machine.until_ended(run)
        assert (ended.stopped, ended.exit_code) == (True, 137)  # it was continued, and did its work
        await runtime.remove(run)


async def test_a_supervisor_that_is_stopped_again_and_again_is_killed_and_the_end_recorded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "OVERDUE_S", 0.2)
    real = signal.pidfd_send_signal

    def without_continue(fd: int, number: int) -> None:
        if number != signal.SIGCONT:  # somebody stops it again at once
            real(fd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", without_continue)
    async with machine.control_plane() as runtime:
        run = machine.run(SLEEP)
        await machine.launch(run)
        await machine.until_running(run)
        supervising = machine.record(run).claim.pid
        os.kill(supervising, signal.SIGSTOP)
        await machine.stop(run, grace=0.1)
        ended = await until_ended(machine, run)
        assert (ended.stopped, ended.exit_code, ended.reason) == (True, None, "Cancelled")
        await until_gone(supervising)
        assert machine.record(run).exit is not None
        await runtime.remove(run)
    assert machine.ranks() == []


# ---- a shortage that passes ----------------------------------------------------------------------------------------


async def test_a_rank_that_cannot_be_executed_for_lack_of_processes_starts_when_there_are_some(
    machine: Machine,
) -> None:
    """The fork server's Python is one in which `posix_spawn` meets EAGAIN for a while."""
    async with machine.control_plane():
        run = machine.run(sh("echo late"), world=WorldSize(1, 1, 1))
        seen_notes: list[str] = []
        machine.runtime._fork_server._python = str(shortage(machine))
        await machine.runtime._fork_server._let_go()
        await machine.launch(run)
        async with asyncio.timeout(WITHIN_S):
            while not any("Resource temporarily unavailable" in note for note in seen_notes):
                machine.woken.clear()
                seen = await machine.seen(run)
                if seen is not None and seen.ended is not None:
                    break
                seen_notes += [] if seen is None else [seen.note]
                await machine.woken.wait()
        assert any("tried again: Resource temporarily unavailable" in note for note in seen_notes)
        (machine.state_dir / "enough").touch()
        assert (await until_ended(machine, run)).log_tail == ("late",)


def shortage(machine: Machine) -> Path:
    """A Python in which `posix_spawn` finds no process free until the file `enough` is there."""
    script = machine.state_dir.parent / "python"
    code = (
        "import os, sys, errno, runpy; real = os.posix_spawn\n"
        "def spawn(*a, **k):\n"
        f"    if not os.path.exists({str(machine.state_dir / 'enough')!r}):\n"
        "        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "    return real(*a, **k)\n"
        "os.posix_spawn = spawn\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (machine.state_dir.parent / "spawn.py").write_text(code)
    program = f'#!/bin/sh\nshift 4\nexec {sys.executable} -I -S {machine.state_dir.parent}/spawn.py "$@"\n'
    script.write_text(program)
    script.chmod(0o755)
    return script


async def test_ranks_that_cannot_be_forked_wait_with_the_reason_and_start_when_they_can(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("exit 0"))
        real, tries = runtime._fork_server.start_ranks, 0

        async def short(request: StartRequest) -> StartReply:
            nonlocal tries
            tries += 1
            if tries < 3:
                return {"pids": [], "error": "cannot fork: Resource temporarily unavailable"}
            return await real(request)

        runtime._fork_server.start_ranks = short  # type: ignore[method-assign]
        await machine.launch(run)
        seen = await machine.seen(run)
        assert seen is not None
        assert seen.sight is Sight.QUEUED
        assert seen.note.endswith("cannot fork: Resource temporarily unavailable")
        assert (await until_ended(machine, run)).exit_code == 0
        assert tries == 3


# ---- bounds --------------------------------------------------------------------------------------------------------


async def test_a_log_is_read_in_bounded_chunks_that_are_the_same_lines_as_its_tail(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("seq 1 200000; printf end; exit 1"))
        for attempt in (1, 2):
            await machine.launch(run, attempt=attempt)
            await until_ended(machine, run, attempt)
        for lines in (None, 0, 1, 5, 200_000, 200_001, 200_002, 300_000, 999_999):
            whole = [*map(str, range(1, 200_001)), "end"] * 2
            wanted = tuple(whole if lines is None else whole[len(whole) - min(lines, len(whole)) :])
            assert (await runtime.tail(run, 0, lines)).lines == wanted
            cursor = None if lines is None else await runtime.tail_cursor(run, 0, lines)
            read: list[str] = []
            async for chunk in runtime.follow(run, 0, cursor):
                assert sum(map(len, chunk.lines)) <= 1 << 19
                read += chunk.lines
                if not chunk.lines:
                    break
            assert tuple(read) == wanted


async def test_readers_of_a_log_do_not_take_the_threads_that_start_runs(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        hold = asyncio.Event()
        loop = asyncio.get_running_loop()

        def busy() -> None:
            asyncio.run_coroutine_threadsafe(hold.wait(), loop).result()

        work = [
            asyncio.create_task(pool.run(busy)) for pool in (runtime._reading, runtime._unpackers) for _ in range(20)
        ]
        assert (await machine.outcome(machine.run(sh("exit 0")))).exit_code == 0
        hold.set()
        await asyncio.gather(*work)


def test_a_sparse_log_is_read_in_no_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\n")
    with log.open("r+b") as file:
        file.seek(1 << 42)
        file.write(b"\nlast\n")
    tail = read_tail(str(log), 1, ended=True)
    assert tail.lines == ("last",)


def test_the_supervisor_reads_no_fifo_and_no_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/hostname")
    for name in ("fifo", "link"):
        with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
            read_file(str(tmp_path / name))
    with pytest.raises(UnusableFile):
        files.read(str(tmp_path / "fifo"), 1)
