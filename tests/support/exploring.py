"""How long Hypothesis explores, and whether it goes where it has not been.

`make test` explores the same cases every time, so that a red build is the change's doing. `make hunt` looks for new
ones, and for longer; what it finds is printed with what brings it back.
"""

import os

from hypothesis import settings

HUNTING = os.environ.get("HYPOTHESIS_PROFILE") == "hunt"
LONGER = 20

settings.register_profile("gate", deadline=None, print_blob=True, derandomize=True, database=None)
settings.register_profile("hunt", deadline=None, print_blob=True, max_examples=100 * LONGER)


def load_profile() -> None:
    settings.load_profile("hunt" if HUNTING else "gate")


def examples(number: int) -> int:
    """What a test may afford that is not content with a hundred. Without Hypothesis it is marked with `hunt`."""
    return number * LONGER if HUNTING else number
