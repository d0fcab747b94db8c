"""The automatic interval: cheap, and the shorter the more often a run fails."""

from hypothesis import given
from hypothesis import strategies as st

from basilica.progress.interval import COST_SHARE, steps_between

seconds = st.floats(1e-4, 1e4)


@given(step=seconds, blocked=st.floats(1e-5, 100), age=st.floats(0, 1e7), failures=st.integers(0, 1000))
def test_snapshots_cost_at_most_their_share(step: float, blocked: float, age: float, failures: int) -> None:
    steps = steps_between(step_seconds=step, blocked_seconds=blocked, age_seconds=age, failures=failures)
    assert steps >= 1
    assert blocked <= COST_SHARE * step * steps * (1 + 1e-9) or steps == 1_000_000


def test_a_run_that_fails_more_often_saves_more_often() -> None:
    steps = [
        steps_between(step_seconds=0.1, blocked_seconds=0.01, age_seconds=36_000, failures=n) for n in (0, 10, 100)
    ]
    assert steps == [268, 81, 27]


def test_a_snapshot_that_costs_nothing_is_taken_at_every_step() -> None:
    assert steps_between(step_seconds=1.0, blocked_seconds=0.0, age_seconds=100, failures=0) == 1
