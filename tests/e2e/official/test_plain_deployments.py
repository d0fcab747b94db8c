"""Deployments of the published client without a `distributed` block."""

from typing import Any


def test_a_plain_deployment_runs_its_command_as_it_stands(seen: Any) -> None:
    assert seen == {
        "name": "plain",
        "replicas": [2, 2],
        "state": ["Active", "ready"],
        "lines": ["0| zero a b got $HOME", "1| zero a b got $HOME"],
        "gone": "DeploymentNotFound",
    }


def test_source_code_is_deployed_and_waited_for(seen: Any) -> None:
    assert seen == [["Active", "serving as text\n"], ["Active", "serving as a function\n"]]


def test_a_plain_deployment_that_fails_says_so(seen: Any) -> None:
    """The client leaves the reason out of what it raises, and keeps it in the deployment's message."""
    assert seen["deployed"]["raised"] == "DeploymentFailed"
    assert seen["message"].startswith("rank 0 exited with code 4")


def test_an_image_alone_is_nothing_to_run(seen: Any) -> None:
    assert seen["raised"] == "ValueError"
    assert "there is nothing to run: give a command" in seen["text"]


def test_a_restart_gives_every_rank_a_fresh_start(seen: Any) -> None:
    assert seen["answer"] is True
    assert seen["started"] == ["0", "0", "1", "1"]
    assert seen["running"] == [[0, "Running", 0], [1, "Running", 0]]
    assert [(e["rank"], e["exit_code"], e["restart_count"]) for e in seen["exits"]] == [(0, 0, 0), (1, 0, 0)]
    assert seen["ended"]["raised"] == "RuntimeError"
    assert seen["ended"]["text"] == "Conflict: run 'restarted' has ended (succeeded)"
