"""The answers of ranks as the control plane reads them: of living processes, merged, whatever a rank has written."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.machine.layout import Key
from basilica.machine.proc import start_time
from basilica.progress.answers import LISTENERS_MAX, Answer, merge, read_answer_of, read_answers
from basilica.progress.formats import ANSWER_BYTES, AnswerLine, State, encode_answer, parse_answer
from tests.progress.conftest import RUN, Place

LINE: dict[str, Any] = {
    "pid": os.getpid(),
    "start": start_time(os.getpid()),
    "worker": 0,
    "number": 3,
    "state": "ready",
    "step": 12,
    "at": 1.7e9,
    "mono": 5.0,
}


def one(number: int, state: State, step: int | None) -> AnswerLine:
    return AnswerLine(pid=1, start=1, worker=0, number=number, state=state, step=step, at=1.0, mono=1.0)


MERGED: list[tuple[list[tuple[int, State, int | None]], tuple[int, State, int | None]]] = [
    ([(0, "listening", None)], (0, "listening", None)),
    ([(2, "ready", 5)], (2, "ready", 5)),
    ([(2, "ready", 5), (2, "ready", 6)], (2, "ready", 6)),
    ([(2, "ready", 5), (2, "seen", 4)], (2, "seen", 5)),
    ([(2, "seen", 5), (2, "listening", None)], (2, "listening", 5)),
    ([(2, "ready", 5), (0, "listening", 4)], (0, "listening", 5)),  # one has not read it yet
    ([(2, "late", 8), (2, "ready", 5)], (2, "late", 8)),
    ([(2, "late", 8), (1, "ready", 9)], (2, "late", 9)),
    ([(1, "late", 8), (2, "seen", 7)], (1, "seen", 8)),  # late for what is over
    ([(1, "ready", 8), (2, "ready", 7)], (1, "seen", 8)),  # ready for different notices
    ([(1, "listening", 8), (2, "ready", 7)], (1, "listening", 8)),
]


@pytest.mark.parametrize(("lines", "merged"), MERGED)
def test_an_attempt_is_as_far_as_its_last_process(
    lines: list[tuple[int, State, int | None]], merged: tuple[int, State, int | None]
) -> None:
    assert merge(one(*line) for line in lines) == Answer(len(lines), *merged)
    assert merge(one(*line) for line in reversed(lines)) == Answer(len(lines), *merged)


def test_nobody_has_no_answer() -> None:
    assert merge([]) is None


STATED: st.SearchStrategy[State] = st.sampled_from(["listening", "seen", "late", "ready"])


@given(st.lists(st.builds(one, st.integers(0, 3), STATED, st.none() | st.integers(0, 9)), min_size=1, max_size=5))
def test_ready_means_all_of_them_for_one_notice(lines: list[AnswerLine]) -> None:
    merged = merge(lines)
    assert merged is not None
    everybody = all((line.number, line.state) == (merged.number, "ready") for line in lines)
    assert (merged.state == "ready") == everybody
    newest = max(line.number for line in lines)
    assert (merged.state == "late") == any((line.number, line.state) == (newest, "late") for line in lines)
    if merged.state in ("seen", "ready"):
        assert all(line.number >= merged.number for line in lines)


# ---- files ---------------------------------------------------------------------------------------------------------


def write(place: Place, name: str, **changes: Any) -> Path:
    reports = place.layout.reports(RUN)
    reports.mkdir(exist_ok=True)
    (reports / name).write_bytes(encode_answer({**LINE, **changes}))
    return reports / name


def test_there_are_none_before_anybody_listens(place: Place) -> None:
    assert read_answers(place.layout, RUN) == {}
    assert read_answer_of(place.layout, Key(RUN, 0, 1)) is None


def test_answers_are_found_by_attempt(place: Place) -> None:
    pid = os.getpid()
    write(place, f"0.1.{pid}.notice")
    write(place, f"3.2.{pid}.notice", state="late", step=14)
    ready, late = Answer(1, 3, "ready", 12), Answer(1, 3, "late", 14)
    assert read_answers(place.layout, RUN) == {Key(RUN, 0, 1): ready, Key(RUN, 3, 2): late}
    assert read_answer_of(place.layout, Key(RUN, 3, 2)) == late
    assert read_answer_of(place.layout, Key(RUN, 3, 1)) is None


def test_the_answer_of_a_process_that_has_ended_does_not_count(place: Place) -> None:
    code = """
