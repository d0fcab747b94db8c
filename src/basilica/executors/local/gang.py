"""A local gang, read from its files: the state of each replica, its output, and notification of changes.

Any process of this user can read the files and can cancel replicas. They are those of the local runtime, and four more:

<directory>/
├── warden.json     the processes of the warden (see `warden.py`) and of the gang's owner, and the gang's timeout
├── news            grows at every change
├── time-is-up      exists if the gang was stopped by its timeout
├── over            exists once the warden has recorded the end of all replicas, or a later launch has stopped them
└── runs/<job>/…    records, logs and results, as `basilica.machine.layout` describes
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from basilica.core import ends
from basilica.core.errors import BadResult
from basilica.executors.protocol import CANCELLED, ENDED, FAILED, PENDING, RUNNING, SUCCEEDED
from basilica.machine import files
from basilica.machine.clocks import steady_now
from basilica.machine.files import UnusableFile
from basilica.machine.inotify import IN_CLOEXEC, IN_MODIFY, IN_NONBLOCK
from basilica.machine.layout import Key, Layout
from basilica.machine.places import start_of
from basilica.machine.proc import boot
from basilica.machine.processes import lives
from basilica.reports.tracebacks import read_traceback
from basilica.runtimes.local.follow import tail_rank
from basilica.runtimes.local.orphans import kill_leftovers
from basilica.runtimes.local.records import NOBODY, Claim, Exit, Record, bury, read_record, write_stop
from basilica.runtimes.local.run_files import RESULT_BYTES_MAX

WARDEN = "warden.json"
CHANGES = "news"
TIME_IS_UP = "time-is-up"
OVER = "over"
WARDEN_BYTES_MAX = 1 << 16
POLL_SECONDS = 0.2  # only where the system cannot notify us
LONGEST_WAIT_SECONDS = 3600.0


class Task(TypedDict):
    """The task of a warden. `rank_names` are variables for the rank. `owner` is the process (pid, start) whose end
    stops the gang, or None."""

    job: str
    directory: str
    argv: list[str]
    env: dict[str, str]
    rank_names: list[str]
    workdir: str
    replicas: int
    gpus: bool
    grace: float
    timeout: float
    owner: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class State:
    """The state of one replica. `ended_at` is None until its end, and where the time is unknown."""

    status: str
    exit_code: int | None = None
    error: str | None = None
    ended_at: float | None = None
    stopped: bool = False  # by the gang's timeout; a cancelled replica has a status of its own


class Gang:
    def __init__(self, directory: Path, job: str) -> None:
        self.job = job
        self._layout = Layout(directory)
        self.directory = self._layout.root

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self, rank: int) -> State:
        if not self.directory.is_dir():
            return State(CANCELLED, error=f"nothing is known of {self.job} (any more): {self.directory} is not there")
        warden = self._warden()
        try:
            record = self._record(rank)
        except UnusableFile as error:  # its supervisor or its warden rewrites it at the end
            return State(RUNNING if warden is not None else FAILED, error=f"its record cannot be read: {error}")
        if record is not None and record.exit is not None:
            return self._ended(rank, record.exit)
        if record is None:
            waits = warden is not None
            return State(PENDING) if waits else State(FAILED, error="it was never started: its warden was killed")
        if warden is None and _living(record) is None:
            if os.path.lexists(self._layout.stop(Key(self.job, rank, 0))):
                return State(CANCELLED, error="cancelled")
            return State(FAILED, error="nobody knows how it ended: its supervisor and its warden were killed")
        return State(PENDING if record.running is None else RUNNING)

    def _ended(self, rank: int, exit: Exit) -> State:
        if exit.exit_code == 0:
            return State(SUCCEEDED, 0, ended_at=exit.finished_at)
        if exit.stopped and os.path.lexists(self.directory / TIME_IS_UP):
            error = f"stopped, since it had not ended within {self._warden_facts().get('timeout', 0):g} s"
            return State(FAILED, exit.exit_code, error, exit.finished_at, stopped=True)
        if exit.stopped:
            return State(CANCELLED, error="cancelled", ended_at=exit.finished_at)
        return State(FAILED, exit.exit_code, self._why(rank, exit), exit.finished_at)

    def _why(self, rank: int, exit: Exit) -> str:
        if exit.start_error is not None:
            return f"could not be started: {exit.start_error}"
        if exit.reason == ends.OOM_KILLED:
            return f"killed: out of memory (OOMKilled{'' if exit.signal is None else f', {exit.signal}'})"
        if exit.signal is not None:
            return f"killed by {exit.signal}"
        if exit.exit_code is None:
            return "nobody knows how it ended: the machine was restarted, or its supervisor was killed"
        stack = read_traceback(self._layout.error(Key(self.job, rank, 0))).splitlines()
        last_words = (stack or self.lines(rank, 1) or [""])[-1]
        return f"exited with code {exit.exit_code}" + (f": {last_words}" if last_words else "")

    def result(self, rank: int) -> Any:
        """Return the entrypoint's result; None if there is none (yet). `BadResult` if the file cannot be read."""
        try:
            return json.loads(files.read(self._layout.result(self.job, rank), RESULT_BYTES_MAX))
        except FileNotFoundError:
            return None
        except UnusableFile as error:
            raise BadResult(rank, error.problem) from error
        except (ValueError, RecursionError):
            raise BadResult(rank, "is no JSON") from None

    def lines(self, rank: int, n_lines: int) -> tuple[str, ...]:
        return tail_rank(self._layout, self.job, rank, n_lines).lines

    def _record(self, rank: int) -> Record | None:
        return read_record(self._layout.record(Key(self.job, rank, 0)))

    def _readable_record(self, rank: int) -> Record | None:
        try:
            return self._record(rank)
        except UnusableFile:
            return None

    def _warden_facts(self) -> dict[str, Any]:
        """Return what the warden published of itself; empty before that."""
        facts = _read_json(str(self.directory / WARDEN))
        return facts if isinstance(facts, dict) else {}

    def _warden(self) -> int | None:
        """Return the warden's pid, if it is alive."""
        facts = self._warden_facts()
        same_boot = bool(facts) and facts["boot"] == boot()
        return facts["pid"] if same_boot and start_of(facts["pid"]) == facts["start"] else None

    @property
    def is_supervised(self) -> bool:
        """True while the warden is alive: replicas may still run."""
        return self._warden() is not None

    @property
    def is_abandoned(self) -> bool:
        """True if replicas may run without supervision: both the warden and the gang's owner were killed."""
        if os.path.lexists(self.directory / OVER):
            return False
        facts = self._warden_facts()
        if not facts.get("owner") or facts["boot"] != boot() or facts["processes"] != process_namespace():
            return False
        pid, start = facts["owner"]
        return start_of(pid) != start and not self.is_supervised

    # ---- ending --------------------------------------------------------------------------------------------------

    def end_abandoned(self, grace: float) -> None:
        for rank in range(self._warden_facts()["replicas"]):
            self.cancel(rank, grace)
        files.write(str(self.directory / OVER), b"")

    def cancel(self, rank: int, grace: float) -> None:
        """Request the end of a replica: SIGTERM, and SIGKILL after the grace. One that has not started never will."""
        if not self.directory.is_dir():
            return
        try:
            record = self._record(rank)
            if record is not None and record.exit is not None:
                return
            key = Key(self.job, rank, 0)
            write_stop(self._layout.stop(key), grace)
            never_started = Exit(exit_code=None, reason=ends.CANCELLED, finished_at=steady_now(), stopped=True)
            if bury(self._layout.record(key), never_started):
                return
            record = self._record(rank)
        except UnusableFile:  # only its processes are known; without them its supervisor ends as well
            kill_leftovers(self._layout, Key(self.job, rank, 0), NOBODY)
            return
        if record is not None and record.exit is None and not _signal_supervisor(record.claim, signal.SIGTERM):
            kill_leftovers(self._layout, key, record.claim)  # its supervisor, which would enforce the grace, is dead

    def kill(self, rank: int) -> None:
        """Kill a replica and its supervisor, which is stopped itself or hangs. The warden records the end."""
        key = Key(self.job, rank, 0)
        try:
            record = self._record(rank)
        except UnusableFile:
            record = Record(claim=NOBODY)
        if record is not None and record.exit is None:
            kill_leftovers(self._layout, key, record.claim)
            _signal_supervisor(record.claim, signal.SIGKILL)
            kill_leftovers(self._layout, key, record.claim)

    # ---- waiting -------------------------------------------------------------------------------------------------

    def waitables(self, stack: ExitStack, ranks: Iterable[int]) -> tuple[list[int], bool]:
        """Return descriptors that become readable at a change, and whether they cover every change.

        Open them before the read of the states that finds nothing new; the stack closes them.
        """
        warden = self._warden()
        if warden is not None:
            watched = [_watch_file(stack, self.directory / CHANGES), _watch_process(stack, warden)]
        else:
            records = [r for r in map(self._readable_record, ranks) if r is not None and r.exit is None]
            watched = [_watch_process(stack, pid) for pid in map(_living, records) if pid is not None]
        return [fd for fd in watched if fd is not None], None not in watched

    def wait_until_over(self, size: int, deadline: float) -> bool:
        """Return True once all replicas and the warden have ended; False if the deadline passes first."""
        while True:
            with watch_changes({self: list(range(size))}) as bell:
                if not self.is_supervised and all(self.state(rank).status in ENDED for rank in range(size)):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                bell.wait(left)


