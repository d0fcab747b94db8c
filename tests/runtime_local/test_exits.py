"""How a rank ended is what really happened, with its evidence."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from basilica.core.spec import Exec, Resources
from basilica.runtimes.local.capabilities import Capability
from tests.runtime_local.machine import Machine, python, sh

MEMORY = 64 << 20
EAT = "b = [bytearray(1 << 20) for _ in range(4096)]"


@pytest.mark.parametrize(
    ("script", "code", "reason", "signal"),
    [
        ("pass", 0, "Completed", None),
        ("raise SystemExit(3)", 3, "Error", None),
        ("raise SystemExit(137)", 137, "Error", None),
        ("import os; os.kill(os.getpid(), 9)", 137, "SIGKILL", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", 139, "SIGSEGV", "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 15)", 143, "SIGTERM", "SIGTERM"),
    ],
)
async def test_the_exit_code_and_the_reason_tell_an_exit_from_a_signal(
    machine: Machine, script: str, code: int, reason: str, signal: str | None
) -> None:
    async with machine.control_plane():
        before = time.time()
        run = machine.run(python(script))
        ended = await machine.outcome(run)
        seen = await machine.seen(run)
    assert (ended.exit_code, ended.reason, ended.signal) == (code, reason, signal)
    assert (ended.stopped, ended.by_platform, ended.start_error) == (False, False, None)
    assert seen is not None
    assert seen.started_at is not None
    assert before <= seen.started_at <= ended.finished_at <= time.time()


async def test_the_last_lines_come_with_the_end(machine: Machine) -> None:
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(sh("seq 1 30; printf '%03000d' 7 >&2; exit 4")))
    assert ended.log_tail[:-1] == tuple(str(n) for n in range(12, 31))
    assert ended.log_tail[-1] == "0" * 2000


async def test_a_rank_that_outgrows_its_memory_is_reported_as_such(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        _needs_memory_limits(runtime.capabilities())
        ended = await machine.outcome(machine.run(python(EAT), resources=Resources(memory_bytes=MEMORY)))
    assert (ended.exit_code, ended.reason, ended.signal) == (137, "OOMKilled", "SIGKILL")


async def test_a_memory_kill_of_a_child_that_the_rank_handles_is_no_end_of_the_rank(machine: Machine) -> None:
    parent = f"import subprocess, sys; sys.exit(5 if subprocess.run([sys.executable, '-c', {EAT!r}]).returncode else 0)"
    async with machine.control_plane() as runtime:
        _needs_memory_limits(runtime.capabilities())
        program = Exec((python("").argv[0], "-c", parent))
        run = machine.run(program, resources=Resources(memory_bytes=MEMORY))
        ended = await machine.outcome(run)
        told = dict((await runtime.observe(run)).warnings)
    assert (ended.exit_code, ended.reason, ended.signal) == (5, "Error", None)
    assert told["MemoryKill"] == (
        "the kernel killed 1 process that rank 0 had started, for memory; the rank went on and exited with code 5"
    )


async def test_a_memory_kill_that_a_shell_passes_on_is_the_end_of_the_rank(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        _needs_memory_limits(runtime.capabilities())
        program = sh(f"{python('').argv[0]} -c '{EAT}'; exit $?")
        ended = await machine.outcome(machine.run(program, resources=Resources(memory_bytes=MEMORY)))
    assert (ended.exit_code, ended.reason, ended.signal) == (137, "OOMKilled", None)


async def test_a_rank_that_survives_a_memory_kill_of_its_child_has_completed(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        _needs_memory_limits(runtime.capabilities())
        program = sh(f"{python('').argv[0]} -c '{EAT}'; exit 0")
        ended = await machine.outcome(machine.run(program, resources=Resources(memory_bytes=MEMORY)))
    assert (ended.exit_code, ended.reason) == (0, "Completed")


async def test_a_limit_beyond_the_machines_memory_is_no_problem(machine: Machine) -> None:
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(sh("exit 0"), resources=Resources(memory_bytes=1 << 50, cpu=512.0)))
    assert ended.reason == "Completed"


async def test_the_cpu_limit_is_that_of_the_rank(machine: Machine) -> None:
    burn = "import time; t = time.perf_counter()\nwhile time.process_time() < 0.2: pass\nprint(time.perf_counter() - t)"
    async with machine.control_plane() as runtime:
        if not next(c for c in runtime.capabilities() if c.name == "cpu limits").available:
            pytest.skip("this machine limits no CPU time")
        ended = await machine.outcome(machine.run(python(burn), resources=Resources(cpu=0.25)))
    assert float(ended.log_tail[0]) > 0.5  # a fifth of a second of work at a quarter of a core


@pytest.mark.parametrize(
    ("program", "code", "sentence"),
    [
        (Exec(("no-such-thing-7", "x")), 127, "no such program: no-such-thing-7"),
        (Exec(("/no/such/thing",)), 127, "no such program: /no/such/thing"),
        (Exec(("/etc/hostname/x",)), 127, "no such program: /etc/hostname/x"),
        (Exec(("/etc",)), 126, "not executable: /etc"),
    ],
)
async def test_a_program_that_is_not_there_fails_with_that_sentence(
    machine: Machine, program: Exec, code: int, sentence: str
) -> None:
    async with machine.control_plane():
        run = machine.run(program)
        ended = await machine.outcome(run)
        seen = await machine.seen(run)
    assert (ended.exit_code, ended.reason, ended.start_error) == (code, "StartError", sentence)
    assert seen is not None
    assert seen.started_at is None


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        ("#!/no/such/interpreter\n", 0o755, "names in its first line is not there"),
        ("not a script", 0o755, "not a program: "),
    ],
)
async def test_a_file_that_cannot_be_executed_says_why(
    machine: Machine, tmp_path: Path, content: str, mode: int, problem: str
) -> None:
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(mode)
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(Exec((str(program),))))
    assert ended.start_error is not None
    assert problem in ended.start_error


@pytest.mark.parametrize(
    ("workdir", "sentence"),
    [("/no/such/place", "no such directory: /no/such/place"), ("/etc/hostname", "not a directory: /etc/hostname")],
)
async def test_a_directory_that_is_not_there_fails_with_that_sentence(
    machine: Machine, workdir: str, sentence: str
) -> None:
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(sh("exit 0"), workdir=workdir))
    assert (ended.exit_code, ended.start_error) == (127, sentence)


async def test_programs_are_found_on_the_ranks_own_path(machine: Machine, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "hello"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\npwd\n")
    program.chmod(0o755)
    async with machine.control_plane():
        run = machine.run(Exec(("hello",)), env={"PATH": f"/nowhere:{program.parent}"}, workdir=str(tmp_path))
        ended = await machine.outcome(run)
    assert (ended.exit_code, ended.log_tail) == (0, (str(tmp_path),))


async def test_what_a_rank_leaves_behind_ends_with_it(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("setsid sleep 1000 & sleep 1000 & exit 0"))
        ended = await machine.outcome(run)
        assert (ended.exit_code, ended.reason) == (0, "Completed")
        assert machine.ranks() == []


async def test_a_rank_starts_with_default_signals_no_stray_files_and_no_input(machine: Machine) -> None:
    script = (
        "import os, sys, signal\n"
        "print(all(signal.getsignal(s) == signal.SIG_DFL for s in (1, 2, 3, 15, 17, 29) if s != 2))\n"
        "print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), sorted(map(int, os.listdir('/proc/self/fd')))[:4])\n"
        "print(repr(sys.stdin.read()), os.getpid() == os.getsid(0) == os.getpgid(0))"
    )
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(python(script)))
    assert ended.log_tail == ("True", "0 [0, 1, 2, 3]", "'' True")  # 3 is the listing itself


async def test_sights_follow_one_another_and_each_is_announced(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("read x < $BASILICA_CHECKPOINT_DIR/gate; exit $x"))
        gate = machine.layout.checkpoints(run.instance) / "gate"
        gate.parent.mkdir(parents=True)
        os.mkfifo(gate)
        await machine.launch(run)
        running = await machine.until_running(run)
        assert (running.pod_name, running.node) == ("train-x-0", socket.gethostname())
        assert running.ended is None
        gate.write_text("9\n")
        assert (await machine.until_ended(run)).exit_code == 9
    assert machine.wakes.count(run.instance) >= 2


def _needs_memory_limits(capabilities: Sequence[Capability]) -> None:
    for capability in capabilities:
        if capability.name == "memory limits" and not capability.available:
            pytest.skip(capability.detail)
