"""The writer of a rank's reports: `basilica.report(step=…, loss=…)`, from any of its processes, in microseconds.

A report is one `pwrite` to a file of the calling process beside `BASILICA_REPORT_FILE`. It waits for no other process,
so it works while the server is down. The file stays small however long the training runs: its lines are
points of a series, and when it is full neighbouring points are merged, with mean, minimum and maximum, so that no spike
and no NaN is lost. The newest report is always the file's last line. `reports.points` documents the format.

The module runs inside other people's programs: standard library only, and it never raises.
"""

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, SupportsFloat

from basilica.reports.points import (
    NAME_LENGTH_MAX,
    STEP_MAX,
    encode,
    merge_neighbours,
    number_text,
    read_points,
    spread_text,
)

__all__ = ["report"]

FILE_ENV = "BASILICA_REPORT_FILE"
BELL_ENV = "BASILICA_REPORT_BELL"  # a FIFO that the control plane reads, if there is one
FILE_BYTES_MAX = 512 << 10
FILES_MAX = 64  # of one attempt: a program may start any number of processes, one after the other
NAMES_MAX = 64
GAPS_KEPT = 31
GAPS_NEEDED = 4  # before that, the median means little
USUAL_EVERY = 1.0  # seconds between two medians
TRY_AGAIN = 10.0  # seconds after the file could not be made
STACK_SIGNAL_OFFSET = 8  # from SIGRTMIN: programs have their own uses for SIGUSR1 and SIGUSR2


def report(step: SupportsFloat | None = None, **numbers: SupportsFloat) -> None:
    """Say where this rank is: the step, and numbers such as `loss=0.3`. `report()` alone is a sign of life.

    Does nothing outside a deployment, never raises, and costs microseconds. Numbers may be floats, integers, NumPy
    scalars and tensors of one element (reading one from a GPU waits for it); anything else is left out, with a warning.

    >>> for step in range(1000):                                     # doctest: +SKIP
    ...     basilica.report(step=step, loss=train_step())            # doctest: +SKIP
    """
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.add(step, numbers)
    except Exception as error:  # noqa: BLE001 (no error of a report may stop the training)
        warn("a report was lost", f"{type(error).__name__}: {error}")


def note(**numbers: SupportsFloat) -> None:
    """Report numbers that belong to no step: their frequency does not count as the time of a step."""
    try:
        writer = _here.writer or _here.begin()
        if writer is not None:
            writer.add(None, numbers, beat=False)
    except Exception as error:  # noqa: BLE001 (as above)
        warn("a report was lost", f"{type(error).__name__}: {error}")


