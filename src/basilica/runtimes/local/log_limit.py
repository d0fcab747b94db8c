"""The bound on the disk space of a rank's log."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import time

FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
BLOCK = 4096
CHECK_EVERY_S = 1.0
NEVER = float("inf")

libc = ctypes.CDLL(None, use_errno=True)


class LogLimit:
    """Bounds the log's disk space by freeing the blocks of its old part; offsets do not change.

    The kernel signals the next write (dnotify: one shot, and no inotify instance, of which users have few), and is
    armed again a second later at the earliest. So a silent rank costs nothing.
    """

    def __init__(self, log: int, directory: int, limit: int) -> None:
        self.log = log
        self.limit = limit
        self.freed = 0
        self.check_at = NEVER
        self.checked_at = 0.0
        self.directory = directory

    def arm(self) -> None:
        try:
            fcntl.fcntl(self.directory, fcntl.F_NOTIFY, fcntl.DN_MODIFY)
        except (OSError, AttributeError):
            self.check_at = time.monotonic() + 30 * CHECK_EVERY_S

    def output_came(self) -> None:
        """Schedule a check after a write, at most one in `CHECK_EVERY_S`."""
        self.check_at = max(time.monotonic(), self.checked_at + CHECK_EVERY_S)

    def trim(self) -> None:
        """Free the old part of a log that has outgrown its limit."""
        self.checked_at, self.check_at = time.monotonic(), NEVER
        self.arm()  # before the size is read: later writes are then signalled
        size = os.fstat(self.log).st_size
        if size < self.freed:
            self.freed = 0  # the program truncated its own output
        end = (size - self.limit) // BLOCK * BLOCK
        if end - self.freed >= max(BLOCK, self.limit // 16) and self.free(end):
            self.freed = end

    def free(self, end: int) -> bool:
        if sys.platform != "linux":
            return False
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        return bool(libc.fallocate(self.log, mode, ctypes.c_long(0), ctypes.c_long(end)) == 0)
