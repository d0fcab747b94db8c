"""`basilica.report` as a training program calls it: whatever it is given, wherever it runs, it never raises."""

import json
import math
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import basilica
from basilica.reports import points as report_points
from basilica.reports import writer as reporting
from basilica.reports.points import Point, parse, read_points

report: Any = basilica.report  # what is no number is given to it on purpose


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process as a rank that has not reported yet."""
    monkeypatch.setenv(reporting.FILE_ENV, str(tmp_path / "reports" / "0.1"))
    monkeypatch.delenv(reporting.BELL_ENV, raising=False)
    reporting._here.reset()
    reporting._warned.clear()
    yield tmp_path / "reports"
    reporting._here.reset()


def points(place: Path) -> list[Point]:
    lines = (place / f"0.1.{os.getpid()}").read_bytes().split(b"\n")[1:]
    return list(read_points(lines))


def in_a_process(code: str, place: Path, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, reporting.FILE_ENV: str(place / "reports" / "0.1"), **env}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=variables
    )


def test_what_is_said_can_be_read_at_once(place: Path) -> None:
    for step in range(3):
        basilica.report(step=step, loss=1 / (step + 1))
    basilica.report(step=3, accuracy=0.5)
    told = points(place)
    assert [p.step for p in told] == [0, 1, 2, 3]
    assert [p.values.get("loss", (None,))[0] for p in told] == [1.0, 0.5, 1 / 3, None]
    assert told[-1].last == {"loss": 1 / 3, "accuracy": 0.5}  # the last of each, whatever the last report had
    assert [p.n for p in told] == [1, 2, 3, 4]


def test_outside_a_deployment_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(reporting.FILE_ENV, raising=False)
    monkeypatch.chdir(tmp_path)
    reporting._here.reset()
    report(step=1, loss=2.0)
    report("junk", more=object())
    reporting._here.reset()
    assert list(tmp_path.iterdir()) == []


class Hostile:
    """An object that answers every question with an exception."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")

    @property
    def item(self) -> Any:
        raise RuntimeError("no")


class Tensor:
    def __init__(self, value: float) -> None:
        self._value = value

    def item(self) -> float:
        return self._value


JUNK = st.one_of(
    st.floats(),
    st.integers(),
    st.text(),
    st.binary(),
    st.none(),
    st.booleans(),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
    st.lists(st.integers()),
    st.builds(Hostile),
    st.builds(Tensor, st.floats()),
    st.builds(numpy.float32, st.floats(width=32)),
    st.builds(lambda v: numpy.array([v]), st.floats()),
    st.just(numpy.zeros(3)),
    st.just(10**400),
    st.just(Hostile),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=JUNK, numbers=st.dictionaries(st.text(), JUNK, max_size=8))
def test_it_never_raises_and_the_file_stays_readable(place: Path, step: Any, numbers: dict[str, Any]) -> None:
    numbers.pop("step", None)
    report(step, **numbers)
    told = points(place)
    assert told
    for name, value in told[-1].last.items():
        assert name.isprintable()
        assert isinstance(value, int | float)


def test_what_is_no_number_is_left_out_and_told_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(100):
        report(step=step, loss="0.3", model=object(), lr=0.1, **{"a\nb": 1, "": 1, "x" * 101: 1})
    assert points(place)[-1].last == {"lr": 0.1}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0] == "basilica.report: only numbers can be reported: 'loss' is of type str"
    assert "printable characters" in said[1]


def test_what_is_not_finite_is_kept(place: Path) -> None:
    basilica.report(step=1, loss=math.nan, high=math.inf, low=-math.inf)
    last = points(place)[-1].last
    assert math.isnan(last["loss"])
    assert (last["high"], last["low"]) == (math.inf, -math.inf)


def test_numbers_of_other_libraries(place: Path) -> None:
    report(step=numpy.int64(7), a=numpy.float32(0.5), b=numpy.array([2.0]), c=Tensor(3), d=True, e=numpy.array(4))
    assert points(place)[-1].last == {"a": 0.5, "b": 2.0, "c": 3.0, "d": 1.0, "e": 4.0}
    assert points(place)[-1].step == 7


def test_ten_thousand_names_are_bounded(place: Path) -> None:
    report(step=1, **{f"n{i}": i for i in range(10_000)})
    assert len(points(place)[-1].last) == reporting.NAMES_MAX
    assert (place / f"0.1.{os.getpid()}").stat().st_size < 10_000


def test_a_long_training_keeps_a_small_file_and_every_spike(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "FILE_BYTES_MAX", 20_000)
    for step in range(20_000):
        basilica.report(step=step, loss=99.0 if step == 1234 else math.nan if step == 15_000 else 1.0)
        if step % 500 == 0:
            size = (place / f"0.1.{os.getpid()}").stat().st_size
            assert size < 21_000
    told = points(place)
    assert told[-1].step == 19_999
    assert told[-1].last["loss"] == 1.0
    whole = [p.values["loss"] for p in told if p.values]
    assert max(high for _, _, high, _ in whole) == 99.0
    assert sum(math.isnan(mean) for mean, *_ in whole) == 1
    count = sum(count for *_, count in whole)
    assert 20_000 - reporting._here.writer._stride < count <= 20_000  # type: ignore[union-attr]
    assert 50 < len(told) < 1000


