"""Facts of `/proc`: the boot, the start of a process, and its descendants.

The module is light enough for the fork server, of which every rank's supervisor is a copy.
"""

from __future__ import annotations

import errno
import os
import stat

SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags to open a file with that a rank may have replaced by anything."""


def read_file(path: str) -> bytes:
    """Read the beginning of the file. Raise `OSError` unless it is regular: other kinds could block for ever."""
    fd = os.open(path, os.O_RDONLY | SAFELY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def boot() -> str:
    """Return the identifier of this boot and pid namespace: in it a pid and a start time identify a process."""
    try:
        boot_id = read_file("/proc/sys/kernel/random/boot_id").decode().strip()
        return f"{boot_id} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def start_time(pid: int) -> int:
    """Return the start of the process in ticks since boot; 0 where the system has no such time."""
    try:
        return int(read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(read_file(f"/proc/{name}/stat").rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found = children.get(root, [])
    for pid in found:
        found += children.get(pid, [])
    return found
