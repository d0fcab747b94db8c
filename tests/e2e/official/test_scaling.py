"""Changing how many ranks there are with the published client."""

from typing import Any

CLEAN = {"exit_code": 0, "termination_reason": "Completed", "restart_count": 0}


def test_a_run_grows_and_shrinks(seen: Any) -> None:
    def running(count: int) -> list[list[object]]:
        return [[rank, "Running"] for rank in range(count)]

    def world(ready: int, target: int) -> dict[str, object]:
        return {"ready": ready, "target": target, "min": 1, "max": 4, "below_minimum": False}

    assert seen["before"] == running(2)
    assert seen["asked_up"]["target"] == 4
    assert seen["grown"] == running(4)
    assert seen["grown_world"] == world(4, 4)
    assert seen["asked_down"]["target"] == 2
    assert seen["shrunk"] == running(2)
    assert seen["shrunk_world"] == world(2, 2)
    # Each rank came up once, and only the highest two were told to go.
    said = [line for line in seen["logs"] if line.endswith((" up", " drained"))]
    assert said == ["0| up", "1| up", "2| drained", "2| up", "3| drained", "3| up"]
    assert seen["exits"] == [{"rank": 0, **CLEAN}, {"rank": 1, **CLEAN}]
    assert [tuple(event) for event in seen["events"] if event[0].startswith("Scale")] == [
        ("ScaleRequested", "a world of 4 wanted"),
        ("ScaleObserved", "world goes from 2 to 4 ranks"),
        ("ScaleRequested", "a world of 2 wanted"),
        ("ScaleObserved", "world goes from 4 to 2 ranks"),
    ]


def test_a_rank_that_was_dropped_comes_back_as_a_new_one(seen: Any) -> None:
    assert seen["back"] == [[0, "Running"], [1, "Running"]]
    assert seen["exits"] == [{"rank": 0, **CLEAN}, {"rank": 1, **CLEAN}]
    assert sorted(seen["asked"].values()) == [2, 2], "equal events are counted"


def test_a_size_out_of_bounds_is_refused(seen: Any) -> None:
    for target in (0, 1, 4, 2**32 - 1):
        by_client, by_server = seen["by_client"][str(target)], seen["by_server"][str(target)]
        assert by_client["raised"] == "WorldSizeOutOfBounds"
        assert by_client["facts"]["requested"] == target
        assert by_server["raised"] == "ValueError"
        assert f"world size {target} is not within 2..3" in by_server["text"]
    assert seen["negative"]["raised"] == "OverflowError"
    assert seen["world"] == {"ready": 2, "target": 2, "min": 2, "max": 3, "belowMinimum": False}


def test_an_ended_run_cannot_be_scaled(seen: Any, version: str) -> None:
    """0.36.8 knows it before it asks; 0.29.0 hears it from the server."""
    by_client, by_server = seen["by_client"], seen["by_server"]
    assert by_server["raised"] == "RuntimeError"
    assert by_server["text"] == "Conflict: run 'ended' has ended (succeeded); it cannot be scaled to 3"
    if version == "0.29.0":
        assert by_client == by_server
    else:
        assert by_client["raised"] == "UDTerminalState"
        assert (by_client["facts"]["phase"], by_client["facts"]["requested_target"]) == ("succeeded", 3)


def test_a_run_of_which_a_rank_has_finished_cannot_be_scaled(seen: Any) -> None:
    assert seen["raised"] == "RuntimeError"
    assert seen["text"].startswith("Conflict: a rank of 'closing' has finished already")
