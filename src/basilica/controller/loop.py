"""The controller's loop: a keyed queue, woken by the store, the runtime and timers. Nothing here polls.

One turn per run at a time; a wake-up that comes during a turn leads to one more. A run that does not change costs
nothing: no task, no timer unless it has a deadline.
"""

import asyncio
import contextlib
import logging
from collections import deque

from basilica.controller.step import step
from basilica.controller.tally import Tally
from basilica.core.deployment import Deployment
from basilica.core.errors import BasilicaError, DeploymentDamaged, DeploymentNotFound, StaleVersion
from basilica.core.failing import describe_problem, record_failure
from basilica.ports import Clock, Runtime, Store

log = logging.getLogger("basilica.controller")

TURNS_AT_ONCE = 64
FIRST_BACK_OFF = 0.1
LONGEST_BACK_OFF = 30.0


class Controller:
    """Gives every live run its turns. `start` adopts the runs of an earlier control plane; `close` lets ranks go on."""

    def __init__(self, store: Store, runtime: Runtime, clock: Clock) -> None:
        self._store, self._runtime, self._clock = store, runtime, clock
        self._due: deque[str] = deque()
        self._queued: set[str] = set()  # in _due, or to be put there when its turn ends
        self._turning: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._back_off: dict[str, float] = {}
        self._failing_since: dict[str, float] = {}  # when the first of a run's failed turns began
        self._live: dict[str, Deployment] = {}  # each run that is not settled, as our last turn left it
        self._tasks: set[asyncio.Task[None]] = set()
        self._feed: asyncio.Task[None] | None = None
        self._closed = False
        self._damaged: set[str] = set()  # runs that are not turned, since their record cannot be read
        self.tally = Tally()
        self.turns = 0
        self.errors = 0

    async def start(self) -> None:
        await self._runtime.start(self.wake)
        self._feed = asyncio.create_task(self._watch_store(), name="controller-feed")
        for instance in await self._store.live():
            self.wake(instance)

    async def close(self, patience: float | None = None) -> None:
        """Finish the turns that are under way and begin no other. After `patience` seconds the unfinished turns are
        cancelled where they are, as in a crash."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        if self._feed is not None:
            self._feed.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._feed
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._runtime.close()

    def wake(self, instance: str) -> None:
        """Enqueue a turn of this run. Any number of calls before the turn begins make one turn."""
        if instance in self._queued or self._closed:
            return
        self._queued.add(instance)
        if instance not in self._turning:
            self._due.append(instance)
            self._spawn()

    def rearm(self) -> None:
        """Enqueue a turn of every run that has a timer: the event loop's timers do not count suspended time."""
        for instance in tuple(self._timers):
            self.wake(instance)

    @property
    def depth(self) -> int:
        return len(self._due)

    @property
    def busy(self) -> bool:
        """True while a run is live, or waits for a turn."""
        return bool(self._queued or self._turning or self._back_off) or any(
            not deployment.status.settled for deployment in self._live.values()
        )

    def live(self) -> list[Deployment]:
        return list(self._live.values())

    def now(self) -> float:
        return self._clock.now()

    async def _watch_store(self) -> None:
        """Wake each run whose record somebody other than this controller has changed."""
        async for instance in self._store.changes():
            try:
                version = (await self._store.get(instance)).version
            except DeploymentNotFound:
                self._end(instance)
                continue
            except DeploymentDamaged:
                version = -1
            except Exception:  # no fault of one run may end the feed
                log.warning("%s changed and cannot be read; turning it anyway", instance, exc_info=True)
                version = -1
            ours = self._live.get(instance)
            if ours is None or version != ours.version:
                self.wake(instance)

    def _spawn(self) -> None:
        if self._due and len(self._tasks) < TURNS_AT_ONCE and not self._closed:
            task = asyncio.create_task(self._worker())
            self._tasks.add(task)
            task.add_done_callback(self._on_worker_done)

    def _on_worker_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._spawn()  # for a run that was woken while the last worker was ending

    async def _worker(self) -> None:
        while self._due and not self._closed:
            instance = self._due.popleft()
            self._queued.discard(instance)
            self._turning.add(instance)
            try:
                await self._turn(instance)
            finally:
                self._turning.discard(instance)
                if instance in self._queued:  # woken during its turn
                    self._due.append(instance)

    async def _turn(self, instance: str) -> None:
        self.turns += 1
        self._cancel_timer(instance)
        began = self._clock.now()
        try:
            deployment, wake_at = await step(instance, self._store, self._runtime, self._clock)
        except DeploymentNotFound:
            self._end(instance)
        except StaleVersion:
            self.wake(instance)
        except DeploymentDamaged as error:
            self._set_aside(instance, error)
        except Exception as error:  # noqa: BLE001 (a fault in one run must not end the controller of all)
            self._retry(instance, error)
            await self._record_failure(instance, error, self._failing_since.setdefault(instance, began))
        else:
            self._back_off.pop(instance, None)
            self._failing_since.pop(instance, None)
            self._damaged.discard(instance)
            before = self._live.get(instance)
            if before is not None:
                self.tally.note(before.status, deployment.status)
            if deployment.status.settled and wake_at is None:
                self._forget(instance)
                if before is not None:  # else it had been counted when it settled
                    self.tally.end(deployment)
            else:
                self._live[instance] = deployment
            if wake_at is not None:
                self._wake_at(instance, wake_at - self._clock.now())

    def _set_aside(self, instance: str, error: DeploymentDamaged) -> None:
        """Give a damaged run no more turns until its record changes: a retry would read the same damage."""
        known = instance in self._damaged
        self._forget(instance)
        self._damaged.add(instance)
        if not known:
            log.error("%s is left alone, and its ranks with it: %s", instance, error)

    def _retry(self, instance: str, error: Exception) -> None:
        self.errors += 1
        delay = self._back_off.get(instance, FIRST_BACK_OFF)
        self._back_off[instance] = min(delay * 2, LONGEST_BACK_OFF)
        expected = isinstance(error, BasilicaError)
        log.warning("turn of %s failed, again in %.1f s: %s", instance, delay, error, exc_info=not expected)
        self._wake_at(instance, delay)

    async def _record_failure(self, instance: str, error: Exception, since: float) -> None:
        """Record in the run's status that its turns fail, once for each failure. If the record cannot be saved either,
        the next failed turn tries again."""
        try:
            deployment, now = await self._store.get(instance), self._clock.now()
            found = record_failure(deployment.status, since, describe_problem(error), now)
            if found is not None:
                status, events = found
                self._live[instance] = await self._store.save_status(deployment, status, events, now=now)
        except Exception as problem:  # noqa: BLE001 (the failed turn is retried, recorded or not)
            log.debug("%s: the failure of its turn cannot be recorded: %s", instance, problem)

    def _wake_at(self, instance: str, delay: float) -> None:
        self._cancel_timer(instance)
        if not self._closed:
            loop = asyncio.get_running_loop()
            self._timers[instance] = loop.call_later(max(0.0, delay), self._fire_timer, instance)

    def _fire_timer(self, instance: str) -> None:
        self._timers.pop(instance, None)
        self.wake(instance)

    def _cancel_timer(self, instance: str) -> None:
        timer = self._timers.pop(instance, None)
        if timer is not None:
            timer.cancel()

    def _end(self, instance: str) -> None:
        """Forget a run that is gone; its time was spent none the less."""
        if instance in self._live:
            self.tally.end(self._live[instance])
        self._forget(instance)

    def _forget(self, instance: str) -> None:
        self._cancel_timer(instance)
        self._back_off.pop(instance, None)
        self._failing_since.pop(instance, None)
        self._live.pop(instance, None)
        self._damaged.discard(instance)
