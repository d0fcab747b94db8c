"""Wake-ups inside one process: rung after a commit, so that no reader has to poll the file for changes."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from weakref import WeakSet

from basilica.core.errors import StoreUnavailable
from basilica.ports import Deployment


class _Reader:
    """The unread changes of one reader: each run once, however often it changed."""

    def __init__(self, first: Iterable[str]) -> None:
        self._pending: OrderedDict[str, None] = OrderedDict.fromkeys(first)
        self._rung = asyncio.Event()
        self._ended = False

    def ring(self, instance: str) -> None:
        self._pending[instance] = None
        self._rung.set()

    def end(self) -> None:
        self._ended = True
        self._rung.set()

    async def read(self) -> AsyncGenerator[str, None]:
        while not self._ended:
            if self._pending:
                yield self._pending.popitem(last=False)[0]
            else:
                self._rung.clear()
                await self._rung.wait()


class Bell:
    """Readers of all changes, and waiters for a change of one run: a ring costs only those whom it concerns."""

    def __init__(self) -> None:
        self._readers: WeakSet[_Reader] = WeakSet()  # each lives as long as its generator
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False

    def ring(self, instance: str) -> None:
        for reader in self._readers:
            reader.ring(instance)
        for waiter in self._waiters.get(instance, ()):
            if not waiter.done():
                waiter.set_result(None)

    def changes(self, first: Iterable[str]) -> AsyncGenerator[str, None]:
        """Yield `first`, then every run that changes from now on; end when the bell is closed."""
        reader = _Reader(first)
        self._readers.add(reader)
        return reader.read()

    async def wait_change(
        self, load: Callable[[str], Deployment], instance: str, version: int, timeout: float | None
    ) -> Deployment | None:
        """Return the run as `load` returns it once it is newer than `version`; None when the time is up."""
        try:
            async with asyncio.timeout(timeout):
                while (found := load(instance)).version <= version:
                    await self._wait(instance)
        except TimeoutError:
            found = load(instance)
        return found if found.version > version else None

    async def _wait(self, instance: str) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(instance, set())
        waiters.add(waiter)
        try:
            await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(instance) is waiters:
                del self._waiters[instance]

    def close(self) -> None:
        """End all iterations, and all waits."""
        self._closed = True
        for reader in self._readers:
            reader.end()
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(StoreUnavailable("the store is closed"))
