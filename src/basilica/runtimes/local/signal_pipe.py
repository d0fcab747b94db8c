"""Signals as bytes of a pipe, so that a process can wait for signals and a deadline at once."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

NEVER = float("inf")
WOKEN_BY = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGIO)


class Wakeups:
    """Waits for signals without a gap in which one could be missed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.poll = select.poll()
        self.poll.register(fd, select.POLLIN)

    def wait(self, until: float) -> bytes:
        """Return the numbers of the signals that arrived; empty if `until` (monotonic) came first."""
        timeout = None if until == NEVER else max(0, min(2**31 - 1, int((until - time.monotonic()) * 1000) + 1))
        return os.read(self.fd, 4096) if self.poll.poll(timeout) else b""


def signals_as_bytes() -> Wakeups:
    fd, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    for number in WOKEN_BY:
        signal.signal(number, lambda *_: None)
    return Wakeups(fd)


def send_to_group(group: int, number: int) -> None:
    with suppress(OSError):  # the group has ended meanwhile, or is another user's by now
        os.killpg(group, number)
