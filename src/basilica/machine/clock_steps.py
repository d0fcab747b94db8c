"""Steps of the wall clock, as events of a kernel timer."""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import time
from collections.abc import AsyncIterator, Callable

log = logging.getLogger("basilica.clock")

_ABSOLUTE = 1 << 0
_CANCEL_ON_SET = 1 << 1  # of timerfd_settime: reading fails with ECANCELED when the wall clock is set
_NEVER = 1 << 40


@contextlib.asynccontextmanager
async def watch_wall_clock(moved: Callable[[], None]) -> AsyncIterator[None]:
    """Call `moved` whenever the wall clock is set, and when the machine wakes from suspension, without polling.

    Timers of the event loop do not count suspended time: callers that count it set their timers again.
    """
    try:
        fd = _arm_new()
    except OSError as error:
        log.warning("steps of the wall clock go unnoticed until a time is next shown: %s", error.strerror)
        yield
        return
    loop = asyncio.get_running_loop()

    def handle() -> None:
        try:
            os.read(fd, 8)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ECANCELED:
                loop.remove_reader(fd)
                raise
        _arm(fd)
        moved()

    loop.add_reader(fd, handle)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _arm_new() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timerfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fd: int = libc.timerfd_create(time.CLOCK_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        _arm(fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def _arm(fd: int) -> None:
    """Arm the timer without an interval, for a first time that never comes: only a step of the clock ends it."""
    libc = ctypes.CDLL(None, use_errno=True)
    never = (ctypes.c_long * 4)(0, 0, _NEVER, 0)
    if libc.timerfd_settime(fd, _ABSOLUTE | _CANCEL_ON_SET, never, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
