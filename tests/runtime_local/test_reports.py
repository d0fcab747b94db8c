"""What ranks report, and what happens when they fall silent: real processes, real files, no server in between."""

import asyncio
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from basilica.core import stalls
from basilica.core.reports import Report, SeriesQuery
from basilica.core.seen import Stalled
from basilica.core.spec import Exec
from basilica.ports import Run
from basilica.reports.files import read_last, report_files
from basilica.runtimes.local import stacks
from tests.runtime_local.machine import PATIENCE_S, Machine

ALL = SeriesQuery()


def rank(script: str) -> Exec:
    """A rank that can import the package. `steps` reports one every few milliseconds, `gate` waits until it is open."""
    prelude = """
import os, signal, subprocess, sys, time, basilica
def steps(first, last, **more):
    for step in range(first, last):
        basilica.report(step=step, loss=1 / (step + 1), **more)
        time.sleep(0.01)
def gate(name):
    path = os.path.join(os.environ["BASILICA_CHECKPOINT_DIR"], name)
    print("at", name, flush=True)
    while not os.path.exists(path):
        time.sleep(0.005)
"""
    return Exec((sys.executable, "-c", prelude + script))


def open_gate(machine: Machine, run: Run, name: str) -> None:
    (machine.layout.checkpoints(run.instance) / name).touch()


@pytest.fixture
def quick_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of silence is enough."""
    monkeypatch.setattr(stalls, "FLOOR", 0.5)


async def until_reported(machine: Machine, run: Run, done: Callable[[Report], bool], rank: int = 0) -> Report:
    """Look whenever the runtime says that there is something new."""
    seen = 0.0
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await machine.runtime.next_report(run, seen)
            reports = await machine.runtime.reports(run)
            if rank in reports and done(reports[rank]):
                return reports[rank]
            seen = max(report.at for report in reports.values())


async def until_stalled(machine: Machine, run: Run, at: str = "gate (") -> Stalled:
    """A machine that is busy may hold a rank up elsewhere for a moment: that is not the stall that is waited for."""
    seen = await machine.until(run, lambda s: s.stalled is not None and s.stalled.where.startswith(at))
    assert seen.stalled is not None
    return seen.stalled


# ---- what is reported ------------------------------------------------------------------------------------------------


async def test_last_values_and_series_of_each_rank(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(rank("steps(0, 20, rank=int(os.environ['RANK']))"))
        await machine.launch(run, 0, 1)
        for number in (0, 1):
            assert (await machine.until_ended(run, number)).exit_code == 0
        reports = await runtime.reports(run)
        assert {n: (r.step, r.values) for n, r in reports.items()} == {
            n: (19, {"loss": 0.05, "rank": float(n)}) for n in (0, 1)
        }
        found = await runtime.series(run, ALL)
        assert [(s.rank, s.worker, s.metric) for s in found] == [
            (0, 0, "loss"),
            (0, 0, "rank"),
            (1, 0, "loss"),
            (1, 0, "rank"),
        ]
        assert [(p.step, p.mean) for p in found[0].points] == [(n, 1 / (n + 1)) for n in range(20)]
        one = await runtime.series(run, SeriesQuery(ranks=frozenset({1}), metrics=frozenset({"loss"}), points=4))
        assert [(p.step, p.count, p.max) for p in one[0].points] == [
            (4, 5, 1.0),
            (9, 5, 1 / 6),
            (14, 5, 1 / 11),
            (19, 5, 1 / 16),
        ]
        late = await runtime.series(run, SeriesQuery(since=found[0].points[10].at, metrics=frozenset({"loss"})))
        assert late[0].points[0].step == 10


async def test_a_run_that_reports_nothing_has_no_reports_and_no_files(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(Exec(("true",)))
        await machine.outcome(run)
        assert await runtime.reports(run) == {}
        assert await runtime.series(run, ALL) == []
        assert not machine.layout.reports(run.instance).exists()


async def test_reports_survive_the_control_plane_and_go_on_without_it(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(rank("steps(0, 10); gate('on'); steps(10, 20); gate('end'); steps(20, 30)"))
        await machine.launch(run)
        await until_reported(machine, run, lambda r: r.step == 9)
    open_gate(machine, run, "on")
    async with asyncio.timeout(PATIENCE_S):  # nobody is there to be told: look at the file itself
        (file,) = report_files(machine.layout, run.instance)
        while (told := read_last(file)) is None or told.last.step != 19:
            await asyncio.sleep(0.01)
    async with machine.control_plane() as runtime:
        assert (await runtime.reports(run))[0].step == 19
        open_gate(machine, run, "end")
        await until_reported(machine, run, lambda r: r.step == 29)
        assert (await machine.until_ended(run)).exit_code == 0
        (loss,) = await runtime.series(run, ALL)
        assert [p.step for p in loss.points] == list(range(30))


async def test_several_attempts_are_one_series(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(rank("a = int(os.environ['BASILICA_ATTEMPT']); steps(10 * a, 10 * a + 5)"))
        await machine.outcome(run)
        await machine.launch(run, attempt=2)
        await machine.until_ended(run, attempt=2)
        (loss,) = await runtime.series(run, ALL)
        assert [p.step for p in loss.points] == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
        assert (await runtime.reports(run))[0].step == 24


async def test_workers_that_a_launcher_started_are_told_apart(machine: Machine) -> None:
    worker = "import os, basilica; [basilica.report(step=s, loss=float(os.environ['LOCAL_RANK'])) for s in range(5)]"
    script = f"""
