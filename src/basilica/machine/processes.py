"""Processes by identity, pid and start time: whether one lives, and a watch that notices its end."""

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

POLL_EVERY_S = 1.0


def lives(pid: int, start: int) -> bool:
    """Whether the process with that pid is the one that started at `start`. A zombie has ended."""
    if sys.platform != "linux":
        return _exists(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, *fields = stat.rpartition(b")")[2].split()
    return state not in (b"Z", b"X") and int(fields[18]) == start


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal or a tracer."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def supervisor_of(rank_directory: str) -> int | None:
    """Return the process with the lock of a rank, from the kernel's list: trying the lock would block others."""
    with suppress(OSError, ValueError):
        inode = os.stat(rank_directory).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, place, _, _ = line.replace(" -> ", " ").split()
            if kind == "FLOCK" and place.rpartition(":")[2] == str(inode) and _is_supervisor(int(pid)):
                return int(pid)
    return None


def _is_supervisor(pid: int) -> bool:
    """Whether the process has a supervisor's name: inode numbers are the same on several disks."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip() == b"basilica-rank"
    except OSError:
        return False


class Watch:
    """A watch that calls `ended` once the process is gone. Without `start`, of the process that has the pid now."""

    def __init__(self, pid: int, start: int | None, ended: Callable[[], None]) -> None:
        """Raises `ProcessLookupError` if the process is gone already."""
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._kqueue: object = None
        try:
            self._fd = self._open()
        except ProcessLookupError:
            raise
        except OSError:  # no such call, or no more descriptors: poll instead
            self._timer = self._loop.call_later(POLL_EVERY_S, self._poll, start, ended)
            return
        if start is not None and not lives(pid, start):  # another process by now, or a zombie that is not reaped
            self.close()
            raise ProcessLookupError(pid)
        self._loop.add_reader(self._fd, ended)

    def _open(self) -> int:
        if sys.platform == "darwin":
            queue = self._kqueue = select.kqueue()
            event = select.kevent(self.pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            queue.control([event], 0)
            return queue.fileno()
        return os.pidfd_open(self.pid)

    def _poll(self, start: int | None, ended: Callable[[], None]) -> None:
        if lives(self.pid, start) if start is not None else _exists(self.pid):
            self._timer = self._loop.call_later(POLL_EVERY_S, self._poll, start, ended)
        else:
            ended()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to exactly that process, unless it has ended meanwhile."""
        try:
            if self._fd is not None and sys.platform == "linux":
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            if self._kqueue is None:
                os.close(self._fd)
            self._fd = self._kqueue = None