class Writer:
    """The report file of this process."""

    def __init__(self, path: str, bell: str | None = None) -> None:
        self._bell = bell
        self._path = f"{path}.{os.getpid()}"
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        _make_room(path)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()
        self._busy = False
        self._names: dict[str, str] = {}  # as JSON
        self._texts: dict[str, str] = {}  # the last value of each name, as JSON
        self._spreads: dict[str, list[float]] = {}  # of the point that is being gathered: sum, minimum, maximum, count
        self._gathered = 0
        self._stride = 1  # reports for a point
        self._count = 0
        self._at = self._mono = 0.0
        self.step: int | None = None  # of the last report that had one
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._beat_at: float | None = None
        self._usual = "null"
        self._usual_due = 0.0
        self._notify_again = False
        self._established = False
        self._length = 0  # of the last line, if it may still be overwritten
        head = json.dumps({**this_process(), "mono": round(time.monotonic(), 3)}).encode() + b"\n"
        self._end = len(head)
        try:
            os.pwrite(self._fd, head, 0)
        except OSError:
            os.close(self._fd)
            raise

    def add(self, step: object, numbers: Mapping[str, object], *, beat: bool = True) -> None:
        with self._lock:
            if self._busy:  # a signal handler or a finalizer that reports, in the middle of a report
                return
            self._busy = True
            try:
                self._add(step, numbers, beat=beat)
            finally:
                self._busy = False

    def close(self) -> None:
        """Write the point that is being gathered, as the last one."""
        with self._lock:
            if self._gathered and not self._busy:
                self._write({}, whole=True)

    def _add(self, step: object, numbers: Mapping[str, object], *, beat: bool) -> None:
        self._at, self._mono = time.time(), time.monotonic()
        values = self._values(numbers) if numbers else {}
        number = None if step is None else _step(step)
        fresh = number != self.step if number is not None else bool(values)
        self._measure_step(self._mono, number, beat=beat and fresh)
        if number is not None:
            self.step = number
        self._count += 1
        self._gathered += 1
        if self._stride > 1:
            self._gather(values)
        self._write(values, whole=self._gathered >= self._stride)

    def _values(self, numbers: Mapping[str, object]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, given in numbers.items():
            value = given if type(given) is float else _number(given)
            key = self._names.get(name) or self._name(name)
            if value is not None and key is not None:
                values[name] = value
                self._texts[name] = f"{key}:{number_text(value)}"
            elif value is None:
                warn("only numbers can be reported", f"{name!r:.50} is of type {type(given).__name__}")
        return values

    def _name(self, name: str) -> str | None:
        if not 0 < len(name) <= NAME_LENGTH_MAX or not name.isprintable():
            warn(f"a name has 1 to {NAME_LENGTH_MAX} printable characters", f"{name!r:.50} is left out")
        elif len(self._names) >= NAMES_MAX:
            warn(f"a process can report {NAMES_MAX} names", f"{name!r:.50} and later ones are left out")
        else:
            return self._names.setdefault(name, json.dumps(name))
        return None

    def _measure_step(self, mono: float, step: int | None, *, beat: bool) -> None:
        """Measure the time between steps. Several reports of a step count once; without steps, each counts."""
        if not beat or (step is None and self.step is not None):
            return
        if self._beat_at is not None:
            self._gaps.append(mono - self._beat_at)
            if mono >= self._usual_due and len(self._gaps) >= GAPS_NEEDED:
                self._usual = f"{sorted(self._gaps)[len(self._gaps) // 2]:.6g}"
                self._usual_due = mono + USUAL_EVERY
                if self._notify_again:
                    self._notify()
        self._beat_at = mono

    def _gather(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            spread = self._spreads.get(name)
            if spread is None:
                spread = self._spreads[name] = [0.0, float("inf"), float("-inf"), 0]
            spread[0] += value
            if value < spread[1]:  # noqa: PLR1730 (quicker than min, and NaN is never taken over)
                spread[1] = value
            if value > spread[2]:  # noqa: PLR1730
                spread[2] = value
            spread[3] += 1

    def _write(self, values: Mapping[str, float], *, whole: bool) -> None:
        """Write one line, over the last one if its point is still being gathered."""
        texts = self._texts
        if self._stride == 1:
            point = ",".join([texts[name] for name in values])
            last = "" if len(values) == len(texts) else ",".join([t for n, t in texts.items() if n not in values])
        else:
            point = self._gathered_text() if whole else ""
            last = ",".join(texts.values())
        n, step = self._count, "null" if self.step is None else self.step
        line = f"[{n},{self._at:.3f},{self._mono:.3f},{step},{self._usual},{{{point}}},{{{last}}},{n}]".encode()
        line = line.ljust(self._length) + b"\n"
        if os.pwrite(self._fd, line, self._end) < len(line):
            raise OSError("no room on the disk")
        self._length = len(line) - 1
        if whole:
            self._gathered, self._length = 0, 0
            self._spreads.clear()
            self._end += len(line)
            if self._end > FILE_BYTES_MAX:
                self._compact()
        if self._count == 1:  # whoever is notified finds the report
            self._notify()
        if not self._established and self._usual != "null":
            self._established = True
            _dump_stacks_on_signal(f"{self._path}.stack")
            self._notify()

    def _gathered_text(self) -> str:
        spreads = {
            name: (total / count, low, high, int(count)) for name, (total, low, high, count) in self._spreads.items()
        }
        return ",".join(f"{self._names[name]}:{spread_text(spread)}" for name, spread in spreads.items())

    def _compact(self) -> None:
        """Merge neighbouring points until the file is half empty. In place: readers drop duplicates."""
        head, *lines = os.pread(self._fd, self._end, 0).split(b"\n")
        points = list(read_points(lines))
        room = FILE_BYTES_MAX // 2
        while True:
            self._stride *= 2
            points = merge_neighbours(points, 2)
            final = points[-1]._replace(mono=self._mono, usual=json.loads(self._usual))
            final = final._replace(last={name: json.loads(f"{{{text}}}")[name] for name, text in self._texts.items()})
            encoded = b"\n".join([head, *(encode(p) for p in points[:-1]), encode(final), b""])
            if len(encoded) <= room or len(points) == 1:
                break
        os.pwrite(self._fd, encoded, 0)
        os.ftruncate(self._fd, len(encoded))
        self._end = len(encoded)

    def _notify(self) -> None:
        """Notify the control plane, if it listens, that this process has begun to report or has changed."""
        self._notify_again = not ring(self._bell, "reporting")


def ring(bell: str | None, event: str) -> bool:
    """Notify the control plane, if it listens, of an event of this process. Return False if it has to be rung again.

    The line begins with a newline too: whatever another process left unfinished before it is then a line of its own.
    """
    if not bell:
        return True
    who = [os.environ.get(name, "") for name in ("BASILICA_DEPLOYMENT", "BASILICA_RANK", "BASILICA_ATTEMPT")]
    try:
        fd = os.open(bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True  # a control plane that starts later reads the files itself
    try:
        os.write(fd, f"\n{' '.join(who)} {event} {os.getpid()}\n".encode())
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    finally:
        os.close(fd)
    return True


def last_step() -> int | None:
    """Return the step that this process reported last; None before its first report of one."""
    writer = _here.writer
    return None if writer is None else writer.step


# ---- arguments ---------------------------------------------------------------------------------------------------


def _number(given: object) -> float | None:
    """Convert any object that is one number to a float; None for others, and for texts."""
    if isinstance(given, str | bytes | bytearray):
        return None
    try:
        item: Any = getattr(given, "item", None)
        return float(given if item is None else item())  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 (objects of other libraries may raise anything)
        return None


def _step(given: object) -> int | None:
    if type(given) is int and -STEP_MAX < given < STEP_MAX:
        return given
    value = _number(given)
    if value is None or not -STEP_MAX < value < STEP_MAX:
        warn("a step is a whole number", f"one of type {type(given).__name__} is left out")
        return None
    return int(value)


def this_process() -> dict[str, int | None]:
    """Return what identifies this process to readers of its files."""
    return {"pid": os.getpid(), "start": _start_of_this_process(), "worker": _worker()}


def _worker() -> int:
    """Return the number of this process in its rank, where a launcher started several."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _start_of_this_process() -> int | None:
    """Return the start time, which identifies this process together with its pid; None if the system has none."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _make_room(path: str) -> None:
    """Remove the oldest files of an attempt: only its latest processes keep theirs."""
    for old in oldest_files(path):
        for name in (old, f"{old}.stack"):
            with contextlib.suppress(OSError):
                os.unlink(name)


def oldest_files(path: str, ending: str = "") -> list[str]:
    """Return the files `<path>.<pid><ending>` of an attempt that are too many once one more is made."""
    directory, name = os.path.split(path)
    mine = re.compile(rf"{re.escape(name)}\.[0-9]+{re.escape(ending)}")
    files: list[tuple[float, str]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if mine.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # another process makes room as well
                    files.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    return [path for _, path in sorted(files)[: max(0, len(files) - FILES_MAX + 1)]]


def _dump_stacks_on_signal(path: str) -> None:
    """Write the stacks of all threads to the file on a signal. The file exists only if the signal is handled."""
    import faulthandler  # noqa: PLC0415 (importing this module stays cheap)
    import signal  # noqa: PLC0415

    try:
        number = stack_signal()
        if signal.getsignal(number) is not signal.SIG_DFL:
            return  # the program handles it itself
        # Never closed: the handler writes to it as long as the process lives.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            faulthandler.register(number, file=fd, all_threads=True, chain=False)
        except (OSError, RuntimeError, ValueError):
            os.unlink(path)
            os.close(fd)
            raise
    except (OSError, RuntimeError, ValueError):
        return


def stack_signal() -> int:
    import signal  # noqa: PLC0415

    return getattr(signal, "SIGRTMIN", signal.SIGUSR2 - STACK_SIGNAL_OFFSET) + STACK_SIGNAL_OFFSET


# ---- this process ------------------------------------------------------------------------------------------------


class _Process:
    """The state of reporting in this process. A forked child starts afresh: it has a file of its own."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.writer: Writer | None = None
        self._outside = False
        self._try_at = 0.0
        self._lock = threading.Lock()

    def begin(self) -> Writer | None:
        """Return the writer; None outside a deployment, and while the file cannot be made."""
        if self._outside or time.monotonic() < self._try_at or not self._lock.acquire(timeout=1):
            return None
        try:
            path = os.environ.get(FILE_ENV)
            self._outside = not path
            if path and self.writer is None:
                self.writer = Writer(path, os.environ.get(BELL_ENV))
                atexit.register(self._end, self.writer)
        except OSError as error:
            self._try_at = time.monotonic() + TRY_AGAIN
            warn("cannot write reports", f"{error}")
        finally:
            self._lock.release()
        return self.writer

    def _end(self, writer: Writer) -> None:
        if writer is self.writer:  # not the writer of the parent of a fork
            with contextlib.suppress(OSError):
                writer.close()


_here = _Process()
_warned: set[str] = set()
if hasattr(os, "register_at_fork"):  # else nothing forks
    os.register_at_fork(after_in_child=_here.reset)


def warn(problem: str, detail: str, caller: str = "basilica.report") -> None:
    """Print the problem to stderr, once for each problem."""
    if problem in _warned or sys.stderr is None:
        return
    _warned.add(problem)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{caller}: {problem}: {detail}", file=sys.stderr, flush=True)
