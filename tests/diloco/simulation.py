"""Replicas, a store and a clock that exist only here: every effect of the protocol takes a random time and may fail.

A schedule is a seed. Replicas crash at any effect and come back with the state of some earlier moment; an upload under
way is then lost, done, torn, or arrives much later; listings are old; bytes rot; a second replica claims a rank.
Any request of a call, housekeeping included, may raise: before it had its effect, after it (the answer was lost), or
with an effect that comes much later; then the caller repeats the call. Whatever happens, `Simulation.run` checks what
must hold.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from basilica.diloco.arithmetic import Numbers
from basilica.diloco.deadlines import Settings
from basilica.diloco.documents import Part, Place, Terms, Version, sealed
from basilica.diloco.effects import Begin, Create, Delete, Effect, Finish, Flow, Found, List, Now, Pause, Put, Range
from basilica.diloco.errors import BarrierTimeout, CorruptPart, RoundConflict, RoundError, RoundGone
from basilica.diloco.housekeeping import Housekeeper
from basilica.diloco.records import unseal
from basilica.diloco.rounds import Outcome, Round
from basilica.diloco.sequence import RoundSequence, Standing
from basilica.diloco.troubles import Troubles

TIMEOUT = 60.0
NUMBERS = 24
CHUNK_BYTES = 16
MOST_EFFECTS = 100_000
MOST_REPAIRS = 30


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What may happen. `faults` bounds how often, so that every schedule ends in a world without faults."""

    seed: int
    world: int = 3
    rounds: int = 2
    quorum: int | None = None
    faults: int = 6
    crash: float = 0.02
    stall: float = 0.01
    error: float = 0.0
    rot: float = 0.0
    torn: bool = True
    stale_listings: bool = True
    other_numbers: bool = False
    """Replicas that are started again may compute something else, and say so by their incarnation."""
    impostor: bool = False
    leftovers: bool = False


