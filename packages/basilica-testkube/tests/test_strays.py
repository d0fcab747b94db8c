"""Processes that are known by their environment, whatever they are doing at the moment of the look."""

import os
import subprocess
from pathlib import Path

from basilica_testkube.strays import end_marked, marked


def test_a_process_that_begins_one_program_after_another_is_never_missed(tmp_path: Path) -> None:
    script = tmp_path / "again"
    script.write_text(f'#!/bin/sh\n: > {tmp_path}/begun\nexec "$0"\n')
    script.chmod(0o755)
    mark = f"MARK_OF_TEST={tmp_path}".encode()
    process = subprocess.Popen([script], env={"PATH": os.environ["PATH"], "MARK_OF_TEST": str(tmp_path)})
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
        assert all(marked(mark) == [process.pid] for _ in range(200))
    finally:
        end_marked(mark)
        process.wait()
    assert marked(mark) == []


def test_a_mark_is_a_whole_variable() -> None:
    process = subprocess.Popen(["/bin/sleep", "60"], env={"MARK_OF_TEST": "12"})
    try:
        end_marked(b"MARK_OF_TEST=1")
        end_marked(b"OF_TEST=12")
        assert process.poll() is None
        assert marked(b"MARK_OF_TEST=12") == [process.pid]
    finally:
        process.kill()
        process.wait()


def test_a_process_without_any_environment_has_no_mark() -> None:
    process = subprocess.Popen(["/bin/sleep", "60"], env={})
    try:
        assert process.pid not in marked(b"MARK_OF_TEST=1")
    finally:
        process.kill()
        process.wait()
