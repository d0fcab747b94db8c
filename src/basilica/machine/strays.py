"""Processes known by their environment: their children keep it, however far they have strayed, unless they hide."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

IN_EXEC_S = 0.5
"""How long a process is waited for that begins a program: microseconds, if it gets to run."""
KERNEL_THREAD = 0x00200000
NOWHERE = 0


def with_environment(marks: set[bytes]) -> list[int]:
    """Processes that were started with all of these variables, each as `NAME=value`."""
    return whose_environment(marks.issubset)


def whose_environment(fits: Callable[[set[bytes]], bool]) -> list[int]:
    """Processes that were started with variables, each as `NAME=value`, that fit."""
    if sys.platform != "linux":
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and fits(set(_environment(pid).split(b"\0")))]


def by_variable(name: bytes, prefix: bytes) -> dict[str, list[int]]:
    """Processes with a variable whose value begins like that, by the rest of the value."""
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
    """Empty for one that is gone, or not ours to look at. In the middle of `exec` a process has none for a moment: who
    took that for an answer would miss it for ever. So it is believed when it is seen twice."""
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
    """Where a process has an environment in which there is nothing; `None` if that is still to be laid out.

    `NOWHERE` for what has none: dead ones, and the kernel's own.
    """
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    state, flags, begin, end = fields[0], *(int(fields[number - 3]) for number in (9, 50, 51))  # as in proc(5)
    if state in "ZX" or flags & KERNEL_THREAD:
        return NOWHERE
    return begin if begin == end != 0 else None
