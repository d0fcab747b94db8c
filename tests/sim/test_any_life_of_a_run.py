"""Whatever exits, vanishes, lags or is resized, in any order, and whenever the controller dies: the promises hold.

The promises themselves are in simulation.py, checked at every turn and once more at the end of each life.
"""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.exploring import HUNTING, examples

from .explore import walk
from .moves import WEIGHTS, Move, make_spec
from .simulation import Simulation

few = st.integers(0, 2)
yes_or_no = st.integers(0, 1)


class AnyLife(RuleBasedStateMachine):
    """One rule for each move, so that Hypothesis may leave whole kinds of trouble out; teardown lets the run end."""

    def __init__(self) -> None:
        super().__init__()
        self.sim: Simulation | None = None

    @initialize(
        low=st.integers(1, 3),
        extra=few,
        room=few,
        restarts=st.integers(0, 3),
        resize=yes_or_no,
        bench=few,
        ttl=few,
        deadline=yes_or_no,
        start=yes_or_no,
        tombstones_show=st.booleans(),
        starts_at_once=st.booleans(),
    )
    def deploy(self, *, tombstones_show: bool, starts_at_once: bool, **spec: int) -> None:
        self.sim = Simulation(make_spec(**spec), tombstones_show=tombstones_show, starts_at_once=starts_at_once)

    def teardown(self) -> None:
        if self.sim is not None:
            self.sim.settle()


def _as_rule(move: Move) -> Callable[..., None]:
    def happens(self: AnyLife, n: int) -> None:
        assert self.sim is not None
        move(self.sim, n)

    happens.__name__ = move.__name__
    return happens


for _move in WEIGHTS:
    setattr(AnyLife, _move.__name__, rule(n=st.integers(0, 99))(_as_rule(_move)))

TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(
    max_examples=examples(150),
    stateful_step_count=80 if HUNTING else 40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


WALKS = examples(30)


@pytest.mark.hunt
@pytest.mark.parametrize("tenth", range(10))
def test_random_walks_end_well(tenth: int) -> None:
    for seed in range(tenth * WALKS, (tenth + 1) * WALKS):
        try:
            walk(seed, 60)
        except Exception as error:
            error.add_note(f"replay: python -m tests.sim.explore --seed {seed} --steps 60 --runs 1 --trace")
            raise


def test_a_walk_can_be_made_again_from_its_seed() -> None:
    first, second = walk(7, 60), walk(7, 60)
    assert (first.status, first.processes, first.now) == (second.status, second.processes, second.now)
