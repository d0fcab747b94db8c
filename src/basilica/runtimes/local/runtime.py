"""The local runtime: ranks as processes of this machine that outlive the control plane."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from basilica.core.actions import Launch, Probe, Stop
from basilica.core.errors import BasilicaError, Conflict, RuntimeUnavailable
from basilica.core.mesh import Announcement
from basilica.core.reports import Report, Series, SeriesQuery
from basilica.core.seen import Sight, Sighting, Stalled
from basilica.ports import Exited, InUse, LogChunk, Output, Run, StoredArchive
from basilica.runtimes.local import cgroups, supervisor
from basilica.runtimes.local.archives import Archives
from basilica.runtimes.local.attempts import Attempt, ended_of
from basilica.runtimes.local.bench import CORES, Benches
from basilica.runtimes.local.capabilities import Capability, capabilities_of
from basilica.runtimes.local.execute import execute
from basilica.runtimes.local.follow import follow_rank, tail_rank
from basilica.runtimes.local.forkserver import ForkServer
from basilica.runtimes.local.gpus import GpuInventory, ask_nvidia_smi, runs_on_cpu
from basilica.runtimes.local.hosts import LOOPBACK, MESH_LIMIT_S, Host, Hosts
from basilica.runtimes.local.inotify import FileWatcher
from basilica.runtimes.local.layout import Key, Layout
from basilica.runtimes.local.line import GpuLine, Turn
from basilica.runtimes.local.orphans import bury_orphan, kill_leftovers
from basilica.runtimes.local.ports import ports_of, remember_rendezvous
from basilica.runtimes.local.processes import Watch, more_descriptors
from basilica.runtimes.local.records import Exit, Record, Running, append_exit, bury, read_record, write_stop
from basilica.runtimes.local.rendezvous import LocalRendezvous
from basilica.runtimes.local.reports import Reports
from basilica.runtimes.local.run_files import finish_removing, read_results, read_run, remove_run, unended
from basilica.runtimes.local.starting import Starting
from basilica.runtimes.local.wakeups import Told, Wakeups

LOG_LIMIT_BYTES = 64 << 20
ENDED_ATTEMPTS_SHOWN = 4
ENDED_RUNS_KEPT = 256
LINE_OPENS_AFTER_S = 0.5
RUNS_REMEMBERED = 256


class LocalRuntime:
    """Ranks on this machine. The files in the state directory are the truth; the table in memory only mirrors them."""

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
    ) -> None:
        """`hosts`: network namespaces that ranks are spread over, all of which reach `rendezvous_address`."""
        self._layout = Layout(state_dir.absolute())
        self._archives = Archives(self._layout.archives)
        self._node = node or socket.gethostname()
        self._hosts = Hosts(hosts or (Host(self._node),), python=python, limit_seconds=mesh_limit_seconds)
        self._rendezvous_address = rendezvous_address
        self._rendezvous = LocalRendezvous(
            self._layout.rendezvous,
            runs=self._layout.runs,
            python=python,
            complaints=self._layout.complaints,
            host=rendezvous_address,
        )
        self._inventory = gpus
        self._line = GpuLine(gpus or GpuInventory())
        self._python = python
        self._log_limit = log_limit_bytes
        self._directory = os.getcwd()
        self._boot = supervisor.boot()
        self._wake: Callable[[str], None] | None = None
        self._runs: dict[str, dict[Key, Attempt]] = {}
        self._ended: dict[str, None] = {}  # runs all of whose attempts have ended, by when they were last looked at
        self._line_opens_at = 0.0
        self._sweep_at = RUNS_REMEMBERED
        self._failures: dict[Key, str] = {}
        self._readers: dict[str, set[asyncio.Event]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._cgroups = cgroups.Cgroups()

    # ------------------------------------------------------------------------------------------------ begin and end

    async def start(self, wake: Callable[[str], None]) -> None:
        with _or_unavailable("cannot use the state directory"):
            for directory in (self._layout.root, self._layout.runs):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._wakeups = Wakeups(self._layout.wake, self._told, self._look_at_all)
        self._wake = wake
        self._files = FileWatcher()
        self._reports = Reports(self._layout, self._files, self._spawn, self._stalled)
        self._fork_server = ForkServer(
            python=self._python, complaints=self._layout.complaints, descriptors=more_descriptors()
        )
        self._benches = Benches(
            self._layout,
            python=self._python,
            start=self._fork_server.start_ranks,
            groups=lambda instance: self._starting.groups(f"{instance}-bench", memory_bytes=None, cpu=CORES),
            changed=self._changed,
        )
        await self._fork_server.start()
        self._rendezvous.start(wake)
        ours = {os.getpid(), self._fork_server.pid}
        self._cgroups = await asyncio.to_thread(cgroups.find, ours.__contains__)
        if self._inventory is None:
            self._line.inventory = await ask_nvidia_smi()
        self._starting = Starting(
            layout=self._layout,
            hosts=self._hosts,
            reports=self._reports,
            inventory=self._line.inventory,
            cgroups=self._cgroups,
            # Two servers on one machine must not share groups, whatever their runs are called.
            mark=sha256(bytes(self._layout.root)).hexdigest()[:8],
            rendezvous_address=self._rendezvous_address,
            log_limit=self._log_limit,
            directory=self._directory,
        )
        with _or_unavailable("cannot read the runs that an earlier server left"):
            await asyncio.to_thread(finish_removing, self._layout)
            instances = await asyncio.to_thread(unended, self._layout)
        await self._benches.adopt()
        if self._layout.instances():
            # Runs that waited for GPUs come back in any order: let the oldest come too before giving any out.
            self._line_opens_at = asyncio.get_running_loop().time() + LINE_OPENS_AFTER_S
        for instance in instances:
            with suppress(RuntimeUnavailable):  # its own `observe` says so; the others are not to suffer
                await self._table(instance)
        await self._rendezvous.wait_until_up()

    async def close(self) -> None:
        if self._wake is None:
            return
        self._wake = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for table in self._runs.values():
            for attempt in table.values():
                attempt.unwatch()
        self._runs.clear()
        self._benches.close()
        self._wakeups.close()
        self._reports.close()
        self._files.close()
        await self._hosts.close()
        await self._rendezvous.close()
        await self._fork_server.close()

    def capabilities(self) -> tuple[Capability, ...]:
        """What this machine can do, once started."""
        return capabilities_of(self._cgroups, self._line.inventory)

    # --------------------------------------------------------------------------------------------------------- look

    async def observe(self, run: Run) -> Sighting:
        table = await self._table(run.instance)
        shown: list[Attempt] = []
        ended: dict[int, int] = {}
        for attempt in sorted(table.values(), key=lambda a: (a.key.rank, -a.key.attempt)):
            if attempt.sight is Sight.ENDED:
                ended[attempt.key.rank] = ended.get(attempt.key.rank, 0) + 1
                if ended[attempt.key.rank] > ENDED_ATTEMPTS_SHOWN:
                    continue
            shown.append(attempt)
        if table and not any(attempt.sight is not Sight.ENDED for attempt in table.values()):
            self._keep_ended(run.instance)
        shown.sort(key=lambda attempt: attempt.key)
        ranks = tuple(attempt.seen(self._hosts.of_rank(attempt.key.rank).name) for attempt in shown)
        if len(self._runs) > self._sweep_at:
            self._forget_old_runs()
        bench = None if run.spec.bench is None else await self._benches.seen(run.instance)
        return Sighting(
            ranks=ranks,
            bench=bench,
            rendezvous=self._rendezvous.seen(run.instance),
            mesh=self._hosts.mesh(run.instance, run.spec.world.target),
            warnings=self._warnings(run),
        )

    def _forget_old_runs(self) -> None:
        """Runs that have ended are read again from disk if anybody asks: with their last lines they take room."""
        ended = [name for name, table in self._runs.items() if all(a.sight is Sight.ENDED for a in table.values())]
        for name in ended[: -RUNS_REMEMBERED // 2]:
            del self._runs[name]
        self._sweep_at = len(self._runs) + RUNS_REMEMBERED

    def _keep_ended(self, instance: str) -> None:
        """Of runs that have ended only the latest stay in memory; the others are read again if somebody asks."""
        self._ended.pop(instance, None)
        self._ended[instance] = None
        while len(self._ended) > ENDED_RUNS_KEPT:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            table = self._runs.get(oldest, {})
            if all(attempt.sight is Sight.ENDED for attempt in table.values()):
                self._runs.pop(oldest, None)

    def _warnings(self, run: Run) -> tuple[tuple[str, str], ...]:
        warnings = []
        wish = run.spec.resources.gpus
        if runs_on_cpu(self._line.inventory, wish):
            what = "1 GPU" if wish.count == 1 else f"{wish.count} GPUs"
            problem = f"asked for {what} per rank; this machine has none: ranks run on the CPU"
            warnings.append(("GPUsUnavailable", problem))
        if run.spec.resources.memory_bytes is not None and not self._cgroups.limits_memory:
            problem = f"the memory limit holds for each process alone: {self._cgroups.problem}"
            warnings.append(("LimitsUnavailable", problem))
        return tuple(warnings)

    async def _table(self, instance: str) -> dict[Key, Attempt]:
        """The attempts of a run as they are known; read from disk the first time."""
        if self._wake is None:
            raise RuntimeUnavailable("the local runtime is not running")
        if instance not in self._runs:
            with _or_unavailable(f"cannot read the state of {instance}"):
                found = await asyncio.to_thread(read_run, self._layout, instance)
            self._runs.setdefault(instance, {})
            for key, record in found.items():
                if record is not None and record.exit is not None:
                    self._mark_ended(key, record.running, record.exit)
                else:
                    self._take_in(key, record)
            table = self._runs[instance]
            self._reports.adopt(instance, [key for key in found if key in table and table[key].sight is Sight.RUNNING])
        return self._runs[instance]

    def _told(self, told: Told) -> None:
        if told.what == "failed":
            self._failures[told.key] = told.detail
        elif told.what == "reporting" and told.key.instance in self._runs and told.detail.isdecimal():
            self._reports.rung(told.key, int(told.detail))
        elif told.key.instance in self._runs:
            self._look(told.key)
        else:  # a supervisor of an earlier control plane that claimed its attempt after we had looked
            self._spawn(self._adopt(told.key.instance))

    async def _adopt(self, instance: str) -> None:
        if self._layout.run(instance).exists():
            await self._table(instance)
            self._changed(instance)

    def _look_at_all(self) -> None:
        for table in tuple(self._runs.values()):
            for key, attempt in tuple(table.items()):
                if attempt.sight in (Sight.STARTING, Sight.RUNNING):
                    self._look(key)

    def _look(self, key: Key) -> None:
        self._take_in(key, read_record(self._layout.record(key)))

    def _take_in(self, key: Key, record: Record | None) -> None:
        """Bring the table in line with what is on disk."""
        known = self._runs[key.instance].get(key)
        if known is not None and known.sight is Sight.ENDED:
            return
        if record is None:
            self._unclaimed(key, known)
        elif record.exit is not None:
            self._end(key, record.running, record.exit)
        elif record.claim.boot != self._boot:
            lost = Exit(exit_code=None, reason="Unknown", finished_at=time.time(), by_platform=True)
            self._write_end(key, record, lost)
        else:
            self._claimed(key, record)

    def _unclaimed(self, key: Key, known: Attempt | None) -> None:
        if known is None or known.watch is not None or known.sight is Sight.QUEUED:
            return
        # Its supervisor ended before it had claimed: it could not write, or another attempt of the rank is alive.
        self._forget(key)
        for attempt in self._layout.attempts(key.instance, key.rank):
            self._look(Key(key.instance, key.rank, attempt))
        self._changed(key.instance)

    def _claimed(self, key: Key, record: Record) -> None:
        attempt = self._runs[key.instance].setdefault(key, Attempt(key=key, sight=Sight.STARTING))
        before = attempt.sight
        if record.running is not None:
            attempt.sight, attempt.started_at = Sight.RUNNING, record.running.started_at
        claim = record.claim
        attempt.gpus = claim.gpus
        self._line.hold(key, claim.gpus)
        if not attempt.orphaned and (attempt.watch is None or attempt.watch.pid != claim.pid):
            attempt.unwatch()
            try:
                attempt.watch = Watch(claim.pid, claim.start, lambda: self._gone(key))
            except ProcessLookupError:
                self._without_supervisor(attempt)
        if attempt.sight is not before:
            self._changed(key.instance)

    def _without_supervisor(self, attempt: Attempt) -> None:
        """The supervisor was killed, or has just ended: then the record says so by now."""
        record = read_record(self._layout.record(attempt.key))
        if record is None or record.exit is not None:
            self._take_in(attempt.key, record)
            return
        attempt.orphaned = True
        if record.running is not None:
            try:
                attempt.watch = Watch(record.running.pid, record.running.start, lambda: self._gone(attempt.key))
                return
            except ProcessLookupError:
                pass
        self._spawn(self._bury(attempt.key, record))

    def _gone(self, key: Key) -> None:
        """A watched process, supervisor or orphaned rank, has ended."""
        attempt = self._runs[key.instance][key]
        attempt.unwatch()
        record = read_record(self._layout.record(key))
        if attempt.orphaned and record is not None:
            self._spawn(self._bury(key, record))
        else:
            self._take_in(key, record)

    async def _bury(self, key: Key, record: Record) -> None:
        exit = await bury_orphan(self._layout, key, record.claim)
        self._write_end(key, record, exit)

    def _write_end(self, key: Key, record: Record, exit: Exit) -> None:
        with suppress(OSError):  # if it cannot be written down, the next control plane comes to the same conclusion
            append_exit(self._layout.record(key), exit)
        self._end(key, record.running, exit)

    def _end(self, key: Key, running: Running | None, exit: Exit) -> None:
        if key.instance in self._runs:  # else it was removed meanwhile
            self._mark_ended(key, running, exit)
            self._free(key)
            self._changed(key.instance)

    def _stalled(self, key: Key, stalled: Stalled | None) -> None:
        attempt = self._runs.get(key.instance, {}).get(key)
        if attempt is not None and attempt.stalled != stalled:
            attempt.stalled = stalled
            self._changed(key.instance)

    def _mark_ended(self, key: Key, running: Running | None, exit: Exit) -> None:
        self._reports.forget(key)
        attempt = self._runs[key.instance].setdefault(key, Attempt(key=key, sight=Sight.ENDED))
        attempt.unwatch()
        attempt.sight, attempt.note, attempt.stalled = Sight.ENDED, "", None
        attempt.started_at = None if running is None else running.started_at
        attempt.ended = ended_of(exit, self._layout, key)

    def _forget(self, key: Key) -> None:
        self._reports.forget(key)
        attempt = self._runs[key.instance].pop(key, None)
        if attempt is not None:
            attempt.unwatch()
        self._free(key)

    def _free(self, key: Key) -> None:
        if self._line.free(key):
            self._spawn(self._serve_line())

    def _changed(self, instance: str) -> None:
        for event in self._readers.get(instance, ()):
            event.set()
        if self._wake is not None:
            self._wake(instance)

    # ------------------------------------------------------------------------------------------------------- launch

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        table = await self._table(run.instance)
        wanted = {Key(run.instance, launch.rank, launch.attempt): launch for launch in launches}
        failed = [problem for key in wanted if (problem := self._failures.pop(key, None)) is not None]
        if failed:
            raise RuntimeUnavailable(f"cannot start ranks of {run.instance}: {failed[0]}")
        if run.spec.archive is not None:
            with _or_unavailable(f"cannot unpack what {run.instance} runs in"):
                target = self._layout.workdir(run.instance)
                await asyncio.to_thread(self._archives.unpack, run.user, run.spec.archive, target)
        await self._open_rendezvous(run)
        fresh = {key: wanted[key] for key in _startable(table, wanted)}
        if not fresh:
            return
        wish = run.spec.resources.gpus
        if wish.count == 0 or runs_on_cpu(self._line.inventory, wish):
            await self._start_ranks(run, dict.fromkeys(fresh.values(), ()))
            return
        for key in fresh:
            table[key] = Attempt(key=key, sight=Sight.QUEUED, note="waiting for GPUs")
        self._line.join(run, fresh)
        await self._serve_line(run.instance)

    async def _serve_line(self, instance: str | None = None) -> None:
        """Start those whose turn it is. If ranks of `instance` cannot be started, that is raised."""
        loop = asyncio.get_running_loop()
        if self._wake is None:
            return
        if loop.time() < self._line_opens_at:
            loop.call_at(self._line_opens_at, lambda: self._spawn(self._serve_line()))
            return
        turns, notes = self._line.serve()
        for key, note in notes.items():
            attempt = self._runs[key.instance][key]
            if attempt.note != note:
                attempt.note = note
                self._changed(key.instance)
        for turn in turns:
            if turn.run.instance != instance:
                self._spawn(self._start_or_forget(turn))
        for turn in turns:
            if turn.run.instance == instance:
                await self._start_ranks(turn.run, turn.granted)

    async def _start_or_forget(self, turn: Turn) -> None:
        try:
            await self._start_ranks(turn.run, turn.granted)
        except RuntimeUnavailable:
            self._changed(turn.run.instance)  # the controller finds them missing and asks again

    async def _start_ranks(self, run: Run, granted: Mapping[Launch, tuple[str, ...]]) -> None:
        table = self._runs[run.instance]
        keys = [Key(run.instance, launch.rank, launch.attempt) for launch in granted]
        for key, uuids in zip(keys, granted.values(), strict=True):
            table[key] = Attempt(key=key, sight=Sight.STARTING, gpus=uuids)
        try:
            with _or_unavailable(f"cannot start ranks of {run.instance}"):
                reply = await self._fork_server.start_ranks(self._starting.request(run, granted))
        except RuntimeUnavailable:
            for key in keys:
                self._forget(key)
            raise
        for key, pid in zip(keys, reply["pids"], strict=False):
            self._watch_new(key, pid)
        for key in keys[len(reply["pids"]) :]:
            self._forget(key)
        if reply["error"] is not None:
            raise RuntimeUnavailable(f"cannot start ranks of {run.instance}: {reply['error']}")

    def _watch_new(self, key: Key, pid: int) -> None:
        attempt = self._runs.get(key.instance, {}).get(key)
        if attempt is None or attempt.watch is not None or attempt.sight is Sight.ENDED:
            return  # it was told of already
        try:
            attempt.watch = Watch(pid, None, lambda: self._gone(key))
        except ProcessLookupError:
            self._look(key)

    # --------------------------------------------------------------------------------------------------- rendezvous

    async def announce(self, run: Run, announcement: Announcement) -> None:
        await self._open_rendezvous(run)
        drives_torch = run.spec.rendezvous_backend == "etcd-v2"
        await self._rendezvous.announce(run.instance, announcement, drives_torch=drives_torch)

    async def _open_rendezvous(self, run: Run) -> None:
        """At the port that the run had before, if it had one: its ranks know no other."""
        instance, path = run.instance, self._layout.ports(run.instance)
        if self._rendezvous.seen(instance) is None:
            with _or_unavailable(f"cannot keep the ports of {instance}"):
                self._layout.run(instance).mkdir(mode=0o700, exist_ok=True)
                wished = ports_of(path).rendezvous
            port = await self._rendezvous.open(instance, wished or None)
            with _or_unavailable(f"cannot keep the ports of {instance}"):
                remember_rendezvous(path, port)
        seen = self._rendezvous.seen(instance)
        if seen is not None and self._wake is not None:
            self._hosts.watch(instance, run.spec.world.target, seen.endpoint, self._wake)

    async def end_rendezvous(self, run: Run) -> None:
        await self._hosts.forget(run.instance)
        await self._rendezvous.end(run.instance)

    # ----------------------------------------------------------------------------------------------- stop and remove

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None:
        table = await self._table(run.instance)
        for stop in stops:
            key = Key(run.instance, stop.rank, stop.attempt)
            attempt = table.get(key)
            if attempt is None or attempt.sight is not Sight.ENDED:
                with _or_unavailable(f"cannot stop {key}"):
                    self._stop(key, stop.grace_seconds)

    def _stop(self, key: Key, grace_seconds: float) -> None:
        if self._line.leave(key):
            self._spawn(self._serve_line())  # those behind it may move up
        never_started = Exit(exit_code=None, reason="Cancelled", finished_at=time.time(), stopped=True)
        try:
            write_stop(self._layout.stop(key), grace_seconds)
            buried = bury(self._layout.record(key), never_started)
        except OSError:
            attempt = self._runs[key.instance].get(key)
            if attempt is None or attempt.watch is None or attempt.orphaned:
                raise
            attempt.watch.signal(signal.SIGUSR1)  # no room for the file: then with the run's own grace
            return
        if buried:
            self._end(key, None, never_started)
            return
        self._look(key)
        attempt = self._runs[key.instance][key]
        if attempt.watch is None:
            return  # it has ended
        attempt.watch.signal(signal.SIGTERM)
        if attempt.orphaned:
            asyncio.get_running_loop().call_later(grace_seconds, self._kill_orphan, key)

    def _kill_orphan(self, key: Key) -> None:
        attempt = self._runs.get(key.instance, {}).get(key)
        record = read_record(self._layout.record(key))
        if attempt is not None and attempt.sight is not Sight.ENDED and record is not None:
            self._spawn(asyncio.to_thread(kill_leftovers, self._layout, key, record.claim))

    async def remove(self, run: Run) -> None:
        for attempt in (await self._table(run.instance)).values():
            if attempt.sight is not Sight.ENDED:
                raise RuntimeUnavailable(f"{attempt.key} has not ended yet")
        await self._benches.end_and_wait(run.instance)
        await self.end_rendezvous(run)
        with _or_unavailable(f"cannot remove what is kept of {run.instance}"):
            await asyncio.to_thread(remove_run, self._layout, run.instance)
        self._runs.pop(run.instance, None)
        self._ended.pop(run.instance, None)

    # ------------------------------------------------------------------------------------------------------- reports

    async def reports(self, run: Run) -> dict[int, Report]:
        with _or_unavailable(f"cannot read the reports of {run.instance}"):
            return await self._reports.last(run.instance)

    async def series(self, run: Run, query: SeriesQuery) -> list[Series]:
        with _or_unavailable(f"cannot read the reports of {run.instance}"):
            return await self._reports.series(run.instance, query)

    async def next_report(self, run: Run, after: float) -> None:
        with _or_unavailable(f"cannot read the reports of {run.instance}"):
            await self._reports.next(run.instance, after)

    # ------------------------------------------------------------------------------------ results, archives, commands

    async def results(self, run: Run) -> dict[int, bytes]:
        with _or_unavailable(f"cannot read the results of {run.instance}"):
            return await asyncio.to_thread(read_results, self._layout, run.instance)

    async def store_archive(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        with _or_unavailable("cannot keep the archive"):
            return await self._archives.store(user, chunks)

    async def has_archive(self, user: str, digest: str) -> bool:
        with _or_unavailable("cannot look for the archive"):
            return self._archives.has(user, digest)

    async def forget_archives(self, in_use: InUse, before: float) -> list[str]:
        with _or_unavailable("cannot remove old archives"):
            if not await asyncio.to_thread(self._archives.old, before):
                return []
            used = await in_use()
            return await asyncio.to_thread(self._archives.forget, used, before)

    async def execute(self, run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        attempts = [a for a in (await self._table(run.instance)).values() if a.key.rank == rank and a.was_launched]
        if not attempts:
            raise Conflict(f"rank {rank} of {run.instance} was never launched")
        newest = max(attempts, key=lambda attempt: attempt.key.attempt)
        launch = Launch(rank, newest.key.attempt, run.spec.world.target)
        with _or_unavailable(f"cannot tell the environment of {run.instance}"):
            env = self._starting.environment(run, launch, newest.gpus)
        async with aclosing(execute(argv, env, self._starting.workdir(run), self._spawn)) as output:
            async for chunk in output:
                yield chunk

    # -------------------------------------------------------------------------------------------------------- bench

    async def probe(self, run: Run, probe: Probe) -> None:
        """Between the hosts of the first two ranks: both placements are satisfied."""
        second = min(1, run.spec.world.target - 1)
        await self._benches.begin(run.instance, (self._hosts.of_rank(0), self._hosts.of_rank(second)))

    async def end_probe(self, run: Run) -> None:
        await self._benches.end(run.instance)

    # --------------------------------------------------------------------------------------------------------- logs

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        with _or_unavailable(f"cannot read the log of {run.instance}"):
            return await asyncio.to_thread(tail_rank, self._layout, run.instance, rank, lines)

    async def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        changed = asyncio.Event()
        readers = self._readers.setdefault(run.instance, set())
        readers.add(changed)
        try:
            async for chunk in follow_rank(
                self._layout, run.instance, rank, cursor, files=self._files, changed=changed
            ):
                yield chunk
        finally:
            readers.discard(changed)
            if not readers:
                self._readers.pop(run.instance, None)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _startable(table: Mapping[Key, Attempt], wanted: Iterable[Key]) -> list[Key]:
    """Those that are not there yet, with no newer attempt of their rank there, and none that has not ended."""
    newest: dict[int, int] = {}
    busy: set[int] = set()
    for key, attempt in table.items():
        newest[key.rank] = max(newest.get(key.rank, -1), key.attempt)
        if attempt.sight is not Sight.ENDED:
            busy.add(key.rank)
    return [key for key in wanted if key.rank not in busy and newest.get(key.rank, -1) < key.attempt]


@contextmanager
def _or_unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except BasilicaError:
        raise
    except OSError as error:
        raise RuntimeUnavailable(f"{what}: {error.strerror or error}") from error
    except ValueError as error:  # a damaged record
        raise RuntimeUnavailable(f"{what}: {error}") from error
