"""`basilica.notice` as a training program calls it: cheap, at the right step, and never an exception."""

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import basilica
from basilica.core import environment as env
from basilica.machine.processes import lives
from basilica.progress import notices
from basilica.progress.formats import encode_notice
from basilica.progress.notice_file import PublishedNotice, write_notice
from basilica.reports.files import report_files
from tests.progress.conftest import AFTERWARDS, RUN, Place


def answer(place: Place, rank: int = 0, pid: int | None = None) -> dict[str, Any]:
    path = place.layout.reports(RUN) / f"{rank}.1.{pid or os.getpid()}.notice"
    data = path.read_bytes()
    assert len(data) == 512
    assert data.endswith(b"\n")
    found: dict[str, Any] = json.loads(data)
    return found


def told(place: Place) -> tuple[str, int, int | None]:
    found = answer(place)
    return found["state"], found["number"], found["step"]


def line(process: "subprocess.Popen[str]") -> str:
    """The next line of a program; it ends the wait if the program does."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


# ---- reading -------------------------------------------------------------------------------------------------------


def test_without_a_notice_there_is_none_and_the_answer_shows_a_listener(here: Place) -> None:
    here.withdraw()
    assert basilica.notice() is None
    found = answer(here)
    assert lives(found.pop("pid"), found.pop("start"))
    assert abs(found.pop("at") - time.time()) < 60
    assert abs(found.pop("mono") - time.monotonic()) < 60
    assert found == {"worker": 0, "number": 0, "state": "listening", "step": None}


def test_a_notice_says_what_is_planned(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    here.withdraw()
    assert basilica.notice() is None
    here.publish(7, until=1030.0)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    notice = basilica.notice()
    assert notice is not None
    assert (notice.kind, notice.reason, notice.target, notice.step) == ("scale", "someone asked for 4 ranks", 4, None)
    assert notice.seconds_left == 30.0
    monkeypatch.setattr("time.time", lambda: 2000.0)
    assert notice.seconds_left == 0.0
    assert told(here) == ("given", 7, None)
    with pytest.raises(AttributeError):
        notice.kind = "drain"  # type: ignore[misc]


def test_it_is_given_at_its_step_and_again_until_it_is_over(here: Place) -> None:
    here.publish(1, step=12)
    given = []
    for step in range(10, 16):
        basilica.report(step=step)
        given.append(basilica.notice())
    assert [notice is not None for notice in given] == [False, False, True, True, True, True]
    assert told(here) == ("given", 1, 12)  # written when it was given, and not at every step
    here.withdraw()
    assert basilica.notice() is None
    assert told(here) == ("listening", 1, 15)


def test_a_program_that_reports_every_tenth_step_is_given_it_at_its_next_report(here: Place) -> None:
    here.publish(1, step=15)
    given = []
    for step in (0, 10, 20, 30):
        basilica.report(step=step)
        given.append(basilica.notice() is not None)
    assert given == [False, False, True, True]


def test_without_a_step_of_its_own_a_process_is_given_no_notice_that_has_one(here: Place) -> None:
    here.publish(1, step=5)
    basilica.report(loss=0.5)
    assert basilica.notice() is None
    assert told(here) == ("seen", 1, None)


def test_the_step_that_was_just_reported_is_not_too_late(here: Place) -> None:
    basilica.report(step=5)
    here.publish(1, step=5)
    assert basilica.notice() is not None


def test_a_process_that_has_passed_the_step_is_late_until_there_is_another(here: Place) -> None:
    basilica.report(step=6)
    here.publish(1, step=5)
    for step in (6, 7, 8):
        basilica.report(step=step)
        assert basilica.notice() is None
    assert told(here) == ("late", 1, 6)
    here.publish(1, step=9)  # the same notice, put off
    assert basilica.notice() is None
    assert told(here) == ("seen", 1, 8)
    basilica.report(step=9)
    assert basilica.notice() is not None


def test_more_time_is_no_other_notice(here: Place) -> None:
    here.publish(1, step=3)
    basilica.report(step=3)
    first = basilica.notice()
    basilica.report(step=5)
    here.publish(1, step=3, until=AFTERWARDS + 100, kind="preemption")
    second = basilica.notice()
    assert first is not None
    assert second is not None
    assert second.kind == "preemption"
    assert 99 < second.seconds_left - first.seconds_left < 101
    assert told(here) == ("given", 1, 3)


def test_a_file_that_comes_later_is_found(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    assert basilica.notice() is None
    assert told(here)[0] == "listening"
    here.publish(1)
    assert basilica.notice() is None  # looked for once a second
    now[0] += 1.0
    assert basilica.notice() is not None


def test_a_variable_that_comes_later_is_found(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    here.publish(1)
    with monkeypatch.context() as patch:
        patch.delenv(env.NOTICE_FILE)
        assert basilica.notice() is None
    now[0] += 1.0
    assert basilica.notice() is not None


def test_outside_a_deployment_there_is_none_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Place
) -> None:
    for name in here.environment():
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert basilica.notice() is None
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("made", ["fifo", "directory", "short", "link", "nothing"])
def test_a_file_of_another_kind_is_no_notice(here: Place, made: str) -> None:
    path = Path(here.notice_file)
    match made:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "short":
            path.write_bytes(b"\2" + bytes(4094))
        case "link":
            path.symlink_to("/dev/zero")
        case _:
            assert made == "nothing"
    assert basilica.notice() is None


@pytest.mark.parametrize("payload", [b"", b"[" * 4088, b"\xff" * 4088, b'{"number": 1}', b"7"])
def test_a_file_with_garbage_is_no_notice(here: Place, payload: bytes) -> None:
    Path(here.notice_file).write_bytes((b"\2" + bytes(7) + payload).ljust(4096, b"\0"))
    assert basilica.notice() is None
    here.publish(1)
    assert basilica.notice() is not None


def test_a_file_that_is_being_written_is_read_by_the_next_call(here: Place) -> None:
    here.withdraw()
    assert basilica.notice() is None
    path = Path(here.notice_file)
    write_notice(str(path.with_name("other")), PublishedNotice(number=1, kind="drain", until=1.0))
    whole = path.with_name("other").read_bytes()
    with path.open("r+b") as file:
        file.write(b"\1" + whole[1:])
    assert basilica.notice() is None
    with path.open("r+b") as file:
        file.write(b"\2")
    assert basilica.notice() is not None


def test_what_changed_while_it_was_read_is_read_again(here: Place) -> None:
    first, second = (encode_notice(PublishedNotice(number=n, kind="drain", until=1.0, reason="x" * n)) for n in (1, 2))

    class View:
        """A file in which the second notice is written while the first is read."""

        data = b"\2" + bytes(7) + first

        def __getitem__(self, part: slice) -> bytes:
            found = self.data[part]
            if part.start == 8:
                self.data = b"\4" + bytes(7) + second
            return found

    notices._here._read(View())  # type: ignore[arg-type]
    assert notices._here._published == PublishedNotice(number=2, kind="drain", until=1.0, reason="xx")


def test_no_mixture_of_two_notices_is_ever_read(here: Place) -> None:
    code = """
