"""The mean over replicas that meet in an object store and nowhere else.

    allreduce = ObjectStoreAllReduce("s3://bucket/run-7", rank, world_size)
    means = allreduce.allreduce(arrays, weight=samples)

All replicas get the same bits, or the same error; `rounds` explains why. Calls with different names are independent and
may run at the same time (`submit`); calls with one name are rounds one after the other.
"""

import math
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from basilica.diloco.arithmetic import Numbers, Residuals
from basilica.diloco.background import Background
from basilica.diloco.deadlines import Settings
from basilica.diloco.documents import Place, Terms
from basilica.diloco.drive import Driver, Traffic
from basilica.diloco.housekeeping import Housekeeper
from basilica.diloco.rounds import Outcome, Round
from basilica.diloco.sequence import RoundSequence, Standing
from basilica.diloco.stores import ObjectStore, open_store
from basilica.diloco.tensors import check_out, empty_like, like, row, state_row
from basilica.diloco.troubles import Troubles
from basilica.diloco.wire import QUANTIZED, WIRES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HISTORY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """The cost of one round for this replica, and its result."""

    name: str
    outcome: Outcome
    array_bytes: int
    bytes_up: int
    bytes_down: int
    requests: Mapping[str, int]
    seconds: float
    waited: float
    troubles: tuple[str, ...] = ()
    """Failures, in words, of work that no round depends on."""


