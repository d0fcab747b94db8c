"""Following incidents: a trouble of this turn opens one or joins the open one; it is over when all ranks work again."""

from dataclasses import replace

from basilica.core import goodput, incidents, policy
from basilica.core.goodput import AT_WORK
from basilica.core.incidents import PLANNED, Incident, IncidentKind
from basilica.core.phase import RankPhase
from basilica.core.steps.turn import Trouble, Turn
from basilica.core.world import RankExit, RankStatus

ROUNDS_CHANGE_WITHIN_SECONDS = 60.0  # after a change of the world: agents that nobody drives may never meet again


def follow_incidents(turn: Turn) -> None:
    for trouble in turn.troubles:
        _take_in(turn, trouble)
    if turn.status.incidents and turn.status.incidents[-1].is_open and _is_over(turn):
        at = turn.now if turn.status.terminal_at is None else turn.status.terminal_at
        done = incidents.closed(turn.status.incidents, at, lost=_lost(turn), steps=turn.status.ledger.steps_recomputed)
        turn.status = replace(turn.status, incidents=done)


def _take_in(turn: Turn, trouble: Trouble) -> None:
    known = turn.status.incidents
    if not known or not known[-1].is_open:
        if not turn.status.was_ready and trouble.kind in PLANNED:
            return  # nothing trained yet: a start is no interruption
        at = min(trouble.at, turn.now)
        before = [rank.segment for rank in turn.before.ranks if rank.segment is not None]
        lost = goodput.lost(goodput.totals(turn.before.ledger, before, at)) + turn.newly_lost
        steps = turn.before.ledger.steps_recomputed
        new = Incident(number=0, kind=trouble.kind, at=at, what=trouble.what, rank=trouble.rank, seen_at=turn.now)
        known = incidents.opened(known, new, lost=lost, steps=steps)
        turn.status = replace(turn.status, incidents=known)
    last = known[-1]
    if trouble.exit is None or (last.kind in PLANNED and trouble.exit.echo):
        return
    culprit = policy.find_culprit(_failures_of(turn, last), None)
    found = trouble.exit if culprit is None else culprit.exit
    facts = _facts_of(found) | {"failures": last.failures + 1}
    turn.status = replace(turn.status, incidents=incidents.changed(known, **facts))


def _failures_of(turn: Turn, incident: Incident) -> list[RankExit]:
    return [exit for exit in turn.status.failures if exit.seen_at >= incident.seen_at]


def _facts_of(exit: RankExit) -> dict[str, object]:
    return {
        "kind": IncidentKind.FAILURE,
        "what": f"{exit.place} {policy.describe_exit(exit)}",
        "rank": exit.rank,
        "worker": exit.worker,
        "torch_rank": exit.torch_rank,
        "exit_code": exit.exit_code,
        "signal": exit.signal,
        "reason": exit.termination_reason,
    }


def _is_over(turn: Turn) -> bool:
    if turn.ended:
        return True
    wanted = [rank for rank in turn.wanted() if rank.phase is not RankPhase.LOST]
    reports = any(rank.steps is not None for rank in wanted)
    agents = any(rank.agent is not None for rank in wanted)
    if turn.status.notice is not None or turn.status.admitted is not None:
        return False
    held = any(rank.held_round is not None for rank in wanted)
    if held and not turn.due(turn.status.incidents[-1].at + ROUNDS_CHANGE_WITHIN_SECONDS):
        return False
    return all(_is_at_work(rank, reports=reports, agents=agents) for rank in wanted)


def _is_at_work(rank: RankStatus, *, reports: bool, agents: bool) -> bool:
    """Return whether the rank does what it did before. One that is yet to meet its peers, or to report, does not.

    Nor does one of whose workers some have failed: its agent is about to start them again, or to exit.
    """
    if rank.phase is RankPhase.SUCCEEDED:
        return True
    if rank.phase is not RankPhase.RUNNING or rank.segment is None or rank.missing_since is not None:
        return False
    if rank.agent is not None and rank.agent.fell_at is not None:
        return False
    unknown = rank.segment.resolvable and (reports or (agents and rank.agent is None))
    return rank.segment.cause in AT_WORK and not unknown


def _lost(turn: Turn) -> int:
    segments = [rank.segment for rank in turn.ranks.values() if rank.segment is not None]
    return goodput.lost(goodput.totals(turn.status.ledger, segments, turn.now))
