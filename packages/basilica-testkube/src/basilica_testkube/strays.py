"""Processes by the mark in their environment: their children inherit it, however far they have strayed.

As a program, `strays.py MARK PIDFD`: waits for the end of the process behind the descriptor, however it came, and
ends every process with the mark. It is run as a file, without the package and without site-packages, so that it starts
in hundredths of a second: it imports the standard library alone.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

_EXEC_S = 0.5  # how long a process is waited for that begins a program: microseconds, if it gets to run
_FORKED_S = 2.0  # how long for children that were on their way from fork to exec, which hold our pipe
_KERNEL_THREAD = 0x00200000


def marked(mark: bytes) -> list[int]:
    """Processes that were started with the variable, `NAME=value`; not this one."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if pid != os.getpid() and mark in _environment(pid).split(b"\0")]


def end_marked(mark: bytes) -> None:
    """Kill every process that carries the mark; again, until a look finds none."""
    while found := marked(mark):
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _environment(pid: int) -> bytes:
    """Empty for a process that is gone or somebody else's.

    In the middle of `exec` a process shows none for a moment, and who believed that would miss it for ever. So an empty
    one is believed at the second look that finds it laid out in the same place.
    """
    until, before = time.monotonic() + _EXEC_S, 0
    try:
        while not (found := _read(pid, "environ")) and time.monotonic() < until:
            place = _empty_place(pid)
            if place is None or place == before != 0:
                break
            before = place
            time.sleep(0.001)
    except OSError:
        return b""
    return found


def _empty_place(pid: int) -> int | None:
    """Where a process keeps an environment without variables; 0 where it is still to be laid out.

    `None` for what will never have one: the dead, and the kernel's own.
    """
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # from the third of proc(5) on
    state, flags, begins, ends = fields[0], int(fields[6]), int(fields[47]), int(fields[48])
    if state in b"ZX" or flags & _KERNEL_THREAD:
        return None
    return begins if begins == ends else 0


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def main(mark: str, pidfd: str) -> None:
    select.select([int(pidfd)], [], [])
    # Our standard input ends when nobody holds its other end: by then, what was being started has its mark.
    select.select([sys.stdin.fileno()], [], [], _FORKED_S)
    end_marked(os.fsencode(mark))


if __name__ == "__main__":
    main(*sys.argv[1:])
