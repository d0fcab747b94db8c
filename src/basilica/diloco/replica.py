"""One replica of a DiLoCo run: its synchronization, the application of results, and its catch-up. NumPy, no torch.

The agreed state lives here as NumPy arrays, apart from the model: the parameters (`agreed`), the outer momentum and
the buffers. All replicas have the same bits of it after each round, and each round proves it: it refuses a replica
whose fingerprint differs. The bucket has it too, so a replica that starts, or was left behind, restores it from there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from basilica.diloco.allreduce import ObjectStoreAllReduce, RoundStats
from basilica.diloco.bucket import STATES_KEPT, Bucket, State
from basilica.diloco.errors import BarrierTimeout, RoundConflict, RoundGone
from basilica.diloco.first_round import check_frozen, run_record, wait_for_state
from basilica.diloco.fragments import Alone, Decided, Fragment, Given, Options, Team, Values
from basilica.diloco.model_update import Landing
from basilica.diloco.outer import Array, divide, pseudo_gradient
from basilica.diloco.round_reports import add_ends, log_entry, tell_round
from basilica.diloco.state_writer import Share, StateWriter

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
        self._landing: Landing | None = None
        """The unfinished work of a step that raised."""
        self._behind: tuple[Fragment, int] | None = None
        """A fragment whose round was gone, and how many rounds the state must have that this replica goes on from."""
        if allreduce is not None and self._team.leads:
            self._bucket = Bucket(allreduce.store, allreduce.run_id)
            self._writer = StateWriter(self._bucket, allreduce.troubles)
        self._begin()

    @property
    def round(self) -> int:
        """The number of applied rounds of every fragment."""
        return min(fragment.round for fragment in self._fragments)

    @property
    def samples(self) -> float:
        """The sample cursor of the run: what all counted replicas have seen together, as all agree."""
        return max(fragment.samples for fragment in self._fragments)

    def step(self, samples: float | None = None) -> bool:
        """After each inner step; True if the model was synchronized. One that raises is not counted: repeat it."""
        before = self.step_count, self._seen
        try:
            self.step_count += 1
            self._seen += 1.0 if samples is None else float(samples)
            if self._landing is None:
                giving = self._schedule.given(self.step_count)
                if giving is not None:
                    self._give(giving)
                applying = self._schedule.applied(self.step_count)
                if applying is None or not self._agree(applying):
                    return False
            self._land()
        except BaseException:
            self.step_count, self._seen = before
            raise
        return True

    def take_agreed(self) -> None:
        """Drop what this replica has learned since the last synchronizations."""
        self._check_settled()
        Landing(word=APPLIED, step=self.step_count, fragments=self._fragments).write(self._values)
        for fragment in self._fragments:
            fragment.counted = self._seen

    def close(self, *, wait: bool = True, **outcome: Any) -> None:
        """Wait until what was agreed on is in the bucket, and record there how this replica ended.

        Without `wait` it gets a moment: what is not in the bucket then is missing there, as if this replica was killed.
        """
        if not self._team.leads or self._writer.left:
            return
        for fragment in self._fragments:
            if fragment.given is not None and fragment.given.means is not None:
                fragment.given.means.cancel()
        if outcome:
            self._writer.end(self._reduce.rank, self.incarnation, round=self.round, **outcome)
        self._writer.close(wait=wait)

    def give_up(self, error: BaseException) -> None:
        """End because of an error, which is recorded in the bucket if time allows."""
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
        if not due or not self._team.leads:
            return
        if fragment.given is None:
            deltas = [
                pseudo_gradient(self._values.seen(index, agreed), self._values.read(index))
                for index, agreed in zip(fragment.indexes, fragment.agreed, strict=True)
            ]
            buffers = self._values.buffers() if fragment.buffers else []
            before = self._reduce.state_dict().get(fragment.name)
            fragment.given = Given(deltas, self._seen - fragment.counted, before, buffers, seen=self._seen)
            if self._options.delay:
                self._submit(fragment, fragment.given)
        # What was given in a step that raised is given still: its round goes on where it was.
        fragment.counted = fragment.given.seen

    def _submit(self, fragment: Fragment, given: Given) -> None:
        given.means = self._reduce.submit(given.deltas, given.weight, **self._terms(fragment, given))

    def _terms(self, fragment: Fragment, given: Given) -> dict[str, Any]:
        """Return the metadata of a part for the all-reduce."""
        return {
            "name": fragment.name,
            "base": fragment.digest,
            "settings": self._options.settings,
            "buffers": given.buffers,
        }

    def _agree(self, number: int) -> bool:
        """Whether the replicas have agreed on something, which this process then has to land."""
        fragment, due = self._of(number)
        if not self._team.leads:
            return self._follow(fragment)
        if self._behind is None and (not due or fragment.given is None):
            self._team.tell([SKIPPED, self.step_count])
            return False
        try:
            if self._behind is None and fragment.given is not None:
                try:
                    self._landing = self._decided(fragment, fragment.given)
                except RoundGone:
                    self._behind = fragment, fragment.round + 1
            if self._behind is not None:
                self._landing = self._catch_up(*self._behind)
        except BaseException as error:
            self._team.tell([FAILED, self.step_count])
            if isinstance(error, BarrierTimeout):
                add_ends(error, self._bucket)
            raise
        return True

    def _decided(self, fragment: Fragment, given: Given) -> Landing:
        """Make the outer step with what the replicas agreed on; whatever fails in it goes on where it was."""
        if given.decided is None:
            given.decided = self._means(fragment, given)
        self._writer.wait(fragment.name)
        decided, agreed = given.decided, fragment.agreed
        if fragment.velocity is None:
            fragment.velocity = self._options.outer.at_rest(agreed)
        velocity = fragment.velocity

        def compute(index: int) -> tuple[Array, list[Array]]:
            parameter, speed = agreed[index].copy(), [array.copy() for array in velocity[index : index + 1]]
            self._options.outer.step([parameter], [decided.means[index]], speed, fragment.round)
            return parameter, speed

        def write(index: int, moved: tuple[Array, list[Array]]) -> None:
            np.copyto(agreed[index], moved[0])
            for mine, speed in zip(velocity[index : index + 1], moved[1], strict=True):
                np.copyto(mine, speed)

        decided.outer.run(len(agreed), compute, write)
        fragment.buffers = decided.means[len(agreed) :]
        fragment.prove()
        return Landing(
            word=APPLIED,
            step=self.step_count,
            fragments=[fragment],
            mix=self._options.mix,
            round=fragment.round + 1,
            samples=fragment.samples + sum(decided.stats.outcome.weights.values()),
            stats=decided.stats,
        )

    def _means(self, fragment: Fragment, given: Given) -> Decided:
        if given.means is not None:
            try:
                means = given.means.result()
            finally:
                if given.means.done():
                    given.means = None  # if it failed, the next time begins anew
        else:
            self._reduce.go_back(fragment.name, given.before)
            means = self._reduce.allreduce(given.deltas, given.weight, **self._terms(fragment, given))
        stats = next(s for s in reversed(tuple(self._reduce.history)) if s.name == fragment.name)
        return Decided(means, stats)

    def _follow(self, fragment: Fragment) -> bool:
        """Run the step of a process that does not lead its replica."""
        word, step = self._team.tell([0, 0])
        if word == FAILED:
            raise RuntimeError("the leader of this replica could not synchronize; its own error says why")
        if word == SKIPPED:
            return False
        landing = Landing(word=word, step=step, fragments=self._fragments, told=True)
        if word == APPLIED:
            landing.fragments, landing.mix = [fragment], self._options.mix
            landing.round, landing.samples = fragment.round + 1, fragment.samples
        for each in landing.fragments:
            self._team.share(each.shared())
        self._landing = landing
        return True

    def _land(self) -> None:
        """Do what is left once the replicas have agreed: it needs no other replica, and can be repeated."""
        landing = self._landing
        assert landing is not None
        self._behind = None
        landing.count()
        if not landing.told:
            self._team.tell([landing.word, landing.step])
            for each in landing.fragments:
                self._team.share(each.shared())
            landing.told = True
        landing.write(self._values)
        if landing.stats is not None:
            self._record(landing.fragments[0], landing.stats)
        self.step_count = landing.step
        self._landing = None

    def _check_settled(self) -> None:
        moving = any(f.given and f.given.decided and f.given.decided.outer.begun for f in self._fragments)
        if moving or self._landing is not None or self._behind is not None:
            raise RuntimeError(
                "the last step() raised when a synchronization was half applied: repeat it first, it goes on from there"
            )

    # What the bucket learns.

    def _record(self, fragment: Fragment, stats: RoundStats) -> None:
        """In the background: the next steps need nothing of it, and do not change what is written."""
        outcome = stats.outcome
        tell_round(
            stats,
            replica=self._reduce.rank,
            world=self._reduce.world_size,
            fragment=self._fragments.index(fragment),
        )
        counted, rank = sorted(outcome.weights), self._reduce.rank
        every = self._options.checkpoint_every
        share = None
        if rank in counted and every and fragment.round % every == 0:
            share = Share(
                state=self._state(fragment, outcome.chain, outcome.following),
                piece=counted.index(rank),
                pieces=len(counted),
                forget_before=fragment.round - STATES_KEPT * every,
            )
        self._writer.submit(share, log_entry(fragment, stats) if rank == counted[0] else None)

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

    # Beginning and catching up.

    def _begin(self) -> None:
        if not self._team.leads:
            self._follow(self._fragments[0])
            self._land()
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
        self._landing = self._caught_up()
        self._land()

    def _join(self) -> None:
        """Take what was agreed on, or let rank 0's be that."""
        rank = self._reduce.rank
        self._bucket.begin(run_record(self._reduce, self._options))
        frozen = self._values.frozen()
        if rank == 0:
            self._writer.sweep()
            check_frozen(self._bucket, self._options.part, rank, frozen)
        for fragment in self._fragments:
            fragment.prove()
            self._take(fragment, self._first_state(fragment))
        if rank != 0:
            check_frozen(self._bucket, self._options.part, rank, frozen)

    def _first_state(self, fragment: Fragment) -> State:
        """Return the initial state of this replica: the newest agreed one, else the parameters of rank 0."""
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
        self._writer.wait(fragment.name)
        fragment.take(state.parameters, state.velocity, state.buffers)
        fragment.samples, fragment.counted, fragment.given = state.samples, self._seen, None
        self._reduce.go_on(fragment.name, round=state.round, chain=state.chain, expected=state.expected)
        fragment.round = state.round

    def _catch_up(self, late: Fragment, at_least: int) -> Landing:
        """The others have gone on without us, and what we missed is removed: take what they agreed on."""
        if not self._options.checkpoint_every:
            raise RoundGone(
                f"round {late.round} of {late.name!r} in run {self._reduce.run_id!r}",
                "the others have gone on, and with checkpoint_every=0 the bucket has no state to catch up from",
            )
        self._take(late, wait_for_state(self._bucket, self._reduce, late.name, at_least=at_least))
        for fragment in self._fragments:
            newer = self._bucket.newest(fragment.name, fragment.round + 1)
            if newer is not None:
                self._take(fragment, newer)
        return self._caught_up()

    def _caught_up(self) -> Landing:
        """From what was taken, at the step that follows from it."""
        step = self._schedule.start_of([f.round for f in self._fragments])
        return Landing(word=CAUGHT_UP, step=step, fragments=self._fragments)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All but the model's own parameters: those belong beside it, as always."""
        self._check_settled()
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
        if self._team.leads:
            self._writer.wait(*fragments)
        self._landing = self._behind = None
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
                fragment.given = Given(list(given["deltas"]), given["weight"], before, buffers, seen=fragment.counted)
                self._submit(fragment, fragment.given)
