"""One step of a run's life, decided: spec, status, what was seen and the time in; a Plan out.

Total and deterministic. A settled run, or one of which nothing changed, gets its own status back and no actions, so
turning the controller once more is always safe. The order of a turn:

    take in what was seen  →  obey the spec  →  judge  →  deadlines  →  launch and stop  →  phase, gate, bench, metering
"""

from dataclasses import replace
from typing import Literal

from basilica.core import mesh, metering, policy, stalls
from basilica.core.actions import Action, Announce, EndProbe, EndRendezvous, Launch, Plan, Probe, Remove, Stop
from basilica.core.events import Event, Reason
from basilica.core.phase import BenchPhase, Phase, RankPhase
from basilica.core.seen import Ended, SeenRank, Sight, Sighting, Stalled
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import (
    HISTORY_MAX,
    BenchStatus,
    Condition,
    DeploymentStatus,
    Milestone,
    Resize,
    WorldSample,
)
from basilica.core.world import STALLED, RankExit, RankStatus

WORLD_READY = "world_ready"
RELAUNCH_DELAY = 1.0  # a launch that no look shows is asked for again after this

_BENCH_EVENTS = {
    BenchPhase.RUNNING: Reason.BENCH_STARTED,
    BenchPhase.SUCCEEDED: Reason.BENCH_SUCCEEDED,
    BenchPhase.FAILED: Reason.BENCH_FAILED,
    BenchPhase.TIMED_OUT: Reason.BENCH_TIMED_OUT,
    BenchPhase.SKIPPED: Reason.BENCH_SKIPPED,
}
_END_EVENTS = {
    Phase.SUCCEEDED: Reason.SUCCEEDED,
    Phase.FAILED: Reason.FAILED,
    Phase.CANCELLED: Reason.CANCELLED,
}


def reconcile(spec: DeploymentSpec, status: DeploymentStatus, seen: Sighting, now: float) -> Plan:
    """Decide one step."""
    turn = _Turn(spec, status, seen, now)
    turn.take_in()
    if not turn.ended:
        turn.obey_spec()
    if not turn.ended:
        turn.notice_readiness()
        turn.judge()  # before the deadlines: a run that is done by now is done, however late the look
    if not turn.ended:
        turn.keep_deadlines()
    if turn.ended:
        turn.wind_down()
    else:
        turn.shape_the_world()
        turn.name_the_phase()
        turn.open_the_gate()
    turn.watch_the_stopping()
    turn.follow_the_bench()
    return turn.plan()


