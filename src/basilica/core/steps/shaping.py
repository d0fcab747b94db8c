"""Shaping the world: who is launched, and who is stopped."""

from dataclasses import replace

from basilica.core import policy
from basilica.core.actions import Launch, Stop
from basilica.core.ends import CANCELLED
from basilica.core.phase import RankPhase
from basilica.core.steps import stalling
from basilica.core.steps.turn import Turn
from basilica.core.world import STALLED, RankStatus

RELAUNCH_DELAY = 1.0  # a launch that no look shows is asked for again after this


def shape_the_world(turn: Turn) -> None:
    target = turn.status.world_target
    stuck = stalling.first_due(turn)
    if stuck is not None:
        turn.ranks[stuck.rank] = replace(stuck, phase=RankPhase.STOPPING, stop_reason=STALLED)
    for rank in list(turn.ranks.values()):
        surplus = rank.rank >= target and rank.phase.may_run
        if surplus or is_outdated(turn, rank) or rank.phase is RankPhase.STOPPING:
            stop(turn, rank)
        elif rank.phase is RankPhase.DROPPED and rank.rank < target:
            turn.ranks[rank.rank] = rank.next_attempt(restarts=0, restart_at=None)
    hold = any(is_outdated(turn, r) for r in turn.ranks.values())  # a gang starts when the last one is gone
    for number in range(target):
        rank = turn.ranks.get(number) or RankStatus(rank=number)
        turn.ranks[number] = rank if hold else _launch_if_due(turn, rank)


def is_outdated(turn: Turn, rank: RankStatus) -> bool:
    """It runs as part of an earlier gang: the user asked for a fresh one, or its world size cannot change."""
    leaving = rank.world_size != turn.status.world_target or rank.phase is RankPhase.STOPPING
    fixed = turn.spec.resize == "restart" and leaving
    return rank.phase.may_run and (fixed or (rank.gang != turn.spec.gang and not turn.held))


def _launch_if_due(turn: Turn, rank: RankStatus) -> RankStatus:
    target = turn.status.world_target
    if rank.phase is RankPhase.WAITING:
        if rank.restart_at is not None:
            # A controller that took over may have a clock that is behind: nobody waits longer than the rule says.
            latest = turn.now + policy.restart_delay(max(rank.restarts, 1))
            rank = replace(rank, restart_at=min(rank.restart_at, latest))
            if rank.restart_at is not None and not turn.due(rank.restart_at):
                return rank
        rank = replace(rank, phase=RankPhase.LAUNCHED, restart_at=None, launched_at=turn.now)
        rank = replace(rank, world_size=target, gang=turn.spec.gang)
        turn.actions.append(Launch(rank.rank, rank.attempt, target))
    elif rank.phase is RankPhase.LAUNCHED and rank.rank not in turn.present:
        turn.actions.append(Launch(rank.rank, rank.attempt, rank.world_size))
        turn.wakes.append(turn.now + RELAUNCH_DELAY)
    return rank


def stop(turn: Turn, rank: RankStatus) -> None:
    turn.actions.append(Stop(rank.rank, rank.attempt, turn.spec.grace_seconds))
    if rank.phase is not RankPhase.STOPPING:
        turn.ranks[rank.rank] = replace(rank, phase=RankPhase.STOPPING, stop_reason=CANCELLED)


def watch_the_stopping(turn: Turn) -> None:
    """A rank that is stopped before any look showed it may never be shown: do not wait for it for ever."""
    for rank in list(turn.ranks.values()):
        if rank.phase is RankPhase.STOPPING and rank.rank not in turn.present and rank.missing_since is None:
            turn.ranks[rank.rank] = replace(rank, missing_since=turn.now)
            turn.wakes.append(turn.now + policy.LOST_AFTER)