import os
from basilica.progress.notice_file import PublishedNotice, write_notice
print("on", flush=True)
for n in range(1, 10**9):
    reason = f"{n} " * (1 + n % 200)
    write_notice(os.environ["BASILICA_NOTICE_FILE"], PublishedNotice(number=n, kind="drain", until=1.0, reason=reason))
"""
    here.withdraw()
    writing = here.start(code, rank=1)
    assert line(writing) == "on"
    numbers: set[int] = set()
    end = time.monotonic() + 60
    while len(numbers) < 500 and time.monotonic() < end:
        notice = basilica.notice()
        if notice is not None:
            assert notice.reason == (f"{notice._published.number} " * (1 + notice._published.number % 200))[:500]
            numbers.add(notice._published.number)
    assert len(numbers) == 500


def test_any_error_is_none_and_told_once(
    here: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(notices, "_mapped", broken)
    monkeypatch.setattr(notices, "TRY_AGAIN", 0.0)
    for _ in range(10):
        assert basilica.notice() is None
    assert capsys.readouterr().err == "basilica.notice: a notice was not read: RuntimeError: broken\n"


def test_answers_that_cannot_be_written_are_told_once_and_written_later(
    here: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    reports = here.layout.reports(RUN)
    reports.write_text("a file where a directory should be")
    here.withdraw()
    assert basilica.notice() is None
    here.publish(1)
    assert basilica.notice() is not None
    here.withdraw()
    assert basilica.notice() is None
    assert capsys.readouterr().err.startswith("basilica.notice: cannot answer a notice: ")
    reports.unlink()
    assert basilica.notice() is None
    assert not reports.exists()
    now[0] += 1.0
    assert basilica.notice() is None
    assert told(here) == ("listening", 1, None)
    assert capsys.readouterr().err == ""


def test_a_signal_handler_may_ask_in_the_middle_of_a_call(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = notices._mapped

    def interrupted(path: str) -> Any:
        asked.append(basilica.notice())
        return real(path)

    monkeypatch.setattr(notices, "_mapped", interrupted)
    here.publish(1)
    assert basilica.notice() is not None
    assert asked == [None]


def test_threads_ask_at_the_same_time(here: Place) -> None:
    here.publish(1, step=1)
    basilica.report(step=1)
    given: list[Any] = []
    threads = [threading.Thread(target=lambda: given.append(basilica.notice())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(given)) == 1
    assert given[0] is not None


# ---- the bell, and files beside others -----------------------------------------------------------------------------


def test_every_answer_rings_the_bell(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    bell = str(here.layout.wake)
    os.mkfifo(bell)
    heard = os.open(bell, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv(env.REPORT_BELL, bell)
    rung = f"\n{RUN} 0 1 answer {os.getpid()}\n"
    try:
        here.withdraw()
        for _ in range(3):
            basilica.notice()
        assert os.read(heard, 10_000).decode() == rung
        here.publish(1)
        notice = basilica.notice()
        assert notice is not None
        assert os.read(heard, 10_000).decode() == 2 * rung  # it was seen, and given
        notice.ready(timeout=0)
        assert os.read(heard, 10_000).decode() == rung
    finally:
        os.close(heard)


def test_a_bell_that_is_full_is_rung_again(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    bell = str(here.layout.wake)
    os.mkfifo(bell)
    heard = os.open(bell, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv(env.REPORT_BELL, bell)
    monkeypatch.setattr(notices, "TRY_AGAIN", 0.0)
    try:
        with suppress(BlockingIOError):
            while True:
                os.write(heard, b"x" * 4096)
        here.withdraw()
        basilica.notice()
        assert set(os.read(heard, 1 << 20)) == set(b"x")
        basilica.notice()
        assert b"answer" in os.read(heard, 1 << 20)
    finally:
        os.close(heard)


def test_answers_are_no_reports_and_neither_are_other_files_beside_them(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from basilica.reports import writer

    monkeypatch.setattr(writer, "FILES_MAX", 2)
    reports = here.layout.reports(RUN)
    reports.mkdir()
    kept = [f"0.1.{10**8 + n}{ending}" for n in range(4) for ending in (".notice", ".agent", ".debug")]
    for name in kept:
        (reports / name).touch()
    basilica.report(step=1)
    assert [file.pid for file in report_files(here.layout, RUN)] == [os.getpid()]
    assert {path.name for path in reports.iterdir()} == {*kept, f"0.1.{os.getpid()}"}


def test_answers_of_ended_processes_make_room_and_those_of_the_living_stay(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from basilica.reports import writer

    monkeypatch.setattr(writer, "FILES_MAX", 3)
    reports = here.layout.reports(RUN)
    reports.mkdir()
    for n, name in enumerate([f"0.1.{os.getppid()}.notice", *(f"0.1.{10**8 + n}.notice" for n in range(5))]):
        (reports / name).touch()
        os.utime(reports / name, (n, n))
    here.withdraw()
    basilica.notice()
    left = {f"0.1.{os.getppid()}.notice", f"0.1.{10**8 + 3}.notice", f"0.1.{10**8 + 4}.notice"}
    assert {path.name for path in reports.iterdir()} == {*left, f"0.1.{os.getpid()}.notice"}


# ---- ready ---------------------------------------------------------------------------------------------------------

READY = """
import signal, sys, basilica
basilica.report(step=1)
while (notice := basilica.notice()) is None: pass
print("given", notice.step, flush=True)
{before}
try:
    notice.ready({timeout})
