"""Ranks whose supervisor was killed: their exit code is lost, but they are stopped, cleaned up and recorded."""

import asyncio
import os
import signal
from contextlib import suppress

from basilica.core import environment as env
from basilica.core.ends import CANCELLED, UNKNOWN
from basilica.machine.cgroup_files import kill_cgroup, remove_cgroup
from basilica.machine.clocks import SteadyClock
from basilica.machine.layout import Key, Layout
from basilica.machine.pools import Pool
from basilica.machine.proc import boot, descendants, read_file, start_time
from basilica.machine.processes import lives, supervisor_of
from basilica.machine.strays import kill, with_environment
from basilica.runtimes.local import supervisor
from basilica.runtimes.local.records import Claim, Exit
from basilica.runtimes.rules import KILL_AGAIN_SECONDS


async def bury_orphan(layout: Layout, key: Key, claim: Claim, pool: Pool, clock: SteadyClock) -> Exit:
    """Kill the leftovers of an attempt whose supervisor and rank are gone, and return its end, without an exit code."""
    finished_at = clock.now()
    while await pool.run(kill_leftovers, layout, key, claim):
        await asyncio.sleep(KILL_AGAIN_SECONDS)
    for path in claim.cgroups:
        await pool.run(remove_cgroup, path)
    stopped = await pool.run(os.path.lexists, layout.stop(key))
    reason = CANCELLED if stopped else UNKNOWN
    return Exit(exit_code=None, reason=reason, finished_at=finished_at, stopped=stopped)


def kill_leftovers(layout: Layout, key: Key, claim: Claim) -> bool:
    """Send SIGKILL to every process of the attempt; return True if there was one.

    The processes are found as the supervisor's descendants, by cgroup, and by their environment.
    """
    adopted = [pid for pid in descendants(claim.pid) if not _is_dead(pid)] if _lives(claim) else []
    kill(adopted)
    left = bool(adopted)
    for path in claim.cgroups:
        members = _members(path)
        left = left or bool(members)
        if members and not kill_cgroup(os.path.join(path, "cgroup.kill")):
            kill(members)
    strays = _with_environment_of(layout, key)
    kill(strays)
    return left or bool(strays)


def is_alive(layout: Layout, key: Key) -> bool:
    """Return True while an attempt without a record has a supervisor, which locks the rank, or other processes."""
    held = supervisor_of(str(layout.rank(key.instance, key.rank))) is not None
    return held or bool(_with_environment_of(layout, key))


def terminate_strays(layout: Layout, key: Key) -> None:
    """Send SIGTERM to the supervisor above the processes of an attempt without a record; without one, to them."""
    strays = _with_environment_of(layout, key)
    above = {found for pid in strays if (found := _supervisor_of(pid)) is not None}
    for pid in above or strays:
        for number in (signal.SIGTERM, signal.SIGCONT):
            with suppress(OSError):  # the process has ended meanwhile
                os.kill(pid, number)


def _supervisor_of(pid: int) -> int | None:
    """Return the nearest process, from this one upwards, with a supervisor's name; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        while pid > 1:
            head, _, rest = read_file(f"/proc/{pid}/stat").rpartition(b")")
            if head.endswith(b"(" + supervisor.NAME):
                return pid
            pid = int(rest.split()[1])
    return None


def _lives(claim: Claim) -> bool:
    return claim.boot == boot() and lives(claim.pid, claim.start)


def _is_dead(pid: int) -> bool:
    """Return True also for a zombie: a suspended parent may never reap it."""
    return not lives(pid, start_time(pid))


def _members(cgroup: str) -> list[int]:
    try:
        return [int(pid) for pid in read_file(os.path.join(cgroup, "cgroup.procs")).split()]
    except OSError:
        return []


def _with_environment_of(layout: Layout, key: Key) -> list[int]:
    """Return the processes that were started with the environment of this attempt.

    The directory sets them apart from those of another server on this machine, whatever its runs are called.
    """
    return with_environment(
        {
            f"{env.CHECKPOINT_DIR}={layout.checkpoints(key.instance)}".encode(),
            f"{env.RANK}={key.rank}".encode(),
            f"{env.ATTEMPT}={key.attempt}".encode(),
        }
    )
