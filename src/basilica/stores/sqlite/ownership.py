"""Ownership of a state file by one process: an flock beside it, which the kernel releases when the process dies."""

import fcntl
import os
from pathlib import Path
from weakref import WeakSet

from basilica.stores.sqlite.errors import StateInUse


class Ownership:
    """Held from `take` to `release`. The lock file stays: if it were removed, two processes could each lock one."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _held.add(self)

    @classmethod
    def take(cls, path: Path) -> "Ownership":
        """Own the state file `path`, or raise `StateInUse` with the owner's pid."""
        lock = path.with_name(path.name + ".lock")
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Written before it is cut to length: on a full disk the old block can be overwritten, a new one not had.
            os.ftruncate(fd, os.pwrite(fd, f"{os.getpid()}\n".encode(), 0))
        except BlockingIOError:
            pid = _read_pid(fd)
            os.close(fd)
            raise StateInUse(pid, str(path)) from None
        except OSError:
            os.close(fd)
            raise
        return cls(fd)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


_held: WeakSet[Ownership] = WeakSet()


def _release_in_child() -> None:
    # An flock is shared with forked children: a supervisor that outlives the server would keep the next one out.
    for ownership in _held:
        ownership.release()


os.register_at_fork(after_in_child=_release_in_child)
