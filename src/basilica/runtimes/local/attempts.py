"""One attempt of a rank, as the runtime knows it."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from basilica.core.ends import OOM_KILLED, UNKNOWN
from basilica.core.names import rank_name
from basilica.core.seen import Ended, SeenRank, Sight, Stalled
from basilica.machine.files import UnusableFile
from basilica.machine.layout import Key, Layout
from basilica.machine.processes import Watch
from basilica.reports.tracebacks import read_traceback
from basilica.runtimes.local.logs import placeholder, read_tail
from basilica.runtimes.local.records import Claim, Exit, Record, append_exit, read_record
from basilica.runtimes.rules import TAIL_LINES, shown_attempts

TAIL_LINE_MAX = 2000
TAIL_BYTES_MAX = 1 << 18


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The mirror of an attempt's record on disk, which is the source of truth; events cause it to be refreshed.

    `watch` is on the supervisor, or on the rank itself where the supervisor is gone (`orphaned`). `problem` is the
    fault of its files that the user is warned of, and `damage` names the part of the record that could not be read.
    """

    key: Key
    sight: Sight
    gpus: tuple[str, ...] = ()
    started_at: float | None = None
    ended: Ended | None = None
    note: str = ""
    stalled: Stalled | None = None
    watch: Watch | None = None
    orphaned: bool = False
    claim: Claim | None = None
    problem: str = ""
    memory_kill: str = ""
    damage: str = ""

    def seen(self, node: str) -> SeenRank:
        return SeenRank(
            rank=self.key.rank,
            attempt=self.key.attempt,
            sight=self.sight,
            node=node,
            pod_name=rank_name(self.key.instance, self.key.rank),
            started_at=self.started_at,
            gpus=len(self.gpus),
            ended=self.ended,
            note=self.note,
            stalled=self.stalled,
        )

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """Return the warnings for the user about this attempt, beside its end."""
        found = [("UnusableFile", self.problem), ("MemoryKill", self.memory_kill)]
        return [(reason, message) for reason, message in found if message]

    @property
    def was_launched(self) -> bool:
        """Return False while the attempt waits, and if it was stopped before it started."""
        if self.ended is None:
            return self.sight is not Sight.QUEUED
        return self.started_at is not None or not self.ended.stopped

    def unwatch(self) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None


def shown(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts of one run that the controller is shown."""
    return shown_attempts(
        attempts, lambda each: (each.key.rank, each.key.attempt), lambda each: each.sight is Sight.ENDED
    )


def damages(attempts: Iterable[Attempt]) -> tuple[tuple[str, str], ...]:
    """Return one warning that names the records that could not be read."""
    named = [f"rank {a.key.rank}, attempt {a.key.attempt} ({a.damage})" for a in attempts if a.damage]
    if not named:
        return ()
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    unknown = "of what it does not tell, such as an exit code, nobody knows"
    return (("RecordDamaged", f"the exit record is damaged of {'; '.join(named[:3])}{more}: {unknown}"),)


def has_ended(layout: Layout, key: Key) -> bool:
    record = read_record(layout.record(key))
    return record is not None and record.exit is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """The state of an attempt's files. Without a record it is unclaimed, or, with a `problem`, its claim is unknown."""

    record: Record | None = None
    ended: Ended | None = None
    problem: str = ""
    memory_kill: str = ""


def read_attempt(layout: Layout, key: Key, boot: str, now: float) -> OnDisk:
    """Read an attempt's files. An attempt of an earlier boot without an end is recorded as ended, cause unknown."""
    try:
        record = read_record(layout.record(key))
    except UnusableFile as error:
        return OnDisk(problem=f"the record of rank {key.rank} cannot be read: {error}")
    if record is None:
        return OnDisk()
    if record.exit is None and record.claim.boot != boot and not record.claim_lost:
        lost = Exit(exit_code=None, reason=UNKNOWN, finished_at=now, by_platform=True)
        record = write_end(layout, key, record, lost)
    return OnDisk(record=record) if record.exit is None else with_output(layout, key, record, record.exit)


def write_end(layout: Layout, key: Key, record: Record, exit: Exit) -> Record:
    with suppress(OSError):  # if the write fails, the next control plane reaches the same conclusion
        append_exit(layout.record(key), exit, record)
    return replace(record, exit=exit)


def with_output(layout: Layout, key: Key, record: Record, exit: Exit) -> OnDisk:
    """Return the end with the last lines of output. Unreadable output hides no end: a placeholder replaces it."""
    try:
        tail, problem = read_tail(layout.log(key), TAIL_LINES, ended=True, at_most=TAIL_BYTES_MAX).lines, ""
    except UnusableFile as error:
        tail, problem = (placeholder(error),), f"the output of rank {key.rank} cannot be read: {error}"
    by_itself = not exit.stopped and exit.exit_code != 0
    traceback = read_traceback(layout.error(key)) if by_itself else ""
    return OnDisk(
        record=record, ended=ended_of(exit, tail, traceback), problem=problem, memory_kill=memory_kill(key, exit)
    )


def memory_kill(key: Key, exit: Exit) -> str:
    """Return a sentence on processes killed for memory that the rank outlived; empty if there are none."""
    if not exit.oom_kills or exit.reason == OOM_KILLED or exit.exit_code is None or exit.stopped:
        return ""
    many = "1 process" if exit.oom_kills == 1 else f"{exit.oom_kills} processes"
    went_on = f"the rank went on and exited with code {exit.exit_code}"
    return f"the kernel killed {many} that rank {key.rank} had started, for memory; {went_on}"


def ended_of(exit: Exit, tail: tuple[str, ...] = (), traceback: str = "") -> Ended:
    """Return the end with the last lines of output, and the traceback of a program that failed by itself."""
    return Ended(
        exit_code=exit.exit_code,
        reason=exit.reason,
        finished_at=exit.finished_at,
        signal=exit.signal,
        stopped=exit.stopped,
        by_platform=exit.by_platform,
        start_error=exit.start_error,
        log_tail=tuple(line[:TAIL_LINE_MAX] for line in tail),
        traceback=traceback,
    )
