"""Whatever happens to the replicas and to the store: no wrong mean, no two results, no wait without end."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basilica.diloco import exchange, rounds
from basilica.diloco.effects import Flow, Now
from tests.diloco.explore import schedule_of
from tests.diloco.simulation import Schedule, Simulation, Violation
from tests.support.exploring import examples


@st.composite
def schedules(draw: Callable[..., Any]) -> Schedule:
    world = draw(st.integers(1, 4))
    return Schedule(
        seed=draw(st.integers(0, 10**6)),
        world=world,
        rounds=draw(st.integers(1, 4)),
        quorum=draw(st.none() | st.integers(1, world)),
        faults=draw(st.integers(0, 10)),
        crash=draw(st.sampled_from((0.0, 0.02, 0.2))),
        stall=draw(st.sampled_from((0.0, 0.05))),
        rot=draw(st.sampled_from((0.0, 0.02))),
        torn=draw(st.booleans()),
        stale_listings=draw(st.booleans()),
        other_numbers=draw(st.booleans()),
        impostor=draw(st.booleans()),
        leftovers=draw(st.booleans()),
    )


@settings(max_examples=examples(100))
@given(schedules())
def test_any_schedule_keeps_the_promises(schedule: Schedule) -> None:
    Simulation(schedule).run()


@pytest.mark.slow
def test_a_thousand_random_schedules() -> None:
    explore(schedule_of(seed) for seed in range(1000))


def test_without_faults_every_replica_is_counted_in_one_attempt() -> None:
    simulation = Simulation(Schedule(seed=1, world=5, rounds=4, faults=0)).run()
    assert sorted(simulation.finished) == [0, 1, 2, 3]
    for outcome, _ in simulation.finished.values():
        assert outcome.attempt == 0
        assert dict(outcome.weights) == {rank: rank + 1.0 for rank in range(5)}
    assert not simulation.errors


def test_an_impostor_is_refused_and_the_round_is_right() -> None:
    simulation = Simulation(Schedule(seed=3, world=3, rounds=1, faults=0, impostor=True)).run()
    assert sum(replica.refused for replica in simulation.replicas) == 1
    assert "two replicas claim" in str(simulation.errors[0])


def no(*_: Any) -> Flow[bool]:
    """A check that finds nothing."""
    yield Now()
    return False


def unchecked(self: Any, rank: int, chunk: int, piece: range, *wires: Any) -> Flow[Any]:
    """What a replica would do that trusts the store."""
    yield Now()
    if rank == self.rank:
        return self.numbers.wire(chunk)
    wire = wires[0]
    offset = self.layout.chunks[chunk].offset - self.layout.chunks[piece[0]].offset
    return None if wire is None else wire[offset : offset + self.layout.chunks[chunk].length]


def drowsy(seed: int, **more: Any) -> Schedule:
    """Replicas that sleep while others finish and remove the round."""
    return Schedule(seed=seed, world=2, rounds=4, quorum=1, stall=0.1, **more)


@dataclass(frozen=True)
class Broken:
    """A protocol that lacks something, and schedules of which at least one must show it."""

    owner: Any
    name: str
    replacement: Any
    schedules: list[Schedule]


BROKEN = {
    "chunks are not checked": Broken(
        exchange.Exchange, "_chunk", unchecked, [schedule_of(seed) for seed in range(200)]
    ),
    "a failure is believed after its round was removed": Broken(
        rounds.Round, "_check_genuine", no, [drowsy(seed, faults=12) for seed in range(50)]
    ),
    "a result is believed after its attempt had failed": Broken(
        exchange.Exchange,
        "_was_left",
        no,
        [drowsy(seed, faults=16, crash=0.1, other_numbers=True, impostor=seed % 2 == 0) for seed in range(1550, 1610)],
    ),
}


def explore(schedules: Iterable[Schedule]) -> None:
    for schedule in schedules:
        Simulation(schedule).run()


@pytest.mark.parametrize("what", BROKEN)
def test_the_simulation_finds_a_protocol_that_is_broken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BROKEN[what]
    explore(broken.schedules)
    monkeypatch.setattr(broken.owner, broken.name, broken.replacement)
    with pytest.raises(Violation):
        explore(broken.schedules)
