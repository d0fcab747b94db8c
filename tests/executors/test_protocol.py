"""The rules that all executors share, and what it costs to import them."""

import io
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from basilica import executors
from basilica.executors import ReplicaHandle, gather_logs
from basilica.executors.environment import replica_environment
from basilica.executors.outcomes import Outcome, replica_result
from basilica.executors.progress import Board, live_table
from basilica.executors.protocol import FAILED, PENDING, RUNNING, SUCCEEDED

HANDLE = ReplicaHandle(1, "local", {"job_name": "gang"})


def test_importing_executors_loads_no_optional_package() -> None:
    code = (
        "import sys, basilica.executors as e\n"
        "e.LocalProcessExecutor, e.SageMakerExecutor, e.ModalSpawnExecutor, e.BasilicaExecutor, e.live_table\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    heavy = {"boto3", "botocore", "modal", "kubernetes", "rich", "obstore", "torch", "numpy", "httpx2"}
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize(
    ("package", "made", "extra"),
    [
        ("boto3", "SageMakerExecutor('image', 'role', 's3://x')", "sagemaker"),
        ("modal", "ModalSpawnExecutor('app')", "modal"),
    ],
)
def test_a_missing_package_is_told_by_the_name_of_its_extra(package: str, made: str, extra: str) -> None:
    name = made.partition("(")[0]
    code = f"import sys; sys.modules[{package!r}] = None\nfrom basilica.executors import {name}\n{made}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert f"RuntimeError: {name} needs {package}: pip install 'basilica-train[{extra}]'" in done.stderr


def test_every_name_is_there() -> None:
    assert all(getattr(executors, name) is not None for name in executors.__all__)
    assert dir(executors) == sorted(executors.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = executors.nothing


def test_scalars_travel_as_variables_too() -> None:
    arguments = {"steps": 3, "lr": 0.5, "name": "x", "fast": False, "none": None, "layers": [1]}
    found = replica_environment(2, "m:f", arguments, remote=True)
    assert found == {
        "STEPS": "3",
        "LR": "0.5",
        "NAME": "x",
        "FAST": "false",
        "WORLD_SIZE": "2",
        "ENTRYPOINT": "m:f",
        "ENTRYPOINT_ARGS": '{"steps": 3, "lr": 0.5, "name": "x", "fast": false, "none": null, "layers": [1]}',
    }


def test_an_argument_does_not_replace_what_replicas_need() -> None:
    found = replica_environment(2, "m:f", {"path": "/data", "world_size": 99, "replica_rank": 7}, remote=True)
    assert (found["WORLD_SIZE"], "PATH" in found, "REPLICA_RANK" in found) == ("2", False, False)


def test_what_remote_backends_leave_out() -> None:
    with pytest.warns(UserWarning, match="'where' of m:f") as told:
        found = replica_environment(2, "m:f", {"where": Path("/x"), "rank_env": "R", "n": 1}, remote=True)
    assert found["ENTRYPOINT_ARGS"] == '{"n": 1}'
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "RANK_ENV" in replica_environment(2, "m:f", {"rank_env": "R"}, remote=False)


@pytest.mark.parametrize(
    ("status", "given", "code"),
    [
        (SUCCEEDED, None, 0),
        (FAILED, None, 1),
        (FAILED, 0, 1),
        (FAILED, 137, 137),
        (RUNNING, 5, None),
        (PENDING, 0, None),
    ],
)
def test_exit_codes_of_results(status: str, given: int | None, code: int | None) -> None:
    assert replica_result(HANDLE, Outcome(status, given), 1.0)["exit_code"] == code


def test_a_replica_that_has_not_ended_says_so_and_what_it_waits_for() -> None:
    assert replica_result(HANDLE, Outcome(RUNNING), 1.5)["error"] == "still running after 1.5 s"
    assert replica_result(HANDLE, Outcome(PENDING, error="no node"), 2)["error"] == "still pending after 2 s: no node"
    assert replica_result(HANDLE, Outcome(SUCCEEDED), 2)["error"] is None


class Quiet:
    """Enough of an executor for its logs to be merged."""

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        return "<rank 1: no logs yet>" if handle.rank == 1 else f"a\nb {n_lines}\n"


def test_logs_are_merged_by_rank() -> None:
    handles: Sequence[ReplicaHandle] = [ReplicaHandle(rank, "local") for rank in (2, 0, 1)]
    merged = gather_logs(Quiet(), handles, n_lines=5)  # type: ignore[arg-type]
    assert merged == "0| a\n0| b 5\n1| <rank 1: no logs yet>\n2| a\n2| b 5\n"


def test_where_nobody_watches_a_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with live_table([HANDLE]) as on_change:
        for status in (PENDING, RUNNING, SUCCEEDED):
            on_change(HANDLE, status)
    assert capsys.readouterr().err == "rank 1 running\nrank 1 succeeded\n"


def drawn(board: Board, height: int) -> list[str]:
    console = Console(width=60, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(board, height=height)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_few_replicas_have_a_row_each() -> None:
    handles = [ReplicaHandle(rank, "local") for rank in range(3)]
    board = Board(handles, "gang")
    board.change(handles[1], RUNNING)
    board.change(handles[2], SUCCEEDED)
    lines = drawn(board, 24)
    assert lines[0] == "gang  1 pending  1 running  1 succeeded"
    assert [line.split()[:2] for line in lines[2:]] == [["0", "pending"], ["1", "running"], ["2", "succeeded"]]


def test_of_many_replicas_those_that_stand_out_are_shown() -> None:
    handles = [ReplicaHandle(rank, "local") for rank in range(1000)]
    board = Board(handles)
    for handle in handles:
        board.change(handle, RUNNING)
    board.change(handles[700], FAILED)
    lines = drawn(board, 10)
    assert lines[0] == "999 running  1 failed"
    assert lines[2].split()[:2] == ["700", "failed"]
    assert lines[-1] == "and 999 more"
    assert len(lines) < 10


def test_what_the_package_exports() -> None:
    assert executors.__all__ == [
        "BasilicaExecutor",
        "EKSExecutor",
        "LocalProcessExecutor",
        "ModalSpawnExecutor",
        "ReplicaHandle",
        "ReplicaResult",
        "SageMakerExecutor",
        "ServerlessExecutor",
        "gather_logs",
        "live_table",
    ]
