"""The rendezvous that the gate asks, and a look at what a test has left running."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from basilica.machine.strays import with_environment
from tests.rendezvous.conftest import ours

__all__ = ["ours"]

MARK = "ENTRYPOINT_TEST"
PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def nothing_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks outlive an agent that is killed: who kills one ends its rank too."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    end = time.monotonic() + PATIENCE_S
    while left := with_environment({f"{MARK}={tmp_path}".encode()}):
        assert time.monotonic() < end, f"the test left processes running: {left}"
        time.sleep(0.02)
