"""One sentence that says what a run is doing or waiting for: no phase without a reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from basilica.core import accounts, policy, stalls
from basilica.core.damage import Trouble
from basilica.core.goodput import Cause
from basilica.core.notice_rules import unready_ranks
from basilica.core.notices import Notice
from basilica.core.phase import Phase, RankPhase
from basilica.core.snapshots import place_of
from basilica.core.spec import DeploymentSpec, Wanted
from basilica.core.status import DeploymentStatus, FailingTurns
from basilica.core.world import STALLED, RankStatus

NOTHING_TO_WAIT_FOR = ": nothing to wait for"


@dataclass(frozen=True, slots=True)
class Absence:
    """The reason why the status of live runs may be out of date, and for how many seconds it has been so."""

    of: Literal["operator", "cluster"]
    seconds: float

    def describe(self, known: str) -> str:
        match self.of:
            case "operator":
                return f"no operator has been at work for {self.seconds:.0f} s; this is what the last one saw: {known}"
            case "cluster":
                silence = f"the cluster's API server has not answered for {self.seconds:.0f} s, and ranks go on without"
                return f"{silence}; this is what was seen before: {known}"


def why(spec: DeploymentSpec, status: DeploymentStatus, now: float, unattended: Absence | None = None) -> str:
    """Return the run's wait, or its end. `unattended`: no controller acts on the run, or none can observe it."""
    if status.phase.terminal:
        ended = _ended(spec, status)
        return (
            ended if status.failing is None or unattended is not None else f"{ended}; {_failing(status.failing, now)}"
        )
    known = _under_way(spec, status, now)
    if unattended is not None:
        return unattended.describe(known)
    if status.failing is not None:
        seen = known.removesuffix(NOTHING_TO_WAIT_FOR)
        return f"{_failing(status.failing, now)}; its ranks go on; this is what was seen before: {seen}"
    return known


def _failing(failing: FailingTurns, now: float) -> str:
    seconds = max(0.0, now - failing.since)
    return f"the controller has not been able to look after this run for {seconds:.0f} s ({failing.problem})"


def with_troubles(sentence: str, status: DeploymentStatus, troubles: Sequence[Trouble]) -> str:
    """The sentence with what is wrong with the server, where the run may still need the server."""
    if status.settled or not troubles:
        return sentence
    return f"{sentence}; the server is in trouble: " + "; ".join(trouble.message for trouble in troubles)


def _under_way(spec: DeploymentSpec, status: DeploymentStatus, now: float) -> str:
    if status.notice is not None:
        return _announced(status.notice, status, now)
    if spec.generation != status.observed_generation:
        return "the controller has yet to act on the latest change of the spec"
    wanted = [r for r in status.ranks if r.rank < status.world_target]
    surplus = [r for r in status.ranks if r.rank >= status.world_target and r.phase.may_run]
    reasons = _reasons(wanted, spec, status, now)
    held = status.mesh is not None and not status.mesh.ready and not status.mesh.degraded
    if status.mesh is not None and held:
        reasons.append(f"the network between hosts ({status.mesh.problem()})")
    if status.rendezvous_silent_since is not None:
        seconds = max(0.0, now - status.rendezvous_silent_since)
        silence = f"which has not answered for {seconds:.0f} s (ranks go on)"
        reasons.append(f"a sign of the run's rendezvous, {silence}")
    if surplus:
        reasons.append(f"{_name(surplus)} to stop (scaled down to {status.world_target})")
    up = f"{status.ready} of {status.world_target} ranks are up"
    apart = f"; {status.mesh.goes_on()}" if status.mesh is not None and status.mesh.degraded else ""
    if not reasons:
        lost = [r for r in wanted if r.phase is RankPhase.LOST]
        stalled = _stalls(wanted, now)
        loops = _crash_loops(wanted, now)
        restoring = _restores(wanted, status, now)
        idle = up if stalled or apart or loops or restoring else up + NOTHING_TO_WAIT_FOR
        return (
            (f"{up}; {_name(lost)} lost, the run goes on without" if lost else idle)
            + apart
            + loops
            + restoring
            + stalled
        )
    degraded = f", fewer than the minimum of {spec.world.min}" if status.phase is Phase.DEGRADED else ""
    return (
        f"{up}{degraded}; waiting for "
        + "; ".join(reasons)
        + apart
        + _crash_loops(wanted, now)
        + _restores(wanted, status, now)
        + _stalls(wanted, now)
    )


def _announced(notice: Notice, status: DeploymentStatus, now: float) -> str:
    """Count down to a planned change, and name the ranks that it waits for."""
    if notice.done_at is not None:
        return f"{notice.describe()} is under way: waiting for workers to meet again"
    left = max(0.0, notice.until - now)
    unready = unready_ranks(notice, status)
    at = "" if notice.step is None else f" at step {notice.step}"
    ranks = _name(unready) if unready else "its ranks"
    return f"waiting for {ranks} to be ready{at} for {notice.describe()}, {left:.0f} s at most"


