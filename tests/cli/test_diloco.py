"""`basilica diloco …`, as a program, on runs of real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 100


def basilica(*arguments: str, state: Path) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "BASILICA_STATE_DIR": str(state), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "basilica.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS, env=env, cwd=ROOT)


def answer(*arguments: str, state: Path) -> Any:
    done = basilica(*arguments, "--json", state=state)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_is_started_inspected_resumed_with_another_world_and_cleaned(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/bucket"
    entrypoint = "tests.diloco.replicas:regression"
    started = answer(
        "run",
        entrypoint,
        "-n",
        "2",
        "-a",
        f"rendezvous_uri={uri}",
        "-a",
        "rounds=4",
        "-a",
        "timeout=60",
        state=tmp_path,
    )
    assert [result["status"] for result in started] == ["succeeded"] * 2

    found = answer("diloco", "inspect", uri, state=tmp_path)
    assert found["record"]["entrypoint"] == entrypoint
    assert found["record"]["arguments"]["rounds"] == 4
    assert len(found["rounds"]) == 4
    assert found["unaccounted"] == []
    said = basilica("diloco", "inspect", uri, state=tmp_path).stdout
    assert "tests.diloco.replicas:regression, 2 replicas, every 10 steps" in said
    assert "0 (160) 1 (160)" in said
    assert "finished" in said

    resumed = answer("diloco", "resume", uri, "-n", "3", "-a", "rounds=7", state=tmp_path)
    assert [result["status"] for result in resumed] == ["succeeded"] * 3
    assert len({result["result"] for result in resumed}) == 1
    found = answer("diloco", "inspect", uri, state=tmp_path)
    assert [len(entry["weights"]) for entry in found["rounds"]] == [2] * 4 + [3] * 3
    assert [(m["rank"], m["incarnation"]) for m in found["members"]] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]

    would = answer("diloco", "gc", uri, "--dry-run", state=tmp_path)
    removed = answer("diloco", "gc", uri, state=tmp_path)
    assert would == removed | {"removed": False}
    assert removed["objects"] > 0
    assert answer("diloco", "gc", uri, state=tmp_path)["objects"] == 0


def test_a_plan_with_a_store_that_was_measured(tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    store.write_text(json.dumps(answer("diloco", "bench", f"file://{tmp_path}/bucket", state=tmp_path)))
    known = ["--params", "1.3e9", "--replicas", "8", "--link", "200Mbit", "--step", "0.9s"]
    plan = answer("diloco", "plan", *known, "--store-bench", str(store), state=tmp_path)
    assert plan["reaches_goal"] is True
    assert plan["utilisation"] > 0.95
    said = basilica("diloco", "plan", *known, state=tmp_path).stdout
    assert f"sync_every={plan['sync_every']}, fragments=4" in said
    assert "times less than gradients at each step" in said
    said = basilica("diloco", "plan", *known, "--steps", "1k", state=tmp_path).stdout
    assert "1,000 steps are 6 rounds, and fewer than 32 cost" in " ".join(said.split())
    assert answer("diloco", "plan", *known, "--steps", "1k", state=tmp_path)["few_rounds"] is True
    said = basilica("diloco", "plan", *known[:4], "--link", "1Mbit", "--step", "900ms", state=tmp_path).stdout
    assert "the goal of 95% is out of reach over this link" in said


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["inspect", "file:///nonexistent"], 1, "holds no run of DiLoCo"),
        (["resume", "file:///nonexistent"], 1, "holds no run of DiLoCo"),
        (["gc", "nonsense"], 1, "has no scheme"),
        (["inspect", "ftp://host/run"], 1, "'ftp://host/run' cannot be opened"),
        (
            ["plan", "--params", "1e9", "--replicas", "2", "--link", "1Mbit", "--step", "1s", "--steps", "0"],
            2,
            "steps must",
        ),
        (["plan", "--params", "many", "--replicas", "2", "--link", "1Mbit", "--step", "1s"], 2, "write 1.3e9"),
        (["plan", "--params", "1e9", "--replicas", "2", "--link", "fast", "--step", "1s"], 2, "write 200Mbit"),
        (["plan", "--params", "1e9", "--replicas", "2", "--link", "0Mbit", "--step", "1s"], 2, "link must be"),
    ],
)
def test_what_cannot_be_meant(arguments: list[str], code: int, problem: str, tmp_path: Path) -> None:
    done = basilica("diloco", *arguments, state=tmp_path)
    assert done.returncode == code
    assert problem in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_several_runs_of_one_prefix_are_told_apart(tmp_path: Path) -> None:
    for run in ("first", "second"):
        (tmp_path / "bucket" / run).mkdir(parents=True)
        record = {"entrypoint": "train", "arguments": {}, "world_size": 1, "quorum": None, "settings": {}}
        (tmp_path / "bucket" / run / "run.json").write_text(json.dumps(record | {"created_at": 0.0}))
    uri = f"file://{tmp_path}/bucket"
    done = basilica("diloco", "inspect", uri, state=tmp_path)
    assert done.returncode == 1
    assert "holds the runs first, second; choose one with --run-id" in done.stderr
    assert answer("diloco", "inspect", uri, "--run-id", "second", state=tmp_path)["run_id"] == "second"
    done = basilica("diloco", "resume", uri, "--run-id", "first", state=tmp_path)
    assert "give --entrypoint package.module:function" in done.stderr
