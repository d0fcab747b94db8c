"""A judge of what a controller did over many turns: the rules as users are told them, and nothing of the core's code.

It knows what really became of every process and what the controller was shown of it, and counts for itself: failures
against the budget, seconds against the back-off, the order of failures against the one that is blamed.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from basilica.core.actions import Action, Launch, Stop
from basilica.core.goodput import microseconds, totals
from basilica.core.phase import Phase, RankPhase
from basilica.core.policy import Culprit
from basilica.core.seen import AnswerState, Ended, SeenRank, Sight, Sighting
from basilica.core.status import DeploymentStatus

if TYPE_CHECKING:
    from .simulation import Process, Simulation

UNSEEN_SECONDS = 30.0  # a rank that no look has shown for so long is gone
SIMULTANEOUS_SECONDS = 0.05
SOONEST_SECONDS = 1.0  # until a rank starts again
LATEST_SECONDS = 60.0

Key = tuple[int, int]


@dataclass(frozen=True)
class Failure:
    """An attempt that ended badly by itself, and when the controller was told."""

    key: Key
    told_at: float  # in seconds that passed
    seen_at: float  # by the controller's clock
    turn: int
    finished_at: float
    by_platform: bool


@dataclass
class Oracle:
    sim: "Simulation"
    failures: dict[Key, Failure] = field(default_factory=dict)
    last_shown: dict[Key, float] = field(default_factory=dict)
    window: int = 0  # the turn in which the controller last took up a change of the spec: budgets may begin anew
    whole: int = 0  # the turn in which the world last became whole
    whole_at: float = 0.0  # by the controller's clock, which may stand still between two turns
    blamable: set[Key] = field(default_factory=set)  # failures of ranks that the world still wants
    places: list[float] = field(default_factory=list)  # since when each place of the world is wanted
    accounted: int = 0  # microseconds of places that are not wanted any more

    # ---- what the controller was told, and what it wrote down ------------------------------------------------------

    def saves(self, before: DeploymentStatus, after: DeploymentStatus) -> None:
        """The look of this turn is taken in for good."""
        sim = self.sim
        if after.observed_generation != before.observed_generation:
            self.window = sim.turns
        for seen in sim.delivered.ranks:
            self.last_shown[seen.rank, seen.attempt] = sim.elapsed
            if seen.ended is not None and _failed(seen.ended):
                self._note(before, seen, seen.ended)
        self.blamable = {key for key in self.blamable if key[0] < after.world_target}
        if _is_whole(after) and not _is_whole(before):
            self.whole, self.whole_at = sim.turns, sim.now
        self._check_lost(before, after)
        self._check_ledger(before, after)
        self._check_notice(before, after)

    def _check_ledger(self, before: DeploymentStatus, after: DeploymentStatus) -> None:
        """The parts of the ledger add up to wall time x target: every place from when it is wanted until it is not."""
        sim = self.sim
        if before.terminal_at is None:
            begin = after.created_at if before.world_target == 0 else sim.now
            self.places += [begin] * (after.world_target - len(self.places))
            keep = after.world_target if after.terminal_at is None else 0
            for begun in self.places[keep:]:
                self.accounted += microseconds(sim.now) - microseconds(begun)
            del self.places[keep:]
        amounts = totals(after.ledger, [r.segment for r in after.ranks if r.segment is not None], sim.now)
        assert all(amount >= 0 for amount in amounts.values()), f"a negative amount in {amounts}"
        wanted = self.accounted + sum(microseconds(sim.now) - microseconds(begun) for begun in self.places)
        assert sim.set_back or sum(amounts.values()) == wanted, f"{amounts} do not add up to {wanted}"
        placed = {r.rank for r in after.ranks if r.segment is not None}
        assert placed == (set() if after.terminal_at is not None else set(range(after.world_target)))

    def _check_notice(self, before: DeploymentStatus, after: DeploymentStatus) -> None:
        """A planned change waits until every rank that reads notices is ready for it, or until its limit."""
        sim = self.sim
        was = before.world_target if before.admitted is None else before.admitted
        resized = was not in (0, after.world_target if after.admitted is None else after.admitted)
        if not resized or after.terminal_at is not None or after.world_target == 0:
            return
        book = {(r.rank, r.attempt): r.phase for r in after.ranks}
        for seen in sim.delivered.ranks:
            phase = book.get((seen.rank, seen.attempt))
            if seen.answer is None or seen.sight is not Sight.RUNNING or phase is not RankPhase.RUNNING:
                continue
            if seen.rank >= was:
                continue
            assert before.notice is not None, f"rank {seen.rank} was not told of the resize"
            ready = seen.answer.state is AnswerState.READY and seen.answer.number == before.notice.number
            assert ready or sim.now >= before.notice.until, f"the resize did not wait for rank {seen.rank}"

    def _note(self, before: DeploymentStatus, seen: SeenRank, ended: Ended) -> None:
        key = (seen.rank, seen.attempt)
        current = any((r.rank, r.attempt) == key and r.phase.may_run for r in before.ranks)
        if current and key not in self.failures:
            sim = self.sim
            self.failures[key] = Failure(key, sim.elapsed, sim.now, sim.turns, ended.finished_at, ended.by_platform)
            if seen.rank < before.world_target and not ended.by_platform:
                self.blamable.add(key)

    def _check_lost(self, before: DeploymentStatus, after: DeploymentStatus) -> None:
        """A rank is given up only when its budget is spent."""
        lost_before = {r.rank for r in before.ranks if r.phase is RankPhase.LOST}
        for rank in after.ranks:
            newly = rank.phase is RankPhase.LOST and rank.rank not in lost_before
            if not newly or after.phase.terminal or before.phase.terminal:
                continue
            ends = [p.ended for p in self.sim.processes if p.rank == rank.rank and p.ended is not None]
            if any(e.start_error is not None for e in ends):
                continue
            bad = sum(not e.by_platform and (_failed(e) or e.stopped) for e in ends)
            assert bad > self.sim.spec.max_restarts, f"rank {rank.rank} was given up after {bad} bad ends"

    # ---- what the controller does ----------------------------------------------------------------------------------

    def acts(self, action: Action) -> None:
        """Before the runtime does it: what is done is written down already, so that the next controller knows."""
        book = {(r.rank, r.attempt): r for r in self.sim.status.ranks}
        if isinstance(action, Launch):
            entry = book.get((action.rank, action.attempt))
            assert entry is not None, f"{action} is not written down"
            assert entry.phase is RankPhase.LAUNCHED, f"{action} is not written down: {entry.phase}"
            self._check_launch(action)
        elif isinstance(action, Stop):
            entry = book.get((action.rank, action.attempt))
            wanted = entry is not None and entry.phase in (RankPhase.LAUNCHED, RankPhase.RUNNING)
            assert not wanted, f"{action} is not written down: {entry}"

    def _check_launch(self, launch: Launch) -> None:
        older = [p for p in self.sim.processes if p.rank == launch.rank and p.attempt < launch.attempt]
        for process in older:
            assert not self._doubled(process), f"{launch} beside {process}, which nobody has given up"
        mine = [f for f in self.failures.values() if f.key[0] == launch.rank and f.key[1] < launch.attempt]
        charged = [f for f in mine if f.turn > self.window and not f.by_platform]
        assert len(charged) <= self.sim.spec.max_restarts, f"{launch} after {len(charged)} failures"
        last = max(mine, key=lambda f: f.key[1], default=None)
        if last is None or last.turn <= self.window or last.key[1] != launch.attempt - 1:
            return
        passed = self.sim.elapsed - last.told_at
        due = SOONEST_SECONDS if last.by_platform else min(LATEST_SECONDS, SOONEST_SECONDS * 2 ** (len(charged) - 1))
        assert passed >= due - 1e-6, f"{launch} came {passed:g} s after a failure, too soon by {due - passed:g} s"

    def _doubled(self, process: "Process") -> bool:
        """It lives, nobody asked it to stop, and it was seen so lately that nobody may take it for gone."""
        if not process.alive or process.asked_to_stop or process.key in self.sim.tombstones:
            return False
        if process.key not in self.last_shown:
            return True  # launched, and never seen since: it is asked for again, as the same attempt
        return self.sim.elapsed - self.last_shown[process.key] < UNSEEN_SECONDS - 1e-6

    def turned(self, look: Sighting) -> None:
        """A whole turn is over: what has no business to run was told to go."""
        sim = self.sim
        if sim.removed:
            return
        book = {(r.rank, r.attempt): r for r in sim.status.ranks}
        shown = {(s.rank, s.attempt) for s in look.ranks if s.sight is not Sight.ENDED}
        for process in sim.processes:
            if process.key not in shown or not process.alive or process.asked_to_stop:
                continue
            entry = book.get(process.key)
            assert entry is not None, f"{process} runs, and the book does not know it"
            assert entry.phase.may_run, f"{process} runs, and the book has it as {entry.phase}"
            assert process.rank < sim.status.world_target, (
                f"{process} is more than the {sim.status.world_target} wanted"
            )
            assert not sim.status.phase.terminal, f"{process} runs on after the end"

    # ---- the end ---------------------------------------------------------------------------------------------------

    def ends(self, culprit: Culprit | None) -> None:
        """The one that is blamed failed first: on one node by its clock, else as the controller came to know of it."""
        sim = self.sim
        stalled = any(e.termination_reason == "Stalled" for e in (*sim.status.failures, *sim.status.exits))
        if sim.status.phase is not Phase.FAILED or culprit is None or stalled or sim.set_back:
            return
        if culprit.exit.worker is not None:
            journals = [
                p.agent.exits for p in sim.processes if p.key == (culprit.exit.rank, culprit.exit.attempt) and p.agent
            ]
            assert any(e.torch_rank == culprit.exit.torch_rank for exits in journals for e in exits), (
                f"{culprit}: invented"
            )
            return
        suspects = [f for f in self.failures.values() if f.key in self.blamable and self._is_since_whole(f)]
        blamed = self.failures.get((culprit.exit.rank, culprit.exit.attempt))
        assert blamed in suspects, f"{culprit} is blamed, and the suspects are {suspects}"
        one_node = len({f.key[0] % sim.nodes for f in suspects}) == 1
        moments = {f.key: f.finished_at if one_node else f.seen_at for f in suspects}
        behind = moments[culprit.exit.rank, culprit.exit.attempt] - min(moments.values())
        assert behind <= SIMULTANEOUS_SECONDS + 1e-9, f"{culprit} is blamed, {behind:g} s after the first of {suspects}"

    def _is_since_whole(self, failure: Failure) -> bool:
        return failure.turn >= self.whole or failure.seen_at >= self.whole_at


def _failed(ended: Ended) -> bool:
    return not ended.stopped and ended.exit_code != 0


def _is_whole(status: DeploymentStatus) -> bool:
    return status.world_target > 0 and status.ready == status.world_target
