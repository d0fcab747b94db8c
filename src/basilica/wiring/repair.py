"""The check and the repair of a state directory, for `basilica doctor`.

The repair deletes nothing. Damaged files are moved into `quarantine/`, or copied there before they are replaced; runs
without a record are ended, and their record is rebuilt from their directories.
"""

import asyncio
import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from basilica.core.damage import Trouble
from basilica.core.deployment import Deployment
from basilica.core.errors import BasilicaError, DeploymentDamaged, StoreUnavailable
from basilica.core.events import Event
from basilica.core.names import check_name, check_user, namespace_of
from basilica.core.phase import Phase, RankPhase
from basilica.core.spec import DeploymentSpec, Exec, Wanted
from basilica.core.status import DeploymentStatus
from basilica.core.world import RankExit, RankStatus, WorldSize
from basilica.machine.high_water import HighWaterMark
from basilica.machine.layout import Layout
from basilica.machine.places import STATE_FILE
from basilica.machine.private_files import write_private
from basilica.machine.state_dir import LOSSES_FILE, QUARANTINE, read_losses, unsafe
from basilica.machine.stray_runs import StrayRun, find_stray_runs
from basilica.runtimes.local.leftovers import end_run
from basilica.runtimes.local.ports import Ports, ports_of
from basilica.runtimes.local.run_files import read_records
from basilica.runtimes.local.snapshot_dirs import leftovers
from basilica.server.serve import DEFAULT_USER
from basilica.stores.sqlite import salvage, schema, tables
from basilica.stores.sqlite.errors import StateFileRefused
from basilica.stores.sqlite.ownership import Ownership
from basilica.stores.sqlite.store import MARK_SUFFIX

