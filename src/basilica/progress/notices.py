"""Planned changes as a training program sees them: `basilica.notice()`, cheap enough for every step.

A notice is published in a file that every process of the rank maps once. The processes of a gang see it at the same
step if it has one: a process is given the notice when its own last report has reached that step, and a process that
first reads it after that step answers that it is late, so that a later step is published. `progress.formats` documents
the files.

The module runs inside other people's programs: standard library only, and `notice()` never raises.
"""

import contextlib
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PROT_READ, mmap

from basilica.progress.formats import (
    ANSWER_SUFFIX,
    COUNTER_BYTES,
    NOTICE_FILE_BYTES,
    PublishedNotice,
    State,
    encode_answer,
    is_written,
    parse_notice,
)
from basilica.reports.writer import BELL_ENV, FILE_ENV, last_step, oldest_files, ring, this_process, warn

__all__ = ["Notice", "notice"]

NOTICE_ENV = "BASILICA_NOTICE_FILE"
TRY_AGAIN = 1.0  # seconds after a file was not there, or could not be made
READ_TRIES = 3  # of a file that is being written; the next call reads it again
POLL_FIRST = 0.001  # seconds
POLL_LONGEST = 0.05


@dataclass(frozen=True)
class Notice:
    """A planned change of the run, as `basilica.notice()` returns it."""

    _published: PublishedNotice

    @property
    def kind(self) -> str:
        """What will happen: `scale`, `restart`, `cancel`, `deadline`, `preemption` or `drain`."""
        return self._published.kind

    @property
    def reason(self) -> str:
        """Why it happens, in one sentence."""
        return self._published.reason

    @property
    def target(self) -> int | None:
        """The size of the world after the change; None if that stays as it is."""
        return self._published.target

    @property
    def step(self) -> int | None:
        """The step after which all processes of the run are given this notice; None if each is given it at once."""
        return self._published.step

    @property
    def seconds_left(self) -> float:
        """The time until the change happens whether this rank is ready or not; 0 if that time is over."""
        return max(0.0, self._published.until - time.time())

    def ready(self, timeout: float | None = None) -> None:
        """Answer that this process has saved its state, and wait for the change.

        The change happens as soon as all processes of the run that listen are ready. A process that it stops gets
        SIGTERM here, and whatever a signal handler raises is passed through. Returns if the change is withdrawn or put
        off to a later step, if the program handled SIGTERM itself, and after `timeout` seconds; then training goes on.
        Steps after this call are lost if the change happens.
        """
        _here.wait_for_change(self, timeout)


def notice() -> Notice | None:
    """Return the planned change that this rank has to prepare for; None if there is none.

    Costs less than two microseconds when there is none, does nothing outside a deployment, and never raises. If the
    processes of a run report their steps, all of them are given a notice after the same step. Every later call returns
    it again until the change is withdrawn or has happened.

    >>> for step in range(1000):                                     # doctest: +SKIP
    ...     basilica.report(step=step, loss=train_step())            # doctest: +SKIP
    ...     if notice := basilica.notice():                          # doctest: +SKIP
    ...         save(step)                                           # doctest: +SKIP
    ...         notice.ready()                                       # doctest: +SKIP
    """
    here = _here
    try:
        view = here.view
        if view[:COUNTER_BYTES] == here.idle if view is not None else time.monotonic() < here.try_at:
            return None
        return here.look()
    except Exception as error:  # noqa: BLE001 (no error of a notice may stop the training)
        warn("a notice was not read", f"{type(error).__name__}: {error}", "basilica.notice")
        return None


