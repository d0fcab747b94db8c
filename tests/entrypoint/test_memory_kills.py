"""Where a driven rank finds the kernel's count of kills for memory: it differs between the versions of cgroups."""

from pathlib import Path

import pytest

from basilica.rank import agent
from basilica.rendezvous.orders import Order

ENVIRONMENT = {"BASILICA_RANK": "0", "BASILICA_RDZV_ENDPOINT": "127.0.0.1:1"}


@pytest.mark.parametrize("version", [0, 1])
def test_the_counter_that_is_there_is_read(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = (tmp_path / "memory.events", tmp_path / "memory.oom_control")
    monkeypatch.setattr(agent, "MEMORY_EVENTS", tuple(map(str, counters)))
    rank = agent.Agent(["true"], ENVIRONMENT, tmp_path)
    assert rank._memory_kills() == 0
    assert "BASILICA_MEMORY_EVENTS" not in rank._rank_environment(Order(attempt=0, run=True))
    counters[version].write_text("oom_kill_disable 0\noom_kill 3\n")
    found = agent.Agent(["true"], ENVIRONMENT, tmp_path)
    assert found._memory_kills() == 3
    given = found._rank_environment(Order(attempt=0, run=True))
    assert given["BASILICA_MEMORY_EVENTS"] == str(counters[version]), "torchrun's agent counts there, too"
