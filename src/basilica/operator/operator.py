"""The operator's life cycle: list all runs, become the leader, turn every run, hand over, and stand for election
again.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Protocol

from basilica.controller.loop import Controller
from basilica.controller.retention import Work, repeat_hourly
from basilica.core.errors import BasilicaError
from basilica.operator.election import Election
from basilica.ports import Clock, Runtime, Store

log = logging.getLogger("basilica.operator")


class CannotLetGo(BasilicaError):
    """Another operator may act soon, and this one has not stopped: its process must end."""


class Refusals(Protocol):
    """Publishes on objects made by hand why they are no runs."""

    async def next(self) -> None:
        """Return when there may be more to publish."""
        ...

    async def publish(self) -> None: ...


class Operator:
    """One of several operators; its controller, and the runtime of that, exist only while it leads."""

    def __init__(
        self,
        store: Store,
        make_runtime: Callable[[], Runtime],
        clock: Clock,
        election: Election,
        *,
        refusals: Refusals | None = None,
        hourly: Callable[[Runtime], Sequence[Work]] = lambda _: (),
        beside: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
    ) -> None:
        """`beside`: works that go on for as long as this one leads."""
        self._works = beside
        self._store, self._make_runtime, self._clock, self._election = store, make_runtime, clock, election
        self._refusals, self._hourly = refusals, hourly
        self.controller: Controller | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Ranks go on without an operator, also while none leads.

        An operator that loses its lease stops acting and stands for election again. A process that ended instead would
        be restarted with growing delays, each time that the cluster's API goes away for a while.
        """
        while await _unless(stop, self._election.acquire()):
            try:
                # The lease is also renewed during the first list of all objects: that may take a while.
                lost = await _unless(stop, self._election.keep(), self._lead())
            finally:
                await self._hand_over()
            if not lost:
                return
            log.warning("%s does not lead any more", self._election.identity)

    async def _lead(self) -> None:
        runtime = self._make_runtime()
        self.controller = Controller(self._store, runtime, self._clock)
        await self.controller.start()
        async with self._beside(self._hourly(runtime)):
            await asyncio.Event().wait()

    async def _hand_over(self) -> None:
        """First stop acting, then release the lease: all within the third of it in which no operator leads."""
        controller, self.controller = self.controller, None
        if controller is not None:
            try:
                async with asyncio.timeout(self._election.duration / 3):
                    await controller.close(patience=self._election.duration / 6)
            except TimeoutError:
                raise CannotLetGo(f"{self._election.identity} does not lead any more, and cannot stop") from None
        await self._election.release()

    @contextlib.asynccontextmanager
    async def _beside(self, hourly: Sequence[Work]) -> AsyncIterator[None]:
        """Run the leader's background works."""
        works = [work() for work in self._works]
        works += [self._publish_refusals()] if self._refusals is not None else []
        works += [repeat_hourly(hourly)] if hourly else []
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish_refusals(self) -> None:
        assert self._refusals is not None
        while True:
            try:
                await self._refusals.publish()
                await self._refusals.next()
            except BasilicaError as error:
                log.warning("what is no run could not be answered: %s", error)
                await asyncio.sleep(1.0)


async def _unless(stop: asyncio.Event, *works: Awaitable[None]) -> bool:
    """Run the works until one of them is done; False if `stop` is set first."""
    doing = [asyncio.ensure_future(work) for work in works]
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({stopping, *doing}, return_when=asyncio.FIRST_COMPLETED)
        for task in doing:
            if task.done():
                task.result()
                return True
        return False
    finally:
        stopping.cancel()
        for task in doing:
            task.cancel()
        await asyncio.gather(stopping, *doing, return_exceptions=True)
