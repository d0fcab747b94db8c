"""The examples run as they are written, against an embedded control plane of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from basilica.client import embedded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("state")
    yield directory
    embedded.shutdown(directory, cancel_runs=True)


def run(name: str, state_dir: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "BASILICA_STATE_DIR": str(state_dir), "BASILICA_IDLE_EXIT": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    told = (ROOT / "tests/docs/test_examples.py").read_text() + (ROOT / "tests/docs/test_docs.py").read_text()
    assert [p.name for p in (ROOT / "examples").glob("*.py") if p.name not in told] == []


def test_report_progress(state_dir: Path) -> None:
    said = run("report_progress.py", state_dir)
    assert "rank 1: step 99, loss " in said
    for rank in (0, 1):
        line = next(line for line in said.splitlines() if line.startswith(f"loss of rank {rank}: "))
        assert line.endswith(" at step 99")
        assert line.count(" at step ") == 5


def test_hello_gang(state_dir: Path) -> None:
    said = run("hello_gang.py", state_dir)
    assert "1| Good morning from rank 1 of 2" in said
    assert "{0: 'rank 0 was here', 1: 'rank 1 was here'}" in said


def test_failing_runs(state_dir: Path) -> None:
    said = run("failing_runs.py", state_dir)
    assert "exception: rank 1, exit code 1, Error" in said
    assert "its last line: ValueError: loss is NaN" in said
    assert "signal: rank 0, exit code 139, SIGSEGV" in said
    assert "memory: rank" in said


def test_torchrun_allreduce(state_dir: Path) -> None:
    said = run("torchrun_allreduce.py", state_dir)
    assert said.count("of 2: the sum is 3") == 2


def test_21_distributed_torchrun(state_dir: Path) -> None:
    assert "c10d" not in (ROOT / "examples/21_distributed_torchrun.py").read_text(), "it shows our own rendezvous"
    said = run("21_distributed_torchrun.py", state_dir)
    assert "3 ranks took part" in said
    assert said.rstrip().endswith("world: 3")


def test_22_distributed_with_bench(state_dir: Path) -> None:
    said = run("22_distributed_with_bench.py", state_dir)
    assert "bench Succeeded: measured over the loopback of " in said
    assert "\n      1024 bytes " in said
    assert "gloo: " in said
    assert "is not waiting for the network" in said
    assert said.rstrip().endswith("the training has succeeded")


def test_executor_hello(state_dir: Path) -> None:
    said = run("executor_hello.py", state_dir)
    assert "1 succeeded 2 None" in said
    assert "2 failed None exited with code 1: ValueError: rank 2 has had enough" in said
    assert said.rstrip().endswith("2| ValueError: rank 2 has had enough")


def test_diloco_demo(state_dir: Path, tmp_path: Path) -> None:
    said = run("diloco_demo.py", state_dir, "--curve", str(tmp_path / "loss.svg"))
    assert "rank 2 was ended by SIGKILL" in said
    assert "4 of 4 ranks exited 0" in said
    assert "60 rounds" in said
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("executor", ["local", "basilica"])
def test_diloco_torch(state_dir: Path, executor: str) -> None:
    tiny = ["--replicas", "2", "--steps", "6", "--sync-every", "3"]
    said = run("diloco_torch.py", state_dir, "--executor", executor, *tiny)
    first, second = (line.split() for line in said.splitlines() if " succeeded " in line and line[0].isdigit())
    assert first[2] == second[2], "both have the same model"
    assert float(first[2]) < 5
