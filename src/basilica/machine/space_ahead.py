"""Blocks that a growing file has beyond its end already: on a full disk it goes on into them, and nobody else can."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

FALLOC_FL_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def allocate(fd: int, start: int, size: int) -> bool:
    """Blocks for that part of the file, whose length stays what it is; False if there are none."""
    if sys.platform != "linux":
        return False
    done: int = _libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_long(start), ctypes.c_long(size))
    return done == 0


class SpaceAhead:
    """Keeps at least half of `size` bytes ahead of the file's end, as long as the disk has them."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._fd: int | None = None
        self._allocated = 0

    def keep(self) -> None:
        """To be called after the file has grown; nothing happens while there is enough."""
        if self._size <= 0:
            return
        with suppress(OSError):
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            end = os.fstat(self._fd).st_size
            # A file that was cut has given its blocks back: then all of it is asked for again.
            ahead = self._allocated - end
            if (ahead < self._size // 2 or ahead > self._size) and allocate(self._fd, end, self._size):
                self._allocated = end + self._size

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
