"""The rendezvous of all runs of this machine: one process beside the server that outlives it.

The server holds on to the process by a connection. When that breaks, the process is gone and is started again, by its
own parent or by us; it comes back with all its keys and ports. When neither a server nor a rank is left that needs it,
it ends by itself.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from basilica.core.errors import RuntimeUnavailable
from basilica.core.mesh import Announcement, SeenRendezvous
from basilica.machine.private_files import append_private
from basilica.rendezvous.announcing import announce
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.control import RendezvousControl
from basilica.rendezvous.driver import Driver
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.service import RendezvousError
from basilica.runtimes.local.processes import Watch

log = logging.getLogger(__name__)

Got = TypeVar("Got")

LINGER_S = 2.0
UP_WITHIN_S = 30.0
UP_AT_START_S = 5.0
GONE_WITHIN_S = 2.0
FIRST_BACK_OFF_S = 0.1
LONGEST_BACK_OFF_S = 5.0


@dataclass(slots=True)
class _Open:
    endpoint: str
    keys: KeysClient
    says: Announcement | None = None
    driver: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self.driver is not None:
            self.driver.cancel()
            await asyncio.gather(self.driver, return_exceptions=True)
        await self.keys.close()


class LocalRendezvous:
    """`host` is the address at which ranks find it."""

    def __init__(self, data_dir: Path, *, runs: Path, python: str, complaints: Path, host: str) -> None:
        self._data_dir, self._runs, self._complaints = data_dir, runs, complaints
        self._python, self._host = python, host
        self._orders = RendezvousControl(data_dir)
        self._open: dict[str, _Open] = {}
        self._serving = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._wake: Callable[[str], None] = lambda _: None

    def start(self, wake: Callable[[str], None]) -> None:
        """Begin to keep the service running. `wake` is called for each run whose keyspace may need something."""
        self._wake = wake
        self._keeper = asyncio.create_task(self._keep(), name="rendezvous-keeper")

    async def wait_until_up(self) -> None:
        """So that the first run need not wait. Not for long: a service that cannot be started is each run's problem."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UP_AT_START_S):
                await self._serving.wait()

    async def close(self) -> None:
        """Let go. Keyspaces stay open, and the service with them while a rank is left."""
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
        """Wait until the process that was just told to leave is gone: who looks then must not find it."""
        gone = asyncio.Event()
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            watch = Watch(int((self._data_dir / "lock").read_text()), None, gone.set)
            try:
                async with asyncio.timeout(GONE_WITHIN_S):
                    await gone.wait()
            finally:
                watch.close()

    # ---- what runs need --------------------------------------------------------------------------------------------

    def seen(self, instance: str) -> SeenRendezvous | None:
        run = self._open.get(instance)
        return None if run is None else SeenRendezvous(endpoint=run.endpoint, says=run.says)

    async def open(self, instance: str, wished_port: int | None = None) -> int:
        """The port of the run's keyspace, made if there is none: on the wished port, if that can be had."""
        known = self._open.get(instance)
        if known is None:
            known = self._remember(instance, await self._order(lambda: self._open_keyspace(instance, wished_port)))
        return int(known.endpoint.rpartition(":")[2])

    async def _open_keyspace(self, instance: str, wished_port: int | None) -> int:
        if wished_port is not None:
            with contextlib.suppress(RendezvousError):  # somebody else has taken it, or it is open on another
                return await self._orders.open(instance, wished_port)
        return await self._orders.open(instance)

    async def announce(self, instance: str, announcement: Announcement, *, drives_torch: bool) -> None:
        """Have the open keyspace say exactly this."""
        run = self._open[instance]
        says, run.says = run.says, None  # unknown, should this fail half-way
        try:
            await announce(run.keys, says, announcement)
        except NoAnswer as error:
            raise RuntimeUnavailable(f"the rendezvous of {instance} does not answer: {error}") from error
        run.says = announcement
        if drives_torch and run.driver is None:
            run.driver = asyncio.create_task(Driver(run.endpoint, instance).run(), name=f"driver-{instance}")

    async def end(self, instance: str) -> None:
        run = self._open.pop(instance, None)
        if run is not None:
            await run.close()
        await self._order(lambda: self._orders.close(instance))

    async def _order(self, order: Callable[[], Awaitable[Got]]) -> Got:
        """Give an order; if the service is away, wait until it is back."""
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
        """Hold the service; start it whenever it is not there."""
        back_off = FIRST_BACK_OFF_S
        while True:
            held = RendezvousControl(self._data_dir)
            try:
                await self._take_stock(held)
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

    async def _take_stock(self, service: RendezvousControl) -> None:
        """See what is open. A run whose keyspace was lost gets a new one, and one that has ended loses its own."""
        there = {keyspace["name"]: keyspace["port"] for keyspace in await service.list()}
        for instance in [name for name in there if not (self._runs / name).exists()]:  # it was removed meanwhile
            await service.close(instance)
            del there[instance]
        for instance in [name for name in self._open if name not in there]:
            await self._open.pop(instance).close()
            self._wake(instance)
        for instance, port in there.items():
            self._remember(instance, port)
            self._wake(instance)

    def _remember(self, instance: str, port: int) -> _Open:
        endpoint = f"{self._host}:{port}"
        return self._open.setdefault(instance, _Open(endpoint, KeysClient(endpoint)))

    def _spawn(self) -> None:
        """Start the service, detached, and wait until it serves."""
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [self._python, "-P", "-m", "basilica.rendezvous", "--host", self._host]
        with os.fdopen(append_private(self._complaints), "ab") as complaints:
            started = subprocess.Popen(
                [*command, "--data-dir", self._data_dir, "--linger", str(LINGER_S), "--runs", self._runs, "--detach"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env={name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")},
                start_new_session=True,  # a Ctrl-C at the server's terminal is not for it
            )
        assert started.stdout is not None
        with started, started.stdout as said:
            if not said.readline():
                raise RuntimeUnavailable(f"it ended at once; see {self._complaints}")
