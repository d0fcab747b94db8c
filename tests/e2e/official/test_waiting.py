"""The published client's waits, with every way that they can end."""

from typing import Any

from tests.e2e.official.versions import only_in_0_36_8


def test_waits_for_the_world_return_when_it_is_there(seen: Any) -> None:
    returned = [{"returned": None}, {"returned": None}]
    assert seen == {"at_once": returned, "running": returned, "ended": returned}


def test_a_world_that_does_not_come_times_out(seen: Any, version: str) -> None:
    assert seen["deployed"]["raised"] == "BelowMinimumWorld"
    facts = seen["deployed"]["facts"]
    assert (facts["ready"], facts["required_min"], facts["timeout"]) == (0, 2, 1)
    if version == "0.29.0":
        assert seen["found"]["returned"] == "pending"
    else:
        assert seen["found"]["raised"] == "DeploymentNotFound"


@only_in_0_36_8
def test_wait_until_complete_returns_the_final_world(seen: Any) -> None:
    assert seen == {"ready": 2, "target": 2, "min": 1, "max": 3, "below_minimum": False}


@only_in_0_36_8
def test_wait_until_complete_tells_how_ranks_failed(seen: Any) -> None:
    waited = seen["waited"]
    assert waited["raised"] == "BelowMinimumWorld"
    assert f"UD '{seen['name']}' reached terminal phase 'failed' (" in waited["text"]
    assert "rank 1: exit_code=3 reason=Error" in waited["text"]
    assert (waited["facts"]["required_min"], waited["facts"]["timeout"]) == (2, 30)


@only_in_0_36_8
def test_wait_until_complete_async_does_the_same(seen: Any) -> None:
    assert seen["world"] == {"ready": 2, "target": 2, "min": 1, "max": 3, "below_minimum": False}
    assert seen["error"] == "BelowMinimumWorld"
    assert "reached terminal phase 'failed' (rank 0: exit_code=7 reason=Error)" in seen["text"]
    assert seen["already"]["raised"] == "UDTerminalState"


@only_in_0_36_8
def test_wait_until_complete_refuses_what_is_over(seen: Any) -> None:
    assert [(s["raised"], s["facts"]["phase"], s["facts"]["requested_target"]) for s in seen] == [
        ("UDTerminalState", "succeeded", None),
        ("UDTerminalState", "failed", None),
    ]


@only_in_0_36_8
def test_wait_until_complete_times_out_while_the_run_goes_on(seen: Any) -> None:
    assert seen["raised"] == "BelowMinimumWorld"
    assert "timed out after 1s (phase=ready, ready=2, target=2)" in seen["text"]


@only_in_0_36_8
def test_a_failed_run_ends_the_wait_for_its_target(seen: Any) -> None:
    assert seen["raised"] == "BelowMinimumWorld"
    assert "reached terminal phase 'failed' before world reached target" in seen["text"]
    assert seen["facts"]["required_min"] == 2


@only_in_0_36_8
def test_a_cancelled_run_ends_the_wait(seen: Any) -> None:
    assert seen["waited"]["raised"] == "BelowMinimumWorld"
    assert "reached terminal phase 'cancelled'" in seen["waited"]["text"]
    assert [e["termination_reason"] for e in seen["exits"]] == ["Cancelled", "Cancelled"]
    assert seen["phase"] == "cancelled"


def test_time_to_live_cancels_a_run(seen: Any) -> None:
    assert [(e["rank"], e["termination_reason"]) for e in seen["exits"]] == [(0, "Cancelled"), (1, "Cancelled")]
    assert seen["ready"] == 0
    assert seen["event"] == "Cancelled"
