"""Processes found by their environment: children inherit it, however far they have strayed, unless they clear it."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

IN_EXEC_S = 0.5
"""Limit of the wait for a process in `exec`: it takes microseconds, once the process is scheduled."""
KERNEL_THREAD = 0x00200000
NOWHERE = 0


def with_environment(marks: set[bytes]) -> list[int]:
    """Return the processes that were started with all of these variables, each as `NAME=value`."""
    return whose_environment(marks.issubset)


def whose_environment(fits: Callable[[set[bytes]], bool]) -> list[int]:
    """Return the processes whose variables at the start, each as `NAME=value`, satisfy `fits`."""
    if sys.platform != "linux":
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and fits(set(_environment(pid).split(b"\0")))]


def by_variable(name: bytes, prefix: bytes) -> dict[str, list[int]]:
    """Return the processes with a variable whose value has the prefix, by the rest of the value."""
    if sys.platform != "linux":
        return {}
    begin, found = name + b"=" + prefix, dict[str, list[int]]()
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]:
        for variable in _environment(pid).split(b"\0") if pid != os.getpid() else ():
            if variable.startswith(begin):
                found.setdefault(os.fsdecode(variable[len(begin) :]), []).append(pid)
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # gone meanwhile
            os.kill(pid, signal.SIGKILL)


def _environment(pid: int) -> bytes:
    """Return the environment; empty if the process is gone, or of another user. In the middle of `exec` a process has
    none for a moment, and would be missed for ever: so an empty environment counts only when it is read twice."""
    process, give_up = Path(f"/proc/{pid}"), time.monotonic() + IN_EXEC_S
    place: int | None = None
    with suppress(OSError):
        while not (environment := (process / "environ").read_bytes()) and time.monotonic() < give_up:
            seen, place = place, _empty_place(process)
            if place == NOWHERE or (place is not None and place == seen):
                break
            time.sleep(0.001)
        return environment
    return b""


def _empty_place(process: Path) -> int | None:
    """Return the address of an empty environment; None if it is not laid out yet.

    `NOWHERE` if the process never has one: the dead, and threads of the kernel.
    """
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    state, flags, begin, end = fields[0], *(int(fields[number - 3]) for number in (9, 50, 51))  # as in proc(5)
    if state in "ZX" or flags & KERNEL_THREAD:
        return NOWHERE
    return begin if begin == end != 0 else None
