"""Processes that are known by their environment, whatever they are doing at the moment of the look."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from basilica.machine.strays import kill, with_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_a_process_that_begins_one_program_after_another_is_never_missed(tmp_path: Path) -> None:
    script = tmp_path / "again"
    script.write_text(f'#!/bin/sh\n: > {tmp_path}/begun\nexec "$0"\n')
    script.chmod(0o755)
    mark = f"STRAY_OF_TEST={tmp_path}"
    process = subprocess.Popen([script], env={"PATH": os.environ["PATH"], "STRAY_OF_TEST": str(tmp_path)})
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
        assert all(with_environment({mark.encode()}) == [process.pid] for _ in range(200))
    finally:
        kill([process.pid])
        process.wait()
    assert with_environment({mark.encode()}) == []


def test_a_process_without_any_environment_is_none_of_them() -> None:
    process = subprocess.Popen(["/bin/sleep", "60"], env={})
    try:
        assert process.pid not in with_environment({b"STRAY_OF_TEST=1"})
    finally:
        kill([process.pid])
        process.wait()
