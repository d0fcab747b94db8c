"""The end of a run's leftovers without a control plane: by its supervisors where they live, else by its marks."""

import asyncio
import os
import signal
import time
from contextlib import suppress

from basilica.core import environment as env
from basilica.core.ends import UNKNOWN
from basilica.machine.clocks import steady_now
from basilica.machine.layout import Key, Layout
from basilica.machine.proc import boot
from basilica.machine.processes import lives, supervisor_of
from basilica.machine.strays import kill, with_environment
from basilica.runtimes.local.records import Exit, Record, append_exit, bury, write_stop
from basilica.runtimes.local.run_files import read_records

GRACE_S = 5.0
POLL_S = 0.02


async def end_run(layout: Layout, instance: str, grace: float = GRACE_S) -> int:
    """End all processes of the run and return their number; ranks have some seconds to end by themselves."""
    marks = {f"{env.CHECKPOINT_DIR}={layout.checkpoints(instance)}".encode()}
    before = len(with_environment(marks))
    deadline = time.monotonic() + grace
    while supervisors := _ask_to_stop(layout, instance, grace):
        if time.monotonic() > deadline + 1:
            kill(supervisors)
        await asyncio.sleep(POLL_S)
    while left := with_environment(marks):
        kill(left)
        await asyncio.sleep(POLL_S)
    _record_ends(layout, instance)
    return before


def _ask_to_stop(layout: Layout, instance: str, grace: float) -> list[int]:
    """Ask each live supervisor to stop, and return their pids."""
    found = []
    for key, record in read_records(layout, instance).items():
        pid = _supervisor(layout, key, record)
        if pid is None:
            continue
        found.append(pid)
        number = signal.SIGTERM
        try:
            if not os.path.exists(layout.stop(key)):
                write_stop(layout.stop(key), grace)
                os.kill(pid, number)
        except OSError:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # no room for the stop file
    return found


def _supervisor(layout: Layout, key: Key, record: Record | None) -> int | None:
    if record is None or record.exit is not None:
        return None
    claim = record.claim
    if claim.boot == boot() and lives(claim.pid, claim.start):
        return claim.pid
    return supervisor_of(os.path.dirname(layout.record(key)))


def _record_ends(layout: Layout, instance: str) -> None:
    """Record an unknown end for each attempt without one."""
    for key, record in read_records(layout, instance).items():
        if record is not None and record.exit is None:
            unknown = Exit(exit_code=None, reason=UNKNOWN, finished_at=steady_now(), stopped=True)
            with suppress(OSError):
                append_exit(layout.record(key), unknown, record)
        elif record is None:
            bury(layout.record(key), Exit(exit_code=None, reason=UNKNOWN, finished_at=steady_now(), stopped=True))
