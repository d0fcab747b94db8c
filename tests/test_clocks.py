"""The time line of a control plane: it goes on steadily, and is shown by the wall clock as that is set now."""

import asyncio
import json
import time
import typing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType

import pytest

from basilica.core.deployment import Deployment
from basilica.core.events import RecordedEvent
from basilica.core.moments import MOMENTS, shifted
from basilica.core.status import Condition, DeploymentStatus, Milestone
from basilica.core.world import RankStatus
from basilica.machine import clock_steps
from basilica.machine.clock_steps import watch_wall_clock
from basilica.machine.clocks import SteadyClock, counted, keep_clock, open_clock, steady_now
from basilica.ports import UsageRow

HOUR, DAY = 3600.0, 86400.0


class Machine:
    """A counter that goes on and a wall clock that is set."""

    def __init__(self) -> None:
        self.counter, self.wall, self.boot = 50.0, 1_000_000.0, "first"

    def passes(self, seconds: float) -> None:
        self.counter += seconds
        self.wall += seconds

    def boots(self, off: float = 60.0) -> None:
        self.counter, self.wall, self.boot = 5.0, self.wall + off, self.boot + "+"

    def clock(self) -> SteadyClock:
        return SteadyClock(counter=lambda: self.counter, wall=lambda: self.wall)

    def open(self, state_dir: Path) -> SteadyClock:
        clock = open_clock(state_dir, boot=self.boot, counter=lambda: self.counter, wall=lambda: self.wall)
        keep_clock(state_dir, clock, boot=self.boot)
        return clock


def shown(clock: SteadyClock) -> float:
    return clock.now() + clock.shift()


@pytest.mark.parametrize("step", [HOUR, -DAY, 2 * DAY])
def test_a_step_moves_what_is_shown_and_no_duration(step: float) -> None:
    machine = Machine()
    clock = machine.clock()
    began = clock.now()
    machine.passes(4)
    machine.wall += step
    machine.passes(4)
    assert clock.now() - began == 8
    assert shown(clock) == machine.wall
    machine.wall -= step
    assert (clock.now() - began, shown(clock)) == (8, machine.wall)


def test_what_is_shown_of_a_moment_stays_the_same_while_the_wall_clock_is_only_slewed() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += 0.4
    assert clock.shift() == 0.0


def test_the_next_server_of_the_same_boot_goes_on_with_the_line_whatever_the_wall_clock_says(tmp_path: Path) -> None:
    machine = Machine()
    began = machine.open(tmp_path).now()
    machine.wall -= DAY
    machine.passes(10)
    again = machine.open(tmp_path)
    assert again.now() - began == 10
    assert shown(again) == machine.wall


def test_a_clock_that_was_put_right_before_a_boot_does_not_count_as_time(tmp_path: Path) -> None:
    """A machine without a battery: it believed in 1970 until the network told it better."""
    machine = Machine()
    machine.wall = 100.0
    clock = machine.open(tmp_path)
    began = clock.now()
    machine.passes(10)
    machine.wall = 1_700_000_000.0
    keep_clock(tmp_path, clock, boot=machine.boot)
    machine.boots(off=60)
    again = machine.open(tmp_path)
    assert again.now() - began == 10 + 60
    assert shown(again) == machine.wall


def test_the_line_never_begins_before_what_was_recorded_on_it() -> None:
    clock = Machine().clock()
    recorded = clock.now() + DAY
    clock.not_before(recorded)
    assert clock.now() == recorded
    clock.not_before(recorded - HOUR)
    assert clock.now() == recorded


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"boot": 1}', b'{"boot":"first","zero":"x","shift":0}'])
def test_a_damaged_file_leaves_it_to_the_wall_clock(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "clock.json").write_bytes(damage)
    machine = Machine()
    assert machine.open(tmp_path).now() == machine.wall
    assert json.loads((tmp_path / "clock.json").read_bytes())["boot"] == "first"
    assert (tmp_path / "clock.json").stat().st_mode & 0o777 == 0o600


def test_the_real_counter_goes_on_at_the_pace_of_the_monotonic_clock() -> None:
    counts, monotonic, line = counted(), time.monotonic(), steady_now()
    time.sleep(0.05)
    elapsed = time.monotonic() - monotonic
    assert counted() - counts == pytest.approx(elapsed, abs=0.02)
    assert steady_now() - line == pytest.approx(elapsed, abs=0.02)
    assert abs(steady_now() - time.time()) < 60


