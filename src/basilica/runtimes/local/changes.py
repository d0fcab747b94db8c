"""Notifications that a run has changed: to the controller, and to the readers that wait in this process."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Readers:
    """The readers that wait for changes of a run, each with an event of its own."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def reading(self, instance: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change, and cleared by its reader."""
        changed = asyncio.Event()
        events = self._events.setdefault(instance, set())
        events.add(changed)
        try:
            yield changed
        finally:
            events.discard(changed)
            if not events:
                self._events.pop(instance, None)

    def notify(self, instance: str) -> None:
        """Wake the readers of the run."""
        for event in self._events.get(instance, ()):
            event.set()


class Changes:
    """Notifies of changes while the runtime runs: before and after, no one is woken and no new work begins."""

    def __init__(self) -> None:
        self.readers = Readers()
        self._wake: Callable[[str], None] | None = None

    @property
    def is_open(self) -> bool:
        return self._wake is not None

    def open(self, wake: Callable[[str], None]) -> None:
        """Start to call `wake` with each run that the controller should observe."""
        self._wake = wake

    def close(self) -> None:
        self._wake = None

    def notify(self, instance: str) -> None:
        """Wake the readers of the run, and the controller."""
        self.readers.notify(instance)
        self.wake(instance)

    def wake(self, instance: str) -> None:
        """Wake the controller alone."""
        if self._wake is not None:
            self._wake(instance)
