"""One replica's part in a DiLoCo run: when to synchronize, what to apply, and how to catch up. NumPy, no torch.

What was agreed on lives here as NumPy arrays, apart from the model: the parameters (`agreed`), the outer momentum and
the buffers. All replicas have the same bits of them after each round, and each round proves it: it refuses a replica
whose fingerprint differs. The bucket keeps them too, so a replica that starts, or was left behind, takes them from it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from basilica.diloco.allreduce import ObjectStoreAllReduce
from basilica.diloco.background import Background
from basilica.diloco.beginning import check_frozen, run_record, wait_for_state
from basilica.diloco.bucket import STATES_KEPT, Bucket, LogEntry, State
from basilica.diloco.errors import BarrierTimeout, RoundConflict, RoundGone
from basilica.diloco.fragments import Alone, Fragment, Given, Options, Team, Values
from basilica.diloco.inspection import sweep
from basilica.diloco.outer import Array, divide, mixed, pseudo_gradient
from basilica.diloco.telling import add_ends, log_entry, tell_round

APPLIED, SKIPPED, CAUGHT_UP, FAILED = range(4)


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
        self._fragments[-1].buffers = values.buffers()
        self._background = Background("basilica-states")
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
        """After each inner step; True if the model was synchronized. One that raises is not counted."""
        before = self.step_count, self._seen
        self.step_count += 1
        self._seen += 1.0 if samples is None else float(samples)
        try:
            giving = self._schedule.given(self.step_count)
            if giving is not None:
                self._give(giving)
            applying = self._schedule.applied(self.step_count)
            return applying is not None and self._apply(applying)
        except BaseException:
            self.step_count, self._seen = before
            raise

    def take_agreed(self) -> None:
        """Drop what this replica has learned since the last synchronizations."""
        for fragment in self._fragments:
            self._write(fragment)
            fragment.counted = self._seen

    def close(self, *, wait: bool = True, **outcome: Any) -> None:
        """Wait until what was agreed on is in the bucket, and record there how this replica ended.

        Without `wait` it gets a moment: what is not in the bucket then is missing there, as if this replica was killed.
        """
        if self._background.stopped.is_set():
            return
        for fragment in self._fragments:
            if fragment.given is not None and fragment.given.means is not None:
                fragment.given.means.cancel()
        if self._team.leads and outcome:
            ended = {"round": self.round, **outcome}
            self._saving.append(
                self._background.submit(self._bucket.leave, self._reduce.rank, self.incarnation, **ended)
            )
        self._background.close(wait=wait)
        self._saved(only_finished=not wait)

    def give_up(self, error: BaseException) -> None:
        """Leave because of an error, which the bucket is told if there is time for it."""
        ended = "failed" if isinstance(error, Exception) else "stopped"
        try:
            self.close(wait=False, outcome=ended, error=f"{type(error).__name__}: {error}"[:1000])
        except Exception as trouble:  # noqa: BLE001  what ended it is what counts
            error.add_note(f"Beside that, not all could be written to the bucket: {trouble}")

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
        if not due or not self._team.leads or fragment.given is not None:
            return  # what was given in a step that raised is given still: its round goes on where it was
        deltas = [
            pseudo_gradient(self._values.seen(index, agreed), self._values.read(index))
            for index, agreed in zip(fragment.indexes, fragment.agreed, strict=True)
        ]
        weight, fragment.counted = self._seen - fragment.counted, self._seen
        buffers = self._values.buffers() if fragment.buffers else []
        fragment.given = Given(deltas, weight, self._reduce.state_dict().get(fragment.name), buffers)
        if self._options.delay:
            self._submit(fragment, fragment.given)

    def _submit(self, fragment: Fragment, given: Given) -> None:
        given.means = self._reduce.submit(given.deltas, given.weight, **self._terms(fragment, given))

    def _terms(self, fragment: Fragment, given: Given) -> dict[str, Any]:
        """What the all-reduce is to know of a part beside its numbers."""
        return {
            "name": fragment.name,
            "base": fragment.digest,
            "settings": self._options.settings,
            "buffers": given.buffers,
        }

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
        except BaseException as error:
            self._team.tell([FAILED, self.step_count])
            if isinstance(error, BarrierTimeout):
                add_ends(error, self._bucket)
            raise
        fragment.given = None
        gradients, fragment.buffers = means[: len(fragment.agreed)], means[len(fragment.agreed) :]
        fragment.velocity = self._options.outer.step(fragment.agreed, gradients, fragment.velocity, fragment.round)
        fragment.prove()
        fragment.round += 1
        self._team.tell([APPLIED, self.step_count])
        self._team.share(fragment.shared())
        self._write(fragment, self._options.mix)
        self._record(fragment)
        return True

    def _means(self, fragment: Fragment, given: Given) -> list[Array]:
        if given.means is not None:
            means, given.means = given.means, None  # if it fails, the next time begins anew
            return means.result()
        return self._reduce.allreduce(given.deltas, given.weight, **self._terms(fragment, given))

    def _follow(self, fragment: Fragment) -> bool:
        """What a process does that does not lead its replica."""
        what, step = self._team.tell([0, 0])
        if what == FAILED:
            raise RuntimeError("the leader of this replica could not synchronize; its own error says why")
        if what == APPLIED:
            self._team.share(fragment.shared())
            fragment.round += 1
            self._write(fragment, self._options.mix)
        elif what == CAUGHT_UP:
            self._jump(step)
        return what != SKIPPED

    def _write(self, fragment: Fragment, mix: float = 0.0) -> None:
        for index, agreed in zip(fragment.indexes, fragment.agreed, strict=True):
            self._values.write(index, mixed(agreed, self._values.read(index), mix) if mix else agreed)
        if fragment.buffers:
            self._values.write_buffers(fragment.buffers)

    # What the bucket learns.

    def _record(self, fragment: Fragment) -> None:
        """In the background: the next steps need nothing of it, and do not change what is written."""
        stats = next(s for s in reversed(tuple(self._reduce.history)) if s.name == fragment.name)
        outcome = stats.outcome
        tell_round(
            stats,
            replica=self._reduce.rank,
            world=self._reduce.world_size,
            fragment=self._fragments.index(fragment),
        )
        fragment.samples += sum(outcome.weights.values())
        state = self._state(fragment, outcome.chain, outcome.following)
        counted = sorted(outcome.weights)
        every, rank = self._options.checkpoint_every, self._reduce.rank
        piece = counted.index(rank) if rank in counted and every and fragment.round % every == 0 else None
        entry = log_entry(fragment, stats) if rank == counted[0] else None
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
            buffers=fragment.buffers,
        )

    def _save(self, state: State, piece: int | None, pieces: int, entry: LogEntry | None) -> None:
        if entry is not None:
            self._bucket.log(entry)
        if piece is not None:
            self._bucket.save(state, piece, pieces)
            if piece == 0:
                self._bucket.forget_states(state.name, state.round - STATES_KEPT * self._options.checkpoint_every)

    def _saved(self, *, only_finished: bool = False) -> None:
        """Wait for it, before what is being written changes."""
        saving, self._saving = self._saving, []
        for saved in saving:
            if saved.done() or not only_finished:
                saved.result()

    # Beginning and catching up.

    def _begin(self) -> None:
        if not self._team.leads:
            self._follow(self._fragments[0])
            return
        try:
            self._reduce.incarnation = self.incarnation = self._bucket.join(self._reduce.rank, part=self._options.part)
            try:
                self._join()
            except BaseException as error:
                self.give_up(error)
                raise
        except BaseException:
            self._team.tell([FAILED, self.step_count])
            raise
        self._go_on()

    def _join(self) -> None:
        """Take what was agreed on, or let rank 0's be that."""
        rank = self._reduce.rank
        self._bucket.begin(run_record(self._reduce, self._options))
        frozen = self._values.frozen()
        if rank == 0:
            self._background.submit(sweep, self._bucket)
            check_frozen(self._bucket, self._options.part, rank, frozen)
        for fragment in self._fragments:
            fragment.prove()
            self._take(fragment, self._first_state(fragment))
        if rank != 0:
            check_frozen(self._bucket, self._options.part, rank, frozen)

    def _first_state(self, fragment: Fragment) -> State:
        """Where this replica begins: the newest that was agreed on, else the parameters of rank 0."""
        found = self._bucket.newest(fragment.name)
        if found is None and self._reduce.rank == 0:
            self._bucket.save(self._state(fragment, "", ()))
        return found or wait_for_state(self._bucket, self._reduce, fragment.name, missing=(0,))

    def _take(self, fragment: Fragment, state: State) -> None:
        """Go on from a state of the bucket."""
        for what, mine, theirs in (
            ("parameters", fragment.agreed, state.parameters),
            ("buffers", fragment.buffers, state.buffers),
        ):
            if [(a.dtype, a.shape) for a in mine] != [(a.dtype, a.shape) for a in theirs]:
                raise RoundConflict(
                    f"the state of {fragment.name!r} in run {self._reduce.run_id!r}",
                    f"it has other {what} than this model: the run is one of another model; use another run_id",
                )
        self._saved()
        fragment.take(state.parameters, state.velocity, state.buffers)
        fragment.round, fragment.samples, fragment.counted = state.round, state.samples, self._seen
        self._reduce.go_on(fragment.name, round=state.round, chain=state.chain, expected=state.expected)

    def _catch_up_with(self, late: Fragment) -> None:
        """The others have gone on without us, and what we missed is removed: take what they agreed on."""
        try:
            if not self._options.checkpoint_every:
                raise RoundGone(
                    f"round {late.round} of {late.name!r} in run {self._reduce.run_id!r}",
                    "the others have gone on, and with checkpoint_every=0 the bucket has no state to catch up from",
                )
            self._take(late, wait_for_state(self._bucket, self._reduce, late.name, at_least=late.round + 1))
            for fragment in self._fragments:
                newer = self._bucket.newest(fragment.name, fragment.round + 1)
                if newer is not None:
                    self._take(fragment, newer)
        except BaseException:
            self._team.tell([FAILED, self.step_count])
            raise
        self._go_on()

    def _go_on(self) -> None:
        """From what was taken, at the step that follows from it."""
        self.step_count = self._schedule.start_of([f.round for f in self._fragments])
        self._team.tell([CAUGHT_UP, self.step_count])
        self._share_all()

    def _jump(self, step: int) -> None:
        """A process that follows goes where its leader is."""
        self.step_count = step
        self._share_all()

    def _share_all(self) -> None:
        for fragment in self._fragments:
            self._team.share(fragment.shared())
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
            if fragment.buffers:
                fields["buffers"] = list(fragment.buffers)
            if fragment.given is not None:
                given = fragment.given
                fields["given"] = {"deltas": given.deltas, "weight": given.weight, "buffers": given.buffers}
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
        self._saved()
        self.step_count = state["step"]
        if self._team.leads:
            self._reduce.load_state_dict(state["allreduce"])
        for fragment, fields in zip(self._fragments, fragments.values(), strict=True):
            fragment.take(fields["agreed"], fields["velocity"], fields.get("buffers", ()))
            fragment.round, fragment.samples = fields["round"], fields["samples"]
            fragment.counted = self._seen - fields["unsent"]
            fragment.given = None
            given = fields.get("given")
            if given is not None:
                before = state["allreduce"].get(fragment.name)
                buffers = list(given.get("buffers", ()))
                fragment.given = Given(list(given["deltas"]), given["weight"], before, buffers)
                self._submit(fragment, fragment.given)