places = [dict(os.environ, LOCAL_RANK=str(n)) for n in range(3)]
workers = [subprocess.Popen([sys.executable, "-c", {worker!r}], env=place) for place in places]
sys.exit(max(w.wait() for w in workers))
"""
    async with machine.control_plane() as runtime:
        run = machine.run(rank(script))
        assert (await machine.outcome(run)).exit_code == 0
        found = await runtime.series(run, ALL)
        assert [(s.worker, {p.mean for p in s.points}) for s in found] == [(n, {float(n)}) for n in range(3)]
        assert (await runtime.reports(run))[0].values == {"loss": 0.0}  # the lowest worker speaks for the rank


async def test_nan_is_told(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(rank("basilica.report(step=1, loss=1.0); basilica.report(step=2, loss=float('nan'))"))
        await machine.outcome(run)
        assert math.isnan((await runtime.reports(run))[0].values["loss"])
        (loss,) = await runtime.series(run, SeriesQuery(points=2))
        assert math.isnan(loss.points[-1].mean)


async def test_hostile_files_in_its_place_are_no_reports(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(Exec(("sleep", "1000")))
        await machine.launch(run)
        await machine.until_running(run)
        place = machine.layout.reports(run.instance)
        place.mkdir()
        (place / "0.1.1").write_bytes(os.urandom(10_000))
        (place / "0.1.2").write_bytes(b"")
        (place / "0.1.3").mkdir()
        (place / "0.1.4").symlink_to("/nonexistent")
        (place / "x.y.z").touch()
        (place / ("0." + "9" * 50 + ".1")).touch()
        bell = os.open(machine.layout.wake, os.O_WRONLY)
        for line in ("reporting 1", "reporting x", "reporting", "reporting 99999999999999999999"):
            os.write(bell, f"{run.instance} 0 1 {line}\n".encode())
        os.close(bell)
        assert await runtime.reports(run) == {}
        assert await runtime.series(run, ALL) == []
        await machine.stop(run, grace=0.1)
        await machine.until_ended(run)


# ---- who falls silent ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_to_judge")
async def test_a_silent_rank_is_stalled_with_its_stack_and_comes_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    script = """
import threading
threading.Thread(target=lambda: gate('never'), daemon=True).start()
def all_reduce():
    gate('on')
