"""Clocks of a control plane: a time line that never jumps, and its moments on the wall clock.

Moments are kept on the time line, so that every duration is a difference of two readings of one steady counter: the
kernel's time since boot, with the time that the machine was suspended. The wall clock matters only where a moment is
shown to people.

The zero of the time line is chosen by the wall clock once per boot and kept in the state directory. A server that
starts later during the same boot goes on with the same line, whatever happened to the wall clock meanwhile; so do
supervisors, which get the zero with their task.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

COUNTER = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
STEP_SECONDS = 1.0  # a smaller difference is no step: daemons that set clocks slew those
ZERO_FILE = "clock.json"

_PROCESS_ZERO_NS = time.time_ns() - time.clock_gettime_ns(COUNTER)


def counted() -> float:
    """Return the seconds since boot, suspended ones included."""
    return time.clock_gettime(COUNTER)


def steady_ns() -> int:
    """Return the nanoseconds of this process's time line, which began at the wall clock's time and never jumps."""
    return _PROCESS_ZERO_NS + time.clock_gettime_ns(COUNTER)


def steady_now() -> float:
    """Return the seconds on that line. Records are stamped with them, so that their differences are durations."""
    return steady_ns() / 1e9


def boot_id() -> str:
    """Return the identifier of this boot; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class WallClock:
    """The wall clock, for processes whose moments are compared with those of other machines."""

    def now(self) -> float:
        return time.time()

    def shift(self) -> float:
        return 0.0


class SteadyClock:
    """A clock on the time line. `zero` is the moment at which the counter was zero, by default by the wall clock."""

    def __init__(
        self,
        zero: float | None = None,
        *,
        counter: Callable[[], float] = counted,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._counter, self._wall = counter, wall
        self.zero = wall() - counter() if zero is None else zero
        self._shift = 0.0

    def now(self) -> float:
        return self.zero + self._counter()

    def shift(self) -> float:
        """Return the seconds from the time line to the wall clock now. They are constant until the wall clock steps."""
        shift = self._wall() - self.now()
        if abs(shift - self._shift) > STEP_SECONDS:
            self._shift = shift
        return self._shift

    def not_before(self, moment: float) -> None:
        """Move the time line ahead if it is before a moment that was already recorded on it."""
        self.zero += max(0.0, moment - self.now())


def open_clock(
    state_dir: Path,
    *,
    boot: str | None = None,
    counter: Callable[[], float] = counted,
    wall: Callable[[], float] = time.time,
) -> SteadyClock:
    """Return the clock of a state directory: the time line of this boot, else one that continues the last.

    After a boot only the wall clock knows how long the machine was off. If it was corrected during the last boot, the
    line continues at the same distance from it.
    """
    boot = boot_id() if boot is None else boot
    known = _read(state_dir / ZERO_FILE)
    if known is not None and boot and known[0] == boot:
        clock = SteadyClock(known[1], counter=counter, wall=wall)
    else:
        apart = 0.0 if known is None else known[2]
        clock = SteadyClock(wall() - counter() - apart, counter=counter, wall=wall)
    clock.shift()
    return clock


def keep_clock(state_dir: Path, clock: SteadyClock, *, boot: str | None = None) -> None:
    """Persist the zero of the time line and its distance from the wall clock, atomically."""
    kept = {"boot": boot_id() if boot is None else boot, "zero": clock.zero, "shift": clock.shift()}
    path = state_dir / ZERO_FILE
    draft = path.with_name(f"{ZERO_FILE}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(kept, file)
        file.flush()
        os.fsync(fd)
    draft.replace(path)


def _read(path: Path) -> tuple[str, float, float] | None:
    """Return boot, zero and shift; None if the file is missing or damaged: then the wall clock decides."""
    try:
        kept = json.loads(path.read_bytes()[:4096])
        return str(kept["boot"]), float(kept["zero"]), float(kept["shift"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
