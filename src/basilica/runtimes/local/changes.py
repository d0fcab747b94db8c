"""Saying that something about a run has changed: to the controller, and to those who wait for it here."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Readers:
    """Those who wait for news of a run, each with an event of its own."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def reading(self, instance: str) -> Iterator[asyncio.Event]:
        """The event is set at each piece of news, and cleared by its reader."""
        news = asyncio.Event()
        events = self._events.setdefault(instance, set())
        events.add(news)
        try:
            yield news
        finally:
            events.discard(news)
            if not events:
                self._events.pop(instance, None)

    def tell(self, instance: str) -> None:
        for event in self._events.get(instance, ()):
            event.set()


class Changes:
    """Open while the runtime runs: before and after that, nobody is woken and nothing new begins."""

    def __init__(self) -> None:
        self.readers = Readers()
        self._wake: Callable[[str], None] | None = None

    @property
    def is_open(self) -> bool:
        return self._wake is not None

    def open(self, wake: Callable[[str], None]) -> None:
        """From now on `wake` is called with each run that the controller should look at."""
        self._wake = wake

    def close(self) -> None:
        self._wake = None

    def tell(self, instance: str) -> None:
        self.readers.tell(instance)
        self.wake(instance)

    def wake(self, instance: str) -> None:
        """The controller alone."""
        if self._wake is not None:
            self._wake(instance)
