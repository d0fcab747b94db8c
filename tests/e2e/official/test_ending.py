"""How ranks end, as the published client tells it."""

from typing import Any


def test_every_way_to_end_is_told_apart(seen: Any) -> None:
    """An own exit with 137 is not a kill, and a run that needs one rank goes on while it has one."""
    assert seen["meanwhile"] == {
        "phase": "ready",
        "exits": [],
        "world": {"ready": 1, "target": 6, "min": 1, "max": 6, "below_minimum": False},
    }
    assert [(e["rank"], e["exit_code"], e["termination_reason"], e["restart_count"]) for e in seen["exits"]] == [
        (0, 0, "Completed", 0),
        (1, 3, "Error", 0),
        (2, 137, "Error", 0),
        (3, 137, "SIGKILL", 0),
        (4, 139, "SIGSEGV", 0),
        (5, 127, "Error", 0),
    ]
    assert [f"rank {rank} is lost" in message for rank, message in enumerate(sorted(seen["lost"]), 1)] == [True] * 5


def test_one_failure_ends_a_gang_that_needs_everybody(seen: Any) -> None:
    assert [(e["rank"], e["termination_reason"]) for e in seen["exits"]] == [
        (0, "Cancelled"),
        (1, "Error"),
        (2, "Cancelled"),
    ]
    assert seen["exits"][1]["exit_code"] == 3
    assert (seen["state"], seen["status"]) == ("Failed", True)
    assert seen["message"].startswith("rank 1 exited with code 3")
    assert seen["world"] == {"ready": 0, "target": 3, "min": 3, "max": 3, "below_minimum": True}
    assert {"RankFailed", "Failed"} <= set(seen["warnings"])


def test_restarts_are_counted(seen: Any) -> None:
    assert [(e["rank"], e["exit_code"], e["restart_count"]) for e in seen["exits"]] == [(0, 0, 0), (1, 0, 1)]
    assert seen["ranks"] == [[0, "Succeeded", 0], [1, "Succeeded", 1]]
    assert seen["metrics"] == 1
    assert seen["reasons"] == ["RankRestarted", "RankFailed"]
