"""Stopping: a signal, some grace, then the end of everything that the rank ever started."""

import asyncio
import errno
import os
import signal
import time

import pytest

from basilica.core.seen import Sight
from basilica.machine import files
from basilica.ports import Run
from basilica.runtimes.local import cgroups
from tests.runtime_local.machine import SLEEP, Machine, python, sh, until_gone

IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"
ENDS_IN_ITS_OWN_TIME = (
    "import os, signal, sys, time\n"
    "def end(*_): time.sleep(0.3); os.write(1, b'saved\\n'); sys.exit(7)\n"
    "signal.signal(15, end); print('ready', flush=True); time.sleep(1000)"
)


async def test_a_rank_uses_its_grace_and_keeps_its_own_exit_code(machine: Machine) -> None:
    async with machine.control_plane():
        run = await _ready(machine, machine.run(python(ENDS_IN_ITS_OWN_TIME)))
        await machine.stop(run, grace=10)
        ended = await machine.until_ended(run)
    assert (ended.exit_code, ended.reason, ended.stopped) == (7, "Cancelled", True)
    assert ended.log_tail == ("ready", "saved")


async def test_a_rank_that_obeys_the_signal_says_which_it_was(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(SLEEP)
        await machine.launch(run)
        await machine.until_running(run)
        before = time.monotonic()
        await machine.stop(run, grace=30)
        ended = await machine.until_ended(run)
    assert (ended.exit_code, ended.signal, ended.reason) == (143, "SIGTERM", "Cancelled")
    assert time.monotonic() - before < 5  # the grace is not waited out


async def test_a_rank_that_ignores_the_signal_is_killed_after_its_grace(machine: Machine) -> None:
    async with machine.control_plane():
        run = await _ready(machine, machine.run(python(IGNORES_SIGTERM)))
        before = time.monotonic()
        await machine.stop(run, grace=0.3)
        ended = await machine.until_ended(run)
    assert time.monotonic() - before >= 0.3
    assert (ended.exit_code, ended.signal, ended.reason, ended.stopped) == (137, "SIGKILL", "Cancelled", True)


async def test_a_second_stop_may_shorten_the_grace_and_never_lengthens_it(machine: Machine) -> None:
    async with machine.control_plane():
        run = await _ready(machine, machine.run(python(IGNORES_SIGTERM)))
        before = time.monotonic()
        for grace in (1000, 0.2, 1000):
            await machine.stop(run, grace=grace)
        await machine.until_ended(run)
    assert time.monotonic() - before < 10


async def test_repeated_stops_are_one_signal_to_the_rank(machine: Machine) -> None:
    told = (
        "import os, signal, time\n"
        "signal.signal(15, lambda *_: os.write(1, b'told\\n'))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1000)"
    )
    async with machine.control_plane():
        run = await _ready(machine, machine.run(python(told)))
        await machine.stop(run, grace=1000)
        await machine.until_printed(run, "told")
        for _ in range(3):
            await machine.stop(run, grace=1000)
        os.kill(machine.record(run).claim.pid, signal.SIGTERM)
        await machine.stop(run, grace=0.2)
        ended = await machine.until_ended(run)
    assert ended.log_tail == ("ready", "told")


async def test_a_shell_that_dies_first_does_not_take_the_grace_from_its_child(machine: Machine) -> None:
    child = f'{python("").argv[0]} -I -S -c "$1" & wait'
    async with machine.control_plane():
        run = await _ready(machine, machine.run(sh(child, ENDS_IN_ITS_OWN_TIME)))
        await machine.stop(run, grace=10)
        ended = await machine.until_ended(run)
        assert machine.ranks() == []
    assert ended.log_tail == ("ready", "saved")
    assert (ended.exit_code, ended.signal) == (143, "SIGTERM")  # the shell's own


async def test_daemons_and_sessions_of_their_own_do_not_escape(machine: Machine) -> None:
    daemon = (
        "import os, signal, sys, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "for _ in range(2):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        os.setsid(); os.write(1, b'daemon\\n'); time.sleep(1000)\n"
        "print('ready', flush=True); time.sleep(1000)"
    )
    async with machine.control_plane():
        run = machine.run(python(daemon))
        await machine.launch(run)
        lines = await machine.until_printed(run, "ready")
        while lines.count("daemon") < 2:
            lines = (await machine.runtime.tail(run, 0, None)).lines  # type: ignore[assignment]
            await asyncio.sleep(0.01)
        assert machine.ranks_become(3)
        await machine.stop(run, grace=0.1)
        await machine.until_ended(run)
        assert machine.ranks() == []


async def test_a_fork_bomb_in_small_is_caught_without_control_groups(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "find", lambda _: cgroups.Cgroups())  # as on a machine that offers none
    restless = (
        "import os, signal, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.002)\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os.setsid()"
    )
    async with machine.control_plane():
        run = machine.run(sh(f'{python("").argv[0]} -I -S -c "$1"; sleep 1000', restless))
        await machine.launch(run)
        await machine.until_printed(run, "ready")
        await machine.stop(run, grace=0.05)
        await machine.until_ended(run)
        assert machine.ranks() == []


async def test_an_attempt_stopped_before_its_launch_never_starts(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("echo it ran"))
        await machine.stop(run)
        buried = await machine.until_ended(run)
        await machine.launch(run)
        after = await machine.seen(run)
    assert (buried.exit_code, buried.reason, buried.stopped) == (None, "Cancelled", True)
    assert after is not None
    assert after.ended == buried
    async with machine.control_plane():
        await machine.launch(run)
        later = await machine.seen(run)
        assert (await machine.runtime.tail(run, 0, None)).lines == ()
    assert later is not None
    assert later.ended == buried


async def test_a_stop_right_after_the_launch_wins_or_stops(machine: Machine) -> None:
    async with machine.control_plane():
        runs = [machine.run(SLEEP, name=f"run-{n}") for n in range(8)]
        await asyncio.gather(*(machine.launch(run, 0, 1) for run in runs), *(machine.stop(run, 0, 1) for run in runs))
        for run in runs:
            for rank in (0, 1):
                ended = await machine.until_ended(run, rank)
                assert (ended.stopped, ended.reason) == (True, "Cancelled")


async def test_stopping_what_has_ended_changes_nothing(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("exit 3"))
        before = await machine.outcome(run)
        await machine.stop(run)
        seen = await machine.seen(run)
    assert seen is not None
    assert seen.ended == before
    assert not before.stopped


async def test_a_full_disk_does_not_keep_a_rank_from_being_stopped(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with machine.control_plane():
        run = await _ready(machine, machine.run(python(IGNORES_SIGTERM), grace_seconds=0.1))
        monkeypatch.setattr(files, "write", no_space)
        await machine.stop(run, grace=1000)
        ended = await machine.until_ended(run)
    assert (ended.stopped, ended.exit_code) == (True, 137)


async def test_the_supervisor_is_gone_when_the_rank_is(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("exit 0"))
        await machine.outcome(run)
        await until_gone(machine.record(run).claim.pid)
        seen = await machine.seen(run)
    assert seen is not None
    assert seen.sight is Sight.ENDED


async def _ready(machine: Machine, run: Run) -> Run:
    await machine.launch(run)
    await machine.until_printed(run, "ready")
    return run