def test_the_last_point_is_whole_when_the_program_ends(tmp_path: Path) -> None:
    code = """
import basilica
from basilica.reports import writer
writer.FILE_BYTES_MAX = 5000
for step in range(997):
    basilica.report(step=step, loss=2.0)
"""
    assert in_a_process(code, tmp_path).returncode == 0
    (path,) = (p for p in (tmp_path / "reports").iterdir() if p.suffix != ".stack")
    told = list(read_points(path.read_bytes().split(b"\n")[1:]))
    assert sum(p.values["loss"][3] for p in told) == 997


def test_a_file_that_was_left_in_the_middle_of_a_merge_is_read_right() -> None:
    lines = [b'[%d,1.0,1.0,%d,null,{"a":%d},{},%d]' % (n, n, n, n) for n in range(1, 9)]
    merged = [report_points.encode(p) for p in report_points.merge_neighbours(list(read_points(lines)), 2)]
    left = [*merged, lines[3][10:], *lines[4:]]  # the new first half, a torn line, and the old second half
    assert [p.n for p in read_points(left)] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"{}", b"[1]", b'[1,1,1,1,null,{"a":1},{},2]', b"[1,1,1,1,null,[],{},1]", b'[1,1,1,1,null,{"a'],
)
def test_a_torn_line_is_no_point(line: bytes) -> None:
    assert parse(line) is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
NUMBERS = st.dictionaries(st.text(), ANYTHING, max_size=3)


@given(st.one_of(st.binary(), ANYTHING, st.tuples(*[ANYTHING] * 5, NUMBERS, NUMBERS, ANYTHING)))
def test_whatever_a_rank_writes_itself_is_a_sound_point_or_none(written: Any) -> None:
    line = written if isinstance(written, bytes) else json.dumps(written).encode()
    for point in [parse(line), *read_points([line, line])]:
        if point is not None:
            assert point.n == written[7]
            assert datetime.fromtimestamp(point.at, UTC)
            assert all(isinstance(v, float) and name.encode() is not None for name, v in point.last.items())
            assert report_points.encode(point)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"[1,1,1,1,null,{},{},1" + b"0" * 5000 + b"]",
        b'[1,1e300,1,1,null,{"a":1},{},1]',
        b'[1,1,1,1,null,{"a":' + b"9" * 400 + b"},{},1]",
        b'[1,1,1,1,null,{"\\ud800":1},{},1]',
        b'[1,1,1,1,null,{"a":[1,2]},{},1]',
        b'[1,1,1,1,null,{"a":[1,1,1,0]},{},1]',
        b'[1,1,1,1,NaN,{"a":1},{},1]',
        b'[1,1,1,9007199254740993,null,{"a":1},{},1]',
        b'[true,1,1,1,null,{"a":1},{},true]',
    ],
)
def test_what_no_writer_of_ours_wrote_is_no_point(line: bytes) -> None:
    assert parse(line) is None
    assert list(read_points([line])) == []


def test_usual_step_time_is_the_median_and_several_reports_of_a_step_are_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for step in range(20):
        for name in ("loss", "lr", "grad"):
            report(step=step, **{name: 1.0})
        report(queue=3)  # without a step, where others have one: no step
        now[0] += 30.0 if step == 7 else 2.0
    assert points(place)[-1].usual == 2.0


def test_what_belongs_to_no_step_says_nothing_of_the_step_time(place: Path) -> None:
    for _ in range(20):
        reporting.note(rounds=1.0)
    assert (points(place)[-1].usual, points(place)[-1].last) == (None, {"rounds": 1.0})
    for step in range(7):
        report(step=step, loss=1.0)
        reporting.note(rounds=float(step))
    told = points(place)
    assert [p.step for p in told[-2:]] == [6, 6]  # it stands where the program is
    assert told[-1].usual is not None
    assert reporting._here.writer is not None
    assert len(reporting._here.writer._gaps) == 6
    reporting.note(junk="no number")  # type: ignore[arg-type]


def test_signs_of_life_alone_have_no_usual_time(place: Path) -> None:
    for _ in range(20):
        report()
    told = points(place)[-1]
    assert (told.n, told.usual, told.last) == (20, None, {})


def test_threads_report_at_the_same_time(place: Path) -> None:
    def work(number: int) -> None:
        for step in range(200):
            report(step=step, **{f"t{number}": step})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = points(place)
    assert [p.n for p in told] == list(range(1, 1601))
    assert told[-1].last == {f"t{n}": 199.0 for n in range(8)}


def test_a_report_within_a_report_is_left_out(place: Path) -> None:
    class Reports:
        def __float__(self) -> float:
            report(step=99)
            return 1.0

    report(step=1, loss=Reports())
    assert [p.step for p in points(place)] == [1]


