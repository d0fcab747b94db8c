"""The bench probe of a run on this machine: one supervised program starts both ends, beside the ranks.

The probe has a supervisor as a rank has, and so a record, a lock and a stop file in `runs/<instance>/bench/`: it
outlives the control plane, never runs twice, and leaves no process behind. Its files are the source of truth. It must
not disturb the run, so errors of its start and measurement become the probe's failure instead of exceptions.
"""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from basilica.bench.report import parse
from basilica.core import environment as env
from basilica.core.ends import CANCELLED, UNKNOWN
from basilica.core.errors import RuntimeUnavailable
from basilica.core.phase import BenchPhase
from basilica.core.seen import SeenBench
from basilica.machine import files
from basilica.machine.cgroup_files import remove_cgroup
from basilica.machine.clocks import SteadyClock
from basilica.machine.files import UnusableFile
from basilica.machine.layout import Layout
from basilica.machine.pools import Pool
from basilica.machine.proc import boot
from basilica.machine.processes import Watch
from basilica.machine.strays import kill, with_environment
from basilica.runtimes.local.cgroups import RankCgroups
from basilica.runtimes.local.environment import INHERITED
from basilica.runtimes.local.hosts import Host
from basilica.runtimes.local.logs import read_tail
from basilica.runtimes.local.records import Claim, Exit, Record, append_exit, bury, read_record, write_stop
from basilica.runtimes.local.run_files import all_ended
from basilica.runtimes.local.task import RankTask, StartReply, StartRequest
from basilica.runtimes.rules import KILL_AGAIN_SECONDS

CORES = 2.0  # one for each end
LOG_LIMIT_BYTES = 1 << 20
MESSAGE_MAX = 500
GONE_WITHIN_S = 10.0
RESULT_BYTES_MAX = 1 << 20
WANTED = INHERITED | {"PYTHONPATH"}  # the probe is Basilica's own code, found on the same path
HOME = env.BENCH_DIR  # the mark of processes whose supervisor was killed
RUNNING = SeenBench(phase=BenchPhase.RUNNING, message="two processes measure the link between them")
UNCERTAIN = SeenBench(phase=BenchPhase.PENDING)