finally:
    print("over", flush=True)
after = basilica.notice()
print("then", None if after is None else after.step, flush=True)
"""


def until_ready(place: Place, pid: int, state: str = "ready") -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(FileNotFoundError, AssertionError, ValueError):
            found = answer(place, pid=pid)
            if (found["state"], found["number"]) == (state, 1):
                return
        time.sleep(0.001)
    raise AssertionError(f"not {state}")


def test_ready_waits_and_returns_when_the_notice_is_withdrawn(place: Place) -> None:
    place.publish(1)
    process = place.start(READY.format(before="", timeout=""))
    assert line(process) == "given None"
    until_ready(place, process.pid)
    assert process.poll() is None
    place.withdraw()
    assert (line(process), line(process)) == ("over", "then None")
    assert process.wait(60) == 0
    assert answer(place, pid=process.pid)["state"] == "listening"


def test_ready_returns_when_the_notice_has_another_step(place: Place) -> None:
    place.publish(1, step=1)
    process = place.start(READY.format(before="", timeout=""))
    assert line(process) == "given 1"
    until_ready(place, process.pid)
    place.publish(1, step=9)
    assert (line(process), line(process)) == ("over", "then None")
    assert answer(place, pid=process.pid)["state"] == "seen"


def test_ready_returns_when_there_is_another_notice(place: Place) -> None:
    place.publish(1, step=1)
    process = place.start(READY.format(before="", timeout=""))
    assert line(process) == "given 1"
    until_ready(place, process.pid)
    place.publish(2, step=0)  # and the process is late for that one
    assert (line(process), line(process)) == ("over", "then None")
    found = answer(place, pid=process.pid)
    assert (found["state"], found["number"]) == ("late", 2)


def test_more_time_does_not_end_the_wait(here: Place) -> None:
    here.publish(1)
    notice = basilica.notice()
    assert notice is not None
    ended = threading.Event()

    def wait() -> None:
        notice.ready()
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    until_ready(here, os.getpid())
    here.publish(1, until=AFTERWARDS + 100)
    assert not ended.wait(0.2)
    assert told(here)[:2] == ("ready", 1)
    here.withdraw()
    assert ended.wait(60)
    waiting.join()


def test_ready_ends_with_its_timeout_and_the_notice_stays(here: Place) -> None:
    here.publish(1)
    notice = basilica.notice()
    assert notice is not None
    begun = time.monotonic()
    notice.ready(timeout=0.1)
    assert time.monotonic() - begun >= 0.1
    assert told(here)[:2] == ("ready", 1)
    assert basilica.notice() is notice


def test_ready_for_what_is_over_returns_at_once_and_answers_nothing(here: Place) -> None:
    here.publish(1)
    notice = basilica.notice()
    assert notice is not None
    here.publish(2)
    notice.ready()
    assert told(here)[:2] == ("seen", 2)


def test_sigterm_ends_a_program_that_waits(place: Place) -> None:
    place.publish(1)
    process = place.start(READY.format(before="", timeout=""))
    until_ready(place, process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_a_signal_handler_raises_is_passed_through(place: Place, number: signal.Signals) -> None:
    before = f"""
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal({int(number)}, stop)
"""
    place.publish(1)
    process = place.start(READY.format(before=before, timeout=""))
    until_ready(place, process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.rstrip().endswith("Stop")


def test_a_keyboard_interrupt_is_passed_through(place: Place) -> None:
    place.publish(1)
    process = place.start(READY.format(before="", timeout=""))
    until_ready(place, process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_handler_of_sigterm_that_only_sets_a_flag_ends_the_wait(place: Place) -> None:
    place.publish(1)
    before = """
