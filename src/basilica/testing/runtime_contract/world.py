"""A runtime with what a controller would do, for stories that tests tell of it."""

import asyncio
import inspect
import io
import os
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from basilica.core.actions import Launch, Stop
from basilica.core.errors import RuntimeUnavailable
from basilica.core.mesh import Announcement, Gate
from basilica.core.notices import Notice
from basilica.core.reports import Series, SeriesQuery
from basilica.core.seen import Ended, SeenRank, Sight, Sighting
from basilica.core.spec import DeploymentSpec, Exec, Shell
from basilica.core.world import WorldSize
from basilica.ports import Exited, Output, Run, Runtime, StoredArchive

PATIENCE_S = 30.0
STORY_SECONDS = 100.0
FOR_EVER = "trap 'exit 0' TERM; while :; do sleep 0.05; done"

Contract = TypeVar("Contract", bound="Opens")


class Opens:
    """Says how a runtime is opened. `namespace` is that of the user `ada`."""

    namespace = "u-ada"

    def opened(self, directory: Path) -> AbstractAsyncContextManager[Runtime]:
        """A runtime that is not started; what an earlier one kept in the directory is there."""
        raise NotImplementedError


def story(test: Callable[[Contract, "World"], Awaitable[None]]) -> Callable[[Contract, Path], None]:
    """Make a test of a coroutine that takes a world with an open runtime."""

    def told(self: Contract, tmp_path: Path) -> None:
        async def tell() -> None:
            world = World(self, tmp_path)
            async with world.control_plane():
                await test(self, world)

        asyncio.run(asyncio.wait_for(tell(), STORY_SECONDS))

    told.__name__, told.__qualname__, told.__doc__ = test.__name__, test.__qualname__, inspect.getdoc(test)
    return told


