"""The high-water mark: the newest version ever committed, kept beside the database to detect lost commits.

The mark is written after each commit, so it is never ahead of an intact database. It is synced to the disk once in a
while: after a power cut it may be a moment behind, which hides a loss of that moment and never invents one.
"""

import os
import time
from pathlib import Path

SYNC_EVERY_S = 1.0
_LENGTH = 32


class HighWaterMark:
    """The mark in a file. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._synced_at = 0.0
        self._dirty = False

    def read(self) -> int:
        """Return the version; 0 if there is no mark. Raise `ValueError` if the file is damaged."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        return int(text[:_LENGTH].split(b"\n")[0] or b"0")

    def open(self, version: int) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.note(version)

    def note(self, version: int) -> None:
        """Write a version that has been committed. A failed write is ignored: the next one supersedes it."""
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, b"%d\n" % version + bytes(_LENGTH - len(b"%d\n" % version)), 0)
            self._dirty = True
            if time.monotonic() - self._synced_at >= SYNC_EVERY_S:
                self._sync()
        except OSError:
            pass

    def _sync(self) -> None:
        if self._fd is not None and self._dirty:
            os.fdatasync(self._fd)
            self._synced_at, self._dirty = time.monotonic(), False

    def close(self) -> None:
        if self._fd is None:
            return
        try:
            self._sync()
        except OSError:
            pass
        finally:
            os.close(self._fd)
            self._fd = None
