"""Control groups as files: functions that make, join, kill and remove one, and read its count of kills for memory."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from basilica.core.ends import memory_kills_in
from basilica.machine.proc import read_file


def write_file(path: str, data: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, data)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def make_cgroup(path: str) -> bool:
    try:
        os.mkdir(path)
    except FileExistsError:
        pass
    except OSError:
        return False
    return True


def join_cgroup(path: str) -> bool:
    return write_file(os.path.join(path, "cgroup.procs"), b"0")


def remove_cgroup(path: str) -> None:
    """Remove the group and the groups that the rank made below it. One that is still in use stays for `remove()`."""
    try:
        os.rmdir(path)
        return
    except OSError:
        pass
    for directory, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):
            os.rmdir(directory)


def kill_cgroup(kill_file: str | None) -> bool:
    return kill_file is not None and write_file(kill_file, b"1")


def kill_frozen(freezer: str | None) -> bool:
    """Kill all members while none of them can fork."""
    if freezer is None or not write_file(os.path.join(freezer, "freezer.state"), b"FROZEN"):
        return False
    try:
        for pid in read_file(os.path.join(freezer, "cgroup.procs")).split():
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        return False
    finally:
        write_file(os.path.join(freezer, "freezer.state"), b"THAWED")
    return True


def read_memory_kills(path: str | None) -> int:
    """Return the kills so far, of `memory.events` or `memory.oom_control`; 0 where the kernel does not count them."""
    if path is None:
        return 0
    try:
        return memory_kills_in(read_file(path).decode())
    except OSError:
        return 0
