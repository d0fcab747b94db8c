"""Work beside the training, in daemon threads: a process that fails ends at once, whatever they are waiting for.

A thread that is cut off leaves the same state as a killed process, from which every replica can go on. It should not be
cut off in a call into compiled code, though: so the end of a process waits a moment for work that is under way.
"""

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")
LAST_SECONDS = 2.0
"""How long the end of a process, or of a block that failed, waits for work that is under way."""


class Background:
    """Up to `threads` calls at a time, in the order in which they were given."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name, self._most = name, threads
        self.stopped = threading.Event()
        """Set once the results are not needed any more: work that waits for others is to give up."""
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._release = weakref.finalize(self, _release, self._calls, self._threads)
        self._release.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any, **options: Any) -> "Future[T]":
        if self.stopped.is_set():
            raise RuntimeError("this replica was left: nothing more can be submitted")
        if self._pid != os.getpid():  # threads do not survive a fork
            self._begin()
        future: Future[T] = Future()
        with self._changed:
            self._unfinished += 1
            if self._unfinished > len(self._threads) and len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put(lambda: self._run(future, call, arguments, options))
        return future

    def close(self, *, wait: bool = True) -> None:
        """Wait for what was submitted; without `wait` only a moment, and nothing can be submitted any more."""
        if not wait:
            self.stopped.set()
        self.finish(None if wait else time.monotonic() + LAST_SECONDS)
        self._release()
        if wait:
            self._begin()

    def finish(self, deadline: float | None) -> None:
        """Wait until nothing is under way, until the deadline at most."""
        if self._pid != os.getpid():
            return
        with self._changed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: not self._unfinished, left)

    def _run(self, future: "Future[T]", call: Callable[..., T], arguments: Any, options: Any) -> None:
        if future.set_running_or_notify_cancel():
            _settle(future, call, arguments, options)
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()


def _release(calls: "queue.SimpleQueue[Callable[[], None] | None]", threads: list[threading.Thread]) -> None:
    """Let the threads end once they have done what was submitted."""
    for _ in threads:
        calls.put(None)


def _work(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Run the queue's work. A thread refers to the queue alone, so that an unused pool can be collected."""
    while (call := calls.get()) is not None:
        call()
        del call


def _settle(future: "Future[T]", call: Callable[..., T], arguments: Any, options: Any) -> None:
    try:
        result = call(*arguments, **options)
    except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
        future.set_exception(error)
    else:
        future.set_result(result)


def check(stopped: threading.Event) -> None:
    """Called between the steps of long work."""
    if stopped.is_set():
        raise CancelledError("the all-reduce was left: this replica failed, or its process ends")


_all: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _at_exit() -> None:
    deadline = time.monotonic() + LAST_SECONDS
    for pool in list(_all):
        pool.stopped.set()
    for pool in list(_all):
        pool.finish(deadline)


atexit.register(_at_exit)
