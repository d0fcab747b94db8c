"""Images that do not have our entrypoint get it from an init container: what that makes, and how it starts ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from basilica.rank.inject import START_PY, carry, main

BARE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()  # a Python in which nothing is installed


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    carry(tmp_path / "carried")
    return tmp_path / "carried"


@pytest.fixture
def image_path(tmp_path: Path) -> str:
    """The PATH of an image that has a shell and a bare Python, which is called `python`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").write_text(f'#!/bin/sh\nexec {BARE} -S "$@"\n')
    (folder / "python").chmod(0o755)
    return str(folder)


def start(carried: Path, path: str, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, **more}
    line = [str(carried / "start"), "--", *command]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, cwd="/", check=False)


def test_a_rank_starts_in_an_image_that_has_python_and_nothing_else(carried: Path, image_path: str) -> None:
    ran = start(carried, image_path, "/bin/sh", "-c", "echo rank $0; exit 3", "here")
    assert (ran.stdout, ran.returncode) == ("rank here\n", 3)


def test_the_program_can_import_basilica_from_where_it_was_carried_to(carried: Path, image_path: str) -> None:
    ran = start(carried, image_path, "python", "-c", "import basilica; print(basilica.__file__)")
    assert ran.stdout.strip() == str(carried / "lib" / "basilica" / "__init__.py"), ran.stderr


def test_a_package_of_that_name_in_the_image_goes_before_ours(carried: Path, image_path: str, tmp_path: Path) -> None:
    theirs = tmp_path / "site"
    (theirs / "basilica").mkdir(parents=True)
    (theirs / "basilica" / "__init__.py").write_text("theirs = True\n")
    told = "import basilica; print(basilica.theirs)"
    ran = start(carried, image_path, "python", "-c", told, PYTHONPATH=str(theirs))
    assert ran.stdout.strip() == "True", ran.stderr


def test_a_command_beside_the_rank_starts_there_too(carried: Path, image_path: str) -> None:
    line = [str(carried / "start"), "--beside", "--", "/bin/sh", "-c", "echo $RANK; exit 3"]
    environment = {"PATH": image_path, "BASILICA_RANK": "2"}
    with subprocess.Popen(
        line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    ) as process:
        assert process.wait(60) == 3
        assert (process.stdout.read(), process.stderr.read()) == (b"\x062\n", b"")  # type: ignore[union-attr]


def test_all_that_a_driven_rank_needs_comes_without_other_packages(carried: Path, image_path: str) -> None:
    modules = "basilica.rank.agent, basilica.rank.reachability, basilica.rendezvous.client, basilica"
    told = f"import {modules}; basilica.report(step=1); basilica.notice()"
    ran = start(carried, image_path, "python", "-c", told)
    assert ran.returncode == 0, ran.stderr


def test_an_image_without_python_is_told_what_it_lacks(carried: Path, tmp_path: Path) -> None:
    ran = start(carried, str(tmp_path / "nothing"), "true")
    assert ran.returncode == 127
    assert "no Python on its PATH" in ran.stderr


def test_an_old_python_is_told_its_version() -> None:
    old = f"import sys; sys.version_info = (3, 8, 2, 'final', 0); exec({START_PY!r})"
    ran = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (126, "basilica: this image has Python 3.8, and ranks need 3.11 or later\n")


def test_to_carry_twice_is_as_good_as_once(carried: Path, image_path: str) -> None:
    carry(carried)
    assert start(carried, image_path, "/bin/sh", "-c", "exit 0").returncode == 0
    assert not list((carried / "lib").rglob("testing"))


def test_it_is_told_where_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "DIRECTORY" in capsys.readouterr().err