def packed(files: Mapping[str, str]) -> bytes:
    """A directory as it is sent. All of its files may be executed."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    return content.getvalue()


def reporting(code: str) -> Exec:
    """A Python program that can `report`."""
    return Exec((sys.executable, "-c", f"from basilica import report\n{code}"))


class World:
    """A runtime with what a controller would do, and waits that it wakes."""

    def __init__(self, contract: Opens, directory: Path) -> None:
        self._contract, self._state, self.files = contract, directory / "state", directory / "files"
        self.files.mkdir()
        self._woken = asyncio.Event()
        self.wakes: list[str] = []
        self._runs: list[Run] = []
        self._opened = AsyncExitStack()
        self.lets_hosts_go = True
        self.notice: Notice | None = None  # that ranks are told of
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "no control plane is up"
        return self._runtime

    @asynccontextmanager
    async def control_plane(self) -> AsyncIterator[None]:
        """At the end nothing of what the story made is left, also if it failed."""
        await self._open()
        try:
            yield
        finally:
            try:
                await self._end_all()
            finally:
                await self._close()

    async def _open(self) -> None:
        self._runtime = await self._opened.enter_async_context(self._contract.opened(self._state))
        await self._runtime.start(self._wake)

    async def _close(self) -> None:
        await self.runtime.close()
        self._runtime = None
        await self._opened.aclose()

    def _wake(self, instance: str) -> None:
        self.wakes.append(instance)
        self._woken.set()

    async def restarted(self, meanwhile: Callable[[], None]) -> None:
        """This control plane lets go, something happens, and another takes over."""
        await self._close()
        meanwhile()
        await self._open()

    async def _end_all(self) -> None:
        for run in self._runs:
            living = [seen for seen in (await self.look(run)).ranks if seen.sight is not Sight.ENDED]
            await self.stop(run, *living, grace=0.0)
            for seen in living:
                await self.ended(run, seen.rank, seen.attempt)
            await self.do(partial(self.runtime.end_rendezvous, run))
            await self.do(partial(self.runtime.remove, run))

    def run(self, script: str | Exec, name: str = "train", **spec: Any) -> Run:
        """A run, of two ranks if nothing else is said."""
        program = script if isinstance(script, Exec) else Shell(script)
        spec = {"world": WorldSize(1, 2, 8), "grace_seconds": 10.0, **spec}
        run = Run(
            instance=f"{name}-0a1b2c3d",
            user="ada",
            namespace=self._contract.namespace,
            created_at=time.time(),
            spec=DeploymentSpec(name=name, program=program, **spec),
        )
        self._runs.append(run)
        return run

    async def do(self, action: Callable[[], Awaitable[Any]]) -> Any:
        """What a controller does with an action that cannot be done now: ask for it again."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await action()
            except RuntimeUnavailable:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)

    async def look(self, run: Run) -> Sighting:
        """What a look shows. Hosts are let go as a controller does it: ranks may wait for that."""
        found: Sighting = await self.do(partial(self.runtime.observe, run))
        if self.lets_hosts_go and found.rendezvous is not None and found.mesh is not None:
            hosts = tuple((host, Gate.READY) for host in found.mesh.hosts)
            released = Announcement(run.spec.world.target, hosts, notice=self.notice)
            if found.rendezvous.says != released:
                await self.do(partial(self.runtime.announce, run, released))
        return found

    async def launch(self, run: Run, *ranks: int, attempt: int = 0) -> None:
        size = run.spec.world.target
        await self.do(lambda: self.runtime.launch(run, [Launch(rank, attempt, size) for rank in ranks]))

    async def stop(self, run: Run, *ranks: SeenRank, grace: float = 10.0) -> None:
        stops = [Stop(seen.rank, seen.attempt, grace) for seen in ranks]
        if stops:
            await self.do(lambda: self.runtime.stop(run, stops))

    async def until(self, run: Run, rank: int, attempt: int, condition: Callable[[SeenRank], object]) -> SeenRank:
        """The attempt as soon as a look shows it so."""
        end = time.monotonic() + PATIENCE_S
        last: Sighting | None = None
        while time.monotonic() < end:
            self._woken.clear()
            last = await self.look(run)
            for seen in last.ranks:
                if (seen.rank, seen.attempt) == (rank, attempt) and condition(seen):
                    return seen
            try:
                await asyncio.wait_for(self._woken.wait(), 0.5)
            except TimeoutError:
                continue
        raise TimeoutError(f"rank {rank}, attempt {attempt}: the last look was {last}")

    async def running(self, run: Run, rank: int = 0, attempt: int = 0) -> SeenRank:
        return await self.until(run, rank, attempt, lambda seen: seen.sight is Sight.RUNNING)

    async def ended(self, run: Run, rank: int = 0, attempt: int = 0) -> Ended:
        seen = await self.until(run, rank, attempt, lambda seen: seen.sight is Sight.ENDED)
        assert seen.ended is not None
        return seen.ended

    async def written(self, name: str, text: str) -> None:
        """Return when a rank has written that to its file."""
        end = time.monotonic() + PATIENCE_S
        while not (self.files / name).exists() or (self.files / name).read_text() != text:
            assert time.monotonic() < end, f"{name} was not written"
            await asyncio.sleep(0.02)

    async def written_to_log(self, run: Run, line: str, rank: int = 0) -> None:
        """Return when the rank's log has that line."""
        end = time.monotonic() + PATIENCE_S
        while line not in (await self.runtime.tail(run, rank, None)).lines:
            assert time.monotonic() < end, f"{line!r} was not written"
            await asyncio.sleep(0.02)

    async def command(self, run: Run, *argv: str, rank: int = 0) -> tuple[str, str, int]:
        """What a command beside the rank wrote to its two streams, and its exit code."""
        written = {"stdout": "", "stderr": ""}
        async with aclosing(self.runtime.execute(run, rank, argv)) as output:
            async for found in output:
                match found:
                    case Output(stream, text):
                        written[stream] += text
                    case Exited(code):
                        assert await anext(output, None) is None, "something came after the exit"
                        return written["stdout"], written["stderr"], code
        raise AssertionError("the command never ended")

    async def announced(self, run: Run, wanted: Announcement) -> None:
        """Announce as a controller does: until a look shows that it is said."""
        end = time.monotonic() + PATIENCE_S
        while (seen := (await self.look(run)).rendezvous) is None or seen.says != wanted:
            assert time.monotonic() < end, f"it says {seen}"
            await self.do(partial(self.runtime.announce, run, wanted))
            await asyncio.sleep(0.05)

    async def send(self, user: str, content: bytes) -> StoredArchive:
        """In pieces, as it comes over a network."""

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(content), 100_000):
                yield content[at : at + 100_000]

        return await self.runtime.store_archive(user, pieces())

    async def reported(self, run: Run, *, step: int) -> None:
        """Return when that is the last step of rank 0."""
        end = time.monotonic() + PATIENCE_S
        while (last := (await self.do(lambda: self.runtime.reports(run))).get(0)) is None or last.step != step:
            assert time.monotonic() < end, f"the last report is {last}"
            await asyncio.sleep(0.05)

    async def series(self, run: Run, query: SeriesQuery | None = None, *, points: int | None = None) -> list[Series]:
        """Those that are asked for, as soon as the first of them has so many points."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found: list[Series] = await self.do(lambda: self.runtime.series(run, query or SeriesQuery()))
            if points is None or (found and len(found[0].points) == points):
                return found
            assert time.monotonic() < end, f"the series are {found}"
            await asyncio.sleep(0.05)

    async def without_rendezvous(self, run: Run) -> None:
        end = time.monotonic() + PATIENCE_S
        while (await self.look(run)).rendezvous is not None:
            assert time.monotonic() < end, "it is still there"
            await asyncio.sleep(0.05)


class Holders:
    """Knows whether a process still has a pipe open that is given to it by its name."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    async def appear(self) -> None:
        await self._become(held=True)

    async def vanish(self) -> None:
        await self._become(held=False)
        os.close(self._reading)

    def stare(self, seconds: float) -> None:
        """Until somebody comes, so long at most. The event loop stands still meanwhile, as on a busy machine."""
        end = time.monotonic() + seconds
        while not self._held() and time.monotonic() < end:
            time.sleep(0.005)

    async def _become(self, *, held: bool) -> None:
        end = time.monotonic() + PATIENCE_S
        while self._held() is not held:
            assert time.monotonic() < end, "nobody came" if held else "somebody is still there"
            await asyncio.sleep(0.02)

    def _held(self) -> bool:
        try:
            return bool(os.read(self._reading, 1))
        except BlockingIOError:
            return True