@contextmanager
def watch_changes(wanted: dict[Gang, list[int]]) -> Iterator["Bell"]:
    """Yield a bell that rings at any change since it was made."""
    with ExitStack() as stack:
        found = [gang.waitables(stack, ranks) for gang, ranks in wanted.items()]
        yield Bell([fd for fds, _ in found for fd in fds], all(complete for _, complete in found))


class Bell:
    def __init__(self, descriptors: list[int], complete: bool) -> None:
        self._poll = select.poll()
        for fd in descriptors:
            self._poll.register(fd, select.POLLIN)
        self._longest = LONGEST_WAIT_SECONDS if complete else POLL_SECONDS

    def wait(self, seconds: float) -> None:
        """Return when the bell rings, when the time is up, or when the caller should read the states itself."""
        self._poll.poll(1000 * max(0.0, min(seconds, self._longest)))


def process_namespace() -> str:
    """Return the namespace that our pids belong to: a container has its own, and may share our files."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _living(record: Record) -> int | None:
    """Return the pid of the supervisor if it is alive, else of the replica if that is."""
    if record.claim.boot != boot():
        return None
    for process in (record.claim, record.running):
        if process is not None and lives(process.pid, process.start):
            return process.pid
    return None


def _signal_supervisor(claim: Claim, number: signal.Signals) -> bool:
    """Signal exactly that process: by its descriptor, once its start time is checked. Return False if it is gone.

    SIGCONT follows, so that a stopped supervisor handles the signal.
    """
    if claim.boot != boot():
        return False
    try:
        if sys.platform != "linux":
            os.kill(claim.pid, number)
            os.kill(claim.pid, signal.SIGCONT)
            return True
        fd = os.pidfd_open(claim.pid)
    except ProcessLookupError:
        return False
    try:
        if not lives(claim.pid, claim.start):
            return False
        signal.pidfd_send_signal(fd, number)
        signal.pidfd_send_signal(fd, signal.SIGCONT)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def _watch_process(stack: ExitStack, pid: int) -> int | None:
    """Return a descriptor of the process; None if it is gone, or the system has no such descriptors."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    stack.callback(os.close, fd)
    return fd


def _watch_file(stack: ExitStack, path: Path) -> int | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK)
    if fd < 0:
        return None
    stack.callback(os.close, fd)
    return fd if libc.inotify_add_watch(fd, os.fsencode(path), IN_MODIFY) >= 0 else None


def _read_json(path: str) -> Any:
    """Return the file's content; None if it is missing or incomplete."""
    try:
        return json.loads(files.read(path, WARDEN_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
