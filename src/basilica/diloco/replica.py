"""One replica's part in a DiLoCo run: when to synchronize, what to apply, and how to catch up. NumPy, no torch.

What was agreed on lives here as NumPy arrays, apart from the model: the parameters (`agreed`) and the outer momentum.
All replicas have the same bits of both after each round, and each round proves it: it refuses a replica whose
fingerprint differs. The bucket keeps them too, so a replica that starts, or was left behind, takes them from there.
"""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from basilica.diloco.allreduce import ObjectStoreAllReduce, RoundStats
from basilica.diloco.bucket import STATES_KEPT, Bucket, LogEntry, RunRecord, State
from basilica.diloco.errors import BarrierTimeout, RoundConflict, RoundGone
from basilica.diloco.fragments import Alone, Fragment, Given, Options, Team, Values
from basilica.diloco.outer import Array, divide, fingerprint, mixed, pseudo_gradient
from basilica.diloco.replica_entrypoint import arguments_of

APPLIED, SKIPPED, CAUGHT_UP, FAILED = range(4)
LOOK_SECONDS = 0.05


class Replica:
    """`allreduce` is None in processes that follow the leader of their replica."""

    def __init__(
        self, values: Values, allreduce: ObjectStoreAllReduce | None, options: Options, *, team: Team | None = None
    ) -> None:
        self.step_count = 0
        self.incarnation = 0
        self._values, self._options, self._schedule = values, options, options.schedule
        self._team = team or Alone()
        if self._team.leads and allreduce is None:
            raise ValueError("the process that leads a replica needs an all-reduce")
        self._allreduce = allreduce
        self._seen = 0.0
        self._fragments = [
            Fragment(f"fragment-{number}{options.part}", indexes, [values.read(index) for index in indexes])
            for number, indexes in enumerate(divide(values.sizes, options.fragments))
        ]
        self._background = ThreadPoolExecutor(1, thread_name_prefix="basilica-states")
        self._saving: list[Future[None]] = []
        if allreduce is not None and self._team.leads:
            self._bucket = Bucket(allreduce.store, allreduce.run_id)
        self._begin()

    @property
    def round(self) -> int:
        """How many rounds of every fragment are applied."""
        return min(fragment.round for fragment in self._fragments)

    @property
    def samples(self) -> float:
        """The sample cursor of the run: what all counted replicas have seen together, as all agree."""
        return max(fragment.samples for fragment in self._fragments)

    def step(self, samples: float | None = None) -> bool:
        """After each inner step; True if the model was synchronized."""
        self.step_count += 1
        self._seen += 1.0 if samples is None else float(samples)
        giving = self._schedule.given(self.step_count)
        if giving is not None:
            self._give(giving)
        applying = self._schedule.applied(self.step_count)
        return applying is not None and self._apply(applying)

    def take_agreed(self) -> None:
        """Drop what this replica has learned since the last synchronizations."""
        for fragment in self._fragments:
            self._write(fragment)
            fragment.counted = self._seen

    def close(self, **outcome: Any) -> None:
        """Wait until what was agreed on is in the bucket, and record there how this replica ended."""
        for fragment in self._fragments:
            if fragment.given is not None and fragment.given.means is not None:
                fragment.given.means.cancel()
        try:
            self._saved()
        finally:
            self._background.shutdown()
            if self._team.leads and outcome:
                self._bucket.leave(self._reduce.rank, self.incarnation, round=self.round, **outcome)

    # Giving and applying.

    @property
    def _reduce(self) -> ObjectStoreAllReduce:
        assert self._allreduce is not None
        return self._allreduce

    def _of(self, number: int) -> tuple[Fragment, bool]:
        """The fragment of a synchronization, and whether that is ahead of us still."""
        round, index = divmod(number, self._options.fragments)
        fragment = self._fragments[index]
        return fragment, fragment.round <= round

    def _give(self, number: int) -> None:
        fragment, due = self._of(number)
        if not due or not self._team.leads:
            return
        deltas = [
            pseudo_gradient(self._values.seen(index, agreed), self._values.read(index))
            for index, agreed in zip(fragment.indexes, fragment.agreed, strict=True)
        ]
        weight, fragment.counted = self._seen - fragment.counted, self._seen
        fragment.given = Given(deltas, weight, self._reduce.state_dict().get(fragment.name))
        if self._options.delay:
            self._submit(fragment, fragment.given)

    def _submit(self, fragment: Fragment, given: Given) -> None:
        given.means = self._reduce.submit(given.deltas, given.weight, name=fragment.name, base=fragment.digest)

    def _apply(self, number: int) -> bool:
        fragment, due = self._of(number)
        if not self._team.leads:
            return self._follow(fragment)
        if not due or fragment.given is None:
            self._team.tell([SKIPPED, self.step_count])
            return False
        try:
            means = self._means(fragment, fragment.given)
            self._saved()
        except RoundGone:
            fragment.given = None
            self._catch_up_with(fragment)
            return True
        except BaseException:
            self._team.tell([FAILED, self.step_count])
            raise
        fragment.given = None
        fragment.velocity = self._options.outer.step(fragment.agreed, means, fragment.velocity)
        fragment.digest = fingerprint(fragment.agreed, fragment.velocity)
        fragment.round += 1
        self._team.tell([APPLIED, self.step_count])
        self._team.share(fragment.agreed)
        self._write(fragment, self._options.mix)
        self._record(fragment)
        return True

    def _means(self, fragment: Fragment, given: Given) -> list[Array]:
        if given.means is not None:
            return given.means.result()
        return self._reduce.allreduce(given.deltas, given.weight, name=fragment.name, base=fragment.digest)

    def _follow(self, fragment: Fragment) -> bool:
        """What a process does that does not lead its replica."""
        what, step = self._team.tell([0, 0])
        if what == FAILED:
            raise RuntimeError("the leader of this replica could not synchronize; its own error says why")
        if what == APPLIED:
            self._team.share(fragment.agreed)
            fragment.round += 1
            self._write(fragment, self._options.mix)
        elif what == CAUGHT_UP:
            self._jump(step)
        return what != SKIPPED

    def _write(self, fragment: Fragment, mix: float = 0.0) -> None:
        for index, agreed in zip(fragment.indexes, fragment.agreed, strict=True):
            self._values.write(index, mixed(agreed, self._values.read(index), mix) if mix else agreed)

    # What the bucket learns.

    def _record(self, fragment: Fragment) -> None:
        """In the background: the next steps need nothing of it, and do not change what is written."""
        stats = next(s for s in reversed(self._reduce.history) if s.name == fragment.name)
        outcome = stats.outcome
        fragment.samples += sum(outcome.weights.values())
        state = self._state(fragment, outcome.chain, outcome.following)
        counted = sorted(outcome.weights)
        every, rank = self._options.checkpoint_every, self._reduce.rank
        piece = counted.index(rank) if rank in counted and every and fragment.round % every == 0 else None
        entry = _entry(fragment, stats) if rank == counted[0] else None
        if piece is not None or entry is not None:
            self._saving.append(self._background.submit(self._save, state, piece, len(counted), entry))

    def _state(self, fragment: Fragment, chain: str, expected: Sequence[int]) -> State:
        return State(
            name=fragment.name,
            round=fragment.round,
            chain=chain,
            expected=tuple(expected),
            samples=fragment.samples,
            parameters=fragment.agreed,
            velocity=fragment.velocity,
            digest=fragment.digest,
        )

    def _save(self, state: State, piece: int | None, pieces: int, entry: LogEntry | None) -> None:
        if entry is not None:
            self._bucket.log(entry)
        if piece is not None:
            self._bucket.save(state, piece, pieces)
            if piece == 0:
                self._bucket.forget_states(state.name, state.round - STATES_KEPT * self._options.checkpoint_every)

    def _saved(self) -> None:
        """Wait for it, before what is being written changes."""
        while self._saving:
            self._saving.pop(0).result()

    # Beginning and catching up.

    def _begin(self) -> None:
        if self._team.leads:
            self._reduce.incarnation = self.incarnation = self._bucket.join(self._reduce.rank, part=self._options.part)
            self._bucket.begin(self._run_record())
            for fragment in self._fragments:
                fragment.digest = fingerprint(fragment.agreed, fragment.velocity)
                self._take(fragment, self._first_state(fragment))
            self.step_count = self._schedule.start_of([f.round for f in self._fragments])
            self._team.tell([CAUGHT_UP, self.step_count])
            self._share_all()
        else:
            _, step = self._team.tell([0, 0])
            self._jump(step)

    def _run_record(self) -> RunRecord:
        environment = {name: value for name, value in os.environ.items() if name != "REPLICA_ARGS_FILE"}
        schedule, outer = self._options, self._options.outer
        return RunRecord(
            entrypoint=os.environ.get("ENTRYPOINT"),
            arguments=arguments_of(environment),
            world_size=self._reduce.world_size,
            quorum=self._reduce.quorum,
            settings={
                "sync_every": schedule.sync_every,
                "fragments": schedule.fragments,
                "delay": schedule.delay,
                "mix": schedule.mix,
                "outer_lr": outer.lr,
                "outer_momentum": outer.momentum,
                "nesterov": outer.nesterov,
                "checkpoint_every": schedule.checkpoint_every,
            },
            created_at=time.time(),
        )

    def _first_state(self, fragment: Fragment) -> State:
        """Where this replica begins: the newest that was agreed on, else the parameters of rank 0."""
        found = self._bucket.newest(fragment.name)
        if found is None and self._reduce.rank == 0:
            self._bucket.save(self._state(fragment, "", ()))
        return found or self._wait_for(fragment, at_least=0, missing=(0,))

    def _wait_for(self, fragment: Fragment, *, at_least: int, missing: tuple[int, ...]) -> State:
        deadline = time.monotonic() + self._reduce.timeout
        while True:
            found = self._bucket.newest(fragment.name, at_least)
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                where = f"the state of {fragment.name!r} in run {self._reduce.run_id!r}"
                raise BarrierTimeout(where, missing, self._reduce.timeout)
            self._reduce.store.wait_for_change(f"{self._reduce.run_id}/states/", LOOK_SECONDS)

    def _take(self, fragment: Fragment, state: State) -> None:
        """Go on from a state of the bucket."""
        kinds = [(a.dtype, a.shape) for a in fragment.agreed]
        if kinds != [(a.dtype, a.shape) for a in state.parameters]:
            raise RoundConflict(
                f"the state of {fragment.name!r} in run {self._reduce.run_id!r}",
                "it has other parameters than this model: the run is one of another model; use another run_id",
            )
        fragment.take(state.parameters, state.velocity)
        fragment.round, fragment.samples, fragment.counted = state.round, state.samples, self._seen
        stands = self._reduce.state_dict()
        stands[fragment.name] = {"round": state.round, "chain": state.chain, "expected": list(state.expected)}
        self._reduce.load_state_dict(stands)

    def _catch_up_with(self, late: Fragment) -> None:
        """The others have gone on without us, and what we missed is removed: take what they agreed on."""
        try:
            self._take(late, self._wait_for(late, at_least=late.round + 1, missing=()))
            for fragment in self._fragments:
                newer = self._bucket.newest(fragment.name, fragment.round + 1)
                if newer is not None:
                    self._take(fragment, newer)
        except BaseException:
            self._team.tell([FAILED, self.step_count])
            raise
        self.step_count = self._schedule.start_of([f.round for f in self._fragments])
        self._team.tell([CAUGHT_UP, self.step_count])
        self._share_all()

    def _jump(self, step: int) -> None:
        """A process that follows goes where its leader is."""
        self.step_count = step
        self._share_all()

    def _share_all(self) -> None:
        for fragment in self._fragments:
            self._team.share(fragment.agreed)
            self._write(fragment)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All but the model's own parameters: those belong beside it, as always."""
        stands = self._reduce.state_dict() if self._team.leads else {}
        fragments = {}
        for fragment in self._fragments:
            fields: dict[str, Any] = {
                "agreed": list(fragment.agreed),
                "velocity": None if fragment.velocity is None else list(fragment.velocity),
                "round": fragment.round,
                "samples": fragment.samples,
                "unsent": self._seen - fragment.counted,
            }
            if fragment.given is not None:
                fields["given"] = {"deltas": fragment.given.deltas, "weight": fragment.given.weight}
                stands.pop(fragment.name, None)
                if fragment.given.before is not None:
                    stands[fragment.name] = fragment.given.before
            fragments[fragment.name] = fields
        return {"step": self.step_count, "fragments": fragments, "allreduce": stands}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, exactly; unless the bucket has gone further meanwhile: then from the bucket."""
        fragments = state["fragments"]
        if list(fragments) != [fragment.name for fragment in self._fragments]:
            raise ValueError(f"the checkpoint has the fragments {list(fragments)}: it was made with other settings")
        if any(fields["round"] < f.round for f, fields in zip(self._fragments, fragments.values(), strict=True)):
            return
        self.step_count = state["step"]
        if self._team.leads:
            self._reduce.load_state_dict(state["allreduce"])
        for fragment, fields in zip(self._fragments, fragments.values(), strict=True):
            fragment.take(fields["agreed"], fields["velocity"])
            fragment.round, fragment.samples = fields["round"], fields["samples"]
            fragment.counted = self._seen - fields["unsent"]
            fragment.given = None
            given = fields.get("given")
            if given is not None:
                fragment.given = Given(list(given["deltas"]), given["weight"], state["allreduce"].get(fragment.name))
                self._submit(fragment, fragment.given)


def _entry(fragment: Fragment, stats: RoundStats) -> LogEntry:
    return LogEntry(
        name=fragment.name,
        round=stats.outcome.round,
        attempt=stats.outcome.attempt,
        weights={str(rank): weight for rank, weight in stats.outcome.weights.items()},
        samples=fragment.samples,
        chain=stats.outcome.chain,
        digest=fragment.digest,
        array_bytes=stats.array_bytes,
        bytes_up=stats.bytes_up,
        bytes_down=stats.bytes_down,
        requests=dict(stats.requests),
        seconds=stats.seconds,
        waited=stats.waited,
        at=time.time(),
    )
