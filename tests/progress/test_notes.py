"""The notes of real processes about their progress, as the control plane reads them."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from basilica.machine.layout import Key, Layout
from basilica.progress.activity import read_activities
from basilica.progress.note_file import NOTE_FILE_BYTES, REFUSALS_KEPT, SLOT_BYTES, encode_slot, parse_notes

KEY = Key("run", 0, 0)
BLOCKED_COST_MAX = 10e-6


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def start(layout: Layout, code: str) -> subprocess.Popen[str]:
    env = {**os.environ, "BASILICA_REPORT_FILE": str(layout.report(KEY))}
    program = [sys.executable, "-c", f"import os, sys, time\nfrom basilica.progress import notes\n{code}"]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(layout: Layout, code: str) -> str:
    process = start(layout, code)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert err == ""
    return out


def seen(layout: Layout):  # type: ignore[no-untyped-def]
    return read_activities(layout, "run", [KEY], lambda mono: mono)[KEY].saving


def document(**facts: object) -> dict[str, object]:
    known = {"pid": 7, "start": 1, "worker": 0, "mono": 1.0, "at": 2.0, "restoring": None, "restored": None}
    return known | {"blocked": 0.5, "snapshots": 1, "every": None, "saved": {}, "refused": []} | facts


def test_a_process_notes_what_it_restores_saves_and_refuses(layout: Layout) -> None:
    code = "notes.restoring(); notes.refused('shard 1 of step 9 is corrupt'); notes.restored(8, 'disk', 0.25)\n"
    code += "notes.interval(5); notes.blocked(0.001); notes.blocked(0.002); notes.saved(10, 'memory', 77)"
    run(layout, code)
    saving = seen(layout)
    assert saving.restoring_since is None
    assert (saving.restored.step, saving.restored.tier, saving.restored.seconds) == (8, "disk", 0.25)
    assert saving.restored.began_at <= saving.restored.at
    assert (saving.blocked_seconds, saving.snapshots, saving.every) == (0.003, 2, 5)
    assert [(each.tier, each.step, each.size) for each in saving.saved] == [("memory", 10, 77)]
    assert [(each.number, each.what) for each in saving.refusals] == [(1, "shard 1 of step 9 is corrupt")]


def test_a_process_outside_a_deployment_notes_nothing(tmp_path: Path) -> None:
    code = "from basilica.progress import notes; notes.restoring(); notes.blocked(1.0); notes.saved(1, 'disk', 1)"
    env = {name: value for name, value in os.environ.items() if name != "BASILICA_REPORT_FILE"}
    found = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, check=True)
    assert (found.stdout, found.stderr, list(tmp_path.iterdir())) == (b"", b"", [])


def test_nothing_that_is_noted_and_no_missing_directory_raises(layout: Layout) -> None:
    code = "for bad in (float('nan'), -1.0, 'x', None, object()):\n"
    code += "    notes.blocked(bad); notes.saved(bad, bad, bad); notes.restored(bad, bad, bad); notes.refused(bad)\n"
    code += "    notes.interval(bad)\n"
    process = start(layout, code)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert seen(layout).blocked_seconds == 0.0


def test_a_forked_child_has_notes_of_its_own(layout: Layout) -> None:
    code = "notes.blocked(1.0)\npid = os.fork()\nnotes.blocked(0.25)\n"
    code += "if pid: os.waitpid(pid, 0)\nelse: sys.exit(0)"
    run(layout, code)
    files = sorted(layout.reports("run").glob("*.progress"))
    found = [parse_notes(file.read_bytes()) for file in files]
    assert sorted(note.blocked for note in found if note is not None) == [0.25, 1.25]


@pytest.mark.parametrize("after", [0.05, 0.11, 0.17])
def test_a_process_that_is_killed_while_it_writes_leaves_whole_notes(layout: Layout, after: float) -> None:
    code = "print('on', flush=True)\nn = 0\nwhile True:\n    n += 1; notes.saved(n, 'disk', n); notes.blocked(0.06)"
    process = start(layout, code)
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    until = time.monotonic() + after
    while time.monotonic() < until:
        saving = seen(layout)
        if saving is not None and saving.saved:
            assert saving.saved[0].step == saving.saved[0].size
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    saving = seen(layout)
    assert saving.saved[0].step == saving.saved[0].size > 0
    assert saving.snapshots in (saving.saved[0].step, saving.saved[0].step - 1)


def test_a_torn_slot_is_refused_and_the_other_one_counts() -> None:
    old, new = encode_slot(1, document(snapshots=1)), encode_slot(2, document(snapshots=2))
    for cut in range(1, SLOT_BYTES, 97):
        note = parse_notes(old + new[:cut] + b"\0" * (SLOT_BYTES - cut))
        assert note is not None
        assert note.snapshots == 1
    whole = parse_notes(old + new)
    assert whole is not None
    assert whole.snapshots == 2


@pytest.mark.parametrize(
    "facts",
    [
        {"pid": -1},
        {"blocked": float("nan")},
        {"blocked": 1e300},
        {"snapshots": True},
        {"saved": {"memory": [1, 2]}},
        {"saved": {"a b": [1, 2, 3.0]}},
        {"saved": {f"t{n}": [1, 2, 3.0] for n in range(50)}},
        {"restored": [1, "disk", 1.0, 2.0]},
        {"restored": "disk"},
        {"refused": [[n, "x"] for n in range(REFUSALS_KEPT + 1)]},
        {"worker": 1 << 40},
    ],
)
def test_a_document_that_no_process_of_ours_wrote_is_none(facts: dict[str, object]) -> None:
    rest = b"1 " + json.dumps(document(**facts)).encode()
    rest = rest.ljust(SLOT_BYTES - 10) + b"\n"
    data = b"%08x " % zlib.crc32(rest) + rest
    assert len(data) == SLOT_BYTES
    assert parse_notes(data) is None


@pytest.mark.parametrize("data", [b"", b"\0" * NOTE_FILE_BYTES, b"[" * NOTE_FILE_BYTES, b"x" * (NOTE_FILE_BYTES + 1)])
def test_hostile_files_are_no_notes(layout: Layout, data: bytes) -> None:
    layout.reports("run").mkdir(parents=True)
    Path(f"{layout.report(KEY)}.7.progress").write_bytes(data)
    os.mkfifo(f"{layout.report(KEY)}.8.progress")
    os.symlink("/etc/passwd", f"{layout.report(KEY)}.9.progress")
    assert parse_notes(data) is None
    assert seen(layout) is None


def test_long_refusals_are_cut_and_the_newest_are_kept(layout: Layout) -> None:
    run(layout, "for n in range(20): notes.refused(f'{n} ' + '\\U0001f600\\n' * 500)")
    refusals = seen(layout).refusals
    assert [each.number for each in refusals] == list(range(13, 21))
    assert all(each.what.isprintable() for each in refusals)


def test_a_note_of_blocked_time_costs_less_than_ten_microseconds(layout: Layout) -> None:
    code = "best = 1.0\nfor _ in range(5):\n    began = time.perf_counter()\n    for n in range(2000):\n"
    code += "        notes.blocked(1e-4); notes.saved(n, 'memory', 10**9)\n"
    code += "    best = min(best, (time.perf_counter() - began) / 2000)\nprint(best)"
    assert float(run(layout, code)) < BLOCKED_COST_MAX