import basilica, signal
basilica.report(step={step})
basilica.notice()
print("on", flush=True)
signal.pause()
"""
    place.publish(1, step=5)
    processes = [place.start(code.format(step=step)) for step in (3, 4, 6)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    key = Key(RUN, 0, 1)
    assert read_answers(place.layout, RUN) == {key: Answer(3, 1, "late", 6)}
    processes[2].kill()
    processes[2].wait()
    assert read_answer_of(place.layout, key) == Answer(2, 1, "seen", 4)
    processes[1].send_signal(signal.SIGKILL)  # a zombie has ended as well
    end = time.monotonic() + 60
    while read_answer_of(place.layout, key) != Answer(1, 1, "seen", 3) and time.monotonic() < end:
        time.sleep(0.001)
    assert read_answers(place.layout, RUN) == {key: Answer(1, 1, "seen", 3)}


def test_another_process_with_that_pid_has_not_answered(place: Place) -> None:
    write(place, f"0.1.{os.getpid()}.notice", start=LINE["start"] + 1)
    write(place, f"0.1.{os.getppid()}.notice", start=start_time(os.getppid()))  # under another name than its own
    assert read_answers(place.layout, RUN) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "done"},
        {"state": ["ready"]},
        {"number": -1},
        {"number": True},
        {"number": 2**60},
        {"number": "3"},
        {"step": 1.5},
        {"step": 2**60},
        {"worker": 1 << 20},
        {"at": float("nan")},
        {"mono": "five"},
        {"at": 1e300},
        {"start": "9"},
    ],
)
def test_what_no_process_of_ours_wrote_is_no_answer(place: Place, changes: dict[str, Any]) -> None:
    write(place, f"0.1.{os.getpid()}.notice", **changes)
    assert read_answers(place.layout, RUN) == {}


@given(st.binary(max_size=2 * ANSWER_BYTES) | st.binary().map(lambda data: data.ljust(ANSWER_BYTES - 1) + b"\n"))
def test_garbage_is_no_answer(garbage: bytes) -> None:
    assert parse_answer(garbage) is None


def test_deep_and_long_texts_are_no_answer() -> None:
    whole = encode_answer(LINE)
    assert parse_answer(whole) is not None
    assert parse_answer(whole + b" ") is None
    assert parse_answer(whole[:-1]) is None
    assert parse_answer(b"[" * (ANSWER_BYTES - 1) + b"\n") is None
    assert parse_answer(json.dumps(LINE).encode()) is None


def test_files_of_other_kinds_are_left_alone(place: Place) -> None:
    sound = write(place, f"0.1.{os.getpid()}.notice")
    reports = sound.parent
    os.mkfifo(reports / "1.1.5.notice")
    (reports / "1.1.6.notice").mkdir()
    (reports / "1.1.7.notice").symlink_to("/dev/zero")
    (reports / f"2.1.{os.getpid()}.notice").symlink_to(sound)
    for name in (f"1.1.{os.getpid()}", "1.1.notice", "x.1.1.notice", "1.1.1.notice.notice", "1" * 10 + ".1.1.notice"):
        (reports / name).write_bytes(sound.read_bytes())
    assert list(read_answers(place.layout, RUN)) == [Key(RUN, 0, 1)]


def test_an_attempt_with_any_number_of_files_costs_little_and_only_itself(place: Place) -> None:
    sound = write(place, f"0.1.{os.getpid()}.notice")
    for n in range(LISTENERS_MAX):
        os.link(sound, sound.with_name(f"1.1.{n}.notice"))
    write(place, f"1.1.{os.getpid()}.notice")
    assert list(read_answers(place.layout, RUN)) == [Key(RUN, 0, 1)]
    assert read_answer_of(place.layout, Key(RUN, 1, 1)) is None


def test_a_directory_that_is_none_has_no_answers(place: Place) -> None:
    place.layout.reports(RUN).symlink_to("/")
    assert read_answers(place.layout, RUN) == {}
