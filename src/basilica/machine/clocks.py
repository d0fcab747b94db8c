"""Clocks of a control plane: a time line that never jumps, and how its moments read on the wall clock.

Moments are kept on the time line, so that every duration is a difference of two readings of one steady counter: the
kernel's time since boot, with the time that the machine was suspended. What the wall clock is set to matters only where
a moment is shown to people.

The zero of the time line is chosen by the wall clock once per boot and kept in the state directory. A server that
starts later during the same boot goes on with the same line, whatever happened to the wall clock meanwhile; so do
supervisors, who are told the zero with their task.
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
    """Seconds since boot, suspended ones included."""
    return time.clock_gettime(COUNTER)


def steady_ns() -> int:
    """Nanoseconds on a time line of this process, which began at the wall clock's time and never jumps."""
    return _PROCESS_ZERO_NS + time.clock_gettime_ns(COUNTER)


def steady_now() -> float:
    """Seconds on that line: what a process stamps its records with, so that their differences are durations."""
    return steady_ns() / 1e9


def boot_id() -> str:
    """Names this boot; empty where the system does not say."""
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
    """`zero` is the moment at which the counter was zero; without one it is chosen by the wall clock."""

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
        """Seconds from the time line to the wall clock as it is set now. Stays the same until the wall clock steps."""
        shift = self._wall() - self.now()
        if abs(shift - self._shift) > STEP_SECONDS:
            self._shift = shift
        return self._shift

    def not_before(self, moment: float) -> None:
        """Move the time line ahead if it has not come to a moment that was recorded on it already."""
        self.zero += max(0.0, moment - self.now())


def open_clock(
    state_dir: Path,
    *,
    boot: str | None = None,
    counter: Callable[[], float] = counted,
    wall: Callable[[], float] = time.time,
) -> SteadyClock:
    """The clock of a state directory: the line that was begun during this boot, else one that continues the last.

    After a boot nobody knows how long the machine was off but the wall clock. If that was put right during the last
    boot, the line goes on at the same distance from it.
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
    """Write down where the time line begins and how far the wall clock is from it, whole or not at all."""
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
    """None where there is no such file, or a damaged one: then the wall clock decides."""
    try:
        kept = json.loads(path.read_bytes()[:4096])
        return str(kept["boot"]), float(kept["zero"]), float(kept["shift"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
