"""The record of an attempt: whole lines count, the first word stands, and no wish is ever lengthened."""

import json
from pathlib import Path

import pytest

from basilica.reports.wakeups import parse
from basilica.runtimes.local import table
from basilica.runtimes.local.records import Exit, append_exit, bury, parse_record, read_record, write_stop
from tests.runtime_local.machine import Machine, sh

ENDED = Exit(exit_code=3, reason="Error", finished_at=7.0)
CLAIM = (
    b'{"format":1,"what":"claim","pid":1,"start":2,"boot":"b","claimed_at":3.0,'
    b'"gpus":["g"],"cgroups":[],"tombstone":false}\n'
)


def test_a_line_cut_short_by_a_power_cut_does_not_count() -> None:
    exit = b'{"format":1,"what":"exit","exit_code":0,"reason":"Completed","finished_at":1.0}\n'
    assert parse_record(CLAIM + exit[:-1]).exit is None
    assert parse_record(CLAIM + exit).exit == Exit(exit_code=0, reason="Completed", finished_at=1.0)
    assert parse_record(CLAIM).claim.gpus == ("g",)
    assert parse_record(CLAIM[:-1]).claim.boot == ""


def test_what_was_said_first_stands(tmp_path: Path) -> None:
    path = tmp_path / "1.record"
    path.write_bytes(CLAIM)
    append_exit(str(path), ENDED)
    append_exit(str(path), Exit(exit_code=0, reason="Completed", finished_at=9.0))
    record = read_record(str(path))
    assert record is not None
    assert record.exit == ENDED


def test_only_an_attempt_that_nobody_has_can_be_buried(tmp_path: Path) -> None:
    path = tmp_path / "rank-0" / "1.record"
    assert bury(str(path), ENDED)
    assert not bury(str(path), ENDED)
    record = read_record(str(path))
    assert record is not None
    assert (record.claim.tombstone, record.exit) == (True, ENDED)
    assert [entry.name for entry in path.parent.iterdir()] == ["1.record"]


def test_a_stop_only_ever_gets_more_urgent(tmp_path: Path) -> None:
    path = tmp_path / "1.stop"
    graces = []
    for grace in (10.0, 2.0, 5.0):
        write_stop(str(path), grace)
        graces.append(json.loads(path.read_text())["grace"])
    assert graces == [10.0, 2.0, 2.0]


@pytest.mark.parametrize("line", ["", "x", "a b c d", "a 1 x started", "a 1"])
def test_a_line_that_no_supervisor_wrote_is_passed_over(line: str) -> None:
    assert parse(line) is None


def test_a_supervisors_complaint_arrives_whole() -> None:
    told = parse("run-x 3 14 failed No space left on device")
    assert told is not None
    assert (told.key.rank, told.key.attempt, told.what, told.detail) == (3, 14, "failed", "No space left on device")


async def test_of_ended_runs_only_the_latest_stay_in_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ENDED_RUNS_KEPT", 2)
    async with machine.control_plane() as runtime:
        runs = [machine.run(sh(f"exit {code}"), name=f"run{code}") for code in range(4)]
        for run in runs:
            await machine.outcome(run)
            await runtime.observe(run)
        assert len(list(runtime._table)) == 2
        codes = [(await runtime.observe(run)).ranks[0].ended for run in runs]
        assert [ended and ended.exit_code for ended in codes] == [0, 1, 2, 3]  # read again from disk
