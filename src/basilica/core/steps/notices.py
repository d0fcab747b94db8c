"""Announcing planned changes: a change waits until the ranks that read notices are ready for it, or until its limit."""

from dataclasses import replace

from basilica.core.events import Reason
from basilica.core.notice_rules import Listener, common_step, follow, is_due, look_again_at
from basilica.core.notices import Notice, NoticeKind
from basilica.core.phase import RankPhase
from basilica.core.steps import stalling
from basilica.core.steps.shaping import is_outdated
from basilica.core.steps.turn import Turn

SOONEST_SECONDS = 1.0  # that a change waits once the platform takes ranks away
HELD_SECONDS_MIN, HELD_SECONDS_MAX = 0.05, 15.0  # after a change until ranks that it does not reach go on


def waits_for_ranks(turn: Turn, kind: NoticeKind, limit: float, reason: str, target: int | None = None) -> bool:
    """Publish the notice of a planned change, or follow the one there is; return whether the change has to wait.

    `limit`: the seconds that ranks have from the publication on.
    """
    return _waits(turn, kind, turn.now + limit, reason, target)


def waits_until(turn: Turn, kind: NoticeKind, until: float, reason: str) -> bool:
    """The same for a change that happens at a given moment anyway."""
    return _waits(turn, kind, until, reason, None)


def _waits(turn: Turn, kind: NoticeKind, until: float, reason: str, target: int | None) -> bool:
    listeners = listeners_of(turn)
    notice = turn.status.notice
    if notice is not None and notice.done_at is not None:
        return bool(listeners) and until > turn.now  # the change before this one has yet to reach the ranks
    if not listeners or until <= turn.now:
        end_notice(turn)
        return False
    if notice is None:
        notice = _published(turn, kind, until, reason, target)
    elif (notice.kind, notice.target) != (kind, target):  # another change of mind: ranks are ready for any change
        notice = replace(notice, kind=kind, target=target, reason=reason, until=min(notice.until, until))
    notice = follow(notice, listeners, turn.now)
    turn.status = replace(turn.status, notice=notice, notices=notice.number)
    if is_due(notice, listeners, turn.now):
        _carry_out(turn, notice, listeners)
        return False
    turn.wakes += [notice.until, *look_again_at(notice, listeners)]
    return True


def listeners_of(turn: Turn) -> list[Listener]:
    """Return the ranks that read notices and stay; not those that this turn stops anyway, or that are not in yet."""
    stuck = stalling.first_due(turn)
    staying = {
        rank.rank
        for rank in turn.wanted()
        if rank.phase is RankPhase.RUNNING and not is_outdated(turn, rank) and rank is not stuck
    }
    inside = turn.status.world_target if turn.status.admitted is None else turn.status.admitted
    return [listener for number, listener in turn.listeners.items() if number in staying and number < inside]


def _published(turn: Turn, kind: NoticeKind, until: float, reason: str, target: int | None) -> Notice:
    number = turn.status.notices + 1
    step = common_step(listeners_of(turn), turn.now)
    notice = Notice(
        number=number,
        kind=kind,
        since=turn.now,
        until=until,
        reason=reason,
        target=target,
        step=step,
        proposed_at=turn.now,
    )
    turn.say(Reason.NOTICE_PUBLISHED, f"ranks were told of {notice.describe()}")
    return notice


def _carry_out(turn: Turn, notice: Notice, listeners: list[Listener]) -> None:
    """Mark the change as made. Ranks wait on until it reaches them: steps that they took meanwhile would be lost."""
    unready = sum(not each.is_ready_for(notice) for each in listeners)
    if unready:
        late = f"{unready} of {len(listeners)} ranks were not ready in time"
        turn.say(Reason.NOTICE_OVER, f"{notice.describe()} did not wait any longer: {late}", warning=True)
    turn.status = replace(turn.status, notice=replace(notice, done_at=turn.now))
    turn.wakes.append(turn.now + HELD_SECONDS_MIN)
    hold_rounds(turn)


def end_notice(turn: Turn) -> None:
    """Withdraw the notice of a change that will not happen, or that no rank waits for."""
    if turn.status.notice is not None and turn.status.notice.done_at is None:
        turn.status = replace(turn.status, notice=None)


def hold_rounds(turn: Turn) -> None:
    """Remember the rounds of workers that a change of the world is about to end."""
    for rank in turn.wanted():
        if rank.phase is RankPhase.RUNNING and rank.agent is not None:
            turn.ranks[rank.rank] = replace(rank, held_round=rank.agent.round)


def release_ranks(turn: Turn) -> None:
    """End a notice whose change has reached every rank: its workers were started again, or it has ended."""
    notice = turn.status.notice
    if notice is None or notice.done_at is None:
        return
    waiting = any(
        rank.held_round is not None or (rank.phase is RankPhase.STOPPING and rank.ready_for == notice.number)
        for rank in turn.ranks.values()
        if rank.phase.may_run
    )
    if turn.due(notice.done_at + (HELD_SECONDS_MAX if waiting else HELD_SECONDS_MIN)):
        turn.status = replace(turn.status, notice=None)


def admit_newcomers(turn: Turn) -> None:
    """Let new ranks into a running world once they have arrived and the others are ready for them."""
    inside, target = turn.status.admitted, turn.status.world_target
    if inside is None or turn.held:
        return
    listeners = listeners_of(turn)
    if listeners and not all(_has_arrived(turn, number) for number in range(inside, target)):
        if turn.status.notice is not None and turn.status.notice.kind is NoticeKind.SCALE:
            end_notice(turn)  # training goes on until the new ranks are back
        return
    what = f"the world goes from {inside} to {target} ranks"
    if listeners and waits_for_ranks(turn, NoticeKind.SCALE, turn.spec.notice_seconds, what, target):
        return
    if turn.status.notice is None:
        hold_rounds(turn)
    turn.status = replace(turn.status, admitted=None)


def _has_arrived(turn: Turn, number: int) -> bool:
    """Return whether nothing but its admission keeps the rank from joining, or it will never join."""
    rank = turn.ranks.get(number)
    if rank is None or not rank.phase.may_run:
        return rank is not None and rank.phase in (RankPhase.LOST, RankPhase.SUCCEEDED)
    agents = any(other.agent is not None for other in turn.wanted())
    return rank.phase is RankPhase.RUNNING and (rank.agent is not None or not agents)


def heed_leaving_ranks(turn: Turn) -> None:
    """Announce that the platform takes ranks away, and stop them once all are ready: they start again elsewhere.

    Ranks that were told of another change are ready for this one, too: it only has to happen soon enough.
    """
    gone = {number: each for number, each in turn.leaving.items() if number < turn.status.world_target}
    notice = turn.status.notice
    ours = notice is not None and notice.kind in (NoticeKind.PREEMPTION, NoticeKind.DRAIN)
    if not gone or not listeners_of(turn):  # without listeners, the platform ends ranks as it would without us
        if ours:
            end_notice(turn)
        return
    first = min(gone.values(), key=lambda leaving: leaving.until)
    if notice is not None and not ours:
        until = max(min(notice.until, first.until), turn.now + SOONEST_SECONDS)
        turn.status = replace(turn.status, notice=replace(notice, until=min(notice.until, until)))
        turn.wakes.append(until)
        return
    kind = NoticeKind.PREEMPTION if first.kind == "preemption" else NoticeKind.DRAIN
    if waits_until(turn, kind, first.until, first.reason):
        return
    for number in gone:
        rank = turn.ranks[number]
        turn.ranks[number] = replace(rank, phase=RankPhase.STOPPING, stop_reason=kind.value.capitalize())
