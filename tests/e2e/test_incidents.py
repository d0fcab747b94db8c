"""What befalls a torchrun world is told at once, blamed on whom it befell first, and nothing is invented."""

import os
import random
from pathlib import Path

import pytest

from tests.e2e.incidents import IN_PLACE, LAUNCHERS, Run, hunt, judge, judge_end, judge_quiet, table
from tests.e2e.server import LastingServer
from tests.support.exploring import HUNTING

SLACK_SECONDS = 4.0  # beside other tests: the figures are measured on a machine that does nothing else


@pytest.mark.timeout(300)
def test_incidents_of_each_kind_of_evidence_are_told(server: LastingServer, tmp_path: Path) -> None:
    run = Run(server, tmp_path / "run", IN_PLACE)
    try:
        outcomes = [
            judge(run, "raise", 1, 1, n=1, slack=SLACK_SECONDS),
            judge(run, "early", 0, 1, n=2, slack=SLACK_SECONDS),
        ]
        outcomes.append(judge(run, "agent", 1, 0, n=3, slack=SLACK_SECONDS))
        faults = [fault for outcome in outcomes for fault in outcome.faults]
        assert not faults + judge_quiet(run, 1.5) + judge_end(run)
    finally:
        run.close()


@pytest.mark.hunt
@pytest.mark.skipif(not HUNTING, reason="`make hunt` explores it")
@pytest.mark.timeout(7200)
def test_incidents_at_random_are_told(server: LastingServer, tmp_path: Path) -> None:
    seed = int(os.environ.get("INCIDENTS_SEED") or random.randrange(10**6))
    outcomes, faults = hunt(server, tmp_path, seed, 200, lambda _: None)
    faults += [f"{each.kind} ({each.launcher}): {fault}" for each in outcomes for fault in each.faults]
    assert len({each.launcher for each in outcomes}) == len(LAUNCHERS)
    assert not faults, f"replay with INCIDENTS_SEED={seed}:\n{table(outcomes)}\n" + "\n".join(faults)