signal.signal(signal.SIGTERM, lambda *_: print("flag", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: print("other", flush=True))
"""
    process = place.start(READY.format(before=before, timeout=""))
    until_ready(place, process.pid)
    assert line(process) == "given None"
    process.send_signal(signal.SIGUSR1)
    assert line(process) == "other"
    process.send_signal(signal.SIGTERM)
    assert [line(process) for _ in range(3)] == ["flag", "over", "then None"]
    assert process.wait(60) == 0


def test_the_wakeup_descriptor_of_an_event_loop_is_left_alone(here: Place) -> None:
    here.publish(1)
    notice = basilica.notice()
    assert notice is not None
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        notice.ready(timeout=0.01)
        assert signal.set_wakeup_fd(before) == write
        notice.ready(timeout=0.01)
        assert signal.set_wakeup_fd(before) == before
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_waiting_takes_next_to_no_time_of_the_processor(here: Place) -> None:
    here.publish(1)
    notice = basilica.notice()
    assert notice is not None
    before = time.process_time()
    notice.ready(timeout=1.0)
    assert time.process_time() - before < 0.1


# ---- forks ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_listens_for_itself(place: Place) -> None:
    code = """
import os, time, basilica
from basilica.progress import notices
basilica.report(step=3)
assert basilica.notice() is None
notices._here._lock.acquire()  # as another thread may hold it at that moment
pid = os.fork()
notices._here._lock.release() if pid else None
os.write(1, b"%d\\n" % os.getpid())  # in one piece: print may write the end of a line apart
if pid == 0:
    basilica.report(step=1)  # a step of its own: the parent's is past that of the notice
    while (notice := basilica.notice()) is None: time.sleep(0.001)
    notice.ready()
    os._exit(0)
while os.waitpid(pid, os.WNOHANG)[0] == 0:
    assert basilica.notice() is None
    time.sleep(0.001)
"""
    place.withdraw()
    process = place.start(code)
    pids = {int(line(process)), int(line(process))}
    place.publish(1, step=1)
    (child,) = pids - {process.pid}
    until_ready(place, child)
    until_ready(place, process.pid, "late")
    place.withdraw()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
