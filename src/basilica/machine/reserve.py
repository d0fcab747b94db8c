"""The reserve: disk space that is held back, so that runs can be ended and deleted on a full disk.

The reserve is a preallocated file. A write that is needed to end something, and fails on a full disk, releases a piece
of it and is retried: in pieces, since the process that filled the disk may be faster. The reserve is refilled as soon
as there is enough space again; until then no new runs are taken.
"""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

LARGEST = 8 << 20
SMALLEST = 256 << 10
PIECES = 16
FULL = (errno.ENOSPC, errno.EDQUOT)

Result = TypeVar("Result")


def size_for(disk_bytes: int) -> int:
    """Return the size of the reserve: a twentieth of a small disk, and `LARGEST` at most."""
    return max(SMALLEST, min(LARGEST, disk_bytes // 20))


def may_refill(missing: int, free: int) -> bool:
    """Whether a refill leaves as much space for others as it takes."""
    return free >= 2 * missing


class Reserve:
    """The reserve of one disk. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._held = 0
        self.size = 0

    def open(self) -> None:
        """Measure the reserve, and refill it if there is space. Never fails: a server also runs without a reserve."""
        with self._lock:
            with suppress(OSError):
                disk = os.statvfs(self._path.parent)
                self.size = size_for(disk.f_blocks * disk.f_frsize)
            with suppress(OSError):
                found = os.lstat(self._path)
                self._held = min(found.st_blocks * 512, found.st_size)
        self.refill()

    @property
    def whole(self) -> bool:
        return self._held >= self.size

    def free(self) -> int:
        """Return the bytes of the disk that are free for others."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return disk.f_bavail * disk.f_frsize

    def release(self) -> bool:
        """Release one piece; False if none is left."""
        with self._lock:
            if self._held <= 0:
                return False
            left = max(0, self._held - max(1, self.size // PIECES))
            try:
                os.truncate(self._path, left)
            except OSError:
                self._held = 0
                return False
            self._held = left
            return True

    def refill(self) -> bool:
        """Refill the reserve if there is space; True if it is whole."""
        with self._lock:
            if self._held >= self.size:
                return True
            if not may_refill(self.size - self._held, self.free()):
                return False
            try:
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError:
                return False
            try:
                os.posix_fallocate(fd, 0, self.size)
                self._held = self.size
            except OSError:
                with suppress(OSError):
                    os.ftruncate(fd, self._held)
            finally:
                os.close(fd)
            return self._held >= self.size

    def spend(self, work: Callable[[], Result]) -> Result:
        """Call `work`, which must end or delete something; while the disk is full, release pieces and retry."""
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno not in FULL or not self.release():
                    raise
