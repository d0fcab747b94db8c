"""Obeying the spec, whenever its generation is one that was not acted on yet."""

from dataclasses import replace

from basilica.core.events import Reason
from basilica.core.incidents import IncidentKind
from basilica.core.notices import NoticeKind
from basilica.core.phase import Phase, RankPhase
from basilica.core.spec import Wanted
from basilica.core.status import Resize
from basilica.core.steps import ending, notices
from basilica.core.steps.turn import Trouble, Turn


def obey_spec(turn: Turn) -> None:
    if turn.spec.generation == turn.status.observed_generation:
        return
    first = turn.status.observed_generation == 0
    turn.held = not first  # until it is known that the change happens now
    if turn.held and _waits(turn):
        return
    turn.held = False
    turn.status = replace(turn.status, observed_generation=turn.spec.generation)
    if turn.spec.wanted is not Wanted.RUN:
        by_user = turn.spec.wanted is Wanted.CANCEL
        ending.end(turn, Phase.CANCELLED, "cancelled by the user" if by_user else "deleted")
    elif first:
        _resize(turn, turn.spec.world.target)
    else:
        if turn.spec.world.target != turn.status.world_target:
            _scale(turn, turn.spec.world.target)
        if any(r.gang != turn.spec.gang and r.phase.may_run for r in turn.wanted()):
            turn.troubles.append(Trouble(IncidentKind.RESTART, turn.now, "all ranks were started again"))
        if any(r.phase is RankPhase.LOST and r.gang != turn.spec.gang for r in turn.ranks.values()):
            _revive_lost(turn)


def _waits(turn: Turn) -> bool:
    """Return whether the change waits for ranks that were told of it. A deletion waits for nobody.

    Ranks that join a running world are launched at once: they wait themselves, until the others are ready for them.
    """
    spec, status = turn.spec, turn.status
    if spec.wanted is Wanted.CANCEL:
        limit = min(spec.notice_seconds, spec.grace_seconds)
        return notices.waits_for_ranks(turn, NoticeKind.CANCEL, limit, "cancelled by the user")
    grows = spec.world.target > status.world_target and spec.resize == "join"
    resized = spec.world.target != status.world_target and not grows and not status.closed
    if spec.wanted is Wanted.RUN and resized:
        what = f"the world goes from {status.world_target} to {spec.world.target} ranks"
        return notices.waits_for_ranks(turn, NoticeKind.SCALE, spec.notice_seconds, what, spec.world.target)
    if spec.wanted is Wanted.RUN and any(r.gang != spec.gang and r.phase.may_run for r in turn.wanted()):
        return notices.waits_for_ranks(turn, NoticeKind.RESTART, spec.notice_seconds, "all ranks start again")
    notices.end_notice(turn)
    return False


def _scale(turn: Turn, target: int) -> None:
    old = turn.status.world_target
    if turn.status.closed:
        turn.say(Reason.SCALE_IGNORED, f"scaling to {target} ignored: a rank has finished already", warning=True)
        return
    turn.say(Reason.SCALE_OBSERVED, f"world goes from {old} to {target} ranks")
    turn.status = replace(turn.status, last_resize=Resize(turn.now, old, target, "scale"))
    turn.troubles.append(Trouble(IncidentKind.RESIZE, turn.now, f"the world went from {old} to {target} ranks"))
    _resize(turn, target)


def _resize(turn: Turn, target: int) -> None:
    failures = tuple(e for e in turn.status.failures if e.rank < target)  # a drained rank is nobody's culprit
    old = turn.status.world_target
    inside = old if turn.status.admitted is None else turn.status.admitted
    joins = 0 < inside < target and turn.spec.resize == "join"
    turn.status = replace(turn.status, world_target=target, failures=failures, admitted=inside if joins else None)
    if 0 < target < old:
        notices.hold_rounds(turn)
    for rank in list(turn.ranks.values()):
        if rank.rank >= target and rank.phase in (RankPhase.WAITING, RankPhase.LOST):
            turn.ranks[rank.rank] = replace(rank, phase=RankPhase.DROPPED, restart_at=None)
    _revive_lost(turn)


def _revive_lost(turn: Turn) -> None:
    """Who asks for a size or a fresh gang wants all of it: those that had used up their restarts start afresh."""
    for rank in turn.wanted():
        if rank.phase is RankPhase.LOST:
            turn.ranks[rank.rank] = rank.next_attempt(restarts=0, restart_at=None)
