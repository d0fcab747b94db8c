"""What the local executor is given, and what it says of it."""

from pathlib import Path
from typing import Any

import pytest

from basilica.executors import LocalProcessExecutor
from basilica.testing.executor_contract import SECONDS
from tests.executors.test_local import WAIT


@pytest.mark.parametrize(
    "wrong", [{"grace_seconds": "soon"}, {"grace_seconds": -1}, {"run_id": "a/b"}, {"run_id": ".."}]
)
def test_what_cannot_be_meant_is_said_before_anything_starts(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LocalProcessExecutor(state_dir=tmp_path / "state", **wrong)


def test_who_was_stopped_in_time_did_not_fail_first(tmp_path: Path) -> None:
    with LocalProcessExecutor(state_dir=tmp_path / "state", grace_seconds=2) as executor:
        handles = executor.launch_replicas(2, WAIT, {"directory": str(tmp_path)}, timeout=1)
        results = executor.collect(handles, timeout=SECONDS)
    assert [result["error"] for result in results] == ["stopped, since it had not ended within 1 s"] * 2


def test_a_function_gets_arguments_that_are_no_json(tmp_path: Path) -> None:
    def tell(data: bytes, pair: tuple[int, int]) -> list[object]:
        import os

        return [len(data), type(pair).__name__, "DATA" in os.environ, os.environ["ENTRYPOINT_ARGS"]]

    with LocalProcessExecutor(state_dir=tmp_path / "state") as executor:
        handles = executor.launch_replicas(1, tell, {"data": b"xyz", "pair": (1, 2)})
        (result,) = executor.collect(handles, timeout=SECONDS)
    assert result["result"] == [3, "tuple", False, '{"pair": [1, 2]}']
