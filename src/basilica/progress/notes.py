"""The notes of a process about its progress: what it restored, what it saved, and how long that blocked the training.

The notes are in a file of the process beside `BASILICA_REPORT_FILE`, rewritten in place; `progress.note_file` documents
it. The control plane is notified of restores, refused copies and snapshots on disk. All else it reads when it looks at
the run for another reason, so a snapshot of every step costs nobody anything.

The module runs inside other people's programs: standard library only, and its functions never raise.
"""

import atexit
import contextlib
import os
import threading
import time
from typing import Any

from basilica.progress.note_file import (
    NOTE_SUFFIX,
    REFUSALS_KEPT,
    SIZE_MAX,
    TIER_CHARS,
    TIERS_MAX,
    clean,
    encode_slot,
)
from basilica.progress.note_file import SLOT_BYTES as SLOT
from basilica.reports.points import STEP_MAX, TIME_MAX
from basilica.reports.writer import BELL_ENV, FILE_ENV, oldest_files, ring, this_process, warn

__all__ = ["blocked", "interval", "refused", "restored", "restoring", "saved"]

WRITE_EVERY = 0.05  # seconds between two writes of numbers for which nobody is notified
TRY_AGAIN = 1.0  # seconds after the file could not be made
RINGING_TIERS = ("disk", "bucket")
CALLER = "basilica.Progress"


def restoring() -> None:
    """Note that this process has begun to restore its state."""
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.restoring()
    except Exception as error:  # noqa: BLE001 (no error of a note may stop the training)
        _lost(error)


def restored(step: int | None, tier: str, seconds: float) -> None:
    """Note that the restore is over: the step and its tier, and how long it took; None for a fresh start."""
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.restored(step, tier, seconds)
    except Exception as error:  # noqa: BLE001 (no error of a note may stop the training)
        _lost(error)


def blocked(seconds: float) -> None:
    """Note that a snapshot has blocked the training for so long. Cheap enough for every step."""
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.blocked(seconds)
    except Exception as error:  # noqa: BLE001 (no error of a note may stop the training)
        _lost(error)


def saved(step: int, tier: str, size: int) -> None:
    """Note that the snapshot of a step, of `size` bytes, is complete in a tier."""
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.saved(step, tier, size)
    except Exception as error:  # noqa: BLE001 (no error of a note may stop the training)
        _lost(error)


def refused(what: str) -> None:
    """Note that a corrupt copy was refused; `what` names it in a sentence."""
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.refused(what)
    except Exception as error:  # noqa: BLE001 (no error of a note may stop the training)
        _lost(error)


def interval(steps: int | None) -> None:
    """Note after how many steps a snapshot is taken; None while that is not known."""
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.interval(steps)
    except Exception as error:  # noqa: BLE001 (no error of a note may stop the training)
        _lost(error)


