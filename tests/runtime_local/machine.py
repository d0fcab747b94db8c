"""A machine with a local runtime on it, for tests: ranks are real processes, and every wait is woken, never timed."""

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from basilica.core.actions import Launch, Stop
from basilica.core.seen import Ended, SeenRank, Sight
from basilica.core.spec import DeploymentSpec, Exec, Resources, Shell
from basilica.core.world import WorldSize
from basilica.machine.layout import Key, Layout
from basilica.ports import Run
from basilica.runtimes.local.gpus import GpuInventory
from basilica.runtimes.local.records import Record, read_record
from basilica.runtimes.local.runtime import LocalRuntime

PATIENCE_S = 10.0
MARK = "BASILICA_TEST_MARK"
NO_GPUS = GpuInventory()
NO_LIMITS = Resources()
ONE_RANK = WorldSize(1, 1, 8)
SLEEP = Exec(("sleep", "1000"))


def python(script: str) -> Exec:
    """A rank in Python that starts quickly."""
    return Exec((sys.executable, "-I", "-S", "-c", script))


def sh(script: str, *args: str) -> Shell:
    return Shell(script, args)


class Machine:
    """One state directory. `control_plane()` is a runtime on it, as often as one likes, one after the other."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.layout = Layout(state_dir)
        self.mark = uuid.uuid4().hex
        self.woken = asyncio.Event()
        self.wakes: list[str] = []
        self._runtime: LocalRuntime | None = None

    @property
    def runtime(self) -> LocalRuntime:
        assert self._runtime is not None
        return self._runtime

    @asynccontextmanager
    async def control_plane(self, *, gpus: GpuInventory = NO_GPUS, **options: Any) -> AsyncIterator[LocalRuntime]:
        def wake(instance: str) -> None:
            self.wakes.append(instance)
            self.woken.set()

        self._runtime = runtime = LocalRuntime(self.state_dir, gpus=gpus, **options)
        await runtime.start(wake)
        try:
            yield runtime
        finally:
            await runtime.close()
            self._runtime = None

    def run(
        self,
        program: Exec | Shell,
        *,
        name: str = "train",
        world: WorldSize = ONE_RANK,
        env: Mapping[str, str] | None = None,
        resources: Resources = NO_LIMITS,
        created_at: float = 1.0,
        **spec: Any,
    ) -> Run:
        return Run(
            instance=f"{name}-x",
            user="ada",
            namespace="u-ada",
            created_at=created_at,
            spec=DeploymentSpec(
                name=name,
                program=program,
                world=world,
                env={MARK: self.mark, **(env or {})},
                resources=resources,
                **spec,
            ),
        )

    async def launch(self, run: Run, *ranks: int, attempt: int = 1) -> None:
        size = run.spec.world.target
        await self.runtime.launch(run, [Launch(rank, attempt, size) for rank in ranks or (0,)])

    async def stop(self, run: Run, *ranks: int, attempt: int = 1, grace: float = 10.0) -> None:
        await self.runtime.stop(run, [Stop(rank, attempt, grace) for rank in ranks or (0,)])

    async def seen(self, run: Run, rank: int = 0, attempt: int = 1) -> SeenRank | None:
        for seen in (await self.runtime.observe(run)).ranks:
            if (seen.rank, seen.attempt) == (rank, attempt):
                return seen
        return None

    async def until(self, run: Run, is_so: Callable[[SeenRank], bool], *, rank: int = 0, attempt: int = 1) -> SeenRank:
        """Look whenever the runtime calls, until the rank is as wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.woken.clear()
                seen = await self.seen(run, rank, attempt)
                if seen is not None and is_so(seen):
                    return seen
                await self.woken.wait()

    async def until_running(self, run: Run, rank: int = 0, attempt: int = 1) -> SeenRank:
        return await self.until(run, lambda seen: seen.sight is Sight.RUNNING, rank=rank, attempt=attempt)

    async def until_ended(self, run: Run, rank: int = 0, attempt: int = 1) -> Ended:
        seen = await self.until(run, lambda seen: seen.sight is Sight.ENDED, rank=rank, attempt=attempt)
        assert seen.ended is not None
        return seen.ended

    async def outcome(self, run: Run) -> Ended:
        """Launch rank 0 and wait for its end."""
        await self.launch(run)
        return await self.until_ended(run)

    async def until_printed(self, run: Run, line: str, rank: int = 0) -> list[str]:
        """All lines of the rank up to the given one."""
        lines: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in self.runtime.follow(run, rank, None):
                lines += chunk.lines
                if line in lines:
                    return lines
        raise AssertionError("follow() ended by itself")

    def record(self, run: Run, rank: int = 0, attempt: int = 1) -> Record:
        record = read_record(self.layout.record(Key(run.instance, rank, attempt)))
        assert record is not None
        return record

    def ranks(self) -> list[int]:
        """The processes of all ranks with all that they started, by the mark in their environment."""
        mark = f"{MARK}={self.mark}".encode()
        return [pid for pid in _pids() if pid != os.getpid() and mark in _environment(pid)]

    def ranks_become(self, count: int) -> bool:
        """A process in the middle of its exec shows no environment, so the number is given a moment."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.ranks()) != count and time.monotonic() < deadline:
            time.sleep(0.001)
        return len(self.ranks()) == count

    def supervisors(self) -> list[int]:
        """Supervisors and fork servers, by what they have open."""
        return [
            pid for pid in _pids() if pid != os.getpid() and any(f.startswith(str(self.state_dir)) for f in _files(pid))
        ]

    def rendezvous_pid(self) -> int:
        return int((self.layout.rendezvous / "lock").read_text())

    def rendezvous_pids(self) -> list[int]:
        """The rendezvous, and before it the parent that would start it again; those that are there."""
        try:
            service = self.rendezvous_pid()
            parent = int(Path(f"/proc/{service}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return []
        return [parent, service] if parent in self.supervisors() else [service]

    def nothing_left(self) -> bool:
        """True once no process of ours is there any more; what is left after a while is killed."""
        for pid in self.rendezvous_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while left := {*self.ranks(), *self.supervisors()}:
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                return False
            time.sleep(0.005)
        return True


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # gone meanwhile


def _files(pid: int) -> list[str]:
    try:
        return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


async def until_gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
