"""A record that cannot be read: the attempt is judged, the damage is named, and no turn fails for ever."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from basilica.core.seen import Sight
from basilica.machine.files import UnusableFile
from basilica.machine.layout import Key
from basilica.runtimes.local.records import Exit, append_exit, parse_record, read_record
from tests.runtime_local.machine import SLEEP, Machine, sh, until_gone
from tests.runtime_local.test_records import CLAIM

EXIT = b'{"format":1,"what":"exit","exit_code":0,"reason":"Completed","finished_at":1.0}\n'


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\x00 garbage",
        b"[1]",
        b"7",
        b'"exit"',
        b"{}",
        b'{"format":99,"what":"claim"}',
        b'{"format":99,"what":"exit","exit_code":1,"reason":"x","finished_at":1.0}',
        b'{"format":1}',
        b'{"format":1,"what":"claim"}',
        b'{"format":1,"what":"exit","exit_code":0}',
        b'{"format":1,"what":"exit","exit_code":0,"reason":"x","finished_at":"soon"}',
        b'{"format":1,"what":"running","pid":"1","start":2,"started_at":3}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_named_and_hides_nothing_else(line: bytes) -> None:
    record = parse_record(CLAIM + line + b"\n" + EXIT)
    assert record.claim.pid == 1
    assert record.exit is not None
    assert record.exit.exit_code == 0
    assert record.damage
    assert parse_record(CLAIM + EXIT).damage == ""


def test_what_is_no_file_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "1.record").mkdir()
    with pytest.raises(UnusableFile, match="is a directory"):
        read_record(str(tmp_path / "1.record"))


def test_an_exit_is_appended_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "1.record"
    path.write_bytes(CLAIM + b'{"format":1,"what":"runn')
    append_exit(str(path), Exit(exit_code=None, reason="Unknown", finished_at=1.0))
    record = read_record(str(path))
    assert record is not None
    assert record.exit is not None
    assert record.exit.reason == "Unknown"


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(64) + b"\n")


def zeros(path: Path) -> None:
    """As some file systems leave what was not written in time."""
    path.write_bytes(bytes(path.stat().st_size))


def cut_in_the_exit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b'"exit"') + 10].replace(b'"what": "exit"', b'"what": "ex') + b"\n")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [garbage, zeros, cut_in_the_exit, directory]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_ended_attempt_with_a_damaged_record_is_judged_unknown(
    machine: Machine, damage: Callable[[Path], None]
) -> None:
    run = machine.run(sh("exit 3"))
    async with machine.control_plane():
        await machine.outcome(run)
    damage(Path(machine.layout.record(Key(run.instance, 0, 1))))
    for number in range(2):  # and the next control plane comes to the same conclusion
        async with machine.control_plane() as runtime:
            ended = await machine.until_ended(run)
            assert (ended.exit_code, ended.reason) == (None, "Unknown")
            warnings = dict((await runtime.observe(run)).warnings)
            if damage is directory:  # the first one has put a record in its place
                assert number or "the record of rank 0 cannot be read" in warnings["UnusableFile"]
            elif damage is not zeros:  # which is a line without its end
                assert "rank 0, attempt 1" in warnings["RecordDamaged"]
    async with machine.control_plane() as runtime:
        await runtime.remove(run)
        assert not machine.layout.run(run.instance).exists()


@pytest.mark.parametrize("damage", [garbage, directory])
async def test_a_rank_whose_record_is_damaged_runs_on_and_is_judged_when_it_ends(
    machine: Machine, damage: Callable[[Path], None]
) -> None:
    run = machine.run(SLEEP)
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_running(run)
        supervisor = machine.record(run).claim.pid
    damage(Path(machine.layout.record(Key(run.instance, 0, 1))))
    async with machine.control_plane():
        seen = await machine.seen(run)
        assert seen is not None
        assert seen.sight is not Sight.ENDED
        assert machine.ranks_become(1)
        await machine.stop(run, grace=5.0)
        ended = await machine.until_ended(run)
        await until_gone(supervisor)
        assert ended.stopped
        assert machine.ranks_become(0)


async def test_what_is_left_of_a_rank_without_supervisor_and_record_is_ended(machine: Machine) -> None:
    run = machine.run(SLEEP)
    async with machine.control_plane():
        await machine.launch(run)
        await machine.until_running(run)
        supervisor = machine.record(run).claim.pid
    os.kill(supervisor, signal.SIGKILL)
    await until_gone(supervisor)
    garbage(Path(machine.layout.record(Key(run.instance, 0, 1))))
    async with machine.control_plane():
        ended = await machine.until_ended(run)
        assert (ended.exit_code, ended.reason) == (None, "Unknown")
        assert machine.ranks_become(0)