def test_a_forked_child_has_a_file_of_its_own(place: Path) -> None:
    code = """
import os, threading, basilica
from basilica.reports import writer
basilica.report(step=1, who=1)
writer._here.writer._lock.acquire()  # as another thread may hold it at that moment
pid = os.fork()
if pid == 0:
    basilica.report(step=2, who=2)
    basilica.report(step=3, who=2)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
writer._here.writer._lock.release()
basilica.report(step=4, who=1)
"""
    done = in_a_process(code, place.parent)
    assert (done.returncode, done.stderr) == (0, "")
    steps = {
        tuple(p.step for p in read_points(path.read_bytes().split(b"\n"))) for path in place.iterdir() if path.is_file()
    }
    assert steps == {(1, 4), (2, 3)}


def test_any_number_of_processes_leave_a_bounded_number_of_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "FILES_MAX", 3)
    place.mkdir()
    for n in range(6):
        (place / f"0.1.{10**8 + n}").touch()
        os.utime(place / f"0.1.{10**8 + n}", (n, n))
    others = ["1.1.1", "0.1.7.agent", "0.1.7.debug", "0.1.7.notice"]  # another rank's, and no reports
    for name in others:
        (place / name).touch()
        os.utime(place / name, (0, 0))
    report(step=1)
    assert sorted(p.name for p in place.iterdir()) == sorted(
        [f"0.1.{os.getpid()}", f"0.1.{10**8 + 4}", f"0.1.{10**8 + 5}", *others]
    )


def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file where a directory should be")
    done = in_a_process("import basilica\nfor s in range(50): basilica.report(step=s)", tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("basilica.report: cannot write reports: ")


def test_a_full_disk_is_told_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place.mkdir()
    path = place / f"0.1.{os.getpid()}"
    path.symlink_to("/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    for step in range(50):
        report(step=step, loss=1.0)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "No space left on device" in said


def test_a_disk_that_becomes_full_and_empty_again_costs_only_what_did_not_fit(place: Path) -> None:
    import resource

    report(step=1, loss=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (place / f"0.1.{os.getpid()}").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # writes are cut short, then refused
    try:
        report(step=2, loss=2.0)
        report(step=3, loss=3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    report(step=4, loss=4.0)
    assert [p.step for p in points(place)] == [1, 4]


def test_stderr_may_be_gone(tmp_path: Path) -> None:
    code = "import sys, basilica; sys.stderr = None; basilica.report(step=1, loss='x'); print('on')"
    assert in_a_process(code, tmp_path).stdout == "on\n"


@pytest.mark.parametrize("bell", ["/nonexistent/bell", "/dev/full", "/"])
def test_a_bell_that_nobody_hears_is_no_problem(place: Path, monkeypatch: pytest.MonkeyPatch, bell: str) -> None:
    monkeypatch.setenv(reporting.BELL_ENV, bell)
    for step in range(50):
        report(step=step)
    assert len(points(place)) == 50


def test_it_rings_when_it_begins_and_when_it_knows_its_step_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bell = place.parent / "bell"
    os.mkfifo(bell)
    heard = os.open(bell, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv(reporting.BELL_ENV, str(bell))
    for name, value in (("DEPLOYMENT", "train-x"), ("RANK", "3"), ("ATTEMPT", "2")):
        monkeypatch.setenv(f"BASILICA_{name}", value)
    for step in range(100):
        report(step=step)
    try:
        assert os.read(heard, 10_000).decode() == f"\ntrain-x 3 2 reporting {os.getpid()}\n" * 2
    finally:
        os.close(heard)


def test_a_bell_that_is_full_is_rung_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bell = place.parent / "bell"
    os.mkfifo(bell)
    heard = os.open(bell, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv(reporting.BELL_ENV, str(bell))
    monkeypatch.setattr(reporting, "USUAL_EVERY", 0.0)
    try:
        with suppress(BlockingIOError):
            while True:
                os.write(heard, b"x" * 4096)
        for step in range(20):
            report(step=step)
        assert set(os.read(heard, 1 << 20)) == set(b"x")
        report(step=21)
        assert b"reporting" in os.read(heard, 1 << 20)
    finally:
        os.close(heard)


def test_the_signal_of_the_program_stays_its_own(tmp_path: Path) -> None:
    code = """
import os, signal, basilica
from basilica.reports.writer import stack_signal
if os.environ["TAKEN"] == "1":
    signal.signal(stack_signal(), lambda *_: print("mine", flush=True))
for step in range(10):
    basilica.report(step=step)
"""
    for taken in ("1", "0"):
        assert in_a_process(code, tmp_path / taken, TAKEN=taken).returncode == 0
    assert [p.suffix for p in (tmp_path / "1/reports").iterdir()].count(".stack") == 0
    assert [p.suffix for p in (tmp_path / "0/reports").iterdir()].count(".stack") == 1


def test_the_head_names_the_process(place: Path) -> None:
    report(step=1)
    head = json.loads((place / f"0.1.{os.getpid()}").read_bytes().split(b"\n")[0])
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert 0 <= time.monotonic() - head.pop("mono") < 60
    assert head == {"pid": os.getpid(), "start": start, "worker": 0}
