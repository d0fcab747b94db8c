"""The local runtime: ranks as processes of this machine that outlive the control plane.

The files in the state directory are the source of truth. `table` mirrors the attempts' files in memory,
`attempt_tracker` keeps the mirror up to date, `launches` and `stops` start and end supervisors. This module wires the
parts together.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from basilica.core.actions import Launch, Probe, Stop
from basilica.core.checkpoints import Checkpoint, checkpoints_of
from basilica.core.errors import BadResult, Conflict, RuntimeUnavailable
from basilica.core.mesh import Announcement
from basilica.core.notices import Notice
from basilica.core.reports import Report, Series, SeriesQuery
from basilica.core.seen import Sight, Sighting, Stalled
from basilica.machine import files
from basilica.machine.clocks import SteadyClock
from basilica.machine.descriptors import raise_descriptor_limit
from basilica.machine.inotify import FileWatcher
from basilica.machine.layout import Key, Layout, number_of
from basilica.machine.pools import Pool
from basilica.machine.reserve import Reserve
from basilica.machine.state_dir import RESERVE_FILE
from basilica.ports import Exited, InUse, LogChunk, Output, Run, StoredArchive
from basilica.progress.notice_file import published, write_notice
from basilica.reports.wakeups import Wakeup, Wakeups
from basilica.runtimes.local import cgroups
from basilica.runtimes.local.activities import RINGS, Activities
from basilica.runtimes.local.archives import Archives
from basilica.runtimes.local.attempt_tracker import Tracking
from basilica.runtimes.local.attempts import Attempt, damages, shown
from basilica.runtimes.local.background import Background
from basilica.runtimes.local.bench import CORES, Benches
from basilica.runtimes.local.capabilities import Capability, capabilities_of, warnings_of
from basilica.runtimes.local.changes import Changes
from basilica.runtimes.local.execute import Commands
from basilica.runtimes.local.follow import follow_rank, read_rank, tail_cursor, tail_rank
from basilica.runtimes.local.forkserver import ForkServer
from basilica.runtimes.local.gpu_queue import GpuLine
from basilica.runtimes.local.gpus import GpuInventory, ask_nvidia_smi
from basilica.runtimes.local.hosts import LOOPBACK, MESH_LIMIT_S, Host, Hosts
from basilica.runtimes.local.launches import Launching
from basilica.runtimes.local.ports import Ports, ports_of, remember_rendezvous
from basilica.runtimes.local.rendezvous import LocalRendezvous
from basilica.runtimes.local.reports import Reports
from basilica.runtimes.local.run_as import Access, User
from basilica.runtimes.local.run_files import finish_removing, read_results, remove_run, unended
from basilica.runtimes.local.snapshot_dirs import SnapshotDirs
from basilica.runtimes.local.snapshot_files import Interrupted, find_snapshots, persist
from basilica.runtimes.local.start_requests import Starting
from basilica.runtimes.local.stops import Stopping
from basilica.runtimes.local.table import Table
from basilica.runtimes.local.unavailable import or_unavailable
from basilica.runtimes.local.workdirs import Unpacking

log = logging.getLogger("basilica.runtime")

LOG_LIMIT_BYTES = 64 << 20
CONTROL_THREADS = 4
READING_THREADS = 4
UNPACKING_THREADS = 3
LINES_AT_ONCE = 10_000
LINE_OPENS_AFTER_S = 0.5


class LocalRuntime:
    """A runtime whose ranks are processes of this machine."""

    name = "local"
    runs_images = False

    def __init__(
        self,
        state_dir: Path,
        *,
        node: str | None = None,
        hosts: Sequence[Host] = (),
        rendezvous_address: str = LOOPBACK,
        mesh_limit_seconds: float = MESH_LIMIT_S,
        gpus: GpuInventory | None = None,
        python: str = sys.executable,
        log_limit_bytes: int = LOG_LIMIT_BYTES,
        clock: SteadyClock | None = None,
        reserve: Reserve | None = None,
        run_as: User | None = None,
    ) -> None:
        """Build the runtime; `start` opens it.

        `hosts`: network namespaces that ranks are spread over, all of which reach `rendezvous_address`. `reserve`: disk
        space set aside so that runs can be stopped and removed on a full disk. `run_as`: the user that ranks run as, in
        `/` unless their spec names a directory; None is the server's own user.
        """
        self._layout = Layout(state_dir.absolute())
        self._clock = clock or SteadyClock()
        self._reserve = Reserve(self._layout.root / RESERVE_FILE) if reserve is None else reserve
        # Slow user files and archives must not delay the control plane, so each kind of work has threads of its own.
        self._own_work = Pool("control", CONTROL_THREADS)
        self._reading = Pool("reading", READING_THREADS)
        self._unpackers = Pool("unpacking", UNPACKING_THREADS)
        self._archives = Archives(self._layout.archives, self._unpackers, self._clock)
        self._node = node or socket.gethostname()
        self._hosts = Hosts(hosts or (Host(self._node),), python=python, limit_seconds=mesh_limit_seconds)
        self._rendezvous_address = rendezvous_address
        self._rendezvous = LocalRendezvous(
            self._layout.rendezvous,
            runs=self._layout.runs,
            python=python,
            complaints=self._layout.complaints,
            host=rendezvous_address,
            users=() if run_as is None else (run_as.uid,),
        )
        self._inventory = gpus
        self._line = GpuLine(gpus or GpuInventory())
        self._python = python
        self._log_limit = log_limit_bytes
        self._access = Access(run_as)
        self._directory = os.getcwd() if run_as is None else "/"
        self._cgroups = cgroups.Cgroups()
        # Two servers on one machine must not share groups or directories in memory, whatever their runs are called.
        self._mark = sha256(bytes(self._layout.root)).hexdigest()[:8]
        self._snapshots = SnapshotDirs(layout=self._layout, mark=self._mark, access=self._access)
        self._in_memory: set[str] = set()  # runs with a snapshot directory in memory
        self._persisting: dict[str, asyncio.Task[None]] = {}
        self._moving = Pool("snapshots", 1)
        self._table = Table()
        self._changes = Changes()
        self._background = Background()
        self._unpacking: Unpacking | None = None
        self._commands = Commands(self._layout, python=python, spawn=self._background.spawn)

    # ------------------------------------------------------------------------------------------------ start and close

    async def start(self, wake: Callable[[str], None]) -> None:
        with or_unavailable("cannot use the state directory"):
            for directory in (self._layout.root, self._layout.runs):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._access.passage(directory)
            self._wakeups = Wakeups(self._layout.wake, self._told, self._told_too_much, self._access.bell)
        self._changes.open(wake)
        self._fork_server = ForkServer(
            python=self._python, complaints=self._layout.complaints, descriptors=raise_descriptor_limit()
        )
        self._prepare_following()
        await self._fork_server.start()
        self._rendezvous.start(wake)
        await self._examine_machine()
        self._prepare_starting()
        with or_unavailable("cannot read the runs that an earlier server left"):
            await self._own_work.run(finish_removing, self._layout)
            await self._own_work.run(self._snapshots.remove_orphans)
            instances = await self._own_work.run(unended, self._layout)
            self._in_memory.update(await self._own_work.run(self._snapshots.held))
        await self._commands.end_leftovers()
        await self._benches.adopt()
        for instance in instances:
            self._activities.adopt(instance)
            with suppress(RuntimeUnavailable):  # the run's own `observe` raises it; other runs must still start
                await self._tracking.attempts(instance)
        await self._rendezvous.wait_until_up()
        if await self._own_work.run(self._layout.instances):
            # Runs that waited for GPUs return in any order: the oldest must have returned before any GPU is granted.
            self._launching.line_opens_at = asyncio.get_running_loop().time() + LINE_OPENS_AFTER_S
        for instance in self._in_memory - set(instances):
            wake(instance)  # the run may have ended: nobody else would ask for the move of its snapshots

    def _prepare_following(self) -> None:
        """Create the parts that are needed at once, since supervisors of an earlier server may ring."""
        self._files = FileWatcher()
        self._reports = Reports(
            self._layout, self._files, self._background.spawn, self._reading, self._stalled, self._clock
        )
        self._activities = Activities(self._layout, self._reading, self._clock)
        self._tracking = Tracking(
            layout=self._layout,
            table=self._table,
            line=self._line,
            reports=self._reports,
            changes=self._changes,
            background=self._background,
            clock=self._clock,
            pool=self._own_work,
        )
        self._stopping = Stopping(
            layout=self._layout,
            table=self._table,
            tracking=self._tracking,
            line=self._line,
            background=self._background,
            clock=self._clock,
            pool=self._own_work,
            reserve=self._reserve,
        )
        self._benches = Benches(
            self._layout,
            python=self._python,
            start=self._fork_server.start_ranks,
            groups=lambda instance: self._starting.groups(f"{instance}-bench", memory_bytes=None, cpu=CORES),
            changed=self._changes.notify,
            clock=self._clock,
            pool=self._own_work,
        )

    async def _examine_machine(self) -> None:
        ours = {os.getpid(), self._fork_server.pid}
        self._cgroups = await self._own_work.run(cgroups.find, ours.__contains__)
        if self._inventory is None:
            self._line.inventory = await ask_nvidia_smi()

    def _prepare_starting(self) -> None:
        """Create the parts that depend on the machine's capabilities."""
        self._starting = Starting(
            layout=self._layout,
            hosts=self._hosts,
            reports=self._reports,
            inventory=self._line.inventory,
            cgroups=self._cgroups,
            mark=self._mark,
            rendezvous_address=self._rendezvous_address,
            log_limit=self._log_limit,
            directory=self._directory,
            clock=self._clock,
            access=self._access,
            snapshots=self._snapshots,
        )
        self._launching = Launching(
            starting=self._starting,
            fork_server=self._fork_server,
            table=self._table,
            tracking=self._tracking,
            line=self._line,
            changes=self._changes,
            background=self._background,
            pool=self._own_work,
        )
        self._unpacking = Unpacking(
            layout=self._layout,
            archives=self._archives,
            table=self._table,
            tracking=self._tracking,
            launching=self._launching,
            changes=self._changes,
            pool=self._own_work,
            access=self._access,
            prepare=self._open_rendezvous,
        )

    async def close(self) -> None:
        if not self._changes.is_open:
            return
        self._changes.close()
        if self._unpacking is not None:
            await self._unpacking.close()
        await self._background.cancel()
        await asyncio.gather(*self._persisting.values(), return_exceptions=True)
        self._table.clear()
        self._benches.close()
        self._wakeups.close()
        self._reports.close()
        self._files.close()
        await self._hosts.close()
        await self._rendezvous.close()
        await self._fork_server.close()
        for pool in (self._own_work, self._reading, self._unpackers, self._moving):
            pool.close()

    def capabilities(self) -> tuple[Capability, ...]:
        """Return the capabilities of this machine, as examined by `start`."""
        return capabilities_of(self._cgroups, self._line.inventory)

    # ------------------------------------------------------------------------------------------------------ observe

    async def observe(self, run: Run) -> Sighting:
        attempts = shown((await self._attempts(run)).values())
        self._table.mark_observed(run.instance)
        seen = [attempt.seen(self._hosts.of_rank(attempt.key.rank).name) for attempt in attempts]
        return Sighting(
            ranks=await self._activities.complete(run.instance, seen, run.fresh_steps),
            bench=None if run.spec.bench is None else await self._benches.seen(run.instance),
            rendezvous=self._rendezvous.seen(run.instance),
            mesh=self._hosts.mesh(run.instance, run.spec.world),
            in_memory=run.instance in self._in_memory,
            warnings=(
                *warnings_of(run.spec.resources, self._cgroups, self._line.inventory),
                *(warning for attempt in attempts for warning in attempt.warnings),
                *damages(attempts),
                *self._rendezvous.warnings(run.instance),
            ),
        )

    async def _attempts(self, run: Run) -> dict[Key, Attempt]:
        if not self._changes.is_open:
            raise RuntimeUnavailable("the local runtime is not running")
        return await self._tracking.attempts(run.instance)

    def _told(self, told: Wakeup) -> None:
        """Handle a message that a supervisor or a rank wrote to the wake pipe."""
        if told.what not in RINGS:
            self._tracking.handle(told)
            return
        pid = number_of(told.detail)
        if pid is None or told.key.instance not in self._table:
            return
        if told.what == "reporting":
            self._reports.rung(told.key, pid)
        self._activities.ring(told.key)
        self._changes.notify(told.key.instance)

    def _told_too_much(self) -> None:
        """Read every live attempt again, since messages may have been lost."""
        self._tracking.refresh_all()
        for attempt in self._table.attempts():
            if attempt.sight is Sight.RUNNING:
                self._activities.ring(attempt.key)

    def _stalled(self, key: Key, stalled: Stalled | None) -> None:
        attempt = self._table.find(key)
        if attempt is not None and attempt.stalled != stalled:
            attempt.stalled = stalled
            self._changes.notify(key.instance)

    # ---------------------------------------------------------------------------------------- launch, stop and remove

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        await self._attempts(run)
        keys = [Key(run.instance, launch.rank, launch.attempt) for launch in launches]
        failed = self._tracking.take_unclaimable(keys)
        if failed:
            again: dict[Launch, tuple[str, ...]] = {
                launch: () for key, launch in zip(keys, launches, strict=True) if key in failed
            }
            self._launching.postpone(run, again, next(iter(failed.values())))
            launches = [launch for launch in launches if launch not in again]
        with or_unavailable(f"cannot make room for the ranks of {run.instance}"):
            await self._own_work.run(files.make_directory, str(self._layout.run(run.instance)))
            self._in_memory.add(run.instance)
            self._wakeups.renew()
        if run.spec.archive is not None and self._unpacking is not None:
            await self._unpacking.launch(run, launches)
            return
        await self._open_rendezvous(run)
        await self._launching.launch(run, launches)

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None:
        await self._attempts(run)
        for stop in stops:
            key = Key(run.instance, stop.rank, stop.attempt)
            with or_unavailable(f"cannot stop {key}"):
                await self._stopping.stop(key, stop.grace_seconds)
            self._commands.end(run.instance, stop.rank)

    async def persist_snapshots(self, run: Run) -> None:
        if run.instance not in self._persisting:
            task = asyncio.get_running_loop().create_task(self._persist(run.instance))
            self._persisting[run.instance] = task

    async def _persist(self, instance: str) -> None:
        def stopped() -> bool:
            return not self._changes.is_open or instance not in self._persisting

        try:
            await self._moving.run(persist, self._snapshots, instance, stopped)
            self._in_memory.discard(instance)
        except Interrupted:
            pass
        except OSError as error:  # they stay in memory until the next start of the server, or the run's removal
            log.warning("the snapshots of %s stay in memory: %s", instance, error)
        finally:
            self._persisting.pop(instance, None)

    async def checkpoints(self, run: Run) -> tuple[Checkpoint, ...] | None:
        with or_unavailable(f"cannot read the snapshots of {run.instance}"):
            return checkpoints_of(await self._reading.run(find_snapshots, self._snapshots, run.instance))

    async def remove(self, run: Run) -> None:
        for attempt in (await self._attempts(run)).values():
            if attempt.sight is not Sight.ENDED:
                raise RuntimeUnavailable(f"{attempt.key} has not ended yet")
        await self._benches.end_and_wait(run.instance)
        await self._commands.end_all(run.instance)
        await self.end_rendezvous(run)
        if self._unpacking is not None:
            await self._unpacking.forget(run.instance)
        moving = self._persisting.pop(run.instance, None)
        if moving is not None:
            await asyncio.gather(moving, return_exceptions=True)
        with or_unavailable(f"cannot remove what is kept of {run.instance}"):
            await self._own_work.run(self._snapshots.remove, run.instance)
            self._in_memory.discard(run.instance)
            await self._own_work.run(self._reserve.spend, partial(remove_run, self._layout, run.instance))
        self._table.remove(run.instance)
        self._activities.forget(run.instance)

    # --------------------------------------------------------------------------------------------------- rendezvous

    async def announce(self, run: Run, announcement: Announcement) -> None:
        await self._open_rendezvous(run)
        await self._publish_notice(run, announcement.notice)
        drives_torch = run.spec.rendezvous_backend == "etcd-v2"
        await self._rendezvous.announce(run.instance, announcement, drives_torch=drives_torch)

    async def _publish_notice(self, run: Run, notice: Notice | None) -> None:
        """Write the notice to the file that ranks read, and send them the signal that the spec asks for."""
        shift = self._clock.shift()
        with or_unavailable(f"cannot publish a notice to {run.instance}"):
            path = self._layout.notice(run.instance)
            await self._own_work.run(write_notice, path, None if notice is None else published(notice, shift))
        said = self._rendezvous.seen(run.instance)
        before = None if said is None or said.says is None else said.says.notice
        if notice is not None and notice != before and run.spec.notice_signal is not None:
            running = [a.key for a in (await self._attempts(run)).values() if a.sight is Sight.RUNNING]
            await self._activities.signal(run.instance, running, run.spec.notice_signal)

    async def _open_rendezvous(self, run: Run) -> None:
        """Open the run's keyspace, at its earlier port if it had one: its ranks know no other."""
        instance, path = run.instance, self._layout.ports(run.instance)
        if self._rendezvous.seen(instance) is None:
            with or_unavailable(f"cannot keep the ports of {instance}"):
                wished = (await self._own_work.run(_ports_of, path)).rendezvous
            port = await self._rendezvous.open(instance, wished or None)
            with or_unavailable(f"cannot keep the ports of {instance}"):
                keep = partial(remember_rendezvous, path, port, user=run.user, name=run.spec.name)
                await self._own_work.run(keep)
        seen = self._rendezvous.seen(instance)
        if seen is not None and self._changes.is_open:
            self._hosts.watch(instance, run.spec.world.target, seen.endpoint, self._changes.wake)

    async def end_rendezvous(self, run: Run) -> None:
        await self._hosts.forget(run.instance)
        await self._rendezvous.end(run.instance)

    # ------------------------------------------------------------------------------------------------------- reports

    async def reports(self, run: Run) -> dict[int, Report]:
        with or_unavailable(f"cannot read the reports of {run.instance}"):
            return await self._reports.last(run.instance)

    async def series(self, run: Run, query: SeriesQuery) -> list[Series]:
        with or_unavailable(f"cannot read the reports of {run.instance}"):
            return await self._reports.series(run.instance, query)

    async def next_report(self, run: Run, after: float) -> None:
        with or_unavailable(f"cannot read the reports of {run.instance}"):
            await self._reports.next(run.instance, after)

    # ------------------------------------------------------------------------------------ results, archives, commands

    async def results(self, run: Run) -> dict[int, bytes | BadResult]:
        with or_unavailable(f"cannot read the results of {run.instance}"):
            return await self._reading.run(read_results, self._layout, run.instance)

    async def store_archive(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        with or_unavailable("cannot keep the archive"):
            return await self._archives.store(user, chunks)

    async def has_archive(self, user: str, digest: str) -> bool:
        with or_unavailable("cannot look for the archive"):
            return await self._own_work.run(self._archives.has, user, digest)

    async def forget_archives(self, in_use: InUse, before: float) -> list[str]:
        with or_unavailable("cannot remove old archives"):
            if not await self._own_work.run(self._archives.old, before):
                return []
            used = await in_use()
            return await self._own_work.run(self._archives.forget, used, before)

    async def execute(self, run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        attempts = [a for a in (await self._attempts(run)).values() if a.key.rank == rank and a.was_launched]
        if not attempts:
            raise Conflict(f"rank {rank} of {run.instance} was never launched")
        newest = max(attempts, key=lambda attempt: attempt.key.attempt)
        launch = Launch(rank, newest.key.attempt, run.spec.world.target)
        with or_unavailable(f"cannot tell the environment of {run.instance}"):
            task = await self._own_work.run(self._starting.command, run, launch, newest.gpus, argv)
        async with aclosing(self._commands.execute(run.instance, rank, task)) as output:
            async for chunk in output:
                yield chunk

    # -------------------------------------------------------------------------------------------------------- bench

    async def probe(self, run: Run, probe: Probe) -> None:
        """Start the probe between the hosts of the first two ranks: both placements are satisfied."""
        second = min(1, run.spec.world.target - 1)
        await self._benches.begin(run.instance, (self._hosts.of_rank(0), self._hosts.of_rank(second)))

    async def end_probe(self, run: Run) -> None:
        await self._benches.end(run.instance)

    # --------------------------------------------------------------------------------------------------------- logs

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        with or_unavailable(f"cannot read the log of {run.instance}"):
            if lines is not None and lines <= LINES_AT_ONCE:
                return await self._reading.run(tail_rank, self._layout, run.instance, rank, lines)
            none = await self._reading.run(tail_rank, self._layout, run.instance, rank, 0)
            chunks = [c async for c in read_rank(self._layout, run.instance, rank, lines, pool=self._reading)]
        found = tuple(line for chunk in chunks for line in chunk.lines)
        return LogChunk(rank, found, chunks[-1].cursor if chunks else none.cursor)

    async def tail_cursor(self, run: Run, rank: int, lines: int) -> str:
        with or_unavailable(f"cannot read the log of {run.instance}"):
            return await self._reading.run(tail_cursor, self._layout, run.instance, rank, lines)

    async def read(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        async with aclosing(self.follow(run, rank, cursor)) as chunks:
            async for chunk in chunks:
                if not chunk.lines:
                    return
                yield chunk

    async def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        with self._changes.readers.reading(run.instance) as changed:
            async for chunk in follow_rank(
                self._layout, run.instance, rank, cursor, files=self._files, changed=changed, pool=self._reading
            ):
                yield chunk


def _ports_of(path: Path) -> Ports:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return ports_of(path)