class _Turn:
    """The status while it is being decided on. It lives for one call and nothing outside sees it."""

    def __init__(self, spec: DeploymentSpec, status: DeploymentStatus, seen: Sighting, now: float) -> None:
        self.spec, self.before, self.seen, self.now = spec, status, seen, now
        self.status = status
        self.ranks = {r.rank: r for r in status.ranks}
        self.exits = list(status.exits)
        self.actions: list[Action] = []
        self.events: list[Event] = []
        self.wakes: list[float] = []
        self.start_errors: dict[int, str] = {}
        self.running: set[int] = set()  # ranks that this look showed running
        self.present: set[int] = set()  # ranks whose current attempt this look showed at all
        self.stalls: list[tuple[int, Stalled]] = []  # that this look was the first to show
        self.strangers = 0
        self.removable = False

    @property
    def ended(self) -> bool:
        return self.status.phase.terminal

    def say(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append(Event(reason, message, warning))

    def wanted(self) -> list[RankStatus]:
        return [r for r in self.ranks.values() if r.rank < self.status.world_target]

    # ---- what was seen -------------------------------------------------------------------------------------------

    def take_in(self) -> None:
        for seen in self.seen.ranks:
            rank = self.ranks.get(seen.rank)
            if rank is None or seen.attempt != rank.attempt or not rank.phase.may_run:
                self._fence(seen)
            else:
                self.present.add(rank.rank)
                self._update(rank, seen)
        for rank in list(self.ranks.values()):
            if rank.phase.may_run and rank.rank not in self.present:
                self._miss(rank)
        if self.stalls:
            self.say(Reason.RANK_STALLED, stalls.announce(stalls.in_order(self.stalls)), warning=True)
        for reason, message in self.seen.warnings:
            if reason not in self.status.warned:
                self.status = replace(self.status, warned=(*self.status.warned, reason))
                self.say(reason, message, warning=True)

    def _fence(self, seen: SeenRank) -> None:
        """What the book does not know, or holds for ended (its last stop may have been lost), must not stay."""
        if seen.sight is not Sight.ENDED:
            self.strangers += 1
            self.actions.append(Stop(seen.rank, seen.attempt, self.spec.grace_seconds))

    def _update(self, rank: RankStatus, seen: SeenRank) -> None:
        rank = replace(
            rank,
            missing_since=None,
            node=seen.node or rank.node,
            pod_name=seen.pod_name or rank.pod_name,
            provider=seen.provider or rank.provider,
            region=seen.region or rank.region,
            gpus=seen.gpus or rank.gpus,
            started_at=rank.started_at if rank.started_at is not None else seen.started_at,
        )
        match seen.sight:
            case Sight.RUNNING:
                self.running.add(rank.rank)
                started = self.now if rank.started_at is None else rank.started_at
                phase = RankPhase.RUNNING if rank.phase is RankPhase.LAUNCHED else rank.phase
                stalled = self._stall(rank, seen.stalled)
                rank = replace(rank, phase=phase, started_at=started, note="", stalled=stalled)
            case Sight.QUEUED | Sight.STARTING:
                rank = replace(rank, note=seen.note)
            case Sight.ENDED if seen.ended is not None:
                self._end(rank, seen.ended)
                return
            case _:
                pass
        self.ranks[rank.rank] = rank

    def _stall(self, rank: RankStatus, seen: Stalled | None) -> Stalled | None:
        """What the book says of a rank's silence after this look; its stack stays as it was first taken."""
        known = rank.stalled
        if rank.phase is RankPhase.STOPPING:
            return known
        if seen is None:
            if known is not None:
                self.say(Reason.RANK_RESUMED, f"rank {rank.rank} reports again")
            return None
        if known is not None and known.since == seen.since:
            return known if known.stack or not seen.stack else self._with_room(seen)
        self.stalls.append((rank.rank, seen))
        return self._with_room(seen)

    def _with_room(self, seen: Stalled) -> Stalled:
        stacks = sum(r.stalled is not None and r.stalled.stack != "" for r in self.ranks.values())
        return seen if stacks < stalls.STACKS_KEPT else replace(seen, stack="")

    def _miss(self, rank: RankStatus) -> None:
        """A rank that was up and is not there: gone for good only after a while without a sign of it."""
        if rank.phase is RankPhase.LAUNCHED and rank.started_at is None:
            return  # never seen: its launch is asked for again
        since = self.now if rank.missing_since is None else rank.missing_since
        if self.now - since < policy.LOST_AFTER:
            self.ranks[rank.rank] = replace(rank, missing_since=since)
            self.wakes.append(since + policy.LOST_AFTER)
            return
        self.actions.append(Stop(rank.rank, rank.attempt, 0.0))  # should it be there after all, it must not stay
        stopped = rank.phase is RankPhase.STOPPING
        self._end(rank, Ended(exit_code=None, reason="Unknown", finished_at=since, by_platform=True, stopped=stopped))

    def _end(self, rank: RankStatus, ended: Ended) -> None:
        """Book one ended attempt. Its exit is recorded where it can change no more."""
        now_or_end = self.now if self.status.terminal_at is None else self.status.terminal_at
        until = min(ended.finished_at, now_or_end)  # a node's clock may be ahead
        usage, rank = metering.close(self.status.usage, rank, until)
        self.status = replace(self.status, usage=usage)
        in_world = rank.rank < self.status.world_target
        # What we stopped because it had stalled has failed: it may have a restart, and that costs it one.
        stalled = ended.stopped and rank.stop_reason == STALLED and in_world and not self.ended
        exit = RankExit(
            rank=rank.rank,
            attempt=rank.attempt,
            exit_code=ended.exit_code,
            termination_reason=(rank.stop_reason or ended.reason) if ended.stopped else ended.reason,
            restart_count=rank.restarts,
            started_at=rank.started_at,
            finished_at=ended.finished_at,
            seen_at=max(self.now, self.status.whole_at or self.now),  # in order, even if the clock was set back
            signal=ended.signal,
            node=rank.node,
            stopped=ended.stopped and not stalled,
            log_tail=ended.log_tail if len(self.exits) < policy.LOG_TAILS_KEPT else (),
            traceback=ended.traceback if len(self.exits) < policy.LOG_TAILS_KEPT else "",
        )
        rank = replace(
            rank, started_at=None, restart_at=None, missing_since=None, stop_reason="", note="", stalled=None
        )
        if exit.failed and in_world and (stalled or not ended.by_platform):
            failures = policy.keep_failure(self.status.failures, exit, self.status.whole_at)
            self.status = replace(self.status, failures=failures)
        if self.ended:
            self._retire(rank, exit, in_world)
        elif stalled:
            self._restart_or_lose(rank, exit, by_platform=False)
        elif not in_world or ended.stopped:
            self.ranks[rank.rank] = replace(rank, phase=RankPhase.DROPPED)
        elif exit.exit_code == 0:
            self.exits.append(exit)
            self.status = replace(self.status, closed=True)
            self.ranks[rank.rank] = replace(rank, phase=RankPhase.SUCCEEDED)
        elif ended.start_error is not None:
            self.exits.append(exit)
            self.start_errors[rank.rank] = ended.start_error
            self.ranks[rank.rank] = replace(rank, phase=RankPhase.LOST)
        else:
            self._restart_or_lose(rank, exit, by_platform=ended.by_platform)

    def _retire(self, rank: RankStatus, exit: RankExit, in_world: bool) -> None:
        """After the end of the run: exits are appended as they come, and nothing starts again."""
        if exit.exit_code == 0 and not exit.stopped:
            phase = RankPhase.SUCCEEDED
        else:
            phase = RankPhase.LOST if exit.failed else RankPhase.DROPPED
        self.ranks[rank.rank] = replace(rank, phase=phase)
        if exit.stopped and exit.started_at is None:
            self._record_last_failure(rank)  # this attempt never started, so the one before it was the last
        elif in_world:
            self.exits.append(exit)

    def _restart_or_lose(self, rank: RankStatus, exit: RankExit, *, by_platform: bool) -> None:
        what = f"rank {rank.rank} {policy.describe_exit(exit)}"
        if by_platform:
            self.say(Reason.RANK_RESTARTED, f"{what}: not its own doing, it starts again")
            at = self.now + policy.FIRST_RESTART_DELAY
            self.ranks[rank.rank] = self._next_attempt(rank, restarts=rank.restarts, restart_at=at)
            return
        self.say(Reason.RANK_FAILED, what, warning=True)
        if policy.may_restart(rank.restarts, self.spec.max_restarts):
            restarts = rank.restarts + 1
            self.say(Reason.RANK_RESTARTED, f"rank {rank.rank} restarts: {restarts} of {self.spec.max_restarts}")
            at = self.now + policy.restart_delay(restarts)
            self.ranks[rank.rank] = self._next_attempt(rank, restarts=restarts, restart_at=at)
            return
        self.exits.append(exit)
        self.ranks[rank.rank] = replace(rank, phase=RankPhase.LOST)
        self.say(Reason.RANK_LOST, f"rank {rank.rank} is lost: it has no restart left", warning=True)

    def _next_attempt(self, rank: RankStatus, *, restarts: int, restart_at: float | None) -> RankStatus:
        return RankStatus(
            rank=rank.rank, attempt=rank.attempt + 1, restarts=restarts, restart_at=restart_at, node=rank.node
        )

    # ---- what is wanted ------------------------------------------------------------------------------------------

    def obey_spec(self) -> None:
        if self.spec.generation == self.status.observed_generation:
            return
        first = self.status.observed_generation == 0
        self.status = replace(self.status, observed_generation=self.spec.generation)
        if self.spec.wanted is not Wanted.RUN:
            self.end(Phase.CANCELLED, "cancelled by the user" if self.spec.wanted is Wanted.CANCEL else "deleted")
        elif first:
            self._resize(self.spec.world.target)
        else:
            if self.spec.world.target != self.status.world_target:
                self._scale(self.spec.world.target)
            if any(r.phase is RankPhase.LOST and r.gang != self.spec.gang for r in self.ranks.values()):
                self._revive_lost()

    def _scale(self, target: int) -> None:
        old = self.status.world_target
        if self.status.closed:
            self.say(Reason.SCALE_IGNORED, f"scaling to {target} ignored: a rank has finished already", warning=True)
            return
        self.say(Reason.SCALE_OBSERVED, f"world goes from {old} to {target} ranks")
        self.status = replace(self.status, last_resize=Resize(self.now, old, target, "scale"))
        self._resize(target)

    def _resize(self, target: int) -> None:
        failures = tuple(e for e in self.status.failures if e.rank < target)  # a drained rank is nobody's culprit
        self.status = replace(self.status, world_target=target, failures=failures)
        for rank in list(self.ranks.values()):
            if rank.rank >= target and rank.phase in (RankPhase.WAITING, RankPhase.LOST):
                self.ranks[rank.rank] = replace(rank, phase=RankPhase.DROPPED, restart_at=None)
        self._revive_lost()

    def _revive_lost(self) -> None:
        """Who asks for a size or a fresh gang wants all of it: those that had used up their restarts start afresh."""
        for rank in self.wanted():
            if rank.phase is RankPhase.LOST:
                self.ranks[rank.rank] = self._next_attempt(rank, restarts=0, restart_at=None)

    def keep_deadlines(self) -> None:
        created = self.status.created_at
        if self.spec.ttl_seconds and self._due(created + self.spec.ttl_seconds):
            self.end(Phase.CANCELLED, f"its time to live of {self.spec.ttl_seconds:g} s ran out")
        elif self.spec.deadline_seconds and self._due(created + self.spec.deadline_seconds):
            message = f"not done within its deadline of {self.spec.deadline_seconds:g} s"
            self.end(Phase.FAILED, message, stop_reason="DeadlineExceeded")
        elif (
            self.spec.start_deadline_seconds
            and not self.status.was_ready
            and self._due(created + self.spec.start_deadline_seconds)
        ):
            message = f"fewer than {self.spec.world.min} ranks were up within {self.spec.start_deadline_seconds:g} s"
            self.end(Phase.FAILED, message, stop_reason="DeadlineExceeded")

    def _due(self, moment: float) -> bool:
        if self.now >= moment:
            return True
        self.wakes.append(moment)
        return False

    def notice_readiness(self) -> None:
        """The first look that shows `min` ranks up or done counts, even if they are resized or judged in this turn."""
        up = sum(r.phase in (RankPhase.RUNNING, RankPhase.SUCCEEDED) for r in self.wanted())
        if not self.status.was_ready and up >= self.spec.world.min:
            self.status = replace(self.status, was_ready=True)
            self.say(Reason.WORLD_READY, f"the world has reached its minimum of {self.spec.world.min}")
            self._milestone(WORLD_READY)

    # ---- verdicts ------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        wanted = self.wanted()
        lost = sum(r.phase is RankPhase.LOST for r in wanted)
        succeeded = sum(r.phase is RankPhase.SUCCEEDED for r in wanted)
        size = self.status.world_target
        errors = [text for number, text in sorted(self.start_errors.items()) if number < size]
        if errors:
            self.end(Phase.FAILED, f"could not be started: {errors[0]}")
        elif size and policy.has_succeeded(self.spec.world, size, succeeded, lost):
            self.end(Phase.SUCCEEDED, f"{succeeded} of {size} ranks exited 0")
        elif size and policy.has_failed(self.spec.world, size, lost):
            culprit = policy.find_culprit(self.status.failures, self.status.whole_at)
            # Who else failed may still turn out: the evidence is told with the culprit, not frozen here.
            cause = f"rank {culprit.exit.rank} {policy.describe_exit(culprit.exit)}; " if culprit else ""
            left = f"{size - lost} of {size} ranks could still succeed, and {self.spec.world.min} are needed"
            self.end(Phase.FAILED, cause + left)

    def end(self, phase: Phase, message: str, *, stop_reason: str = "Cancelled") -> None:
        """Enter a terminal phase: what is known is recorded with it, what still runs is stopped."""
        for rank in list(self.ranks.values()):
            if rank.phase is RankPhase.WAITING:
                self.ranks[rank.rank] = replace(rank, phase=RankPhase.DROPPED, restart_at=None)
                self._record_last_failure(rank)
            elif rank.phase.may_run:
                # Metering stops at this moment.
                metered = metering.advance(rank, self.now) if rank.rank in self.running else rank
                reason = rank.stop_reason or stop_reason
                self.ranks[rank.rank] = replace(metered, phase=RankPhase.STOPPING, stop_reason=reason)
        self.status = replace(self.status, phase=phase, message=message, terminal_at=self.now)
        self._milestone(phase.value)
        self._condition("Ready", False, _END_EVENTS[phase].value)
        self.say(_END_EVENTS[phase], message, warning=phase is Phase.FAILED)

    def _record_last_failure(self, rank: RankStatus) -> None:
        """The exit of a rank that was about to restart when the run ended: it will not have another."""
        mine = [e for e in self.status.failures if e.rank == rank.rank and e.attempt == rank.attempt - 1]
        if mine and rank.rank < self.status.world_target and mine[-1] not in self.exits:
            self.exits.append(mine[-1])

    def wind_down(self) -> None:
        """Stop what is left; the run is settled when nothing of it can run any more."""
        if self.spec.generation != self.status.observed_generation:
            self.status = replace(self.status, observed_generation=self.spec.generation)
            if self.spec.wanted is Wanted.RUN:
                text = f"the run has ended ({self.status.phase}); this change of its spec has no effect"
                self.say(Reason.UD_TERMINAL_STATE, text, warning=True)
        for rank in list(self.ranks.values()):
            if rank.phase.may_run:
                self._stop(rank, "Cancelled")
        busy = self.strangers or any(r.phase.may_run for r in self.ranks.values())
        self.status = replace(self.status, settled=self.status.settled or not busy)
        self.removable = not busy and self.spec.wanted is Wanted.DELETE
        if not busy and self.seen.rendezvous is not None:
            self.actions.append(EndRendezvous())

    # ---- launching and stopping ----------------------------------------------------------------------------------

    def shape_the_world(self) -> None:
        target = self.status.world_target
        stuck = self._first_stalled() if self.spec.on_stall == "restart" else None
        if stuck is not None:
            self.ranks[stuck.rank] = replace(stuck, phase=RankPhase.STOPPING, stop_reason=STALLED)
        for rank in list(self.ranks.values()):
            surplus = rank.rank >= target and rank.phase.may_run
            if surplus or self._outdated(rank) or rank.phase is RankPhase.STOPPING:
                self._stop(rank, "Cancelled")
            elif rank.phase is RankPhase.DROPPED and rank.rank < target:
                self.ranks[rank.rank] = self._next_attempt(rank, restarts=0, restart_at=None)
        hold = any(self._outdated(r) for r in self.ranks.values())  # a gang starts when the last one is gone
        for number in range(target):
            rank = self.ranks.get(number) or RankStatus(rank=number)
            self.ranks[number] = rank if hold else self._launch_if_due(rank)

    def _first_stalled(self) -> RankStatus | None:
        """The rank that fell silent first, once it is due to be restarted for it.

        One at a time: others may go on when it is back, so each has its full time again from when the world is whole.
        """
        wanted = self.wanted()
        silent = {r.rank: r.stalled for r in wanted if r.stalled is not None and r.phase is RankPhase.RUNNING}
        if not silent or any(r.phase in (RankPhase.WAITING, RankPhase.LAUNCHED, RankPhase.STOPPING) for r in wanted):
            return None
        number, stall = stalls.in_order(list(silent.items()))[0]
        was_whole = self.before.ready == self.before.world_target
        whole_at = self.status.whole_at if was_whole and self.status.whole_at is not None else self.now
        due = max(stall.since, whole_at) + stalls.limit(stall.usual_step_seconds)
        return self.ranks[number] if self._due(due) else None

    def _outdated(self, rank: RankStatus) -> bool:
        """It runs as part of an earlier gang: the user asked for a fresh one, or its world size cannot change."""
        leaving = rank.world_size != self.status.world_target or rank.phase is RankPhase.STOPPING
        fixed = self.spec.resize == "restart" and leaving
        return rank.phase.may_run and (fixed or rank.gang != self.spec.gang)

    def _launch_if_due(self, rank: RankStatus) -> RankStatus:
        target = self.status.world_target
        if rank.phase is RankPhase.WAITING:
            if rank.restart_at is not None and not self._due(rank.restart_at):
                return rank
            rank = replace(rank, phase=RankPhase.LAUNCHED, restart_at=None, world_size=target, gang=self.spec.gang)
            self.actions.append(Launch(rank.rank, rank.attempt, target))
        elif rank.phase is RankPhase.LAUNCHED and rank.rank not in self.present:
            self.actions.append(Launch(rank.rank, rank.attempt, rank.world_size))
            self.wakes.append(self.now + RELAUNCH_DELAY)
        return rank

    def _stop(self, rank: RankStatus, reason: str) -> None:
        self.actions.append(Stop(rank.rank, rank.attempt, self.spec.grace_seconds))
        if rank.phase is not RankPhase.STOPPING:
            rank = replace(rank, phase=RankPhase.STOPPING, stop_reason=reason)
            self.ranks[rank.rank] = rank

    def watch_the_stopping(self) -> None:
        """A rank that is stopped before any look showed it may never be shown: do not wait for it for ever."""
        for rank in list(self.ranks.values()):
            if rank.phase is RankPhase.STOPPING and rank.rank not in self.present and rank.missing_since is None:
                self.ranks[rank.rank] = replace(rank, missing_since=self.now)
                self.wakes.append(self.now + policy.LOST_AFTER)

    # ---- how it is shown -----------------------------------------------------------------------------------------

    def name_the_phase(self) -> None:
        self._sync_ranks()
        ready, world = self.status.ready, self.spec.world
        before = self.status.phase
        if ready >= world.min:
            phase = Phase.READY
        elif self.status.was_ready:
            phase = Phase.DEGRADED
        else:
            phase = self._starting_phase()
        if phase is Phase.READY and before is Phase.DEGRADED:
            self.say(Reason.WORLD_RECOVERED, f"the world is at its minimum of {world.min} again")
        elif phase is Phase.DEGRADED and before is not Phase.DEGRADED:
            self.say(Reason.WORLD_SHRUNK_BELOW_MIN, f"the world is below its minimum of {world.min}", warning=True)
        whole = ready == self.status.world_target
        was_whole = self.before.ready == self.before.world_target and self.before.world_target > 0
        self.status = replace(
            self.status,
            phase=phase,
            whole_at=self.now if whole and not was_whole else self.status.whole_at,
        )
        self._condition("Ready", ready >= world.min, "RanksReady" if ready >= world.min else "RanksMissing")
        self._condition("BelowMinimum", ready < world.min, "RanksMissing" if ready < world.min else "RanksReady")

    def _starting_phase(self) -> Phase:
        wanted = [s for s in self.seen.ranks if s.rank < self.status.world_target]
        up = any(s.sight in (Sight.STARTING, Sight.RUNNING) for s in wanted)
        return Phase.STARTING if up else Phase.PENDING

    def _condition(self, type_: str, holds: bool, reason: str, message: str = "") -> None:
        value: Literal["True", "False"] = "True" if holds else "False"
        old = next((c for c in self.status.conditions if c.type == type_), None)
        if old is not None and (old.status, old.reason, old.message) == (value, reason, message):
            return
        since = old.since if old is not None and old.status == value else self.now
        new = Condition(type=type_, status=value, reason=reason, message=message, since=since)
        others = tuple(c for c in self.status.conditions if c.type != type_)
        self.status = replace(self.status, conditions=(*others, new))

    def _milestone(self, name: str) -> None:
        self.status = replace(self.status, milestones=(*self.status.milestones, Milestone(name, self.now)))

    # ---- the network between ranks -------------------------------------------------------------------------------

    def open_the_gate(self) -> None:
        """Tell the ranks how many they are, and let each host go when it reaches the others, or at the limit."""
        if self.seen.mesh is None:
            return
        before = self.status.mesh
        after, wake_at = mesh.turn(before, self.seen.mesh, self.now)
        if wake_at is not None:
            self.wakes.append(wake_at)
        self.status = replace(self.status, mesh=after)
        if self.seen.rendezvous is not None:
            self.status = replace(self.status, rendezvous_endpoint=self.seen.rendezvous.endpoint)
        self._tell_of_the_mesh(before, after)
        taking_part = sum(rank.phase is not RankPhase.LOST for rank in self.wanted())
        wanted = mesh.Announcement(taking_part, after.released)
        if self.seen.rendezvous is None or self.seen.rendezvous.says != wanted:
            self.actions.append(Announce(wanted))

    def _tell_of_the_mesh(self, before: mesh.MeshStatus | None, after: mesh.MeshStatus) -> None:
        if after.degraded:
            self._condition("DegradedMesh", True, "HostsUnreachable", after.problem())
        elif after.ready:
            self._condition("DegradedMesh", False, "HostsReachable")
        if after.ready and (before is None or not before.ready):
            several = len(after.hosts) > 1
            self.say(Reason.MESH_READY, "every host reaches every other" if several else "all ranks are on one host")
        elif after.degraded and (before is None or before.released != after.released):
            self.say(Reason.DEGRADED_MESH, f"hosts go over the relay: {after.problem()}", warning=True)

    # ---- bench ---------------------------------------------------------------------------------------------------

    def follow_the_bench(self) -> None:
        """The probe has a life of its own and never delays or fails the run; the run's end ends it."""
        if self.spec.bench is None:
            return
        bench = self.status.bench or BenchStatus()
        if not bench.phase.terminal:
            bench = self._turn_bench(bench, self.spec.bench.placement)
        elif self.seen.bench is not None and not self.seen.bench.phase.terminal:
            self.actions.append(EndProbe())  # the one that came with its end may have been lost
        self.status = replace(self.status, bench=bench)

    def _turn_bench(self, bench: BenchStatus, placement: str) -> BenchStatus:
        seen = self.seen.bench
        if seen is not None and seen.phase.terminal:
            self._bench_event(seen.phase, seen.message)
            return replace(
                bench,
                phase=seen.phase,
                completed_at=self.now,
                message=seen.message,
                on_worker_nodes=seen.on_worker_nodes,
                result=seen.result,
            )
        if self.ended:
            self.actions.append(EndProbe())
            return self._end_bench(bench, BenchPhase.SKIPPED, "the run ended before the probe was done")
        # Its time begins when the run is ready: before that there is nothing to probe.
        ready_at = next((m.at for m in self.status.milestones if m.name == WORLD_READY), None)
        if ready_at is None or not self._due(ready_at + policy.BENCH_DEADLINE):
            if seen is not None and seen.phase is BenchPhase.RUNNING and bench.phase is BenchPhase.PENDING:
                self._bench_event(BenchPhase.RUNNING, seen.message)
                return replace(bench, phase=BenchPhase.RUNNING, started_at=self.now, message=seen.message)
            if seen is None and self.status.was_ready:
                self.actions.append(Probe("strict" if placement == "strict" else "preferred"))
            return bench
        self.actions.append(EndProbe())
        return self._end_bench(bench, BenchPhase.TIMED_OUT, f"no result within {policy.BENCH_DEADLINE:g} s")

    def _end_bench(self, bench: BenchStatus, phase: BenchPhase, message: str) -> BenchStatus:
        self._bench_event(phase, message)
        return replace(bench, phase=phase, completed_at=self.now, message=message)

    def _bench_event(self, phase: BenchPhase, message: str) -> None:
        bad = phase in (BenchPhase.FAILED, BenchPhase.TIMED_OUT)
        self.say(_BENCH_EVENTS[phase], message or f"bench probe: {phase}", warning=bad)

    # ---- the plan ------------------------------------------------------------------------------------------------

    def _sync_ranks(self) -> None:
        ranks = tuple(self.ranks[n] for n in sorted(self.ranks))
        self.status = replace(self.status, ranks=ranks, exits=tuple(self.exits))

    def plan(self) -> Plan:
        self._sync_ranks()
        self._sample_world()
        if self.status != self.before and not self.ended:
            for number in self.running:
                if self.ranks[number].phase.may_run:
                    self.ranks[number] = metering.advance(self.ranks[number], self.now)
            self._sync_ranks()
        if self.removable and any(isinstance(a, Stop) for a in self.actions):
            self.wakes.append(self.now + RELAUNCH_DELAY)  # first the stop, then a look, then the removal
        elif self.removable:
            self.actions.append(Remove())
        wake_at = min(self.wakes, default=None)
        return Plan(self.status, tuple(self.actions), tuple(self.events), wake_at)

    def _sample_world(self) -> None:
        sample = (self.status.world_target, self.status.ready)
        if self.ended or sample == (self.before.world_target, self.before.ready):
            return
        history = (*self.status.history, WorldSample(self.now, *sample))[-HISTORY_MAX:]
        self.status = replace(self.status, history=history)
