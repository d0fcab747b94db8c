"""Blocks allocated beyond the end of a growing file: on a full disk it grows into them, and no other file can."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

FALLOC_FL_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def allocate(fd: int, start: int, size: int) -> bool:
    """Allocate blocks for that part of the file without changing its length; False if there are none."""
    if sys.platform != "linux":
        return False
    done: int = _libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_long(start), ctypes.c_long(size))
    return done == 0


class SpaceAhead:
    """Allocated space of at least half of `size` bytes beyond the file's end, as long as the disk has them."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._fd: int | None = None
        self._allocated = 0

    def keep(self) -> None:
        """Allocate more if less than half is left. Called after the file has grown."""
        if self._size <= 0:
            return
        with suppress(OSError):
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            end = os.fstat(self._fd).st_size
            # A truncated file has lost its blocks: then all of them are allocated again.
            ahead = self._allocated - end
            if (ahead < self._size // 2 or ahead > self._size) and allocate(self._fd, end, self._size):
                self._allocated = end + self._size

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
