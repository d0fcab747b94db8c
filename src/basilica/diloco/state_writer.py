"""Writes what was agreed on to the bucket, beside the training: states, and the log of the rounds.

No round depends on it, so none of its errors is raised in a step: they are recorded as troubles. A log entry that could
not be written is written with the next one. A state that could not be is followed by the next state; the last one is
tried again when the replica closes, and only then an error is raised, for there is nobody else to write it.
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
"""Log entries that wait for a bucket which cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One replica's part of a state: `piece` of `pieces`. States of fewer rounds than `forget_before` may go."""

    state: State
    piece: int
    pieces: int
    forget_before: int


class StateWriter:
    """One replica's writer: a thread of its own, one thing after the other."""

    def __init__(self, bucket: Bucket, troubles: Troubles) -> None:
        self._bucket, self._troubles = bucket, troubles
        self._background = Background("basilica-states")
        self._unlogged: deque[LogEntry] = deque(maxlen=ENTRIES_KEPT)
        self._unsaved: dict[str, Share] = {}
        """By fragment, what could not be written of its newest state, as long as its arrays have not changed."""
        self._ended: Future[None] | None = None

    @property
    def left(self) -> bool:
        """Whether this replica has ended without waiting: nothing more is written."""
        return self._background.stopped.is_set()

    def submit(self, share: Share | None, entry: LogEntry | None) -> None:
        """Write these in the background. The state's arrays must not change before `wait` has returned."""
        if share is not None or entry is not None:
            self._background.submit(self._write, share, entry)

    def sweep(self) -> None:
        """Remove, in the background, what writers that were killed have left."""
        self._background.submit(sweep, self._bucket)

    def wait(self, *names: str) -> None:
        """Until nothing is being written; afterwards the arrays of these fragments may change."""
        self._background.finish(None)
        for name in names:
            self._unsaved.pop(name, None)

    def end(self, rank: int, incarnation: int, **outcome: Any) -> None:
        """Record, in the background, how this replica ended."""
        told = [str(trouble) for trouble in self._troubles.current]
        more = {"troubles": told, **outcome} if told else outcome
        self._ended = self._background.submit(self._bucket.leave, rank, incarnation, **more)

    def close(self, *, wait: bool = True) -> None:
        """Wait until all is in the bucket; an error if something is not. Without `wait` it gets a moment."""
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
        except Exception as error:  # noqa: BLE001  whatever the store raises: no round depends on it
            self._troubles.record(work, error)
            return False
        self._troubles.resolve(work)
        return True
