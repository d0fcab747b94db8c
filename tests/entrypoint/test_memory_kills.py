"""Where a driven rank finds the kernel's count of kills for memory: it differs between the versions of cgroups."""

from pathlib import Path

import pytest

from basilica.rank import agent

ENVIRONMENT = {"BASILICA_RANK": "0", "BASILICA_RDZV_ENDPOINT": "127.0.0.1:1"}


@pytest.mark.parametrize("version", [0, 1])
def test_the_counter_that_is_there_is_read(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = (tmp_path / "memory.events", tmp_path / "memory.oom_control")
    monkeypatch.setattr(agent, "MEMORY_EVENTS", tuple(map(str, counters)))
    rank = agent.Agent(["true"], ENVIRONMENT, tmp_path)
    assert rank._memory_kills() == 0
    counters[version].write_text("oom_kill_disable 0\noom_kill 3\n")
    assert agent.Agent(["true"], ENVIRONMENT, tmp_path)._memory_kills() == 3