@pytest.mark.anyio
async def test_the_kernel_is_asked_to_say_when_somebody_sets_the_wall_clock() -> None:
    moved: list[int] = []
    async with watch_wall_clock(lambda: moved.append(1)):
        armed = _timers()
        await asyncio.sleep(0.05)
    assert [(info["clockid"], info["settime flags"]) for info in armed] == [("0", "03")]  # absolute, cancelled on set
    assert moved == []


@pytest.mark.anyio
async def test_who_watches_is_called_each_time_that_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock cannot be set in a test; a time that comes wakes the same descriptor."""
    monkeypatch.setattr(clock_steps, "_NEVER", 1)
    calls, enough = 0, asyncio.Event()

    def moved() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            enough.set()

    async with watch_wall_clock(moved), asyncio.timeout(5):
        await enough.wait()


def _timers() -> list[dict[str, str]]:
    """What the kernel says of the timers of this process that are descriptors."""
    return [info for info in map(_timer_info, Path("/proc/self/fdinfo").iterdir()) if info]


def _timer_info(path: Path) -> dict[str, str]:
    try:
        lines = [line.partition(":") for line in path.read_text().splitlines()]
    except OSError:  # closed meanwhile
        return {}
    info = {name.strip(): value.strip() for name, _, value in lines}
    return info if "clockid" in info else {}


# ---- what is shown of a run ------------------------------------------------------------------------------------------


def numbers_of(kind: object, found: dict[str, set[str]] | None = None) -> dict[str, set[str]]:
    """The fields that hold fractions of seconds or of anything else, by the name of their class, all the way down."""
    found = {} if found is None else found
    if isinstance(kind, UnionType) or typing.get_origin(kind) is not None:
        for part in typing.get_args(kind):
            numbers_of(part, found)
    elif isinstance(kind, type) and is_dataclass(kind) and kind.__name__ not in found:
        found[kind.__name__] = set()
        for name, hint in typing.get_type_hints(kind).items():
            if hint is float or float in typing.get_args(hint):
                found[kind.__name__].add(name)
            numbers_of(hint, found)
    return found


def test_every_number_of_a_status_is_known_as_a_moment_or_as_something_else() -> None:
    """A new field is decided on here: if it is a moment, it must move with the others."""
    others = {
        "gpu_seconds",
        "rank_seconds",
        "training_seconds",
        "lost_seconds",
        "usual_step_seconds",
        "measured_at",  # by the probe, with the wall clock
        *("algbw_gbps", "algbw_gbps_p50", "busbw_gbps", "busbw_gbps_p10", "busbw_gbps_p50", "busbw_gbps_p90"),
        *("latency_us", "latency_us_at_1mib"),
    }
    found: dict[str, set[str]] = {}
    for kind in (DeploymentStatus, RecordedEvent, UsageRow):
        numbers_of(kind, found)
    assert {name for names in found.values() for name in names} <= MOMENTS | others
    spec_numbers = numbers_of(typing.get_type_hints(Deployment)["spec"])
    assert not {name for names in spec_numbers.values() for name in names} & MOMENTS


def test_a_shift_moves_every_moment_by_the_same_and_nothing_else() -> None:
    status = DeploymentStatus(
        created_at=1.0,
        whole_at=2.0,
        ranks=(RankStatus(rank=3, started_at=4.0),),
        conditions=(Condition(type="a", status="True", reason="", message="", since=5.0),),
        milestones=(Milestone("x", 6.0),),
    )
    moved = shifted(status, 10.0)
    assert moved == replace(
        status,
        created_at=11.0,
        whole_at=12.0,
        ranks=(RankStatus(rank=3, started_at=14.0),),
        conditions=(Condition(type="a", status="True", reason="", message="", since=15.0),),
        milestones=(Milestone("x", 16.0),),
    )
    assert shifted(moved, -10.0) == status
    assert shifted(status, 0.0) is status


def test_the_newest_moment_of_a_status_is_at_least_all_that_the_controller_recorded() -> None:
    status = DeploymentStatus(created_at=1.0, milestones=(Milestone("x", 6.0),), whole_at=7.0)
    assert status.latest == 7.0
    assert {f.name for f in fields(DeploymentStatus)} >= {"history", "milestones", "conditions", "ranks"}
