"""The FIFO into which supervisors write a line when a rank has started or ended.

A FIFO rather than a socket: its path may be long, and it holds a thousand lines where a datagram socket holds ten.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from basilica.runtimes.local.layout import Key

READ = 1 << 20
FULL = 60 * 1024  # of the kernel's 64 KiB: lines may have been lost


@dataclass(frozen=True, slots=True)
class Told:
    """`what` is "started", "ended", or "failed" with the reason why the attempt could not even be claimed."""

    key: Key
    what: str
    detail: str = ""


class Wakeups:
    def __init__(
        self,
        path: Path,
        told: Callable[[Told], None],
        lost: Callable[[], None],
        made: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """`made` is called with the path before anybody is waited for."""
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        made(path)
        self._told = told
        self._lost = lost
        # Opened for both: with a writer always there, the end of the last supervisor is no end of file.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ)
        except BlockingIOError:
            return
        for line in dict.fromkeys(data.decode(errors="replace").splitlines()):
            told = parse(line)
            if told is not None:
                self._told(told)
        if len(data) >= FULL:
            self._lost()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


def parse(line: str) -> Told | None:
    """One line; None for one that no supervisor wrote."""
    match line.split(" ", 4):
        case [instance, rank, attempt, what, *detail] if rank.isdigit() and attempt.isdigit():
            return Told(Key(instance, int(rank), int(attempt)), what, *detail)
        case _:
            return None