def _crash_loops(wanted: list[RankStatus], now: float) -> str:
    """Name the ranks that fail again and again, each with its last error."""
    text = ""
    for rank in wanted:
        loop = rank.crashes
        if loop is None or loop.count < policy.LOOP_LENGTH or now - loop.at > policy.LOOP_GAP_SECONDS:
            continue
        who = f"rank {rank.rank}" if loop.worker is None else f"worker {loop.worker} of rank {rank.rank}"
        text += f"; {who} has failed {loop.count} times in {loop.at - loop.since:.0f} s: {loop.error}"
    return text


def _reasons(wanted: list[RankStatus], spec: DeploymentSpec, status: DeploymentStatus, now: float) -> list[str]:
    notes: dict[str, list[RankStatus]] = {}
    restarts: dict[str, list[RankStatus]] = {}
    for rank in wanted:
        if rank.phase is RankPhase.LAUNCHED:
            notes.setdefault(rank.note, []).append(rank)
        elif rank.phase is RankPhase.WAITING and rank.restart_at is not None:
            left = max(0.0, rank.restart_at - now)
            last = [e for e in status.failures if (e.rank, e.attempt) == (rank.rank, rank.attempt - 1)]
            cause = f"which {policy.describe_exit(last[-1])}" if last else "which was lost through no fault of its own"
            budget = f" (restart {rank.restarts} of {spec.max_restarts})" if last else ""
            restarts.setdefault(f", {cause}, to start again in {left:.0f} s{budget}", []).append(rank)
    reasons = [f"{_name(ranks)}{restart}" for restart, ranks in restarts.items()]
    for note, ranks in notes.items():
        reasons.append(f"{_name(ranks)}: {note}" if note else f"{_name(ranks)} to start")
    unlaunched = [r for r in wanted if r.phase is RankPhase.WAITING and r.restart_at is None]
    stopping = [r for r in wanted if r.phase is RankPhase.STOPPING]
    missing = [r for r in wanted if r.phase is RankPhase.RUNNING and r.missing_since is not None]
    if unlaunched:
        reasons.append(f"{_name(unlaunched)} to be launched")
    for cause, ranks in (
        ("", [r for r in stopping if r.stop_reason != STALLED]),
        (", which had stalled,", [r for r in stopping if r.stop_reason == STALLED]),
    ):
        if ranks:
            reasons.append(f"{_name(ranks)}{cause} to stop, and then to start again")
    if missing:
        reasons.append(f"a sign of {_name(missing)}: not seen in the last look")
    return reasons + _silences(wanted, now)


def _silences(wanted: list[RankStatus], now: float) -> list[str]:
    """One reason for each node whose agents are silent, with the silence of the one that was heard from last."""
    nodes: dict[str, list[RankStatus]] = {}
    for rank in wanted:
        if rank.phase.may_run and rank.silent_since is not None:
            nodes.setdefault(rank.node, []).append(rank)
    reasons: list[str] = []
    for node, ranks in nodes.items():
        seconds = now - max(r.silent_since for r in ranks if r.silent_since is not None)
        verb = "has" if len(ranks) == 1 else "have"
        reasons.append(f"a sign of {_name(ranks)} on node {node}, which {verb} not been heard from for {seconds:.0f} s")
    return reasons


def _stalls(wanted: list[RankStatus], now: float) -> str:
    found = [(r.rank, r.stalled) for r in wanted if r.stalled is not None and r.phase is RankPhase.RUNNING]
    return f"; {stalls.describe(found, now)}" if found else ""


def _restores(wanted: list[RankStatus], status: DeploymentStatus, now: float) -> str:
    """Name the ranks that restore their state, for how long, and the newest step that is known to be saved."""
    found = {r.rank: r.segment for r in wanted if r.segment is not None and r.segment.cause is Cause.RESTORING}
    if not found:
        return ""
    seconds = max(0.0, now - min(segment.since for segment in found.values()))
    saved = status.snapshots.saved if status.snapshots is not None else ()
    newest = max(saved, key=lambda each: each.step, default=None)
    known = "" if newest is None else f" (last known to be saved: step {newest.step} {place_of(newest.tier)})"
    verb = "is" if len(found) == 1 else "are"
    return f"; {policy.name_ranks(found)} {verb} restoring, for {accounts.duration(seconds)} so far{known}"


def _ended(spec: DeploymentSpec, status: DeploymentStatus) -> str:
    text = f"{status.phase}: {status.message}"
    left = [r for r in status.ranks if r.phase.may_run]
    if not status.settled and left:
        return f"{text}; waiting for {_name(left)} to stop (at most {spec.grace_seconds:g} s)"
    account = accounts.describe_end(accounts.figures(accounts.goodput_of(spec, status, None)))
    text += f"; {account}" if account else ""
    return f"{text}; being deleted" if spec.wanted is Wanted.DELETE else text


def _name(ranks: list[RankStatus]) -> str:
    return policy.name_ranks(r.rank for r in ranks)
