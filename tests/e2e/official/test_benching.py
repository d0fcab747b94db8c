"""The bench probe as the published client sees it: a result while the run goes on, or the reason why there is none."""

from typing import Any

from tests.e2e.official.versions import only_in_0_36_8


def test_a_bench_that_is_asked_for_measures_while_the_run_goes_on(seen: Any, version: str) -> None:
    assert seen["while_running"] == "ready"
    assert seen["block"]["mode"] == "on-start"
    assert seen["block"]["message"].startswith("measured ")
    assert seen["result"]["p50"] > 0
    assert seen["result"]["sizes"]
    assert seen["ready"] == 2
    assert [event[:2] for event in seen["events"]] == [["Normal", "BenchSucceeded"], ["Normal", "BenchStarted"]]
    if version == "0.36.8":
        diagnostics = seen["diagnostics"]
        assert (diagnostics["mode"], diagnostics["phase"]) == ("on-start", "Succeeded")
        assert diagnostics["last_attempt_outcome"] == "success"
        assert diagnostics["message"] == seen["block"]["message"]
        assert diagnostics["completed_at"] != "None"


def test_a_bench_that_is_off_is_not_there(seen: Any) -> None:
    assert seen == {"block": None, "result": None, "diagnostics": None}


@only_in_0_36_8
def test_waiting_for_the_bench_ends(seen: Any) -> None:
    assert seen["best_effort"]["deployed"] == {"returned": "ready"}
    assert seen["best_effort"]["heard"] == []
    assert seen["required"] == {"deployed": {"returned": "ready"}, "heard": []}
    assert seen["off"] == {"deployed": {"returned": "ready"}, "heard": []}


@only_in_0_36_8
def test_a_strict_bench_measures_too(seen: Any) -> None:
    assert seen == "on-start"


def test_a_run_that_ends_first_has_its_bench_skipped(seen: Any) -> None:
    assert seen == "Skipped"