NAMED = 5
REBUILT = "its record was lost; rebuilt from its directory by 'basilica doctor --repair', which ended its ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """One step of a repair."""

    kind: str
    subject: str
    done: str


# ---- check -----------------------------------------------------------------------------------------------------------


def examine_state(state_dir: Path) -> list[Trouble]:
    """Return all faults, without changing anything; a server may be running."""
    if not state_dir.exists():
        return []
    return list(_troubles(state_dir))


def _troubles(state_dir: Path) -> Iterator[Trouble]:
    problem = unsafe(state_dir)
    if problem is not None:
        yield _trouble("StateDirectoryOpen", f"{state_dir}: {problem}")
    yield from read_losses(state_dir)
    path = state_dir / STATE_FILE
    known: list[str] = []
    try:
        with contextlib.closing(_opened(path)) as connection:
            for line in _check(connection):
                yield _trouble("StateFileDamaged", f"{path}: {line}")
            expected, found = _mark(path).read(), tables.newest_version(connection)
            if expected > found:
                yield _trouble(
                    "StateLost", f"{path} should be at version {expected} and is at {found}: writes were lost"
                )
            known = tables.instances(connection, None)
            damaged = _damaged(connection, known)
        if damaged:
            yield _trouble("DamagedRuns", f"the stored record cannot be read of {_names(damaged)}")
    except FileNotFoundError:
        pass
    except (sqlite3.Error, BasilicaError, ValueError) as error:
        yield _trouble("StateFileDamaged", f"{path}: {error}")
        return  # without the file, the runs that should exist are unknown
    strays = find_stray_runs(state_dir, known)
    if strays:
        alive = sum(len(stray.pids) for stray in strays)
        names = _names([stray.instance for stray in strays])
        yield _trouble("ForgottenRuns", f"there is no record of {names}, though something is left; processes: {alive}")
    unread = _unread_records(Layout(state_dir))
    if unread:
        yield Trouble(
            kind="RecordDamaged",
            message=f"exit records cannot be read of {_names(unread)}: how those attempts ended is unknown",
            remedy="nothing: a server judges them as unknown",
        )


def _trouble(kind: str, message: str) -> Trouble:
    return Trouble(kind=kind, message=message, remedy="basilica doctor --repair")


def _names(instances: list[str]) -> str:
    more = f" and {len(instances) - NAMED} more" if len(instances) > NAMED else ""
    return ", ".join(instances[:NAMED]) + more


def _mark(path: Path) -> HighWaterMark:
    return HighWaterMark(path.with_name(path.name + MARK_SUFFIX))


def _opened(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise FileNotFoundError(path)
    with schema.explained(path):
        return schema.connect(path, query_only=True)


def _check(connection: sqlite3.Connection) -> list[str]:
    lines = [str(row[0]) for row in connection.execute("PRAGMA quick_check(5)")]
    return [] if lines == ["ok"] else lines


def _damaged(connection: sqlite3.Connection, instances: list[str]) -> list[str]:
    found = []
    for instance in instances:
        try:
            tables.load(connection, instance)
        except DeploymentDamaged:
            found.append(instance)
    return found


def _unread_records(layout: Layout) -> list[str]:
    found = []
    for instance in layout.instances():
        for key, record in read_records(layout, instance).items():
            if record is not None and record.damage and record.exit is None:
                found.append(str(key))
    return found


# ---- repair ----------------------------------------------------------------------------------------------------------


def repair_state(state_dir: Path) -> list[Repaired]:
    """Repair all that can be repaired. `StateInUse` while a server uses the directory: it would lose its open files."""
    path = state_dir / STATE_FILE
    ownership = Ownership.take(path)
    try:
        return _Repair(state_dir).repair()
    finally:
        ownership.release()


class _Repair:
    def __init__(self, state_dir: Path) -> None:
        self.state_dir, self.path = state_dir, state_dir / STATE_FILE
        self.layout = Layout(state_dir)
        self.done: list[Repaired] = []
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._quarantine = state_dir / QUARANTINE / stamp
        number = 1
        while self._quarantine.exists():
            number += 1
            self._quarantine = state_dir / QUARANTINE / f"{stamp}-{number}"

    def repair(self) -> list[Repaired]:
        if unsafe(self.state_dir) is not None:
            self.state_dir.chmod(0o700)
            self._record("StateDirectoryOpen", str(self.state_dir), "made writable for its owner alone (mode 0700)")
        self._repair_file()
        schema.prepare(self.path)
        with schema.explained(self.path), contextlib.closing(schema.connect(self.path)) as connection:
            self._catch_up(connection)
            for instance in _damaged(connection, tables.instances(connection, None)):
                self._replace_record(connection, instance)
            for stray in find_stray_runs(self.state_dir, tables.instances(connection, None)):
                self._rebuild(connection, stray)
        losses = self.state_dir / LOSSES_FILE
        if losses.exists():
            losses.rename(self.quarantine() / LOSSES_FILE)
            self._record("StateLost", str(self.path), "the loss is taken note of; what could be found again was")
        return self.done

    def quarantine(self) -> Path:
        for directory in (self._quarantine.parent, self._quarantine):
            directory.mkdir(mode=0o700, exist_ok=True)
        return self._quarantine

    def _record(self, kind: str, subject: str, done: str) -> None:
        self.done.append(Repaired(kind=kind, subject=subject, done=done))

    def _repair_file(self) -> None:
        """Quarantine a damaged state file, and copy its readable rows into a new one."""
        try:
            with contextlib.closing(_opened(self.path)) as connection:
                problems = _check(connection)
                tables.newest_version(connection)
        except FileNotFoundError:
            return
        except (sqlite3.Error, StoreUnavailable, StateFileRefused, TypeError) as error:
            problems = [str(error)]
        if not problems:
            return
        aside = self.quarantine()
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", aside / f"{STATE_FILE}{suffix}")
        schema.prepare(self.path)
        saved = salvage.copy_rows(aside / STATE_FILE, self.path)
        rows = ", ".join(f"{count} {table}" for table, count in saved.items() if count) or "nothing"
        self._record("StateFileDamaged", str(self.path), f"put aside in {aside}; taken over from it: {rows}")

    def _catch_up(self, connection: sqlite3.Connection) -> None:
        mark = _mark(self.path)
        try:
            expected = mark.read()
        except ValueError:
            expected = 0
        found = tables.newest_version(connection)
        if expected > found:
            tables.raise_version(connection, expected + 1)
            self._record("StateLost", str(self.path), f"goes on after version {expected}; it had come back at {found}")
        mark.open(tables.newest_version(connection))
        mark.close()

    def _replace_record(self, connection: sqlite3.Connection, instance: str) -> None:
        kept = self.quarantine() / f"{instance}.json"
        write_private(kept, json.dumps(tables.raw(connection, instance), default=repr).encode(), durable=True)
        connection.execute("BEGIN IMMEDIATE")
        tables.condemn(connection, instance, Wanted.CANCEL, time.time())
        connection.execute("COMMIT")
        done = f"the damaged record is kept in {kept}; the run is cancelled: the next server ends its ranks"
        self._record("DamagedRuns", instance, done)

    def _rebuild(self, connection: sqlite3.Connection, stray: StrayRun) -> None:
        ended = asyncio.run(end_run(self.layout, stray.instance))
        if not stray.has_directory:
            self._record("ForgottenRuns", stray.instance, f"{ended} processes ended; nothing else is left of it")
            return
        deployment = rebuilt(self.layout, stray.instance, time.time())
        connection.execute("BEGIN IMMEDIATE")
        tables.restore(connection, deployment, [Event("Rebuilt", REBUILT, warning=True)], time.time())
        connection.execute("COMMIT")
        done = f"{ended} processes ended; its record is rebuilt for the user {deployment.user!r}, with logs and results"
        self._record("ForgottenRuns", stray.instance, done)


def rebuilt(layout: Layout, instance: str, now: float) -> Deployment:
    """Return an ended run rebuilt from its directory: its user, its ranks and their exits."""
    ports = _ports(layout, instance)
    records = {key: record for key, record in read_records(layout, instance).items() if record is not None}
    ranks = max((key.rank for key in records), default=0) + 1
    last = {key.rank: (key, record) for key, record in sorted(records.items(), key=lambda item: item[0])}
    ends = sorted(last.items())
    created = min((r.claim.claimed_at for r in records.values() if r.claim.claimed_at), default=now)
    exits = tuple(
        RankExit(
            rank=rank,
            attempt=key.attempt,
            exit_code=record.exit.exit_code,
            termination_reason=record.exit.reason,
            restart_count=0,
            started_at=None if record.running is None else record.running.started_at,
            finished_at=record.exit.finished_at,
            seen_at=now,
            signal=record.exit.signal,
            stopped=record.exit.stopped,
        )
        for rank, (key, record) in ends
        if record.exit is not None
    )
    user = ports.user or DEFAULT_USER
    spec = DeploymentSpec(
        name=_name_of(ports, instance),
        program=Exec(("true",)),
        world=WorldSize(1, ranks, ranks),
        wanted=Wanted.CANCEL,
    )
    status = DeploymentStatus(
        created_at=created,
        phase=Phase.CANCELLED,
        message=REBUILT,
        observed_generation=spec.generation,
        world_target=ranks,
        terminal_at=now,
        settled=True,
        ranks=tuple(RankStatus(rank=rank, attempt=key.attempt, phase=RankPhase.DROPPED) for rank, (key, _) in ends),
        exits=exits,
    )
    return Deployment(instance=instance, user=user, namespace=namespace_of(user), spec=spec, status=status, version=0)


def _ports(layout: Layout, instance: str) -> Ports:
    try:
        ports = ports_of(layout.ports(instance))
        if ports.user:
            check_user(ports.user)
        return ports
    except (OSError, ValueError):
        return Ports(master=0)


def _name_of(ports: Ports, instance: str) -> str:
    for name in (ports.name, instance.rpartition("-")[0], "rebuilt"):
        try:
            return check_name(name)
        except ValueError:
            continue
    return "rebuilt"


def snapshots_without_owner() -> Iterator[tuple[str, str]]:
    """Yield the directories of snapshots in this machine's memory whose state directory is gone, and that directory."""
    yield from leftovers()
