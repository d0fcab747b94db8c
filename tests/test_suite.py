"""How the tests are run: who stays together, what counts as slow, and what becomes of a test that fails under load."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import groups, times

ROOT = Path(__file__).parents[1]

CONFTEST = """
from tests.support.second_try import SecondTry

def pytest_addoption(parser):
    parser.addoption("--second-try", action="store_true")

def pytest_configure(config):
    if config.option.second_try:
        config.pluginmanager.register(SecondTry(config))
"""

TESTS = """
import os
import pytest
from pathlib import Path

def test_well():
    pass

def test_under_load():
    been = Path(__file__).with_name("been")
    if not been.exists():
        been.touch()
        raise AssertionError("too slow")

@pytest.mark.skipif("FAULT" not in os.environ, reason="there is no fault")
def test_fault():
    raise AssertionError("wrong")
"""


def tried(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "0", "--second-try", "--rootdir", str(folder)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT), **env}
    )


def test_what_passes_alone_is_named_and_counted_and_fails_nothing(tmp_path: Path) -> None:
    done = tried(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AssertionError: too slow" in done.stdout
    assert "1 test failed at first and passed alone: each is a fault to mend" in done.stdout
    assert "1 passed, 1 skipped, 1 passed alone in" in done.stdout.splitlines()[-1]


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    done = tried(tmp_path, FAULT="1")
    assert done.returncode == 1
    assert "1 failed, 1 passed, 1 passed alone in" in done.stdout.splitlines()[-1]
    assert "FAILED test_it.py::test_fault" in done.stdout


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/core/test_spec.py::test_x[a::b]", "tests/core/test_spec.py"),
        ("tests/e2e/official/test_waiting.py::test_x[0.36.8]", "the published client"),
        ("tests/operator/official/test_stories.py::test_x[0.29.0]", "the published client"),
        ("tests/console/test_run.py::test_x", "the console"),
    ],
)
def test_a_file_stays_together_and_so_do_stories_and_the_console(nodeid: str, group: str) -> None:
    assert groups.group_of(nodeid) == group


def test_slow_is_a_test_whose_longest_case_takes_long(tmp_path: Path) -> None:
    measured = {"a.py::test_x[1]": 0.01, "a.py::test_x[2]": 3.0, "a.py::test_y": 0.01, "a.py::T::test_z": 0.5}
    times.write(measured.items(), tmp_path / "times.txt")
    again = times.read(tmp_path / "times.txt")
    assert dict(times.longest_cases(again.items())) == {"a.py::test_x": 3.0, "a.py::T::test_z": 0.5}
