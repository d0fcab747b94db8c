"""The rendezvous of all runs of this machine: one process beside the server that outlives it.

The server holds the process by a connection. When the connection breaks, the process is gone and is started again, by
its own parent or by the server, with all its keys and ports. The process ends by itself when neither a server nor a
rank is left that needs it.

The process answers the server's own user, root and the user that ranks run as, and no other. A mirror (`KeysMirror`)
follows each announcement in a keyspace: a rank that overwrites or deletes it wakes the run, whose next turn publishes
it again. Keys lost with a damaged file are published again in the same way, and the loss is a warning.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from basilica.core.errors import RuntimeUnavailable
from basilica.core.mesh import Announcement, SeenRendezvous
from basilica.machine import files
from basilica.machine.processes import Watch
from basilica.rendezvous.announcements import announce, announced, changes_announcement
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.control import RendezvousControl
from basilica.rendezvous.driver import Driver
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.mirror import KeysMirror
from basilica.rendezvous.names import ROOT
from basilica.rendezvous.quota import SHARED_WEIGHT
from basilica.rendezvous.service import RendezvousError

log = logging.getLogger(__name__)

Got = TypeVar("Got")

LINGER_S = 2.0
UP_WITHIN_S = 30.0
UP_AT_START_S = 5.0
GONE_WITHIN_S = 2.0
FIRST_BACK_OFF_S = 0.1
LONGEST_BACK_OFF_S = 5.0
HEAL_AFTER_S = 0.1
KEYS_LOST = "RendezvousKeysLost"


class _Open:
    """The open keyspace of a run, and its last announcement. `changed` is called when another changes the latter."""

    def __init__(self, endpoint: str, changed: Callable[[], None]) -> None:
        self.endpoint, self._changed = endpoint, changed
        self.keys = KeysClient(endpoint)
        self.published: Announcement | None = None
        self.fault: str | None = None
        self._driver: asyncio.Task[None] | None = None
        self._mirror = KeysMirror(endpoint, ROOT, self._compare_soon)
        self._follower: asyncio.Task[None] | None = None
        self._check: asyncio.TimerHandle | None = None

    async def announce(self, wanted: Announcement) -> None:
        before, self.published = self.published, None  # unknown if this fails half-way
        await announce(self.keys, before, wanted)
        self.published = wanted
        if self._follower is None:
            self._follower = asyncio.create_task(self._mirror.run(), name=f"announced-{self.endpoint}")

    def drive(self, instance: str) -> None:
        if self._driver is None:
            self._driver = asyncio.create_task(Driver(self.endpoint, instance).run(), name=f"driver-{instance}")

    def _compare_soon(self, key: str | None) -> None:
        """Compare a little later: our own keys arrive one by one, and a foreign writer may go on changing them."""
        if self._check is None and (key is None or changes_announcement(key)):
            self._check = asyncio.get_running_loop().call_later(HEAL_AFTER_S, self._compare)

    def _compare(self) -> None:
        self._check = None
        if self._mirror.fresh and self.published is not None:
            found, wanted = announced(self._mirror.values), self.published
            if set(found.released) != set(wanted.released) or replace(found, released=wanted.released) != wanted:
                self.published = None
                self._changed()

    async def close(self) -> None:
        if self._check is not None:
            self._check.cancel()
        tasks = [task for task in (self._driver, self._follower) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.keys.close()


class LocalRendezvous:
    """Keeps the rendezvous process running. `host`: its address for ranks; `users`: uids answered besides our own."""

    def __init__(
        self, data_dir: Path, *, runs: Path, python: str, complaints: Path, host: str, users: Collection[int] = ()
    ) -> None:
        self._data_dir, self._runs, self._complaints = data_dir, runs, complaints
        self._python, self._host, self._users = python, host, users
        self._orders = RendezvousControl(data_dir)
        self._open: dict[str, _Open] = {}
        self._serving = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._wake: Callable[[str], None] = lambda _: None

    def start(self, wake: Callable[[str], None]) -> None:
        """Start to keep the service running. `wake` is called for each run whose keyspace may need an action."""
        self._wake = wake
        self._keeper = asyncio.create_task(self._keep(), name="rendezvous-keeper")

    async def wait_until_up(self) -> None:
        """Wait briefly for the service, so that the first run need not. Each run reports a service that stays down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UP_AT_START_S):
                await self._serving.wait()

    async def close(self) -> None:
        """Release the service. Keyspaces stay open, and the service stays while a rank is left."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        for run in self._open.values():
            await run.close()
        self._open.clear()
        if await self._orders.leave():
            await self._gone()
        await self._orders.disconnect()

    async def _gone(self) -> None:
        """Wait until the process that was ordered to leave is gone: callers must not find it after `close`."""
        gone = asyncio.Event()
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            watch = Watch(int((self._data_dir / "lock").read_text()), None, gone.set)
            try:
                async with asyncio.timeout(GONE_WITHIN_S):
                    await gone.wait()
            finally:
                watch.close()

    # ---- keyspaces of runs -----------------------------------------------------------------------------------------

    def seen(self, instance: str) -> SeenRendezvous | None:
        run = self._open.get(instance)
        return None if run is None else SeenRendezvous(endpoint=run.endpoint, says=run.published)

    def warnings(self, instance: str) -> tuple[tuple[str, str], ...]:
        """Return the warnings about the run's keyspace, as (reason, message)."""
        run = self._open.get(instance)
        return () if run is None or run.fault is None else ((KEYS_LOST, run.fault),)

    async def open(self, instance: str, wished_port: int | None = None) -> int:
        """Return the port of the run's keyspace, opening one if there is none: on the wished port, if that is free."""
        known = self._open.get(instance)
        if known is None:
            known = self._remember(instance, await self._order(lambda: self._open_keyspace(instance, wished_port)))
        return int(known.endpoint.rpartition(":")[2])

    async def _open_keyspace(self, instance: str, wished_port: int | None) -> dict[str, Any]:
        if wished_port is not None:
            with contextlib.suppress(RendezvousError):  # the port is taken, or the keyspace is open on another
                return await self._orders.about(instance, wished_port)
        return await self._orders.about(instance)

    async def announce(self, instance: str, announcement: Announcement, *, drives_torch: bool) -> None:
        """Publish exactly this announcement in the open keyspace."""
        run = self._open[instance]
        try:
            await run.announce(announcement)
            if run.fault is not None:
                await self._orders.acknowledge(instance)  # the run has its warning, and its keys are back
        except (NoAnswer, RendezvousError) as error:
            raise RuntimeUnavailable(f"the rendezvous of {instance} does not answer: {error}") from error
        if drives_torch:
            run.drive(instance)

    async def end(self, instance: str) -> None:
        run = self._open.pop(instance, None)
        if run is not None:
            await run.close()
        await self._order(lambda: self._orders.close(instance))

    async def _order(self, order: Callable[[], Awaitable[Got]]) -> Got:
        """Send an order to the service; while the service is down, wait until it is back."""
        try:
            async with asyncio.timeout(UP_WITHIN_S):
                while True:
                    await self._serving.wait()
                    try:
                        return await order()
                    except NoAnswer:
                        if self._serving.is_set():  # the keeper has yet to notice
                            await asyncio.sleep(FIRST_BACK_OFF_S)
        except TimeoutError:
            problem = f"the rendezvous service does not answer; see {self._complaints}"
            raise RuntimeUnavailable(problem) from None
        except RendezvousError as error:
            raise RuntimeUnavailable(f"the rendezvous service refuses: {error}") from error

    # ---- the process -----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Hold the service by a connection; start it whenever it is down."""
        back_off = FIRST_BACK_OFF_S
        while True:
            held = RendezvousControl(self._data_dir)
            try:
                await self._reconcile_keyspaces(held)
                self._serving.set()
                back_off = FIRST_BACK_OFF_S
                await held.hold()
            except (NoAnswer, RendezvousError):
                if self._serving.is_set():
                    self._serving.clear()
                    continue  # its own parent may have started it again already
            finally:
                await held.disconnect()
            try:
                await asyncio.to_thread(self._spawn)
            except (OSError, RuntimeUnavailable) as error:
                log.warning("the rendezvous service cannot be started, again in %.1f s: %s", back_off, error)
                await asyncio.sleep(back_off)
                back_off = min(back_off * 2, LONGEST_BACK_OFF_S)

    async def _reconcile_keyspaces(self, service: RendezvousControl) -> None:
        """Close the keyspaces of removed runs, and wake all others: a run whose keyspace was lost opens another."""
        for uid in self._users:  # an earlier server may have started the service for other users
            await service.allow(uid)
        there = {keyspace["name"]: keyspace for keyspace in await service.list()}
        for instance in [name for name in there if not (self._runs / name).exists()]:  # the run was removed meanwhile
            await service.close(instance)
            del there[instance]
        for instance in [name for name in self._open if name not in there]:
            await self._open.pop(instance).close()
            self._wake(instance)
        for instance, about in there.items():
            self._remember(instance, about)
            self._wake(instance)

    def _remember(self, instance: str, about: Mapping[str, Any]) -> _Open:
        run = self._open.get(instance)
        if run is None:
            run = self._open[instance] = _Open(f"{self._host}:{about['port']}", lambda: self._wake(instance))
        if about["fault"] is not None:
            run.fault, run.published = about["fault"], None
            self._wake(instance)
        return run

    def _spawn(self) -> None:
        """Start the service, detached, and wait until it serves."""
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [self._python, "-P", "-m", "basilica.rendezvous", "--host", self._host]
        options = ["--data-dir", str(self._data_dir), "--runs", str(self._runs), "--linger", str(LINGER_S)]
        options += [f"--keyspace-bytes={SHARED_WEIGHT}", *(f"--allow-uid={uid}" for uid in self._users)]
        with files.appending(str(self._complaints)) as complaints:
            started = subprocess.Popen(
                [*command, *options, "--detach"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env={name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")},
                start_new_session=True,  # a Ctrl-C at the server's terminal is not for it
            )
        assert started.stdout is not None
        with started, started.stdout as output:
            if not output.readline():
                raise RuntimeUnavailable(f"it ended at once; see {self._complaints}")
