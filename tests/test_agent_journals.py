"""The journals of torchrun agents as the control plane reads them, whatever is in the files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.machine.layout import Key, Layout
from basilica.reports.agents import (
    FILES_MAX,
    Journal,
    Meeting,
    RoundStarted,
    Stopped,
    Worker,
    WorkerExit,
    journal_file,
    journal_files,
    parse_journal,
    read_journal,
)
from basilica.reports.files import report_files

HEAD = {"pid": 7, "start": 99, "nproc": 2}
MEETING = {"n": 1, "at": 10.5, "mono": 1.5, "event": "meeting"}
ROUND = {"n": 2, "at": 11.0, "mono": 2.0, "event": "round", "round": 1, "group_rank": 1, "agents": 2, "world": 4}
ROUND |= {"workers": [[0, 2, 70], [1, 3, 71]]}
EXIT: dict[str, Any] = {"n": 3, "at": 12.0, "mono": 3.0, "event": "exit", "round": 1, "worker": 1, "torch_rank": 3}
EXIT |= {"pid": 71, "code": -9, "memory_kills": 1, "kind": "own", "message": "", "traceback": "", "seen_at": 12.1}
STOPPED = {"n": 4, "at": 13, "mono": 4, "event": "stopped"}

READ = (
    Meeting(1, 10.5, 1.5),
    RoundStarted(2, 11.0, 2.0, 1, 1, 2, 4, (Worker(0, 2, 70), Worker(1, 3, 71))),
    WorkerExit(3, 12.0, 3.0, 1, 1, 3, 71, -9, 1, "own", "", "", 12.1),
    Stopped(4, 13.0, 4.0),
)


def content(*objects: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in objects)


WHOLE = content(HEAD, MEETING, ROUND, EXIT, STOPPED)
REWRITTEN = content(HEAD, EXIT, STOPPED) + b'_kills": 3}\n' + WHOLE[WHOLE.find(b"\n") + 1 :]
DEEP = content(HEAD) + b"\n\n\xff\xfe\n" + b"[" * 9000 + b"\n" + content(MEETING)


def test_a_journal_is_read_as_it_was_written() -> None:
    assert parse_journal(WHOLE) == Journal(7, 99, 2, READ)
    assert parse_journal(content({**HEAD, "start": None})) == Journal(7, None, 2, ())


@pytest.mark.parametrize(
    ("data", "events"),
    [
        pytest.param(WHOLE[:-1], READ[:3], id="a last line without its end"),
        pytest.param(WHOLE[:-20], READ[:3], id="a torn last line"),
        pytest.param(REWRITTEN, READ, id="being rewritten"),
        pytest.param(content(HEAD, STOPPED, MEETING), (READ[0], READ[3]), id="in another order"),
        pytest.param(content(HEAD, MEETING, {**MEETING, "at": 99.0}), READ[:1], id="the same number again"),
        pytest.param(DEEP, READ[:1], id="no JSON"),
        pytest.param(content(HEAD, 3, None, [MEETING], "meeting", {}, MEETING), READ[:1], id="other JSON"),
        pytest.param(content(HEAD, {**MEETING, "more": "x" * 20_000}, STOPPED), READ[3:], id="a line that is too long"),
        pytest.param(content(HEAD, {**MEETING, "more": 1}), READ[:1], id="a field of a later version"),
        pytest.param(content(HEAD, {**MEETING, "event": "party"}, STOPPED), READ[3:], id="an event of a later version"),
    ],
)
def test_lines_of_another_form_are_dropped_and_the_others_are_read(data: bytes, events: tuple[object, ...]) -> None:
    found = parse_journal(data)
    assert found is not None
    assert found.events == events


@pytest.mark.parametrize("name", ["n", "at", "mono", "event"])
@pytest.mark.parametrize("value", [None, "1", -1, True, [], {}, 1e300, float("nan"), float("inf"), 10**400])
def test_every_event_has_a_number_and_a_time(name: str, value: Any) -> None:
    found = parse_journal(content(HEAD, {**MEETING, name: value}, STOPPED))
    assert found is not None
    assert found.events == READ[3:]


OF_AN_EXIT = [name for name in EXIT if name not in MEETING]
WRONG: list[Any] = [None, True, [], {}, 10**12, "nobody"]


@pytest.mark.parametrize(
    "fields",
    [
        *({**EXIT, name: value} for name in OF_AN_EXIT for value in WRONG[: 5 if type(EXIT[name]) is str else 6]),
        *({key: EXIT[key] for key in EXIT if key != name} for name in OF_AN_EXIT),
    ],
)
def test_an_exit_has_the_fields_of_our_writer(fields: dict[str, Any]) -> None:
    found = parse_journal(content(HEAD, fields, STOPPED))
    assert found is not None
    assert found.events == READ[3:]


@pytest.mark.parametrize(("code", "kind"), [(0, "own"), (0, "echo"), (1, "done"), (-9, "done")])
def test_a_worker_is_done_with_the_code_0_and_no_other(code: int, kind: str) -> None:
    found = parse_journal(content(HEAD, {**EXIT, "code": code, "kind": kind}))
    assert found == Journal(7, 99, 2, ())


@pytest.mark.parametrize(
    "workers", [None, 3, "abc", {}, [3], ["abc"], [[1, 2]], [[1, 2, 3, 4]], [[1, 2, "3"]], [[0, -1, 7]]]
)
def test_a_round_has_workers_with_three_numbers(workers: Any) -> None:
    found = parse_journal(content(HEAD, {**ROUND, "workers": workers}, STOPPED))
    assert found is not None
    assert found.events == READ[3:]


@pytest.mark.parametrize(
    "head", [b"", b"\n", b"{}\n", b"7\n", content({**HEAD, "pid": "7"}), content({**HEAD, "start": -1}), WHOLE[:10]]
)
def test_a_journal_without_its_first_line_is_none(head: bytes) -> None:
    assert parse_journal(head) is None


def test_texts_are_cut_and_can_be_stored() -> None:
    fields = {**EXIT, "message": "a\nb" + "m" * 5000, "traceback": "\ud800" + "t" * 5000}
    found = parse_journal(content(HEAD, fields))
    assert found is not None
    (event,) = found.events
    assert isinstance(event, WorkerExit)
    assert event.message == "a b" + "m" * 997
    assert event.traceback == "t" * 4000


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["exit", "round", "own"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.lists(
        st.binary()
        | st.tuples(st.sampled_from([HEAD, MEETING, ROUND, EXIT]), st.sampled_from(sorted(EXIT)), ANYTHING).map(
            lambda changed: json.dumps({**changed[0], changed[1]: changed[2]}).encode()
        )
    )
)
def test_whatever_a_rank_writes_raises_nothing(lines: list[bytes]) -> None:
    found = parse_journal(b"\n".join([json.dumps(HEAD).encode(), *lines, b""]))
    assert found is not None
    assert [event.n for event in found.events] == sorted({event.n for event in found.events})


def test_only_regular_files_are_read_and_only_a_part_of_a_large_one(tmp_path: Path) -> None:
    folder = Path(os.path.realpath(tmp_path))
    (folder / "0.0.7.agent").write_bytes(WHOLE + b"x" * (64 << 20))
    found = read_journal(str(folder / "0.0.7.agent"))
    assert found is not None
    assert found.events == READ
    os.mkfifo(folder / "0.0.8.agent")
    (folder / "0.0.9.agent").symlink_to(folder / "0.0.7.agent")
    for number in (8, 9, 10):
        assert read_journal(str(folder / f"0.0.{number}.agent")) is None


def test_files_of_an_agent_are_no_report_files_and_the_other_way_round(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert journal_files(layout, "run") == []
    reports = layout.reports("run")
    reports.mkdir(parents=True)
    for name in ("1.2.7", "1.2.7.agent", "1.2.7.debug", "1.2.7.stack", "1.2.7.notice", "1.2.x.agent", "1.2.agent"):
        (reports / name).touch()
    assert journal_files(layout, "run") == [journal_file(layout, Key("run", 1, 2), 7)]
    assert journal_file(layout, Key("run", 1, 2), 7).path == f"{reports}/1.2.7.agent"
    assert [file.path for file in report_files(layout, "run")] == [f"{reports}/1.2.7"]
    for number in range(FILES_MAX + 1):
        (reports / f"0.0.{number}.agent").touch()
    assert [file.key.rank for file in journal_files(layout, "run")] == [1]