steps(0, 20)
all_reduce()
steps(20, 200)
"""
    async with machine.control_plane():
        run = machine.run(rank(script))
        await machine.launch(run)
        stalled = await until_stalled(machine, run)
        assert 0.005 < stalled.usual_step_seconds < 0.5
        reported = (await machine.runtime.reports(run))[0].at
        assert stalled.since == pytest.approx(reported, abs=0.05)  # read from two clocks
        assert stalled.where.startswith("gate (<string>:")
        main, _, others = stalled.stack.partition("\nThread\n")
        assert main.startswith("MainThread\n  gate (")
        assert "all_reduce" in main
        assert "gate (" in others
        open_gate(machine, run, "on")
        await machine.until(run, lambda s: s.stalled is None)
        assert (await machine.until_ended(run)).exit_code == 0


@pytest.mark.usefixtures("quick_to_judge")
@pytest.mark.skipif(stacks.find_py_spy() is None, reason="py-spy is not installed")
async def test_py_spy_tells_where_a_rank_is_that_answers_no_signal(machine: Machine) -> None:
    script = "steps(0, 20); signal.signal(signal.SIGRTMIN + 8, signal.SIG_IGN); gate('on'); steps(20, 100)"
    async with machine.control_plane():
        run = machine.run(rank(script))
        await machine.launch(run)
        stalled = await until_stalled(machine, run)
        assert stalled.where.startswith("gate (<string>:")
        assert stalled.stack.startswith("MainThread\n  gate (")
        open_gate(machine, run, "on")
        assert (await machine.until_ended(run)).exit_code == 0


@pytest.mark.usefixtures("quick_to_judge")
async def test_a_rank_that_would_die_of_the_signal_is_not_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    script = "steps(0, 20); import faulthandler; faulthandler.unregister(signal.SIGRTMIN + 8); gate('on')"
    async with machine.control_plane():
        run = machine.run(rank(script))
        await machine.launch(run)
        stalled = await until_stalled(machine, run, "")
        assert (stalled.where, stalled.stack) == ("", "")
        open_gate(machine, run, "on")
        assert (await machine.until_ended(run)).exit_code == 0


@pytest.mark.usefixtures("quick_to_judge")
async def test_a_stopped_process_is_stalled_and_asking_it_does_not_hang(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.2)
    async with machine.control_plane():
        run = machine.run(rank("steps(0, 10**9)"))
        await machine.launch(run)
        await until_reported(machine, run, lambda r: r.step is not None and r.step > 20)
        (file,) = report_files(machine.layout, run.instance)
        os.kill(file.pid, signal.SIGSTOP)
        stalled = await until_stalled(machine, run, "")
        assert stalled.where == ""
        os.kill(file.pid, signal.SIGCONT)
        await machine.until(run, lambda s: s.stalled is None)
        await machine.stop(run, grace=0.1)
        await machine.until_ended(run)


@pytest.mark.usefixtures("quick_to_judge")
async def test_the_worker_that_is_stuck_is_the_one_that_is_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    script = """
if sys.argv[1:]:
    def stuck():
        gate('on')
    steps(0, 20)
    stuck()
else:
    source = open('/proc/self/cmdline').read().split(chr(0))[2]
    sys.exit(subprocess.call([sys.executable, '-c', source, 'worker']))
"""
    async with machine.control_plane():
        run = machine.run(rank(script))
        await machine.launch(run)
        stalled = await until_stalled(machine, run)
        assert "stuck (" in stalled.stack
        open_gate(machine, run, "on")
        assert (await machine.until_ended(run)).exit_code == 0


@pytest.mark.usefixtures("quick_to_judge")
async def test_a_worker_that_has_ended_is_not_stalled(machine: Machine) -> None:
    script = """
if sys.argv[1:]:
    steps(0, 20)
else:
    source = open('/proc/self/cmdline').read().split(chr(0))[2]
    subprocess.call([sys.executable, '-c', source, 'worker'])
    basilica.report(step=1)
    gate('end')