class SimulatedStore:
    """Strong reads and conditional creates, as the port demands; listings may be old."""

    def __init__(self, chance: random.Random, stale: bool) -> None:
        self.objects: dict[str, bytes] = {}
        self._chance, self._stale = chance, stale
        self._past: list[dict[str, int]] = [{}]

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self._remember()

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self.write(key, data)
        return True

    def delete(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            self.objects.pop(key, None)
        self._remember()

    def read(self, wanted: Range) -> memoryview | None:
        data = self.objects.get(wanted.key)
        if data is None:
            return None
        part = data[wanted.start : wanted.start + wanted.length]
        if wanted.into is None:
            return memoryview(part)
        wanted.into[: len(part)] = part
        return wanted.into[: len(part)]

    def list(self, prefix: str, after: str) -> tuple[Found, ...]:
        age = self._chance.choice((0, 0, 0, 1, 2, 5)) if self._stale else 0
        then = self._past[max(0, len(self._past) - 1 - age)]
        return tuple(Found(key, then[key]) for key in sorted(then) if key.startswith(prefix) and key > after)

    def _remember(self) -> None:
        self._past = [*self._past[-8:], {key: len(data) for key, data in self.objects.items()}]


@dataclass
class Replica:
    """One process after the other of one rank; `genuine` is False for an impostor."""

    rank: int
    genuine: bool = True
    incarnation: int = 0
    kept: list[Standing] = field(default_factory=lambda: [Standing()])
    """What it saved after each call that returned: it is started again from one of these."""
    flow: Flow[None] | None = None
    effect: Effect | None = None
    life: int = 0
    done: bool = False
    refused: bool = False


@dataclass(frozen=True)
class Given:
    """What a caller gave, and the round that it meant."""

    rank: int
    weight: float
    numbers: np.ndarray[Any, Any]
    round: int


class RequestFailed(OSError):
    """A request that got no answer, or a bad one."""

    def __init__(self, effect: Effect, fate: str) -> None:
        super().__init__(f"{type(effect).__name__} ({fate})")
        self.effect = effect

    def is_of(self, place: Place) -> bool:
        """Whether the round itself needs the request; all others are housekeeping."""
        match self.effect:
            case Create(key) | Put(key):
                return key.startswith(place.prefix)
            case List(prefix):
                return prefix in (place.prefix, place.joining(place.round + 1))
            case Delete():
                return False
            case _:
                return True


class Violation(AssertionError):
    """The protocol did what it must not."""


class Simulation:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.chance = random.Random(schedule.seed)
        self.store = SimulatedStore(self.chance, schedule.stale_listings)
        self.settings = Settings(
            timeout=TIMEOUT, quorum=schedule.quorum, grace=4.0, first_pause=0.1, longest_pause=3.0, piece_bytes=40
        )
        self.now = 0.0
        self.faults = schedule.faults
        self.replicas = [Replica(rank) for rank in range(schedule.world)]
        if schedule.impostor:
            self.replicas.append(Replica(self.chance.randrange(schedule.world), genuine=False))
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ticks = 0
        self._given: dict[str, Given] = {}
        self.finished: dict[int, tuple[Outcome, bytes]] = {}
        self.errors: list[RoundError] = []
        self.failed: list[RequestFailed] = []
        """Errors of requests that callers have seen."""
        self.troubles = Troubles()
        self.events: list[str] = []

    # Time.

    def at(self, delay: float, act: Callable[[], None]) -> None:
        self._ticks += 1
        heapq.heappush(self._queue, (self.now + delay, self._ticks, act))

    def run(self) -> "Simulation":
        if self.schedule.leftovers:
            self._leave_behind()
        for replica in self.replicas:
            self.at(self.chance.expovariate(1.0), partial(self._start, replica))
        while self._queue:
            self.now, _, act = heapq.heappop(self._queue)
            if self.now > 400 * TIMEOUT or self._ticks > MOST_EFFECTS:
                raise Violation(f"no end in sight at {self.now:.0f} s")
            act()
        unfinished = [r.rank for r in self.replicas if not r.done and not r.refused]
        if unfinished:
            raise Violation(f"ranks {unfinished} neither finished nor were refused")
        if not self.schedule.impostor and not self.schedule.leftovers and any(r.refused for r in self.replicas):
            raise Violation("a replica was refused although nobody else claims its rank")
        return self

    # A replica's life.

    def _start(self, replica: Replica) -> None:
        replica.life += 1
        replica.flow = self._program(replica)
        self._advance(replica, None)

    def _program(self, replica: Replica) -> Flow[None]:
        """What a training does: one call after the other; a call that failed is repeated as it was."""
        sequence = self._sequence(replica)
        while (round := replica.kept[-1].round) < self.schedule.rounds:
            mine, target = self._numbers(replica, round), np.zeros(NUMBERS, np.float32)
            numbers = Numbers(["float32"], [mine], [target], chunk_bytes=CHUNK_BYTES)
            stands = sequence.standing
            terms = Terms(
                place=Place("run", "gradients", stands.round),
                base=stands.chain,
                expected=stands.expected or tuple(range(self.schedule.world)),
                quorum=self.schedule.quorum,
                layout=numbers.layout.fingerprint,
            )
            weight = float(1 + replica.rank)
            self._remember(terms, replica, weight, numbers, Given(replica.rank, weight, mine, round))
            course = Round(terms, replica.rank, weight, numbers, self.settings, incarnation=replica.incarnation)
            try:
                outcome = yield from sequence.play(course, lambda outcome: outcome)
            except RequestFailed as error:
                self.failed.append(error)
                if not error.is_of(terms.place):
                    raise Violation(f"the housekeeping of {terms.place} has failed it: {error}") from error
                continue
            except RoundConflict as conflict:
                self._refuse(replica, conflict)
                return
            except RoundGone as gone:
                self._catch_up(replica, gone)
                sequence = self._sequence(replica)
                continue
            except (BarrierTimeout, CorruptPart) as error:
                self.errors.append(error)
                if any(other.refused for other in self.replicas):
                    replica.refused = True  # whoever is missing may not come again
                    return
                continue
            self._check(outcome, target, round)
            replica.kept.append(sequence.standing)
        replica.done = True

    def _sequence(self, replica: Replica) -> RoundSequence:
        return RoundSequence(replica.kept[-1], Housekeeper(replica.rank, 1, self.troubles))

    def _refuse(self, replica: Replica, conflict: RoundConflict) -> None:
        self.errors.append(conflict)
        replica.refused = True

    def _catch_up(self, replica: Replica, gone: RoundGone) -> None:
        """From the state that some other replica keeps: here, from the furthest one."""
        self.errors.append(gone)
        furthest = max((r.kept[-1] for r in self.replicas), key=lambda kept: kept.round)
        if furthest.round <= replica.kept[-1].round:
            raise Violation(f"rank {replica.rank} was told that its round is gone, but nobody is ahead")
        replica.kept.append(furthest)

    def _numbers(self, replica: Replica, round: int) -> np.ndarray[Any, Any]:
        """Small integers: every sum of them is exact, so that any mistake shows."""
        incarnation = replica.incarnation if self.schedule.other_numbers else 0
        seed = (self.schedule.seed, replica.rank, round, incarnation, int(replica.genuine))
        return np.random.default_rng(seed).integers(-64, 64, NUMBERS).astype(np.float32)

    # One effect.

    def _advance(self, replica: Replica, answer: object, failed: RequestFailed | None = None) -> None:
        assert replica.flow is not None
        try:
            replica.effect = replica.flow.send(answer) if failed is None else replica.flow.throw(failed)
        except StopIteration:
            return
        life = replica.life
        delay = self.chance.expovariate(20.0)
        if isinstance(replica.effect, Pause):
            delay += replica.effect.seconds
        elif self._strikes(self.schedule.stall):
            self.events.append(f"rank {replica.rank} stalls")
            delay += self.chance.uniform(5, 3 * TIMEOUT)
        self.at(delay, lambda: self._perform(replica, life))

    def _perform(self, replica: Replica, life: int) -> None:
        if life != replica.life or replica.effect is None:
            return
        if self._strikes(self.schedule.crash):
            self._crash(replica)
        elif self._fails(replica.effect):
            self._fail(replica, replica.effect)
        else:
            self._advance(replica, self._answer(replica.effect))
        if self._strikes(self.schedule.rot):
            self._rot()

    def _strikes(self, probability: float) -> bool:
        if self.faults > 0 and self.chance.random() < probability:
            self.faults -= 1
            return True
        return False

    def _fails(self, effect: Effect) -> bool:
        """Only what is a request of the store can fail; a schedule without errors draws no chance for them."""
        asks = not isinstance(effect, Now | Pause | Begin)
        return asks and self.schedule.error > 0 and self._strikes(self.schedule.error)

    def _answer(self, effect: Effect) -> object:
        match effect:
            case Now():
                return self.now
            case Pause():
                return None
            case List(prefix, after):
                return self.store.list(prefix, after)
            case Begin(ranges):
                return ranges
            case Finish(ticket):
                return [self.store.read(wanted) for wanted in ticket]
            case Create(key, size, buffers):
                return self.store.create(key, _joined(size, buffers))
            case Put(key, size, buffers):
                self.store.write(key, _joined(size, buffers))
                return None
            case Delete(keys):
                self.store.delete(keys)
                return None

    # What goes wrong.

    def _crash(self, replica: Replica) -> None:
        self.events.append(f"rank {replica.rank} crashes at {type(replica.effect).__name__}")
        if isinstance(replica.effect, Create | Put):
            self._leave_upload(replica.effect)
        replica.life += 1
        replica.flow = replica.effect = None
        steps_back = self.chance.choice((0, 0, 1))
        replica.kept = replica.kept[: max(1, len(replica.kept) - steps_back)]
        replica.incarnation += self.chance.randrange(2) if self.schedule.other_numbers else 0
        self.at(self.chance.expovariate(0.2), lambda: self._start(replica))

    def _fail(self, replica: Replica, effect: Effect) -> None:
        """One request fails, and the process lives on."""
        fate = self.chance.choice(("before", "after", "late", "twice"))
        if fate == "late" and not isinstance(effect, Create | Put | Delete):
            fate = "after"
        self.events.append(f"rank {replica.rank}: {type(effect).__name__} fails, {fate}")
        if fate == "twice" and isinstance(effect, Create):
            # The store's own client has repeated a request whose answer was lost, and finds what it has itself written.
            self._answer(effect)
            self._advance(replica, False)
            return
        if fate == "late":
            self._leave_request(effect)
        elif fate != "before":
            self._answer(effect)
        self._advance(replica, None, RequestFailed(effect, fate))

    def _leave_request(self, effect: Effect) -> None:
        """A request whose sender has given it up reaches the store much later."""
        if isinstance(effect, Create | Put):
            data = _joined(effect.size, effect.buffers)
            effect = replace(effect, buffers=[memoryview(data)])
        self.at(self.chance.uniform(1, 2 * TIMEOUT), lambda: (self._answer(effect), None)[1])

    def _leave_upload(self, effect: Create | Put) -> None:
        """The writer is dead, but what it sent may be anywhere."""
        data = _joined(effect.size, effect.buffers)
        fate = self.chance.choice(("lost", "done", "torn" if self.schedule.torn else "lost", "late"))
        self.events.append(f"  {effect.key}: {fate}")
        if fate == "torn":
            data = data[: self.chance.randrange(len(data) + 1)]
        if fate != "lost":
            write = self.store.create if isinstance(effect, Create) else self.store.write
            delay = self.chance.uniform(1, 2 * TIMEOUT) if fate == "late" else 0.0
            self.at(delay, lambda: (write(effect.key, data), None)[1])

    def _rot(self) -> None:
        parts = [key for key, data in self.store.objects.items() if "/part-" in key and data]
        if parts:
            key = self.chance.choice(sorted(parts))
            data = bytearray(self.store.objects[key])
            data[self.chance.randrange(len(data))] ^= 0x10
            self.events.append(f"{key} rots")
            self.store.write(key, bytes(data))

    def _leave_behind(self) -> None:
        """Objects of an earlier run under the same prefix, and half a round of an earlier life of this one."""
        for key in ("part-00000", "manifest-000", "result-000-00000"):
            self.store.write(f"earlier/rounds/gradients/00000000/{key}", b"of an earlier run")
        self.store.write("run/rounds/gradients/00000000/part-00000", b"not a part at all")

    # What must hold.

    def _remember(self, terms: Terms, replica: Replica, weight: float, numbers: Numbers, given: Given) -> None:
        digests = [numbers.digest(index) for index in range(len(numbers.layout.chunks))]
        for version in itertools.product(range(replica.incarnation + 1), range(MOST_REPAIRS)):
            _, id = sealed(Part.fields(terms, replica.rank, weight, Version(*version), digests))
            self._given.setdefault(id, given)

    def _check(self, outcome: Outcome, mean: np.ndarray[Any, Any], round: int) -> None:
        if outcome.round != round:
            raise Violation(f"the call of round {round} was answered with round {outcome.round}")
        first = self.finished.setdefault(outcome.round, (outcome, mean.tobytes()))
        if first[0].chain != outcome.chain or first[1] != mean.tobytes() or first[0].weights != outcome.weights:
            raise Violation(f"two results of round {outcome.round}: {first[0]} and {outcome}")
        quorum = self.schedule.quorum
        if quorum is None and len(outcome.weights) != self.schedule.world:
            raise Violation(f"round {outcome.round} counted only {sorted(outcome.weights)}")
        if quorum is not None and len(outcome.weights) < quorum:
            raise Violation(f"round {outcome.round} was closed below the quorum")
        self._check_mean(outcome, mean)

    def _check_mean(self, outcome: Outcome, mean: np.ndarray[Any, Any]) -> None:
        """It is the mean of numbers that the counted ranks gave, whichever of their numbers the manifest names."""
        place = Place("run", "gradients", outcome.round)
        record = self.store.objects[place.manifest(outcome.attempt)]
        total, weights = np.zeros(NUMBERS, np.float64), 0.0
        for member in unseal(memoryview(record)).fields["members"]:
            given = self._given[member["part"]]
            if given.rank != member["rank"] or outcome.weights[given.rank] != given.weight:
                raise Violation(f"round {outcome.round} counted rank {given.rank} wrongly")
            if given.round != outcome.round:
                raise Violation(f"round {outcome.round} counted what rank {given.rank} gave for round {given.round}")
            total += given.weight * given.numbers.astype(np.float64)
            weights += given.weight
        if not np.allclose(mean, total / weights, rtol=1e-5, atol=1e-5):
            raise Violation(f"the mean of round {outcome.round} is wrong")


def _joined(size: int, buffers: Iterator[memoryview] | Any) -> bytes:
    data = b"".join(buffers)
    if len(data) != size:
        raise Violation(f"{len(data)} bytes were sent as {size}")
    return data