@dataclass(slots=True)
class _Live:
    """A probe whose supervisor is being watched."""

    watch: Watch
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Benches:
    """The probes of all runs. `start` starts supervisors, `changed` notifies that a run should be observed."""

    def __init__(
        self,
        layout: Layout,
        *,
        python: str,
        start: Callable[[StartRequest], Awaitable[StartReply]],
        groups: Callable[[str], RankCgroups],
        changed: Callable[[str], None],
        clock: SteadyClock,
        pool: Pool,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._python = python
        self._start = start
        self._groups = groups
        self._changed = changed
        self._clock = clock
        self._boot = boot()
        self._live: dict[str, _Live] = {}
        self._failures: dict[str, str] = {}

    async def adopt(self) -> None:
        """Watch the probes that an earlier control plane left, and end those that have outlived their run."""
        for instance in await self._pool.run(self._unended):
            seen = await self.seen(instance)
            live = seen is not None and not seen.phase.terminal
            if live and await self._pool.run(all_ended, self._layout, instance):
                await self.end(instance)

    def _unended(self) -> list[str]:
        """Return the runs whose probe has not ended. An unreadable record is reported when its run is observed."""
        found = []
        for instance in self._layout.instances():
            with suppress(OSError, ValueError):
                record = read_record(self._file(instance, "1.record"))
                if record is not None and record.exit is None:
                    found.append(instance)
        return found

    def close(self) -> None:
        for live in self._live.values():
            live.watch.close()
        self._live.clear()

    # ------------------------------------------------------------------------------------------------------ observe

    async def seen(self, instance: str) -> SeenBench | None:
        """Return the state of the probe; None if there is none."""
        try:
            return await self._seen(instance)
        except UnusableFile as error:
            return _failed(f"its files cannot be used: {error}")
        except OSError:
            return UNCERTAIN
        except ValueError as error:
            return _failed(str(error))

    async def _seen(self, instance: str) -> SeenBench | None:
        path = self._file(instance, "1.record")
        record = await self._pool.run(read_record, path)
        if record is None:
            if instance in self._failures:
                return _failed(self._failures[instance])
            return RUNNING if instance in self._live else None
        if record.exit is None and record.claim.boot == self._boot:
            if self._watch(instance, record.claim.pid, record.claim.start):
                return RUNNING
            record = await self._pool.run(read_record, path) or record  # it may have ended since the first read
        if record.exit is None:
            record = await self._bury(instance, record)
        return await self._pool.run(self._ended, instance, record.exit)

    def _ended(self, instance: str, exit: Exit | None) -> SeenBench:
        assert exit is not None
        if self._has(instance, "result.json"):
            found = parse(files.read(self._file(instance, "result.json"), RESULT_BYTES_MAX).decode())
            where = f"between {found.probe_node_a} and {found.probe_node_b}"
            if found.probe_node_a == found.probe_node_b:
                where = f"over the loopback of {found.probe_node_a}: no network is between ranks of one machine"
            return SeenBench(phase=BenchPhase.SUCCEEDED, message=f"measured {where}", result=found)
        if exit.stopped:
            return SeenBench(phase=BenchPhase.SKIPPED, message="the probe was taken down before it was done")
        if exit.start_error is not None:
            return _failed(exit.start_error)
        lines = read_tail(self._file(instance, "1.log"), 1, ended=True, at_most=1 << 14).lines
        if exit.exit_code is None:
            return _failed("the probe was lost: its supervisor was killed, or the machine restarted")
        return _failed(lines[-1] if lines else f"the probe ended with {exit.signal or f'exit code {exit.exit_code}'}")

    def _watch(self, instance: str, pid: int, start: int | None) -> bool:
        """Watch this supervisor for its end; return False if it has ended."""
        known = self._live.get(instance)
        if known is not None and known.watch.pid == pid:
            return True
        try:
            watch = Watch(pid, start, lambda: self._gone(instance, pid))
        except ProcessLookupError:
            return False
        if known is not None:
            known.watch.close()
        self._live[instance] = _Live(watch)
        return True

    def _gone(self, instance: str, pid: int) -> None:
        live = self._live.get(instance)
        if live is None or live.watch.pid != pid:
            return
        del self._live[instance]
        live.watch.close()
        live.gone.set()
        if not self._has(instance, "1.record"):
            self._failures[instance] = f"the probe could not be started; see {self._layout.complaints}"
        self._changed(instance)

    async def _bury(self, instance: str, record: Record) -> Record:
        """End the leftovers of a probe whose supervisor was killed, and record that its end is unknown."""
        if record.claim.boot == self._boot:
            await self._kill_leftovers(instance, record.claim)
        exit = Exit(exit_code=None, reason=UNKNOWN, finished_at=self._clock.now())
        with suppress(OSError):  # the next read reaches the same conclusion
            await self._pool.run(append_exit, self._file(instance, "1.record"), exit, record)
        return replace(record, exit=exit)

    async def _kill_leftovers(self, instance: str, claim: Claim) -> None:
        mark = {f"{HOME}={self._layout.bench(instance)}".encode()}
        while left := await self._pool.run(with_environment, mark):
            kill(left)
            await asyncio.sleep(KILL_AGAIN_SECONDS)
        for path in claim.cgroups:
            remove_cgroup(path)

    # -------------------------------------------------------------------------------------------------- begin and end

    async def begin(self, instance: str, ends: tuple[Host, Host]) -> None:
        """Start the probe between two hosts of the run, unless it runs or has run."""
        if await self.seen(instance) is not None:
            return
        try:
            await self._pool.run(self._make_directory, instance)
            reply = await self._start(self._request(instance, ends))
        except (OSError, RuntimeUnavailable) as error:
            self._failures[instance] = f"the probe could not be started: {error}"
        else:
            if reply["error"] is not None:
                self._failures[instance] = f"the probe could not be started: {reply['error']}"
            for pid in reply["pids"]:
                self._watch(instance, pid, None)
        self._changed(instance)

    async def end(self, instance: str) -> None:
        """Take the probe down, if it has not ended, and keep it from ever starting."""
        self._failures.pop(instance, None)
        never_started = Exit(exit_code=None, reason=CANCELLED, finished_at=self._clock.now(), stopped=True)
        asking = signal.SIGTERM
        try:
            if await self._pool.run(self._ask_for_end, instance, never_started):
                return
        except (OSError, ValueError):
            asking = signal.SIGUSR1  # no room for the stop file, which SIGUSR1 does not need
        await self.seen(instance)  # so that a probe of an earlier control plane is watched, too
        if instance in self._live:
            self._live[instance].watch.signal(asking)
            self._live[instance].watch.signal(signal.SIGCONT)  # a suspended supervisor would not receive the first

    def _ask_for_end(self, instance: str, never_started: Exit) -> bool:
        """Write the stop file. Return True if no supervisor is left to ask."""
        record = read_record(self._file(instance, "1.record"))
        if record is not None and record.exit is not None:
            return True
        write_stop(self._file(instance, "1.stop"), 0.0)
        return bury(self._file(instance, "1.record"), never_started)

    def _make_directory(self, instance: str) -> None:
        self._layout.run(instance).mkdir(mode=0o700, parents=True, exist_ok=True)
        files.make_directory(str(self._layout.bench(instance)))

    async def end_and_wait(self, instance: str) -> None:
        """End the probe before the run's files are removed. `RuntimeUnavailable` if it does not end."""
        if not self._has(instance):
            return
        await self.end(instance)
        live = self._live.get(instance)
        if live is not None:
            try:
                await asyncio.wait_for(live.gone.wait(), GONE_WITHIN_S)
            except TimeoutError:
                live.watch.signal(signal.SIGKILL)  # the supervisor does not obey: the next read ends the leftovers
                raise RuntimeUnavailable(f"the bench probe of {instance} has not ended yet") from None
        self._failures.pop(instance, None)

    def _request(self, instance: str, ends: tuple[Host, Host]) -> StartRequest:
        directory = str(self._layout.bench(instance))
        groups = self._groups(instance)
        result = self._file(instance, "result.json")
        nodes = [{"node": end.name, "address": end.address, "enter": end.enter} for end in ends]
        task = RankTask(
            instance=instance,
            rank=0,
            attempt=1,
            directory=directory,
            argv=None,
            env={},
            gpus=[],
            cgroups=list(groups.tasks),
            memory_events=groups.memory_events,
            kill_file=groups.kill_file,
            freezer=groups.freezer,
        )
        return StartRequest(
            argv=[self._python, "-P", "-m", "basilica.bench.pair", "--out", result, "--ends", json.dumps(nodes)],
            env={**{name: value for name, value in os.environ.items() if name in WANTED}, HOME: directory},
            cwd=directory,
            grace=0.0,
            memory_limit=None,
            log_limit=LOG_LIMIT_BYTES,
            clock_zero=self._clock.zero,
            wake=os.devnull,  # the watch on its supervisor shows its end; a wake line would be read as a rank's
            ranks=[task],
        )

    def _file(self, instance: str, name: str) -> str:
        return f"{self._layout.bench(instance)}/{name}"

    def _has(self, instance: str, name: str | None = None) -> bool:
        return os.path.lexists(self._layout.bench(instance) if name is None else self._file(instance, name))


def _failed(why: str) -> SeenBench:
    return SeenBench(phase=BenchPhase.FAILED, message=why[:MESSAGE_MAX])