class ObjectStoreAllReduce:
    """One replica's side. All replicas must be given the same `run_id`, `quorum` and `wire`.

    `quorum`: how many replicas are enough if the others do not come within a grace time; None: all must come.
    `wire`: None sends arrays as they are; `fp16` and so on send floats in that form.
    `incarnation`: higher each time this rank is started again, if it may then compute other numbers than before.
    `retain`: how many finished rounds stay in the store for replicas that were restarted from an earlier state.
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        *,
        run_id: str = "run",
        timeout: float = 600.0,
        quorum: int | None = None,
        grace: float = 5.0,
        wire: str | None = None,
        error_feedback: bool = True,
        incarnation: int = 0,
        retain: int = 2,
        store: ObjectStore | None = None,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        if world_size < 1 or rank < 0 or (rank >= world_size and quorum is None):
            raise ValueError(f"rank {rank} is not within a world of {world_size}")
        if quorum is not None and not 1 <= quorum <= world_size:
            raise ValueError(f"a quorum of {quorum} cannot be had of {world_size} replicas")
        if wire is not None and wire not in WIRES:
            raise ValueError(f"wire {wire!r} is unknown; choose {', '.join(WIRES)} or None (the arrays' own type)")
        if timeout <= 0 or grace < 0 or retain < 0:
            raise ValueError("timeout must be more than 0, grace and retain not less")
        self.rank, self.world_size, self.run_id = rank, world_size, _checked("run_id", run_id)
        self._wire, self._feedback = wire, error_feedback and wire in QUANTIZED
        self._incarnation, self._retain = incarnation, retain
        self._store = open_store(uri, store_options, patience=timeout) if store is None else store
        self._background = Background("basilica-allreduce", threads=64)
        self._driver = Driver(self._store, self._background.stopped)
        self._settings = Settings(
            timeout=timeout,
            quorum=quorum,
            grace=grace,
            first_pause=self._store.first_pause,
            longest_pause=self._store.longest_pause,
            piece_bytes=self._store.piece_bytes,
        )
        self._sequences: dict[str, RoundSequence] = {}
        self._troubles = Troubles()
        self._guard = threading.Lock()
        self.history: deque[RoundStats] = deque(maxlen=HISTORY)

    def allreduce(
        self,
        arrays: Sequence[Any],
        weight: float = 1.0,
        *,
        name: str = "default",
        base: str = "",
        settings: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] = (),
        out: Sequence[Any] | None = None,
    ) -> list[Any]:
        """The mean of everybody's arrays, weighted; the same bits on every replica.

        `base` names the state that the arrays were made from, so that replicas are refused that started from another.
        `settings` are what all must have set alike, as JSON knows it: a replica with others is refused, too.
        `buffers` are more arrays, whose results follow those of the others: numbers that describe, such as running
        statistics. They travel as they are whatever `wire` is; of floats it is the mean, of integers the greatest.
        `out` receives the results and saves the time for new memory. After any error the call may be repeated, with the
        same arrays: it is the same round then, and gives what was decided in it.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"a weight must be a number of 0 or more, not {weight}")
        with self._running(name) as sequence:
            given = [*arrays, *buffers]
            results = [empty_like(array) for array in given] if out is None else list(out)
            for result, array in zip(results, given, strict=True):
                if out is not None:
                    check_out(result, array)
            mine, target = (
                [*map(row, things[: len(arrays)]), *map(state_row, things[len(arrays) :])]
                for things in (given, results)
            )
            residuals = sequence.standing.residuals or Residuals()
            numbers = Numbers(
                [r.kind for r in mine],
                [r.numbers for r in mine],
                [r.numbers for r in target],
                wire=self._wire,
                residuals=residuals if self._feedback else None,
            )
            terms = self._terms(
                sequence.standing, name, base=base, layout=numbers.layout.fingerprint, settings=settings or {}
            )
            course = Round(terms, self.rank, float(weight), numbers, self._settings, incarnation=self._incarnation)
            began, traffic = time.monotonic(), Traffic()

            def deliver(outcome: Outcome) -> list[Any]:
                means = [like(result, array) for result, array in zip(results, given, strict=True)]
                array_bytes = sum(r.numbers.nbytes for r in mine)
                self._remember(name, outcome, traffic, array_bytes=array_bytes, seconds=time.monotonic() - began)
                return means

            return self._driver.run(sequence.play(course, deliver), traffic)

    def submit(self, arrays: Sequence[Any], weight: float = 1.0, **options: Any) -> "Future[list[Any]]":
        """Begin an all-reduce in a thread of its own; the arrays must not change until its result is there."""
        return self._background.submit(self.allreduce, arrays, weight, **options)

    def resize(self, world_size: int) -> None:
        """The world of the next rounds, if all must come: every replica has to say so before the same round."""
        if self._settings.quorum is not None:
            raise ValueError("with a quorum the world follows from who comes")
        if self.rank >= world_size:
            raise ValueError(f"rank {self.rank} is not within a world of {world_size}")
        self.world_size = world_size

    @property
    def store(self) -> ObjectStore:
        """The store of the run's rounds, and of its other objects."""
        return self._store

    @property
    def troubles(self) -> Troubles:
        """Errors of what no round depends on, such as removing old ones: they are recorded here and never raised."""
        return self._troubles

    @property
    def timeout(self) -> float:
        return self._settings.timeout

    @property
    def quorum(self) -> int | None:
        return self._settings.quorum

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @incarnation.setter
    def incarnation(self, number: int) -> None:
        """To be set before the first round of this process."""
        self._incarnation = number

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this replica: keep it with the checkpoint that it belongs to."""
        with self._guard:
            return {name: sequence.standing.state() for name, sequence in self._sequences.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. What another replica kept serves as well, without its residuals."""
        with self._guard:
            self._sequences = {name: self._begun(Standing.of(fields)) for name, fields in state.items()}

    def go_on(self, name: str, *, round: int, chain: str, expected: Sequence[int]) -> None:
        """Take one all-reduce to where another replica left it; rounds of other names may be running."""
        with self._guard:
            self._sequences[_checked("name", name)] = self._begun(Standing(round, chain, tuple(expected)))

    def go_back(self, name: str, before: Mapping[str, Any] | None) -> None:
        """Take one all-reduce to where `state_dict` said it was, so that a call which may have been left after its
        round was decided can be repeated. None: before its first round."""
        standing = Standing() if before is None else Standing.of(before)
        with self._guard:
            if self._sequences.setdefault(name, self._begun(standing)).standing.round != standing.round:
                self._sequences[name] = self._begun(standing)

    def close(self, *, wait: bool = True) -> None:
        """Wait for what was submitted and let go of the store.

        Without `wait` it is left where it stands, as if this process had been killed: the others wait for this rank, or
        go on without it where there is a quorum, and the rank goes on when it is started again. So a block that fails
        ends at once.
        """
        self._background.close(wait=wait)
        self._driver.close(wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    @contextmanager
    def _running(self, name: str) -> Iterator[RoundSequence]:
        """The sequence of that name, for one call at a time."""
        with self._guard:
            sequence = self._sequences.setdefault(_checked("name", name), self._begun(Standing()))
            if sequence.running:
                raise RuntimeError(
                    f"a round of {name!r} is running already: calls with one name come one after the other"
                )
            sequence.running = True
        try:
            yield sequence
        finally:
            sequence.running = False

    def _begun(self, standing: Standing) -> RoundSequence:
        return RoundSequence(standing, Housekeeper(self.rank, self._retain, self._troubles))

    def _terms(
        self, standing: Standing, name: str, *, base: str, layout: tuple[str, ...], settings: Mapping[str, Any]
    ) -> Terms:
        elastic = self._settings.quorum is not None
        return Terms(
            place=Place(self.run_id, name, standing.round),
            base=f"{standing.chain}/{base}",
            expected=(standing.expected if elastic else ()) or tuple(range(self.world_size)),
            quorum=self._settings.quorum,
            layout=layout,
            settings=settings,
        )

    def _remember(self, name: str, outcome: Outcome, traffic: Traffic, *, array_bytes: int, seconds: float) -> None:
        self.history.append(
            RoundStats(
                name=name,
                outcome=outcome,
                array_bytes=array_bytes,
                bytes_up=traffic.up,
                bytes_down=traffic.down,
                requests=dict(traffic.requests),
                seconds=seconds,
                waited=outcome.waited,
                troubles=tuple(map(str, self._troubles.current)),
            )
        )


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} must be letters, digits, '.', '_' and '-', beginning with a letter or digit")
    return name