class _Listener:
    """The notice file as this process reads it, and its answers. A forked child starts afresh and has its own."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.view: mmap | None = None
        self.idle = b""  # the counter with which nothing is published, and nothing left to do
        self._counter = b""
        self._published: PublishedNotice | None = None
        self._notice: Notice | None = None  # that which is published, as the program is given it
        self._late = False  # the process had passed the step of the notice when it first read it
        self._given = False
        self._number = 0  # of the last notice that was read
        self.try_at = 0.0
        self._answers: _AnswerFile | None = None
        self._unanswered: State | None = "listening"  # what could not be written yet
        self._answer_at = 0.0
        self._lock = threading.RLock()
        self._busy = False

    # ---- reading ---------------------------------------------------------------------------------------------------

    def look(self) -> Notice | None:
        """Read what is published, answer it if it is new, and return the notice once its step is reached."""
        with self._lock:
            if self._busy:  # a signal handler or a finalizer that asks, in the middle of a look
                return None
            self._busy = True
            try:
                return self._due() if self._update() else None
            finally:
                self._busy = False

    def _update(self) -> bool:
        """Bring `_published` up to date. Return False outside a deployment and as long as there is no file."""
        if self.view is None:
            now = time.monotonic()
            if now < self.try_at:
                return False
            path = os.environ.get(NOTICE_ENV)
            self.view = _mapped(path) if path else None
            if self.view is None:  # set last: other threads do not wait for a look that is under way
                self.try_at = now + TRY_AGAIN
            if not path:
                return False
        if self._unanswered is not None and time.monotonic() >= self._answer_at:
            self._answer(self._unanswered)
        if self.view is None:
            return False
        if self.view[:COUNTER_BYTES] != self._counter:
            self._read(self.view)
        if self._published is None and self._unanswered is None:
            self.idle = self._counter
        return True

    def _read(self, view: mmap) -> None:
        """Read the file, unless it is being written: then the next call reads it."""
        for _ in range(READ_TRIES):
            counter = view[:COUNTER_BYTES]
            if is_written(counter):
                payload = view[COUNTER_BYTES:NOTICE_FILE_BYTES]
                if view[:COUNTER_BYTES] == counter:
                    self._counter = counter
                    self._take(parse_notice(payload))
                    return

    def _take(self, found: PublishedNotice | None) -> None:
        """Take over what is published. The same notice with other facts, such as more time, needs no other answer."""
        known, self._published = self._published, found
        if found is None:
            self._notice = None
            if known is not None:
                self._answer("listening")
            return
        self._notice = Notice(found)
        if known is not None and (known.number, known.step) == (found.number, found.step):
            return
        step = last_step()
        self._given = False
        self._late = found.step is not None and step is not None and step > found.step
        self._number = found.number
        self._answer("late" if self._late else "seen")

    def _due(self) -> Notice | None:
        """Return the notice if its step is reached; by then it was read in time, or answered as late."""
        found = self._published
        if found is None or self._late:
            return None
        if not self._given and found.step is not None:
            step = last_step()
            if step is None or step < found.step:
                return None
        if not self._given:
            self._given = True
            self._answer("given")  # it saves now, which may take long: it has not missed the step
        return self._notice

    # ---- answering -------------------------------------------------------------------------------------------------

    def wait_for_change(self, notice: Notice, timeout: float | None) -> None:
        """Answer that this process is ready for the notice, and wait until another one, or none, is published.

        The file is polled: a process has nothing that it could be woken by, and a FIFO for each process is not worth
        the milliseconds. No lock is held meanwhile, so other threads and signal handlers can ask for the notice as
        well.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = POLL_FIRST
        with _signals() as wake:  # before the answer: the change may follow at once
            with self._lock:
                if not self._is_current(notice):
                    return
                self._answer("ready")
            while self._is_current(notice):
                left = pause if end is None else min(pause, end - time.monotonic())
                if left <= 0 or _was_stopped(wake, left):
                    return
                pause = min(2 * pause, POLL_LONGEST)

    def _is_current(self, notice: Notice) -> bool:
        with self._lock:
            found = self._published if self._update() else None
        return found is not None and (found.number, found.step) == (notice._published.number, notice.step)

    def _answer(self, state: State) -> None:
        """Write the answer of this process. If that fails it is tried again later: a notice does not wait for it."""
        self._unanswered = state
        try:
            path = os.environ.get(FILE_ENV)
            if self._answers is None and path:
                self._answers = _AnswerFile(path, os.environ.get(BELL_ENV))
            if self._answers is None or self._answers.write(self._number, state):
                self._unanswered = None
        except OSError as error:
            warn("cannot answer a notice", f"{error}", "basilica.notice")
        self._answer_at = time.monotonic() + TRY_AGAIN


class _AnswerFile:
    """The file in which this process answers notices. Its existence shows that the process listens."""

    def __init__(self, path: str, bell: str | None) -> None:
        self._bell = bell
        self._about = this_process()
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        _make_room(path)
        name = f"{path}.{os.getpid()}{ANSWER_SUFFIX}"
        self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, number: int, state: State) -> bool:
        """Write the answer, and ring. Return False if the bell was full, so that nobody may have noticed."""
        line = {
            **self._about,
            "number": number,
            "state": state,
            "step": last_step(),
            "at": round(time.time(), 3),
            "mono": round(time.monotonic(), 3),
        }
        encoded = encode_answer(line)
        if os.pwrite(self._fd, encoded, 0) < len(encoded):
            raise OSError("no room on the disk")
        return ring(self._bell, "answer")


def _make_room(path: str) -> None:
    """Remove the oldest answer files of processes that have ended. Those of the living stay: they listen."""
    for old in oldest_files(path, ANSWER_SUFFIX):
        try:
            os.kill(int(old.removesuffix(ANSWER_SUFFIX).rpartition(".")[2]), 0)
        except (ProcessLookupError, OverflowError):
            with contextlib.suppress(OSError):
                os.unlink(old)
        except OSError:  # it lives, as another user
            continue


def _mapped(path: str) -> mmap | None:
    """Map the notice file; None if there is none, or not all of it yet."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size < NOTICE_FILE_BYTES:
            return None
        return mmap(fd, NOTICE_FILE_BYTES, prot=PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


# ---- signals during a wait -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals() -> Iterator[int | None]:
    """Yield a descriptor from which the numbers of handled signals can be read; None where there cannot be one.

    Python resumes a sleep after a signal handler that raises nothing. A handler of SIGTERM that only sets a flag, for
    the training loop to end by, would thus be waited for until the process is killed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    try:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else _pipe()
    except OSError:  # no more descriptors
        yield None
        return
    try:
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            if before != -1:  # an event loop's, which has to be woken
                signal.set_wakeup_fd(before)
            yield read if before == -1 else None
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)
    finally:
        os.close(read)
        os.close(write)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


def _was_stopped(wake: int | None, seconds: float) -> bool:
    """Sleep; return True at once if the program's own handler of SIGTERM has run."""
    if wake is None:
        time.sleep(seconds)
        return False
    poll = select.poll()  # a training may have more descriptors than `select.select` can name
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(seconds * 1000)) and signal.SIGTERM in os.read(wake, 4096)


_here = _Listener()
if hasattr(os, "register_at_fork"):  # else nothing forks
    os.register_at_fork(after_in_child=_here.reset)