"""
    async with machine.control_plane() as runtime:
        run = machine.run(rank(script))
        await machine.launch(run)
        await machine.until_printed(run, "at end")
        async with asyncio.timeout(PATIENCE_S):
            while runtime._reports._watched:  # until the timer has found that it is gone
                await asyncio.sleep(0.02)
        seen = await machine.seen(run)
        assert seen is not None
        assert seen.stalled is None
        open_gate(machine, run, "end")
        assert (await machine.until_ended(run)).exit_code == 0


@pytest.mark.usefixtures("quick_to_judge")
async def test_a_stall_is_known_at_once_to_the_next_control_plane(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(rank("steps(0, 20); gate('on'); steps(20, 200)"))
        await machine.launch(run)
        before = await until_stalled(machine, run)
    async with machine.control_plane():
        seen = await machine.seen(run)  # the first look
        assert seen is not None
        assert seen.stalled is not None
        assert seen.stalled.since == before.since
        again = await machine.until(run, lambda s: s.stalled is not None and s.stalled.stack != "")
        assert again.stalled is not None
        assert again.stalled.where == before.where
        open_gate(machine, run, "on")
        await machine.until(run, lambda s: s.stalled is None)
        assert (await machine.until_ended(run)).exit_code == 0


@pytest.mark.usefixtures("quick_to_judge")
async def test_a_rank_that_begins_to_report_while_the_server_is_away_is_watched(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(rank("gate('begin'); steps(0, 20); gate('on')"))
        await machine.launch(run)
        await machine.until_printed(run, "at begin")
    open_gate(machine, run, "begin")
    async with machine.control_plane():
        await until_stalled(machine, run)
        open_gate(machine, run, "on")
        assert (await machine.until_ended(run)).exit_code == 0


@pytest.mark.usefixtures("quick_to_judge")
async def test_ranks_that_report_nothing_or_too_little_cost_no_timer(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(rank("basilica.report(step=1); basilica.report(step=2); gate('end')"))
        await machine.launch(run)
        await until_reported(machine, run, lambda r: r.step == 2)
        assert runtime._reports._watched == {}
        open_gate(machine, run, "end")
        assert (await machine.until_ended(run)).exit_code == 0


async def test_a_rank_that_reports_costs_one_timer_and_its_end_takes_it_away(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(rank("steps(0, 20); gate('end')"))
        await machine.launch(run)
        await machine.until_printed(run, "at end")
        (processes,) = runtime._reports._watched.values()
        assert [p.timer is not None for p in processes.values()] == [True]
        open_gate(machine, run, "end")
        await machine.until_ended(run)
        assert runtime._reports._watched == {}


async def test_waiting_for_a_report_ends_with_the_next_one_and_leaves_nothing(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(
            rank("gate('one'); basilica.report(step=1); gate('two'); basilica.report(step=2); gate('end')")
        )
        await machine.launch(run)
        await machine.until_printed(run, "at one")
        waiting = asyncio.create_task(runtime.next_report(run, 0.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        open_gate(machine, run, "one")
        await asyncio.wait_for(waiting, PATIENCE_S)
        first = (await runtime.reports(run))[0]
        assert first.step == 1
        waiting = asyncio.create_task(runtime.next_report(run, first.at))
        open_gate(machine, run, "two")
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert (await runtime.reports(run))[0].step == 2
        assert (runtime._reports._readers._events, runtime._files._callbacks) == ({}, {})
        open_gate(machine, run, "end")
        assert (await machine.until_ended(run)).exit_code == 0


# ---- stacks ----------------------------------------------------------------------------------------------------------


def test_what_py_spy_prints() -> None:
    text = """Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 9 (idle): "Thread-1 (work)"
    wait (threading.py:320)
Thread 7 (active): "MainThread"
    all_reduce (/lib/torch/distributed.py:12)
    <module> (/a dir (1)/train.py:40)
"""
    taken = stacks.render(stacks.parse_py_spy(text))
    assert taken.where == "all_reduce (distributed.py:12)"
    assert taken.text == (
        "MainThread\n  all_reduce (/lib/torch/distributed.py:12)\n  <module> (/a dir (1)/train.py:40)\n"
        "Thread-1 (work)\n  wait (threading.py:320)"
    )


@pytest.mark.parametrize("text", ["", "garbage", "Thread", "\x00\xff", "Error: no permission"])
def test_what_is_no_stack(text: str) -> None:
    assert stacks.render(stacks.parse_py_spy(text)) == stacks.NOTHING
    assert stacks.render(stacks.parse_dump(text)) == stacks.NOTHING


def test_a_program_in_place_of_py_spy_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\nexec sleep 1000\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(stacks, "PY_SPY_SECONDS", 0.1)
    assert shutil.which("py-spy") == str(fake)
    assert asyncio.run(stacks._spy(os.getpid())) == []


def test_nobody_is_asked_that_does_not_live_or_has_no_file(tmp_path: Path) -> None:
    assert stacks.ask_fault_handler(os.getpid(), 1, str(tmp_path / "none")) == []
    (tmp_path / "there").touch()
    assert stacks.ask_fault_handler(os.getpid(), 1, str(tmp_path / "there")) == []  # another process's pid by now
    assert not stacks.catches(2**22 + 1, 42)
