"""The FIFO into which the processes of a rank, and supervisors of ranks, write a line when there is news of the rank.

It is a FIFO rather than a socket: its path may be long, and it buffers a thousand lines, a datagram socket ten.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from basilica.machine import files
from basilica.machine.layout import Key, number_of

log = logging.getLogger("basilica.runtime")

READ = 1 << 20
FULL = 60 * 1024  # of the kernel's 64 KiB: lines may have been lost


@dataclass(frozen=True, slots=True)
class Wakeup:
    """A line. `what`: "started", "ended", "failed" (to claim) or "short" (of resources) with a reason, by supervisors;
    "reporting", "answer", "progress" or "agent" by processes of the rank: there is news in its files.
    """

    key: Key
    what: str
    detail: str = ""


class Wakeups:
    def __init__(
        self,
        path: Path,
        on_wakeup: Callable[[Wakeup], None],
        on_loss: Callable[[], None],
        on_made: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """`on_made` is called with the path whenever the FIFO was made, before it is read."""
        self._path = path
        self._on_made = on_made
        self._on_wakeup = on_wakeup
        self._on_loss = on_loss
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self.renew()

    def renew(self) -> None:
        """Make the FIFO anew, unless it is in place: any rank can replace it by something else."""
        if self._fd >= 0:
            with suppress(OSError):
                if os.path.samestat(os.lstat(self._path), os.fstat(self._fd)):
                    return
            self.close()
        files.put_aside(str(self._path))
        os.mkfifo(self._path, 0o600)
        self._on_made(self._path)
        # Opened for both: our own writer keeps the end of the last supervisor from being an end of file.
        self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._loop.add_reader(self._fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ)
        except BlockingIOError:
            return
        for line in dict.fromkeys(data.decode(errors="replace").split("\n")):
            wakeup = parse(line)
            if wakeup is not None:
                self._deliver(wakeup)
        if len(data) >= FULL:
            self._on_loss()

    def _deliver(self, wakeup: Wakeup) -> None:
        """Handle one line. Any rank can write here: a line that cannot be handled must not lose the others."""
        try:
            self._on_wakeup(wakeup)
        except Exception:
            log.exception("cannot act on the wake-up %r of %s", wakeup.what, wakeup.key)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1


def parse(line: str) -> Wakeup | None:
    """Parse a line; return None for one that none of ours wrote."""
    match line.split(" ", 4):
        case [instance, rank, attempt, what, *detail] if "/" not in instance and instance not in ("", ".", ".."):
            numbers = number_of(rank), number_of(attempt)
            return None if None in numbers else Wakeup(Key(instance, numbers[0] or 0, numbers[1] or 0), what, *detail)
        case _:
            return None
