"""Whatever happens to the replicas and to the store: no wrong mean, no two results, no wait without end."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basilica.diloco import documents, exchange, housekeeping, rounds, sequence
from basilica.diloco.effects import Flow, Now
from basilica.diloco.errors import RoundConflict
from tests.diloco.explore import schedule_of
from tests.diloco.simulation import RequestFailed, Schedule, Simulation, Violation
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
        error=draw(st.sampled_from((0.0, 0.02, 0.2))),
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


@pytest.mark.hunt
def test_random_schedules_keep_the_promises() -> None:
    explore(schedule_of(seed) for seed in range(examples(150)))


def test_without_faults_every_replica_is_counted_in_one_attempt() -> None:
    simulation = Simulation(Schedule(seed=1, world=5, rounds=4, faults=0)).run()
    assert sorted(simulation.finished) == [0, 1, 2, 3]
    for outcome, _ in simulation.finished.values():
        assert outcome.attempt == 0
        assert dict(outcome.weights) == {rank: rank + 1.0 for rank in range(5)}
    assert not simulation.errors


@pytest.mark.parametrize("quorum", [None, 1])
def test_a_call_that_failed_at_any_request_is_repeated_and_nobody_is_refused(quorum: int | None) -> None:
    failed = Counter[str]()
    for seed in range(60):
        simulation = Simulation(unanswered(seed, quorum=quorum)).run()
        assert sorted(simulation.finished) == [0, 1, 2, 3, 4, 5]
        assert not any(isinstance(error, RoundConflict) for error in simulation.errors)
        failed.update(event.partition(": ")[2] for event in simulation.events if "fails" in event)
    everywhere = {f"{what} fails, {fate}" for what in ("List", "Finish", "Create") for fate in ("before", "after")}
    everywhere |= {"Create fails, late", "Create fails, twice", "Delete fails, before", "Delete fails, late"}
    assert everywhere <= failed.keys()


def test_the_wrong_mean_of_a_call_that_moves_on_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only that its housekeeping failed: the numbers of one round are counted in the next."""
    monkeypatch.setattr(sequence.RoundSequence, "play", moves_first)
    monkeypatch.setattr(RequestFailed, "is_of", lambda *_: True)
    found = set()
    for seed in range(60):
        try:
            Simulation(unanswered(seed)).run()
        except Violation as violation:
            found.add(str(violation))
    assert any("counted what rank" in problem for problem in found), found


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


def moves_first(self: Any, course: rounds.Round, deliver: Callable[[rounds.Outcome], Any]) -> Flow[Any]:
    """A sequence that stands in the next round before its housekeeping is done."""
    outcome = yield from course.play()
    self.standing = sequence.Standing(outcome.round + 1, outcome.chain, outcome.following)
    yield from strict(self._housekeeper, course.place, outcome)
    return deliver(outcome)


def strict(self: Any, place: documents.Place, outcome: rounds.Outcome) -> Flow[None]:
    """Housekeeping whose errors are errors of the call."""
    if not outcome.counted:
        yield from housekeeping.announce(place, place.round + 2, self._rank)
    old = place.round - 1 - self._retain
    if old >= 0 and self._rank == min(outcome.weights):
        yield from housekeeping.remove_round(documents.Place(place.run, place.name, old))


def unanswered(seed: int, **more: Any) -> Schedule:
    """Requests fail, and nothing else happens."""
    return Schedule(seed=seed, world=2, rounds=6, crash=0.0, stall=0.0, error=0.1, faults=30, **more)


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
    "chunks are not checked": Broken(exchange.Exchange, "_chunk", unchecked, [schedule_of(seed) for seed in range(45)]),
    "a failure is believed after its round was removed": Broken(
        rounds.Round, "_check_genuine", no, [drowsy(seed, faults=12) for seed in range(20)]
    ),
    "a result is believed after its attempt had failed": Broken(
        exchange.Exchange,
        "_was_left",
        no,
        [drowsy(seed, faults=16, crash=0.1, other_numbers=True, impostor=seed % 2 == 0) for seed in range(1555, 1570)],
    ),
    "a call that has moved on fails in its housekeeping": Broken(
        sequence.RoundSequence, "play", moves_first, [unanswered(seed) for seed in range(20)]
    ),
    "housekeeping fails a round": Broken(
        housekeeping.Housekeeper, "after", strict, [unanswered(seed) for seed in range(20)]
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
