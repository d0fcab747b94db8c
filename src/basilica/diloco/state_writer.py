"""The background writer of agreed states and of the log of the rounds to the bucket.

No round depends on it, so none of its errors is raised in a step: they are recorded as troubles. A log entry whose
write failed is written with the next one. A failed write of a state is superseded by the next state; the last one is
retried when the replica closes, and only then an error is raised, for no other replica will write it.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from basilica.diloco.background import Background
from basilica.diloco.bucket import Bucket, LogEntry, State
from basilica.diloco.inspection import sweep
from basilica.diloco.troubles import Troubles

ENTRIES_KEPT = 1000
"""The number of log entries kept while the bucket cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One replica's part of a state: `piece` of `pieces`. States of fewer rounds than `forget_before` are obsolete."""

    state: State
    piece: int
    pieces: int
    forget_before: int


class StateWriter:
    """One replica's writer: a thread of its own, which runs one write at a time."""

    def __init__(self, bucket: Bucket, troubles: Troubles) -> None:
        self._bucket, self._troubles = bucket, troubles
        self._background = Background("basilica-states")
        self._unlogged: deque[LogEntry] = deque(maxlen=ENTRIES_KEPT)
        self._unsaved: dict[str, Share] = {}
        """By fragment, the share of its newest state that is not written yet, until its arrays change."""
        self._ended: Future[None] | None = None

    @property
    def left(self) -> bool:
        """Whether this replica has ended without waiting for its writes: no further write is accepted."""
        return self._background.stopped.is_set()

    def submit(self, share: Share | None, entry: LogEntry | None) -> None:
        """Write these in the background. The state's arrays must not change before `wait` has returned."""
        if share is not None or entry is not None:
            self._background.submit(self._write, share, entry)

    def sweep(self) -> None:
        """Remove, in the background, the leftovers of killed writers."""
        self._background.submit(sweep, self._bucket)

    def wait(self, *names: str) -> None:
        """Wait until no write is running; afterwards the arrays of these fragments may change."""
        self._background.finish(None)
        for name in names:
            self._unsaved.pop(name, None)

    def end(self, rank: int, incarnation: int, **outcome: Any) -> None:
        """Record, in the background, how this replica ended."""
        told = [str(trouble) for trouble in self._troubles.current]
        more = {"troubles": told, **outcome} if told else outcome
        self._ended = self._background.submit(self._bucket.leave, rank, incarnation, **more)

    def close(self, *, wait: bool = True) -> None:
        """Wait until the bucket has everything; raise if a write fails. Without `wait`, running writes get a moment."""
        self._background.close(wait=wait)
        if wait:
            for share in list(self._unsaved.values()):
                self._save(share)
            self._log()
        if self._ended is not None and self._ended.done():
            self._ended.result()

    def _write(self, share: Share | None, entry: LogEntry | None) -> None:
        if entry is not None:
            self._unlogged.append(entry)
            self._tried(f"recording the rounds of run {self._bucket.run_id!r}", self._log)
        if share is None:
            return
        state, where = share.state, f"{share.state.name!r} in run {self._bucket.run_id!r}"
        self._unsaved[state.name] = share
        saved = self._tried(f"saving the states of {where}", lambda: self._save(share))
        if saved and share.piece == 0:
            forget = lambda: self._bucket.forget_states(state.name, share.forget_before)  # noqa: E731
            self._tried(f"removing old states of {where}", forget)

    def _log(self) -> None:
        while self._unlogged:
            self._bucket.log(self._unlogged[0])
            self._unlogged.popleft()

    def _save(self, share: Share) -> None:
        self._bucket.save(share.state, share.piece, share.pieces)
        self._unsaved.pop(share.state.name, None)

    def _tried(self, work: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001  any error of the store: no round depends on it
            self._troubles.record(work, error)
            return False
        self._troubles.resolve(work)
        return True