class _NoteFile:
    """The notes of this process, and the file that they are written to."""

    def __init__(self, path: str, bell: str | None) -> None:
        self._bell = bell
        self._at = round(time.monotonic(), 3)  # of the last snapshot; before the first, of the first note
        self._about = {**this_process(), "mono": self._at}
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        _make_room(path)
        name = f"{path}.{os.getpid()}{NOTE_SUFFIX}"
        self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._lock = threading.RLock()
        self._busy = False
        self._writes = 0
        self._due = 0.0  # when numbers may be written again
        self._unwritten = 0.0  # blocked seconds that the file does not have
        self._dirty = False
        self._ring_again = False
        self._restoring: float | None = None
        self._restored: list[Any] | None = None
        self._blocked = 0.0
        self._snapshots = 0
        self._every: int | None = None
        self._saved: dict[str, list[Any]] = {}
        self._refused: list[tuple[int, str]] = []

    def restoring(self) -> None:
        with self._lock:
            self._restoring = round(time.monotonic(), 3)
            self._write(notify=True)

    def restored(self, step: int | None, tier: str, seconds: float) -> None:
        with self._lock:
            end = round(time.monotonic(), 3)
            took = _seconds(seconds)
            begin = round(max(0.0, end - took), 3) if self._restoring is None else self._restoring
            self._restoring = None
            self._restored = [_step(step), _tier(tier), took, begin, end]
            self._write(notify=True)

    def blocked(self, seconds: float) -> None:
        if not 0.0 <= seconds < TIME_MAX:
            return
        with self._lock:
            self._blocked += seconds
            self._unwritten += seconds
            self._snapshots += 1
            self._dirty = True
            now = self._at = time.monotonic()
            if self._unwritten >= WRITE_EVERY or now >= self._due:
                self._write()

    def saved(self, step: int, tier: str, size: int) -> None:
        with self._lock:
            tier = _tier(tier)
            if tier in self._saved or len(self._saved) < TIERS_MAX:
                whole = size if type(size) is int and 0 <= size < SIZE_MAX else 0
                self._saved[tier] = [_step(step) or 0, whole, round(time.monotonic(), 3)]
                self._dirty = True
            if tier in RINGING_TIERS:
                self._write(notify=True)
            elif time.monotonic() >= self._due:
                self._write()

    def refused(self, what: str) -> None:
        with self._lock:
            number = self._refused[-1][0] + 1 if self._refused else 1
            self._refused = [*self._refused, (number, clean(f"{what}"))][-REFUSALS_KEPT:]
            self._write(notify=True)

    def interval(self, steps: int | None) -> None:
        with self._lock:
            every = steps if type(steps) is int and 0 < steps < STEP_MAX else None
            if every != self._every:
                self._every, self._dirty = every, True
                if time.monotonic() >= self._due:
                    self._write()

    def close(self) -> None:
        """Write what has not been written yet, as the last of this process."""
        with self._lock:
            if self._dirty:
                self._write()

    def _write(self, *, notify: bool = False) -> None:
        """Write the notes to the slot that is older. A write that fails is made up for by the next one."""
        if self._busy:  # a signal handler that notes something, in the middle of a write
            self._dirty = True
            return
        self._busy = True
        try:
            now = time.monotonic()
            document = {
                **self._about,
                "at": round(self._at, 3),
                "restoring": self._restoring,
                "restored": self._restored,
                "blocked": round(self._blocked, 6),
                "snapshots": self._snapshots,
                "every": self._every,
                "saved": self._saved,
                "refused": self._refused,
            }
            slot = encode_slot(self._writes + 1, document)
            if os.pwrite(self._fd, slot, self._writes % 2 * SLOT) < SLOT:
                raise OSError("no room on the disk")
            self._writes += 1
            self._due, self._unwritten, self._dirty = now + WRITE_EVERY, 0.0, False
        finally:
            self._busy = False
        if notify or self._ring_again:
            self._ring_again = not ring(self._bell, "progress")


def _step(given: object) -> int | None:
    return given if type(given) is int and -STEP_MAX < given < STEP_MAX else None


def _tier(given: object) -> str:
    text = f"{given}"[:TIER_CHARS]
    return text if text.isidentifier() else "unknown"


def _seconds(given: float) -> float:
    return round(given, 6) if 0.0 <= given < TIME_MAX else 0.0


def _make_room(path: str) -> None:
    """Remove the oldest note files of processes that have ended."""
    for old in oldest_files(path, NOTE_SUFFIX):
        try:
            os.kill(int(old.removesuffix(NOTE_SUFFIX).rpartition(".")[2]), 0)
        except (ProcessLookupError, OverflowError):
            with contextlib.suppress(OSError):
                os.unlink(old)
        except OSError:  # it lives, as another user
            continue


# ---- this process --------------------------------------------------------------------------------------------------


class _Process:
    """The notes of this process. A forked child starts afresh: it has a file of its own, and counts from 0."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.writer: _NoteFile | None = None
        self._try_at = 0.0
        self._lock = threading.Lock()

    def begin(self) -> _NoteFile | None:
        """Return the writer; None outside a deployment, and while the file cannot be made."""
        if time.monotonic() < self._try_at or not self._lock.acquire(timeout=1):
            return None
        try:
            path = os.environ.get(FILE_ENV)
            if path and self.writer is None:
                self.writer = _NoteFile(path, os.environ.get(BELL_ENV))
                atexit.register(self._end, self.writer)
            elif not path:
                self._try_at = time.monotonic() + TRY_AGAIN
        except OSError:
            self._try_at = time.monotonic() + TRY_AGAIN
            raise
        finally:
            self._lock.release()
        return self.writer

    def _end(self, writer: _NoteFile) -> None:
        if writer is self.writer:  # not the writer of the parent of a fork
            with contextlib.suppress(Exception):
                writer.close()


def _lost(error: Exception) -> None:
    warn("a note on the progress was lost", f"{type(error).__name__}: {error}", CALLER)


_here = _Process()
if hasattr(os, "register_at_fork"):  # else nothing forks
    os.register_at_fork(after_in_child=_here.reset)
