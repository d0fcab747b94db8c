"""The ledger of a run has what its processes say of themselves, cause by cause, and the exact sum."""

from pathlib import Path

import pytest

from tests.e2e.accounts import GOAL, TORCHRUN, Comparison, compare, table
from tests.e2e.server import LastingServer
from tests.support.exploring import HUNTING

# Short runs beside other tests: a process that waits half a second for a core is a hundredth of 50 s. Whole runs on a
# machine that does nothing else are within GOAL.
TOLERANCE = 0.05
SUM_SECONDS = 0.1  # the moment of a resize is known to the observer only by the answer to its request


def check(one: Comparison, tolerance: float) -> None:
    assert abs(one.sum_error) < SUM_SECONDS, one.sum_error
    assert one.worst <= tolerance, table([one])


# The seeds are those of runs with a hang and a kill, and with a raise.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "seed"), [("python", 5004), (TORCHRUN, 5005)], ids=["python", "torchrun"])
def test_the_ledger_is_what_the_processes_say(server: LastingServer, tmp_path: Path, launcher: str, seed: int) -> None:
    check(compare(server, tmp_path / "run", launcher, seed), TOLERANCE)


@pytest.mark.hunt
@pytest.mark.skipif(not HUNTING, reason="`make hunt` explores it")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("launcher", ["python", TORCHRUN], ids=["python", "torchrun"])
def test_the_ledgers_of_many_runs_are_what_the_processes_say(
    server: LastingServer, tmp_path: Path, launcher: str
) -> None:
    found = [compare(server, tmp_path / str(seed), launcher, seed) for seed in range(25)]
    assert not [each for each in found if each.worst > 2 * GOAL], table(found)
