"""Notifications of changed files: one inotify instance for the whole control plane, else polling."""

import asyncio
import ctypes
import os
import struct
import sys
from collections.abc import Callable

IN_MODIFY = 0x2
IN_DONT_FOLLOW = 0x02000000
IN_MOVED_FROM, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF = 0x40, 0x200, 0x400, 0x800
TAKEN_AWAY = IN_MOVED_FROM | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF  # a directory, or something in it
IN_CLOEXEC = os.O_CLOEXEC
IN_NONBLOCK = os.O_NONBLOCK
POLL_EVERY_S = 0.2
_EVENT = struct.Struct("iIII")


class FileWatcher:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._callbacks: dict[int, list[Callable[[], None]]] = {}
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._read)

    def watch(self, path: str, changed: Callable[[], None], events: int = IN_MODIFY) -> Callable[[], None]:
        """Call `changed` after each write to the file (or other event), until the returned function is called."""
        number = (
            self._libc.inotify_add_watch(self._fd, os.fsencode(path), events | IN_DONT_FOLLOW) if self._fd >= 0 else -1
        )
        if number < 0:
            return self._poll(changed)
        self._callbacks.setdefault(number, []).append(changed)

        def cancel() -> None:
            callbacks = self._callbacks.get(number, [])
            if changed in callbacks:
                callbacks.remove(changed)
            if not callbacks and self._callbacks.pop(number, None) is not None and self._fd >= 0:
                self._libc.inotify_rm_watch(self._fd, number)

        return cancel

    def _poll(self, changed: Callable[[], None]) -> Callable[[], None]:
        timers: list[asyncio.TimerHandle] = []

        def poll() -> None:
            changed()
            timers[:] = [self._loop.call_later(POLL_EVERY_S, poll)]

        def cancel() -> None:
            for timer in timers:
                timer.cancel()

        poll()
        return cancel

    def _read(self) -> None:
        data = os.read(self._fd, 1 << 16)
        numbers = set()
        position = 0
        while position < len(data):
            number, _, _, name_length = _EVENT.unpack_from(data, position)
            numbers.add(number)
            position += _EVENT.size + name_length
        if -1 in numbers:  # the kernel's queue overflowed: anything may have changed
            numbers = set(self._callbacks)
        for number in numbers:
            for changed in tuple(self._callbacks.get(number, ())):
                changed()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
