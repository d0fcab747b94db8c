"""A command beside a rank, as the entrypoint of its container runs it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from basilica.rank import exec as rank_exec
from basilica.runtimes.rules import COMMAND_RUNS

SECONDS = 30.0
COMMAND = [sys.executable, "-m", "basilica.entrypoint", "--beside"]


@contextmanager
def started(*command: str, **env: str) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BASILICA_")} | env
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*COMMAND, *command], env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.stdin.close()


def ran(*command: str, **env: str) -> tuple[bytes, bytes, int]:
    """Its streams and its code, with somebody who listens to the end."""
    with started("--", *command, **env) as process:
        out, err = process.stdout.read(), process.stderr.read()  # type: ignore[union-attr]
        return out, err, process.wait(SECONDS)


def is_alive(pid: int) -> bool:
    """False for one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_gone(pid: int) -> None:
    end = time.monotonic() + SECONDS
    while is_alive(pid):
        assert time.monotonic() < end, f"{pid} is still there"
        time.sleep(0.02)


def test_it_says_that_it_runs_and_ends_as_the_command_does() -> None:
    assert ran("sh", "-c", "cat; echo out; echo oh >&2; exit 3") == (b"\x06out\n", b"oh\n", 3)
    assert ran("sh", "-c", "kill -KILL $$") == (b"\x06", b"", 137)
    out, err, code = ran("no-such-program")
    assert (out, code) == (b"\x06", 127)
    assert err.decode() == f"cannot execute no-such-program in {os.getcwd()}: No such file or directory\n"
    assert ran(str(Path(__file__)))[2] == 126


def test_without_a_command_it_says_what_it_takes() -> None:
    with started() as process:
        assert b"COMMAND" in process.stderr.read()  # type: ignore[union-attr]
        assert process.wait(SECONDS) == 2


def test_the_command_and_all_it_started_end_when_nobody_listens() -> None:
    with started("--", "sh", "-c", "setsid sleep 1000 & echo $! $$; exec sleep 1000") as process:
        pids = [int(pid) for pid in process.stdout.readline().removeprefix(COMMAND_RUNS).split()]  # type: ignore[union-attr]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(SECONDS) == 137
    for pid in pids:
        until_gone(pid)


def test_what_it_leaves_behind_ends_with_it() -> None:
    out, _, code = ran("sh", "-c", "setsid sleep 1000 & echo $!; exit 4")
    assert code == 4
    until_gone(int(out.removeprefix(COMMAND_RUNS)))


def test_it_has_what_the_rank_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TMPDIR": str(tmp_path), "BASILICA_POD_UID": "some-pod", "BASILICA_RANK": "1", "KEPT": "yes", "OURS": "1"}
    monkeypatch.setattr(rank_exec, "_container_environment", lambda: given)
    monkeypatch.chdir(tmp_path)
    rank = {name: value for name, value in given.items() if name != "OURS"}
    rank_exec.record_environment({**rank, "RANK": "1", "WORLD_SIZE": "2", "MINE": "a b", "TMPDIR": "/elsewhere"})
    (written,) = tmp_path.iterdir()
    assert "yes" not in written.read_text()  # what the container has anyhow stays where it is
    monkeypatch.chdir("/")
    shown = ("sh", "-c", "echo $RANK/$WORLD_SIZE $MINE $KEPT$OURS $TMPDIR; pwd")
    assert ran(*shown, **given)[0] == f"\x061/2 a b yes /elsewhere\n{tmp_path}\n".encode()
    rank_exec.remove_recorded()
    assert list(tmp_path.iterdir()) == []
    assert ran(*shown, **given, BASILICA_WORLD_TARGET="4")[0] == f"\x061/4 yes1 {tmp_path}\n/\n".encode()


def test_what_a_process_was_started_with_is_known_whatever_it_made_of_it() -> None:
    told = "from basilica.rank.exec import _container_environment; print(_container_environment())"
    program = f"import os; os.environ['A'] = '2'; {told}"
    done = subprocess.run([sys.executable, "-c", program], env={"A": "1", "B": "x=y"}, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "{'A': '1', 'B': 'x=y'}"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"environment": {}}), '{"environment": 7, "directory": 8}']
)
def test_a_word_that_is_none_is_not_heeded(tmp_path: Path, text: str) -> None:
    (tmp_path / "basilica-rank-here.json").write_text(text)
    given = {"BASILICA_RANK": "3", "BASILICA_WORLD_TARGET": "5", "TMPDIR": str(tmp_path)}
    assert rank_exec.rank_of_this_container(given) == ({**given, "RANK": "3", "WORLD_SIZE": "5"}, os.getcwd())
