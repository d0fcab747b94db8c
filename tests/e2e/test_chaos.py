"""The server is killed at random moments under twenty live runs; nothing is lost, doubled or left behind."""

import os
import random
from pathlib import Path

import pytest

from tests.e2e.chaos import Chaos


def _survive(directory: Path, kills: int) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    chaos = Chaos(directory, seed, kills)
    chaos.run()
    assert not chaos.faults, f"replay with CHAOS_SEED={seed}:\n" + "\n".join(chaos.faults)
    assert sum(chaos.finished.values()) >= chaos.width, chaos.finished


@pytest.mark.timeout(300)
def test_the_server_is_killed_a_few_times(tmp_path: Path) -> None:
    _survive(tmp_path, kills=8)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_the_server_is_killed_fifty_times(tmp_path: Path) -> None:
    _survive(tmp_path, kills=50)
