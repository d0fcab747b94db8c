"""The simulation finds each fault that is put into the controller on purpose, within a bounded search."""

import pytest

from .explore import walk
from .mutants import MUTANTS, Mutant

WALKS = 3000
FIRST_SEED = 20_000


def find(mutant: Mutant) -> int | None:
    """How many walks it took; None if none of them noticed."""
    with mutant.applied():
        for number in range(WALKS):
            try:
                walk(FIRST_SEED + number, 60)
            except AssertionError:
                return number + 1
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_notices(mutant: Mutant) -> None:
    assert find(mutant) is not None, f"{WALKS} walks noticed nothing"


def test_a_mutant_is_gone_after_its_block() -> None:
    mutant = MUTANTS[2]
    with mutant.applied():
        assert mutant.function(3, 3)
    assert not mutant.function(3, 3)
