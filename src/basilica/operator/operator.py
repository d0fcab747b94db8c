"""The operator's life: know what there is, become the leader, turn every run, let go."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from basilica.controller.loop import Controller
from basilica.core.errors import BasilicaError
from basilica.operator.election import Election
from basilica.ports import Clock, Runtime, Store

log = logging.getLogger("basilica.operator")

LETTING_GO_SECONDS = 5.0
RETENTION_PERIOD = 3600.0


class LeadershipLost(BasilicaError):
    """Another operator may act by now: this one must end, and is started again by Kubernetes."""


class Refusals(Protocol):
    """Objects that people made by hand and that are no runs: the leader tells them."""

    async def next(self) -> None:
        """Return when there may be more to tell."""
        ...

    async def tell(self) -> None: ...


class Operator:
    """One of several; the controller exists only while this one leads."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        clock: Clock,
        election: Election,
        *,
        refusals: Refusals | None = None,
        hourly: Sequence[Callable[[], Awaitable[list[str]]]] = (),
    ) -> None:
        self._store, self._runtime, self._clock, self._election = store, runtime, clock, election
        self._refusals, self._hourly = refusals, hourly  # works that remove what is too old, and name it
        self.controller: Controller | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. `LeadershipLost` if the lease is lost before; ranks go on in either case."""
        if not await _unless(stop, self._election.acquire()):
            return
        try:
            # The lease is kept while all there is is read for the first time, too: that may take a while.
            lost = await _unless(stop, self._election.keep(), self._lead())
            if lost:
                raise LeadershipLost(f"{self._election.identity} does not lead any more")
        finally:
            await self._let_go()

    async def _lead(self) -> None:
        self.controller = Controller(self._store, self._runtime, self._clock)
        await self.controller.start()
        async with self._beside():
            await asyncio.Event().wait()

    async def _let_go(self) -> None:
        """First stop acting, then say so."""
        controller, self.controller = self.controller, None
        if controller is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LETTING_GO_SECONDS):
                    await controller.close()
        await self._election.release()

    @contextlib.asynccontextmanager
    async def _beside(self) -> AsyncIterator[None]:
        """What a leader does beside turning runs."""
        works = [self._tell_refusals()] if self._refusals is not None else []
        works += [self._keep_retention()] if self._hourly else []
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_refusals(self) -> None:
        assert self._refusals is not None
        while True:
            try:
                await self._refusals.tell()
                await self._refusals.next()
            except BasilicaError as error:
                log.warning("what is no run could not be answered: %s", error)
                await asyncio.sleep(1.0)

    async def _keep_retention(self) -> None:
        while True:
            for work in self._hourly:
                try:
                    for name in await work():
                        log.info("removing %s: older than the retention", name)
                except BasilicaError as error:
                    log.warning("retention: %s", error)
            await asyncio.sleep(RETENTION_PERIOD)


async def _unless(stop: asyncio.Event, *works: Awaitable[None]) -> bool:
    """Do these until one of them is done; False if `stop` is set first."""
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
