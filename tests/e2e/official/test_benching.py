"""The bench probe, which this server does not have yet: asked for, it is skipped with a reason and disturbs nothing."""

from typing import Any

import pytest

from tests.e2e.official.versions import only_in_0_36_8

pytestmark = pytest.mark.slow


def test_a_bench_that_is_asked_for_is_skipped_with_a_message(seen: Any, version: str) -> None:
    assert seen["while_running"] == "ready"
    assert seen["block"]["mode"] == "on-start"
    assert seen["block"]["message"]
    assert seen["result"] is None
    assert seen["ready"] == 2
    assert seen["events"] == [["Normal", "BenchSkipped", seen["block"]["message"]]]
    if version == "0.36.8":
        diagnostics = seen["diagnostics"]
        assert (diagnostics["mode"], diagnostics["phase"]) == ("on-start", "Skipped")
        assert diagnostics["last_attempt_outcome"] == "skipped"
        assert diagnostics["message"] == seen["block"]["message"]
        assert diagnostics["completed_at"] is not None


def test_a_bench_that_is_off_is_not_there(seen: Any) -> None:
    assert seen == {"block": None, "result": None, "diagnostics": None}


@only_in_0_36_8
def test_waiting_for_the_bench_ends(seen: Any) -> None:
    assert seen["best_effort"]["deployed"] == {"returned": "ready"}
    [warning] = seen["best_effort"]["heard"]
    assert "bench probe phase=Skipped message=" in warning
    assert seen["required"]["deployed"]["raised"] == "DistributedError"
    assert seen["off"] == {"deployed": {"returned": "ready"}, "heard": []}


@only_in_0_36_8
def test_a_strict_bench_is_skipped_too(seen: Any) -> None:
    assert seen == "on-start"
