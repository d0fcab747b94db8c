"""A run, the real turn of the controller, and a store and a runtime that keep their promises and not one more.

The runtime is honest to the port: Launch is idempotent and refused while an older attempt of that rank lives, Stop of
an attempt that never came makes sure that it never will. But it is no friend: looks come late, come twice, miss ranks
that run, cannot tell, or fail; ranks end in any way; records get lost with the process they were about; the controller
dies between any two steps. Nothing here is random: whoever drives it (Hypothesis, or explore.py) makes the choices.

Every promise of the core that can be checked at one step is checked in `_check_plan`, those about processes where they
start and end, and those about the end of it all in `settle`. What the controller does over many turns is judged by
`oracle.Oracle`, which knows the rules from the documentation and none of the code that follows them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from basilica.controller import step as stepping
from basilica.core import metering, policy
from basilica.core.actions import (
    Action,
    Announce,
    EndProbe,
    EndRendezvous,
    Launch,
    PersistSnapshots,
    Plan,
    Probe,
    Remove,
    Stop,
)
from basilica.core.errors import StaleVersion
from basilica.core.failing import RECORD_AFTER_S, record_failure
from basilica.core.mesh import Announcement, Gate, SeenMesh, SeenRendezvous, failing_pairs
from basilica.core.phase import BenchPhase, Phase, RankPhase
from basilica.core.reconcile import reconcile
from basilica.core.seen import (
    AnswerState,
    Ended,
    Leaving,
    SeenAgent,
    SeenAnswer,
    SeenBench,
    SeenProgress,
    SeenRank,
    SeenRefusal,
    SeenRestore,
    SeenSaved,
    SeenSaving,
    SeenWorkerExit,
    Sight,
    Sighting,
    Stalled,
)
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import HISTORY_MAX, DeploymentStatus, Usage
from basilica.core.why import why
from basilica.core.world import STALLED

from .oracle import Oracle
from .ports import Died, drive, ports_of

LOOKS_KEPT = 6
START = 1_000.0
NODES = ("node-a", "node-b")


@dataclass
class Process:
    """One attempt of one rank, as it really is. `shown` and `clear` are about the looks, not about the process."""

    rank: int
    attempt: int
    world_size: int
    sight: Sight = Sight.STARTING
    started_at: float | None = None
    asked_to_stop: bool = False
    ended: Ended | None = None
    stalled: Stalled | None = None
    agent: SeenAgent | None = None
    progress: SeenProgress | None = None
    answer: SeenAnswer | None = None
    saving: SeenSaving | None = None
    leaving: Leaving | None = None
    shown: bool = True
    clear: bool = True
    forgotten: bool = False  # the record is lost too; the process is dead by then
    was_hidden: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.attempt

    @property
    def alive(self) -> bool:
        return self.sight is not Sight.ENDED

    @property
    def running(self) -> bool:
        return self.sight is Sight.RUNNING

    def seen(self) -> SeenRank:
        node = NODES[self.rank % len(NODES)]
        if not self.clear and self.alive:
            return SeenRank(rank=self.rank, attempt=self.attempt, sight=Sight.UNKNOWN, node=node)
        note = "behind another run" if self.sight is Sight.QUEUED else ""
        return SeenRank(
            rank=self.rank,
            attempt=self.attempt,
            sight=self.sight,
            node=node,
            pod_name=f"sim-{self.rank}",
            started_at=self.started_at,
            gpus=2 if self.started_at is not None else 0,
            ended=self.ended,
            note=note,
            stalled=self.stalled,
            agent=self.agent,
            progress=self.progress,
            answer=self.answer if self.alive else None,
            saving=self.saving,
            leaving=self.leaving if self.alive else None,
        )


@dataclass
class Simulation:
    """`tombstones_show`: whether looks show an attempt that was stopped before it came, or nothing at all."""

    spec: DeploymentSpec
    tombstones_show: bool = True
    starts_at_once: bool = False
    hides_new: bool = False
    now: float = START
    status: DeploymentStatus = field(default_factory=lambda: DeploymentStatus(created_at=START))
    processes: list[Process] = field(default_factory=list)
    tombstones: set[tuple[int, int]] = field(default_factory=set)
    probe: SeenBench | None = None
    rendezvous: SeenRendezvous | None = None
    cut: set[tuple[str, str]] = field(default_factory=set)  # ways between hosts that do not work
    removed: bool = False
    looks: list[Sighting] = field(default_factory=list)
    delivered: Sighting = field(default_factory=Sighting)
    wake_at: float | None = START
    restless: bool = True  # the runtime or the spec changed since the controller last looked
    faithful: bool = True  # looks have shown all there was, and no controller has died so far
    told: set[tuple[int, int]] = field(default_factory=set)  # attempts that some look showed running or ended
    turns: int = 0
    elapsed: float = 0.0  # seconds that passed; the clock may have been set back meanwhile
    set_back: bool = False
    nodes: int = len(NODES)
    reached: int = 0  # the highest step that any rank has reported
    journalled: int = 0  # exits of workers so far
    oracle: Oracle = field(init=False)

    def __post_init__(self) -> None:
        self.oracle = Oracle(self)

    # ---- the runtime acts ----------------------------------------------------------------------------------------

    def apply(self, action: Action) -> None:
        self.oracle.acts(action)
        assert not self.removed or isinstance(action, Remove), f"{action} after everything was removed"
        match action:
            case Launch():
                self._launch(action)
            case Stop(rank, attempt):
                self._stop(rank, attempt)
            case Probe():
                self.probe = self.probe or SeenBench(phase=BenchPhase.PENDING)
            case EndProbe():
                self.probe = None
            case Announce(announcement):
                assert not self.status.phase.terminal, f"{action} after the end"
                self.rendezvous = SeenRendezvous(endpoint="127.0.0.1:2379", says=announcement)
            case EndRendezvous():
                assert self.status.settled, "the rendezvous was taken from ranks that may still run"
                self.rendezvous = None
            case PersistSnapshots():
                assert self.status.phase.terminal, "the memory of ranks that may still run was taken"
            case Remove():
                self.rendezvous = None
                # One that the looks kept from the controller for so long that it was given up is beyond its power.
                known = {(s.rank, s.attempt) for s in self.delivered.ranks if s.sight is not Sight.ENDED}
                alive = [p for p in self.processes if p.alive and (p.key in known or not p.was_hidden)]
                assert not alive, f"removed while {alive} live"
                self.removed = True

    def _launch(self, launch: Launch) -> None:
        assert not self.status.phase.terminal, f"{launch} after the end"
        mine = [p for p in self.processes if p.rank == launch.rank and not p.forgotten]
        assert all(p.attempt <= launch.attempt for p in mine), f"{launch} goes back behind {mine}"
        key = (launch.rank, launch.attempt)
        if key in self.tombstones or any(p.attempt == launch.attempt or p.alive for p in mine):
            return  # it must not start, is there already, or is refused: an older one lives
        process = Process(launch.rank, launch.attempt, launch.world_size, shown=not self.hides_new)
        if self.hides_new:
            self._doubt(process)
        self.processes.append(process)
        self.restless = True
        if self.starts_at_once:
            self.start(process)

    def _stop(self, rank: int, attempt: int) -> None:
        mine = [p for p in self.processes if p.key == (rank, attempt) and not p.forgotten]
        if not mine:
            self.tombstones.add((rank, attempt))
            if self.tombstones_show:
                gone = Ended(exit_code=None, reason="Unknown", finished_at=self.now, stopped=True)
                self.processes.append(Process(rank, attempt, 0, sight=Sight.ENDED, ended=gone))
                self.restless = True
        for process in mine:
            if process.alive and not process.running:
                self._end(process, Ended(exit_code=None, reason="Unknown", finished_at=self.now, stopped=True))
            process.asked_to_stop = True

    # ---- what happens to processes -------------------------------------------------------------------------------

    def start(self, process: Process) -> None:
        if process.sight not in (Sight.STARTING, Sight.QUEUED):
            return
        others = [p for p in self.processes if p.rank == process.rank and p.running]
        assert not others, f"rank {process.rank} runs twice: {process} beside {others}"
        assert process.key not in self.tombstones, f"{process} starts after it was stopped"
        process.sight, process.started_at = Sight.RUNNING, self.now
        self.restless = True

    def queue(self, process: Process) -> None:
        if process.sight is Sight.STARTING:
            process.sight = Sight.QUEUED
            self.restless = True

    def exit(self, process: Process, code: int | None, signal: str | None, reason: str, *, platform: bool) -> None:
        """The program ends; if it had been asked to, the runtime knows."""
        if process.running:
            self._end(
                process,
                Ended(
                    exit_code=code,
                    reason=reason,
                    finished_at=self.now,
                    signal=signal,
                    stopped=process.asked_to_stop,
                    by_platform=platform,
                    log_tail=("last words",),
                ),
            )

    def stall_or_resume(self, process: Process) -> None:
        """It falls silent, or reports again."""
        if process.running:
            process.stalled = None if process.stalled else Stalled(since=self.now, usual_step_seconds=0.1, stack="f")
            self.restless = True

    # ---- workers, steps and notices ------------------------------------------------------------------------------

    def meet(self, process: Process) -> None:
        """The rank's agent has no workers and waits for the others."""
        if process.running:
            known = process.agent or SeenAgent(pid=process.attempt + 1, nproc=2)
            process.agent = replace(known, meeting_since=self.now, executing_since=None)
            process.progress = process.saving = None
            self.restless = True

    def begin_round(self, process: Process) -> None:
        agent = process.agent
        if process.running and agent is not None and agent.executing_since is None:
            first = 2 * process.rank
            process.agent = replace(
                agent, round=agent.round + 1, executing_since=self.now, first_torch_rank=first, pids=(1, 2)
            )
            self.restless = True

    def worker_exits(self, process: Process, code: int, *, echo: bool) -> None:
        agent = process.agent
        if process.running and agent is not None and agent.executing_since is not None:
            self.journalled += 1
            exit = SeenWorkerExit(
                number=self.journalled,
                worker=self.journalled % 2,
                torch_rank=2 * process.rank + self.journalled % 2,
                pid=1 + self.journalled % 2,
                exit_code=code,
                reason="Error" if code else "Completed",
                at=self.now,
                round=agent.round,
                echo=echo and code != 0,
                message="RuntimeError: boom" if code else "",
            )
            process.agent = replace(agent, exits=(*agent.exits, exit)[-4:])
            self.restless = True

    def take_steps(self, process: Process, count: int, *, back: int) -> None:
        """The rank's program reports steps; a fresh process begins some steps before the highest one."""
        if not process.running or (process.agent is not None and process.agent.executing_since is None):
            return
        if process.progress is None:
            first = max(1, self.reached + 1 - back)
            process.progress = SeenProgress(first_at=self.now, first_step=first, at=self.now, step=first)
        step = process.progress.step + count
        process.progress = replace(process.progress, at=self.now, step=step, step_seconds=0.1)
        self.reached = max(self.reached, step)
        self.restless = True

    def restore(self, process: Process, *, refuses: bool) -> None:
        """The rank's program begins to restore its state, or ends with that; perhaps it refuses a copy."""
        if not process.running or (process.agent is not None and process.agent.executing_since is None):
            return
        known = process.saving or SeenSaving(process_at=self.now, at=self.now)
        if known.restoring_since is None:
            process.saving = replace(known, restoring_since=self.now)
        else:
            began = known.restoring_since
            over = SeenRestore(
                step=self.reached or None, tier="disk", seconds=1.0, began_at=began, at=max(began, self.now)
            )
            process.saving = replace(known, restoring_since=None, restored=over)
        if refuses:
            number = len(known.refusals) + 1
            refusal = SeenRefusal(pid=process.attempt + 1, number=number, what=f"copy {number} is corrupt")
            process.saving = replace(process.saving, refusals=(*known.refusals, refusal))
        self.restless = True

    def snapshot(self, process: Process, seconds: float) -> None:
        """Snapshots have blocked the rank; a rank may claim any time for that."""
        if process.running and process.progress is not None:
            known = process.saving or SeenSaving(process_at=self.now, at=self.now)
            process.saving = replace(
                known,
                at=max(known.at, self.now),
                blocked_seconds=known.blocked_seconds + seconds,
                snapshots=known.snapshots + 1,
                saved=(SeenSaved(tier="memory", step=process.progress.step, size=7, at=self.now),),
            )

    def answer(self, process: Process, state: AnswerState) -> None:
        if process.running:
            says = self.rendezvous.says if self.rendezvous is not None else None
            number = 0 if says is None or says.notice is None else says.notice.number
            step = None if process.progress is None else process.progress.step
            state = state if number else AnswerState.LISTENING
            process.answer = SeenAnswer(state=state, number=number, step=step, at=self.now)
            self.restless = True

    def take_away(self, process: Process, seconds: float) -> None:
        if process.running:
            process.leaving = Leaving(kind="preemption", until=self.now + seconds, reason="spot")
            self.restless = True

    def fail_to_start(self, process: Process) -> None:
        if process.alive and not process.running:
            error = "no such program: 'trian.py'"
            self._end(process, Ended(exit_code=None, reason="Error", finished_at=self.now, start_error=error))

    def vanish(self, process: Process) -> None:
        """Process and record are lost together: no look will ever show it again."""
        if not process.forgotten:
            self._end(process, Ended(exit_code=None, reason="Unknown", finished_at=self.now))
            process.forgotten = True
            self.faithful = False

    def _end(self, process: Process, ended: Ended) -> None:
        if process.alive:
            process.sight, process.ended, process.stalled = Sight.ENDED, ended, None
            self.restless = True

    def bench(self, phase: BenchPhase) -> None:
        if self.probe is not None and not self.probe.phase.terminal:
            self.probe = SeenBench(phase=phase, message="measured" if phase is BenchPhase.SUCCEEDED else "")
            self.restless = True

    # ---- the network ---------------------------------------------------------------------------------------------

    def cut_or_heal(self, source: str, target: str) -> None:
        self.cut ^= {(source, target)}
        self.restless = True

    def lose_rendezvous(self) -> None:
        """With all its keys; the runtime notices."""
        self.restless = self.restless or self.rendezvous is not None
        self.rendezvous = None

    # ---- what looks show -----------------------------------------------------------------------------------------

    def hide(self, process: Process) -> None:
        process.shown = False
        self._doubt(process)

    def blur(self, process: Process) -> None:
        process.clear = False
        self.faithful = False

    def reveal(self) -> None:
        """Looks show everything again, and ranks are seen as soon as they are there."""
        self.hides_new = False
        for process in self.processes:
            self.restless = self.restless or not (process.shown and process.clear)
            process.shown = process.clear = True

    def _doubt(self, process: Process) -> None:
        self.faithful = False
        process.was_hidden = True

    def look(self) -> Sighting:
        ranks = tuple(p.seen() for p in self.processes if p.shown and not p.forgotten)
        reports = {a: {b: "no route" if (a, b) in self.cut else "" for b in NODES} for a in NODES}
        hosts = NODES[: self.spec.world.target]
        mesh = SeenMesh(hosts=hosts, failing=failing_pairs(hosts, reports))
        look = Sighting(ranks=ranks, bench=self.probe, mesh=mesh, rendezvous=self.rendezvous)
        self.looks = [*self.looks, look][-LOOKS_KEPT:]
        return look

    # ---- people and time -----------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Clocks of machines are set back now and then."""
        self.now += seconds
        self.elapsed += max(0.0, seconds)
        if seconds < 0:
            self.faithful, self.set_back = False, True

    def scale(self, target: int) -> None:
        """Past the API: nobody asks whether the world is closed or the run over."""
        self.spec = self.spec.scaled(max(self.spec.world.min, min(target, self.spec.world.max)))
        self.restless = True

    def restart(self) -> None:
        self.spec = self.spec.restarted()
        self.restless = True

    def ask(self, wanted: Wanted) -> None:
        self.spec = self.spec.ended_by(wanted)
        self.restless = True

    # ---- the controller ------------------------------------------------------------------------------------------

    def turn(self, *, stale: int = 0, dies_after: int | None = None, conflict: bool = False) -> Plan | None:
        """One turn. `stale`: the look is that many looks old. `conflict`: somebody wrote, the plan is thrown away.

        `dies_after`: the controller dies when so many of its writes are done: that of the status counts as one, and so
        does each action.
        """
        if self.removed:
            return None
        self.turns += 1
        fresh = self.look()
        look = self.looks[-1 - min(stale, len(self.looks) - 1)]
        if look != fresh:
            self.faithful = False
            shown = {(s.rank, s.attempt) for s in look.ranks}
            for process in self.processes:
                process.was_hidden = process.was_hidden or process.key not in shown
        self.delivered = look
        plan = reconcile(self.spec, self.status, look, self.now)
        self._check_plan(plan, look)
        changed = self.restless
        self.restless = False
        try:
            wake_at = drive(stepping.step("sim", *ports_of(self, conflict=conflict, dies_after=dies_after)))[1]
        except StaleVersion:
            self.restless = changed
            return plan
        except Died:
            self.restless = True  # the next controller looks at every live run when it starts
            self._record_failure()
            return plan
        assert self.removed or self.status.failing is None, "a turn that went well left an earlier failure"
        self.wake_at = wake_at
        self.oracle.turned(look)
        return plan

    def _record_failure(self) -> None:
        """As a controller does whose turns fail: the status is written by another than `step`."""
        found = record_failure(self.status, self.now - RECORD_AFTER_S, "the turn failed", self.now)
        if found is not None and not self.removed:
            self.status = found[0]

    def save(self, status: DeploymentStatus) -> None:
        """The store has it: from here on a controller that dies has decided this."""
        assert not (status.settled and status.failing is not None), "a run that is settled is not looked after any more"
        self.told |= {(s.rank, s.attempt) for s in self.delivered.ranks if s.sight in (Sight.RUNNING, Sight.ENDED)}
        self.oracle.saves(self.status, status)
        self.status = status

    def settle(self, *, turns: int = 80) -> None:
        """From here on looks are whole, ranks start when launched, end with 0, and obey stops: so the run must end.

        The controller turns only when something woke it: a change in the runtime or spec, or its own `wake_at`.
        """
        if self.removed:
            return
        self.reveal()
        self.cut.clear()
        for process in self.processes:
            process.stalled = process.leaving = None
        self.starts_at_once = True
        self.restless = True  # a fresh controller
        self.turn()
        giving_up = any(r.stop_reason == STALLED for r in self.status.ranks)  # what has stalled may cost the run
        failed_before = self.status.phase.terminal or giving_up
        for _ in range(turns):
            if self._done():
                break
            self._everybody_moves()
            if not self.restless:
                assert self.wake_at is not None, f"nothing will ever wake {self.status}"
                self.pass_time(max(0.0, self.wake_at - self.now))
            self.turn()
        assert self._done(), f"not settled after {turns} turns: {self.status}"
        self._check_end(failed_before)

    def _done(self) -> bool:
        if self.removed:
            return True
        quiet = not any(p.alive for p in self.processes)
        return quiet and self.status.settled and self.spec.wanted is not Wanted.DELETE and self.rendezvous is None

    def _everybody_moves(self) -> None:
        self.pass_time(0.25)
        for process in list(self.processes):
            if process.running:
                self.exit(process, 0, None, "Completed", platform=False)
            elif process.alive and not process.asked_to_stop:
                self.start(process)

    # ---- promises ------------------------------------------------------------------------------------------------

    def _check_plan(self, plan: Plan, look: Sighting) -> None:
        old, new = self.status, plan.status
        assert reconcile(self.spec, old, look, self.now) == plan, "not deterministic"
        again = reconcile(self.spec, new, look, self.now)
        assert again.status == new, f"one more turn on the same look changes the status: {_changes(new, again.status)}"
        assert not again.events, f"one more turn on the same look says {again.events}"
        self._check_status(old, new)
        self._check_actions(plan, new)
        launches = {a for a in plan.actions if isinstance(a, Launch)}
        pending = {(r.rank, r.attempt) for r in new.ranks if r.phase is RankPhase.LAUNCHED}
        repeated = {a for a in again.actions if isinstance(a, Launch)}
        assert {(a.rank, a.attempt) for a in repeated} <= pending, "one more turn launches something new"
        assert {a for a in repeated if (a.rank, a.attempt) in {(b.rank, b.attempt) for b in launches}} <= launches
        assert plan.wake_at is None or plan.wake_at > self.now, "wakes at once, for ever"
        assert again.wake_at is None or again.wake_at > self.now, "wakes at once, for ever"
        assert all(e.message.strip() for e in plan.events)
        for spec in (self.spec, replace(self.spec, generation=self.spec.generation + 1)):
            sentence = why(spec, new, self.now)
            assert len(sentence) > 10, f"no reason for {new.phase}: {sentence!r}"
            assert "None" not in sentence, sentence

    def _check_status(self, old: DeploymentStatus, new: DeploymentStatus) -> None:
        if old.phase.terminal:
            verdict = (old.phase, old.message, old.terminal_at)
            assert (new.phase, new.message, new.terminal_at) == verdict, "a verdict was taken back"
        assert new.exits[: len(old.exits)] == old.exits, f"exits lost or changed: {old.exits} {new.exits}"
        attempts = [(e.rank, e.attempt) for e in new.exits]
        assert len(set(attempts)) == len(attempts), f"an exit twice: {attempts}"
        for name in ("settled", "closed", "was_ready"):
            assert getattr(new, name) or not getattr(old, name), f"{name} was taken back"
        assert old.observed_generation <= new.observed_generation <= self.spec.generation
        assert 0 <= new.ready <= new.world_target <= self.spec.world.max
        _check_usage(metering.total(old), metering.total(new))
        mine = {r.rank: r for r in new.ranks}
        for rank in old.ranks:
            assert mine[rank.rank].attempt >= rank.attempt, "an attempt went backwards"
        assert [r.rank for r in new.ranks] == sorted(mine)
        assert len(new.history) <= HISTORY_MAX
        assert len(new.failures) <= 8 * len(new.ranks)
        overdue = new.notice is not None and new.notice.done_at is None and self.now >= new.notice.until
        assert not overdue, f"{new.notice} is overdue"
        held = new.notice is not None and new.notice.done_at is not None and self.now >= new.notice.done_at + 15
        assert not held, f"{new.notice} holds ranks for too long"
        assert len(new.milestones) <= 2
        if old.bench is not None and old.bench.phase.terminal:
            assert new.bench == old.bench, "the probe's end was taken back"
        if new.phase.terminal:
            assert new.bench is None or new.bench.phase.terminal
            assert not any(r.phase in (RankPhase.WAITING, RankPhase.LAUNCHED, RankPhase.RUNNING) for r in new.ranks)
        else:
            assert (new.phase is Phase.READY) == (new.ready >= self.spec.world.min), f"{new.phase} with {new.ready}"
            assert (new.phase is Phase.DEGRADED) == (new.was_ready and new.ready < self.spec.world.min)
        self._check_exits(new)

    def _check_exits(self, status: DeploymentStatus) -> None:
        """An exit says what really happened, or that nobody knows."""
        for exit in status.exits:
            truth = [p.ended for p in self.processes if p.key == (exit.rank, exit.attempt) and p.ended is not None]
            known = {(t.exit_code, t.finished_at, t.stopped) for t in truth}
            told = (exit.exit_code, exit.finished_at, exit.stopped or exit.termination_reason == STALLED)
            assert exit.exit_code is None or told in known, f"{exit} is not what happened: {truth}"

    def _check_actions(self, plan: Plan, new: DeploymentStatus) -> None:
        book = {r.rank: r for r in new.ranks}
        launches = [a for a in plan.actions if isinstance(a, Launch)]
        stops = {(a.rank, a.attempt) for a in plan.actions if isinstance(a, Stop)}
        assert len({a.rank for a in launches}) == len(launches), f"one rank launched twice: {launches}"
        assert not launches or not new.phase.terminal, f"launched after the end: {launches}"
        for launch in launches:
            rank = book[launch.rank]
            assert (rank.phase, rank.attempt) == (RankPhase.LAUNCHED, launch.attempt), f"{launch} is not in the book"
            assert launch.rank < new.world_target, f"{launch} is beyond the world"
            assert (launch.rank, launch.attempt) not in self.told | stops, f"{launch} has been there already"
            if self.spec.resize == "restart" and launch.attempt:
                old = [r for r in new.ranks if r.phase is RankPhase.STOPPING]
                assert not old, f"{launch} beside {old}, the gang from before the resize"
        self._check_gate(plan, new)
        removes = [a for a in plan.actions if isinstance(a, Remove)]
        if removes:
            assert new.settled, "removed before it was settled"
            assert self.spec.wanted is Wanted.DELETE, "removed though nobody asked"
            assert not stops, "removed while something is being stopped"

    def _check_gate(self, plan: Plan, new: DeploymentStatus) -> None:
        """Ranks are told how many they are before any of them starts or goes, and a host that may go is told so."""
        announced = [a.announcement for a in plan.actions if isinstance(a, Announce)]
        if new.phase.terminal:
            assert not announced
            return
        says = self.delivered.rendezvous.says if self.delivered.rendezvous is not None else None
        assert new.mesh is not None
        assert self.delivered.mesh is not None
        inside = new.ranks[: new.world_target if new.admitted is None else new.admitted]
        taking_part = sum(r.phase is not RankPhase.LOST for r in inside)
        wanted = Announcement(taking_part, new.mesh.released, new.admitted, new.notice)
        assert announced == ([] if says == wanted else [wanted])
        troubled = {host for pair in self.delivered.mesh.failing for host in (pair.source, pair.target)}
        for host in new.mesh.hosts:
            assert host.gate is Gate.READY or host.host in troubled, f"{host} is held though it reaches all"
            overdue = host.failing_since is not None and self.now - host.failing_since >= 30
            assert host.gate is Gate.DEGRADED or not overdue, f"{host} is held past its limit"
        degraded = [c.status == "True" for c in new.conditions if c.type == "DegradedMesh"]
        assert degraded in ([], [new.mesh.degraded]) or not new.mesh.ready

    def _check_end(self, ended_before: bool) -> None:
        status = self.status
        alive = [p for p in self.processes if p.alive]
        assert not alive, f"still there after the end: {alive}"
        out_of_time = any(t in status.message for t in ("its deadline of", "time to live of", "ranks were up within"))
        if not ended_before and not out_of_time:
            asked = self.spec.wanted is not Wanted.RUN
            assert status.phase is (Phase.CANCELLED if asked else Phase.SUCCEEDED), f"{status}"
        if status.phase is Phase.SUCCEEDED:
            clean = {e.rank for e in status.exits if e.exit_code == 0 and not e.stopped}
            assert len(clean) >= self.spec.world.min
            bad = [r for r in status.ranks if r.rank < status.world_target and r.rank not in clean]
            assert all(r.phase is RankPhase.LOST for r in bad), f"succeeded in spite of {bad}"
        assert self.probe is None or self.probe.phase.terminal, "the probe goes on after the end"
        culprit = policy.find_culprit(status.failures, status.whole_at)
        if culprit is not None:
            assert culprit.exit.failed
            assert culprit.exit in (*status.exits, *status.failures)
            assert culprit.exit.rank < status.world_target, f"{culprit} is no part of the world"
        if status.phase is Phase.FAILED and not out_of_time:
            assert culprit is not None, f"failed, and nobody did it: {status}"
        for exit in status.exits:
            policy.role_of(exit, culprit)
        self.oracle.ends(culprit)
        if not self.removed:
            plan = reconcile(self.spec, status, self.look(), self.now + 1e6)
            assert (plan.status, plan.actions, plan.wake_at) == (status, (), None), f"a settled run moves: {plan}"
        if self.faithful:
            self._check_metering(status)

    def _check_metering(self, status: DeploymentStatus) -> None:
        """With whole looks the account is exact: from start to end, at most to the end of the run."""
        end = status.terminal_at or self.now
        seconds = sum(
            max(0.0, min(p.ended.finished_at, end) - p.started_at)
            for p in self.processes
            if p.started_at is not None and p.ended is not None
        )
        total = metering.total(status)
        assert abs(total.rank_seconds - seconds) < 1e-6, f"metered {total}, ran {seconds} s"
        assert abs(total.gpu_seconds - 2 * seconds) < 1e-6, f"metered {total}, ran {seconds} s on 2 GPUs each"

    # ---- for those who drive it ----------------------------------------------------------------------------------

    def nth(self, n: int, candidates: Iterable[Process] | None = None) -> Process | None:
        """One of the processes that live, whichever n says."""
        alive = [p for p in (self.processes if candidates is None else candidates) if p.alive]
        return alive[n % len(alive)] if alive else None


def _changes(before: Any, after: Any) -> str:
    """Name the fields of two values that differ, as deep as they are alike."""
    if is_dataclass(before) and type(before) is type(after):
        found = {f.name: _changes(getattr(before, f.name), getattr(after, f.name)) for f in fields(before)}
        return " ".join(f"{name}.{change}" for name, change in found.items() if change)
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return " ".join(f"{n}.{change}" for n, (a, b) in pairs if (change := _changes(a, b)))
    return "" if before == after else f"{before!r} -> {after!r}"


def _check_usage(old: Usage, new: Usage) -> None:
    assert new.rank_seconds >= old.rank_seconds - 1e-9, f"metering went backwards: {old} {new}"
    assert new.gpu_seconds >= old.gpu_seconds - 1e-9, f"metering went backwards: {old} {new}"
