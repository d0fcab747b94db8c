"""The Python exception that a rank failed with comes with its end, whatever else lies where it is looked for."""

import json
import os
import sys
from pathlib import Path

import pytest

from basilica.core.spec import Exec
from basilica.reports.tracebacks import FILE_BYTES_MAX, TRACEBACK_CHARS_MAX, read_traceback
from basilica.shipping.source import ship
from tests.runtime_local.machine import Machine, sh

SAID = 'printf %s \'{"message": {"message": "X: y", "extraInfo": {"py_callstack": "Traceback…\\nX: y\\n"}}}\''
LEAVE = f'{SAID} > "$TORCHELASTIC_ERROR_FILE"; '


def fails(word: str) -> None:
    raise LookupError(word)


async def test_a_function_that_raises_leaves_its_traceback(machine: Machine) -> None:
    shipped = ship(fails, args=("nowhere",), python=sys.executable)
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(Exec(tuple(shipped.argv)), env=shipped.env))
    assert ended.exit_code == 1
    assert ended.traceback.startswith("Traceback (most recent call last):\n")
    assert ended.traceback.endswith("\nLookupError: nowhere")
    assert "raise LookupError(word)" in ended.traceback


async def test_it_belongs_to_the_attempt_that_failed_and_outlives_the_control_plane(machine: Machine) -> None:
    once = f'if test "$BASILICA_ATTEMPT" = 1; then {LEAVE} fi; exit 3'
    async with machine.control_plane():
        run = machine.run(sh(once))
        assert (await machine.outcome(run)).traceback == "Traceback…\nX: y"
        await machine.launch(run, attempt=2)
        assert (await machine.until_ended(run, attempt=2)).traceback == ""
    async with machine.control_plane():
        assert (await machine.until_ended(run)).traceback == "Traceback…\nX: y"


async def test_a_rank_that_ended_well_has_none(machine: Machine) -> None:
    async with machine.control_plane():
        assert (await machine.outcome(machine.run(sh(f"{LEAVE} exit 0")))).traceback == ""


def test_the_two_forms_that_torch_writes(tmp_path: Path) -> None:
    path = tmp_path / "error"
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": {"py_callstack": "T\nE: x\n"}}}))
    assert read_traceback(str(path)) == "T\nE: x"
    path.write_text(json.dumps({"message": {"message": "Signal 9", "errorCode": 1}}))
    assert read_traceback(str(path)) == "Signal 9"
    path.write_text(json.dumps({"message": "just text", "timestamp": 1}))
    assert read_traceback(str(path)) == "just text"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'{"message": 3}',
        b'{"message": {"extraInfo": []}}',
        b'{"message": {"extraInfo": {"py_callstack": {}}}}',
        b"[" * 200_000,
        b'{"message": "' + b"x" * FILE_BYTES_MAX + b'"}',
    ],
)
def test_what_is_no_error_file_is_no_traceback(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "error"
    path.write_bytes(data)
    assert read_traceback(str(path)) == ""


def test_neither_are_pipes_links_directories_and_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").write_text('{"message": "secret"}')
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder", "missing"):
        assert read_traceback(str(tmp_path / name)) == ""


def test_a_long_one_keeps_its_end_and_can_always_be_stored(tmp_path: Path) -> None:
    path = tmp_path / "error"
    path.write_text(json.dumps({"message": "a" * TRACEBACK_CHARS_MAX + "\ud800 the end"}))
    found = read_traceback(str(path))
    assert len(found) == TRACEBACK_CHARS_MAX
    assert found.endswith("? the end")
    found.encode()
