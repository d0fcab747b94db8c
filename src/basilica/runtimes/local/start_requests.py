"""Start requests for supervisors: the ranks of a run, with their environment, command line and limits."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from basilica.core import environment as env
from basilica.core.actions import Launch
from basilica.machine import files
from basilica.machine.clocks import SteadyClock
from basilica.machine.layout import Key, Layout
from basilica.ports import Run
from basilica.progress.notice_file import make_notice_file
from basilica.runtimes.local.cgroups import Cgroups, RankCgroups, for_rank
from basilica.runtimes.local.environment import command_line, machine_environment, own_command_line
from basilica.runtimes.local.gpus import GpuInventory
from basilica.runtimes.local.hosts import Hosts
from basilica.runtimes.local.ports import ports_of
from basilica.runtimes.local.reports import Reports
from basilica.runtimes.local.run_as import Access
from basilica.runtimes.local.snapshot_dirs import SnapshotDirs
from basilica.runtimes.local.task import CommandTask, RankTask, StartRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """Builds start requests. `mark` sets this server's control groups apart; ranks run in `directory` by default."""

    layout: Layout
    hosts: Hosts
    reports: Reports
    inventory: GpuInventory
    cgroups: Cgroups
    mark: str
    rendezvous_address: str
    log_limit: int
    directory: str
    clock: SteadyClock
    access: Access
    snapshots: SnapshotDirs

    def request(self, run: Run, granted: Mapping[Launch, tuple[str, ...]]) -> StartRequest:
        """Return the request for these launches, each with its GPUs; make the directories that they need."""
        self.access.passage(self.layout.run(run.instance))
        with suppress(FileExistsError):  # a rank may have replaced it: the server never reads it
            self.access.give(self.layout.checkpoints(run.instance))
        self.snapshots.make(run.instance)
        files.make_directory(str(self.layout.results(run.instance)))
        self.access.give(self.layout.results(run.instance))
        if self.access.user is not None:  # else ranks make it themselves at their first report
            self.access.give(self.layout.reports(run.instance))
        make_notice_file(self.layout.notice(run.instance))
        self.access.show(self.layout.notice(run.instance))
        environment = self._common(run)
        return StartRequest(
            argv=command_line(run.spec),
            env=environment,
            cwd=self.workdir(run),
            grace=run.spec.grace_seconds,
            memory_limit=run.spec.resources.memory_bytes,
            log_limit=self.log_limit,
            wake=str(self.layout.wake),
            clock_zero=self.clock.zero,
            ranks=[self._task(run, launch, uuids, environment) for launch, uuids in granted.items()],
            user=self.access.ids,
        )

    def environment(self, run: Run, launch: Launch, uuids: tuple[str, ...]) -> dict[str, str]:
        """Return the whole environment of this attempt."""
        return self._common(run) | self._own(run, launch, uuids)

    def command(self, run: Run, launch: Launch, uuids: tuple[str, ...], argv: Sequence[str]) -> CommandTask:
        """Return the task of a command beside this attempt, within its limits."""
        return CommandTask(
            argv=self.access.command(argv),
            env=self.environment(run, launch, uuids),
            cwd=self.workdir(run),
            cgroups=list(self._groups_of(run, launch).tasks),
            memory_limit=run.spec.resources.memory_bytes,
        )

    def workdir(self, run: Run) -> str:
        if run.spec.archive is None:
            return run.spec.workdir or self.directory
        return str(self.layout.workdir(run.instance) / (run.spec.workdir or ""))

    def groups(self, name: str, *, memory_bytes: int | None, cpu: float | None) -> RankCgroups:
        return for_rank(self.cgroups, f"basilica-{self.mark}-{name}", memory_bytes=memory_bytes, cpu=cpu)

    def _groups_of(self, run: Run, launch: Launch) -> RankCgroups:
        resources = run.spec.resources
        name = f"{run.instance}-{launch.rank}-{launch.attempt}"
        return self.groups(name, memory_bytes=resources.memory_bytes, cpu=resources.cpu)

    def _common(self, run: Run) -> dict[str, str]:
        ports = ports_of(self.layout.ports(run.instance))
        resumed = env.resume_environment(run.spec, self.snapshots.places)
        return (
            {env.NOTICE_FILE: self.layout.notice(run.instance)}
            | resumed
            | env.run_environment(
                run.spec,
                run.instance,
                machine=machine_environment(self.access.environment(os.environ)),
                user=env.user_environment(run.spec),
                master=(self.hosts.of_rank(0).address, ports.master),
                rendezvous=f"{self.rendezvous_address}:{ports.rendezvous}",
                checkpoints=str(self.layout.checkpoints(run.instance)),
                snapshots=self.snapshots.used(run.instance),
            )
        )

    def _own(self, run: Run, launch: Launch, uuids: tuple[str, ...]) -> dict[str, str]:
        key = Key(run.instance, launch.rank, launch.attempt)
        visible = self.inventory.visible(uuids) if self.inventory.gpus else None
        result, error = self.layout.result(run.instance, launch.rank), self.layout.error(key)
        own = env.attempt_environment(
            launch.rank, launch.attempt, launch.world_size, result_file=result, error_file=error
        )
        own[env.NODE_NAME] = self.hosts.of_rank(launch.rank).name
        if visible is not None:
            own["CUDA_VISIBLE_DEVICES"] = visible
        return own | self.reports.environment(key)

    def _task(self, run: Run, launch: Launch, uuids: tuple[str, ...], common: Mapping[str, str]) -> RankTask:
        own = self._own(run, launch, uuids)
        with suppress(OSError):
            files.remove(own[env.RESULT_FILE])  # of an earlier attempt
        groups = self._groups_of(run, launch)
        if groups.memory_events is not None:
            own[env.MEMORY_EVENTS] = groups.memory_events
        return RankTask(
            instance=run.instance,
            rank=launch.rank,
            attempt=launch.attempt,
            directory=str(self.layout.rank(run.instance, launch.rank)),
            argv=self._own_command_line(run, launch, {**common, **own}),
            env=own,
            gpus=list(uuids),
            cgroups=list(groups.tasks),
            memory_events=groups.memory_events,
            kill_file=groups.kill_file,
            freezer=groups.freezer,
        )

    def _own_command_line(self, run: Run, launch: Launch, environment: Mapping[str, str]) -> list[str] | None:
        """Return this rank's own command line, None if all ranks have the same."""
        argv, enter = own_command_line(run.spec, environment), self.hosts.of_rank(launch.rank).enter
        return [*enter, *(argv or command_line(run.spec))] if enter else argv
