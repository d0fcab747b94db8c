"""One attempt of a rank, as the runtime knows it."""

from collections.abc import Iterable
from dataclasses import dataclass

from basilica.core.names import rank_name
from basilica.core.seen import Ended, SeenRank, Sight, Stalled
from basilica.runtimes.local.layout import Key, Layout
from basilica.runtimes.local.logs import read_tail
from basilica.runtimes.local.processes import Watch
from basilica.runtimes.local.records import Exit, read_record
from basilica.runtimes.local.tracebacks import read_traceback

ENDED_ATTEMPTS_SHOWN = 4
TAIL_LINES = 20
TAIL_LINE_MAX = 2000
TAIL_BYTES_MAX = 1 << 18


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The record on disk is the truth; this mirrors it, and is brought up to date when somebody says so.

    `watch` is on the supervisor, or on the rank itself where the supervisor is gone (`orphaned`). `damage` names what
    of the record could not be read.
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
    def was_launched(self) -> bool:
        """False while it waits, and for one that was stopped before it started."""
        if self.ended is None:
            return self.sight is not Sight.QUEUED
        return self.started_at is not None or not self.ended.stopped

    def unwatch(self) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None


def shown(attempts: Iterable[Attempt]) -> list[Attempt]:
    """In order, those that the controller is shown: of each rank what has not ended, and the last that have."""
    found = []
    ended: dict[int, int] = {}
    for attempt in sorted(attempts, key=lambda attempt: (attempt.key.rank, -attempt.key.attempt)):
        if attempt.sight is Sight.ENDED:
            ended[attempt.key.rank] = ended.get(attempt.key.rank, 0) + 1
            if ended[attempt.key.rank] > ENDED_ATTEMPTS_SHOWN:
                continue
        found.append(attempt)
    return sorted(found, key=lambda attempt: attempt.key)


def damages(attempts: Iterable[Attempt]) -> tuple[tuple[str, str], ...]:
    """What the user should know of records that could not be read, as one warning."""
    named = [f"rank {a.key.rank}, attempt {a.key.attempt} ({a.damage})" for a in attempts if a.damage]
    if not named:
        return ()
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    unknown = "of what it does not tell, such as an exit code, nobody knows"
    return (("RecordDamaged", f"the exit record is damaged of {'; '.join(named[:3])}{more}: {unknown}"),)


def has_ended(layout: Layout, key: Key) -> bool:
    record = read_record(layout.record(key))
    return record is not None and record.exit is not None


def ended_of(exit: Exit, layout: Layout, key: Key) -> Ended:
    """The end with the last lines of output, and what the program that failed by itself left of its exception."""
    tail = read_tail(layout.log(key), TAIL_LINES, ended=True, at_most=TAIL_BYTES_MAX)
    return Ended(
        exit_code=exit.exit_code,
        reason=exit.reason,
        finished_at=exit.finished_at,
        signal=exit.signal,
        stopped=exit.stopped,
        by_platform=exit.by_platform,
        start_error=exit.start_error,
        log_tail=tuple(line[:TAIL_LINE_MAX] for line in tail.lines),
        traceback="" if exit.stopped or exit.exit_code == 0 else read_traceback(layout.error(key)),
    )
