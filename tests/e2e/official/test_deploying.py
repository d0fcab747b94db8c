"""Deploying with the published client: commands, functions, sources; short, failing and second runs.

torchrun with its rendezvous is not what these tests are about: where a function is deployed, a double of torchrun,
first on the ranks' PATH, shows its arguments and runs the script with plain Python.
"""

import re
import shutil
from typing import Any

from tests.e2e.official.versions import only_in_0_29_0, only_in_0_36_8


def test_a_command_runs_in_a_shell_with_its_variables_expanded(seen: Any) -> None:
    assert seen == ["0| rank=0 min=1 target=2 a  b", "1| rank=1 min=1 target=2 a  b"]


def test_a_script_gets_arguments_and_environment(seen: Any) -> None:
    positional, environment, command_line = seen
    assert positional == "0=-- 1=first 2=a b"
    assert environment == "NCCL=WARN mine=it's $5"
    assert command_line.startswith("/bin/sh|-c|echo ")
    assert command_line.endswith("|--|first|a b|")


def test_the_default_gpu_of_the_client_is_no_obstacle_without_gpus(seen: Any, on_a_cluster: bool) -> None:
    """On a cluster a node has to have one."""
    if on_a_cluster:
        assert seen == []
    elif shutil.which("nvidia-smi") is None:
        [warning] = seen
        assert warning["type"] == "Warning"
        assert "ranks run on the CPU" in warning["message"]


def test_a_decorated_function_is_shipped_and_run(seen: Any, version: str) -> None:
    """With a double of torchrun, so only the launch itself: the command, its variables, the function."""
    assert seen["phase"] == "succeeded"
    assert seen["same"] == seen["name"]
    assert [line for line in seen["lines"] if "torchrun" not in line] == [
        "0| trained by rank 0",
        "1| trained by rank 1",
    ]
    backend, conf = (
        ("etcd-v2", "") if version == "0.29.0" else ("etcd", " --rdzv-conf=timeout=1500,last_call_timeout=900")
    )
    for rank, line in enumerate(line for line in seen["lines"] if "torchrun" in line):
        assert re.fullmatch(
            rf"{rank}\| torchrun --rdzv-backend={backend} --rdzv-endpoint=127(\.\d+){{3}}:\d+"
            rf" --rdzv-id={seen['name']}{conf}"
            r" --nnodes=1:4 --nproc-per-node=1 --max-restarts=10 /\S+\.py",
            line,
        )


def test_functions_deployed_at_once_do_not_mix(seen: Any) -> None:
    """The client lets every rank write the function to the same file in /tmp."""
    assert seen == {
        "first": ["0| this is the first", "1| this is the first"],
        "second": ["0| this is the second", "1| this is the second"],
    }


@only_in_0_29_0
def test_sources_of_0_29_0_are_shipped_and_run(seen: Any) -> None:
    assert [lines[1:] for lines in seen] == [["from a function"], ["from text"], ["from a file"], ["from a file"]]
    assert all(lines[0].startswith("torchrun --rdzv-backend=etcd-v2 ") for lines in seen)


def test_a_job_that_ends_between_two_looks_was_deployed(seen: Any) -> None:
    """The client only counts ready ranks, and deletes a run whose ranks it never saw ready."""
    assert seen["world"] == {"ready": 2, "target": 2, "min": 2, "max": 2, "below_minimum": False}
    assert seen["listed"] == "Succeeded"


def test_a_job_that_fails_at_once_is_not_deployed(seen: Any, version: str) -> None:
    """0.36.8 deletes what it could not deploy; 0.29.0 leaves it to be looked at."""
    assert seen["deployed"]["raised"] == "BelowMinimumWorld"
    assert seen["deployed"]["facts"]["ready"] == 0
    if version == "0.29.0":
        assert seen["found"] == {"returned": "failed"}
    else:
        assert seen["found"]["raised"] == "DeploymentNotFound"


def test_a_name_is_free_again_when_its_run_has_ended(seen: Any) -> None:
    assert seen["refused"]["raised"] == "RuntimeError"
    assert seen["refused"]["text"].startswith("Conflict: a live run is called 'same-name' already")
    assert seen["first"] in seen["refused"]["text"]
    assert seen["newest"] == seen["second"] != seen["first"]


def test_the_async_calls_do_the_same(seen: Any) -> None:
    assert (seen["scaled"], seen["ready"], seen["metrics"]) == (3, 3, 3)
    assert seen["logs"] == ["0| up", "1| up", "2| up"]
    assert seen["streamed"] == [[0, "0| up"], [0, "1| up"], [0, "2| up"]]
    assert {"Created", "WorldReady", "ScaleRequested", "ScaleObserved", "Succeeded"} <= set(seen["reasons"])
    assert seen["gone"] == "DeploymentNotFound"


@only_in_0_36_8
def test_leaving_the_with_block_deletes_the_run(seen: Any) -> None:
    assert seen == {"inside": "ready", "afterwards": "DeploymentNotFound", "rank_runs": False}
