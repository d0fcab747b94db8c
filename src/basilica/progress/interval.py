"""The number of steps between two snapshots. Pure.

Two rules hold, and the longer interval of the two is taken. The cost rule: the time that training is blocked stays
under one percent. The loss rule (Young, 1974; Daly, 2006): with a mean time M between failures and a cost C of a
snapshot, an interval of sqrt(2 C M) makes the sum of both losses least: the time in snapshots, and the work since the
last one that a failure undoes. A run without failures has a mean time of at least its own age.
"""

import math

COST_SHARE = 0.01
STEPS_MAX = 1_000_000


def steps_between(*, step_seconds: float, blocked_seconds: float, age_seconds: float, failures: int) -> int:
    """Return the interval in steps, at least 1."""
    if step_seconds <= 0 or blocked_seconds <= 0:
        return 1
    by_cost = blocked_seconds / (COST_SHARE * step_seconds)
    mean_time = max(age_seconds, step_seconds) / (failures + 1)
    by_loss = math.sqrt(2 * blocked_seconds * mean_time) / step_seconds
    return min(STEPS_MAX, max(1, math.ceil(by_cost), round(by_loss)))
