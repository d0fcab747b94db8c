"""Announcing planned changes: a change waits until the ranks that read notices are ready for it, or until its limit."""

from dataclasses import replace

from basilica.core.actions import Stop
from basilica.core.events import Reason
from basilica.core.notice_rules import Listener, common_step, follow, is_due, look_again_at
from basilica.core.notices import Notice, NoticeKind
from basilica.core.phase import RankPhase
from basilica.core.steps.shaping import is_outdated
from basilica.core.steps.turn import Turn

SOONEST_SECONDS = 1.0  # that a change waits once the platform takes ranks away


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
        end_notice(turn)
        return False
    turn.wakes += [notice.until, *look_again_at(notice, listeners)]
    return True


def listeners_of(turn: Turn) -> list[Listener]:
    """Return the ranks that read notices and stay; not those that this turn stops anyway."""
    target = turn.status.world_target
    mine = ((turn.ranks[number], listener) for number, listener in turn.listeners.items() if number < target)
    return [listener for rank, listener in mine if not is_outdated(turn, rank)]


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


def end_notice(turn: Turn) -> None:
    """End the notice: its change happens now, or will not happen."""
    notice = turn.status.notice
    if notice is None:
        return
    listeners = listeners_of(turn)
    unready = sum(not each.is_ready_for(notice) for each in listeners)
    if turn.now >= notice.until and unready:
        late = f"{unready} of {len(listeners)} ranks were not ready in time"
        turn.say(Reason.NOTICE_OVER, f"{notice.describe()} did not wait any longer: {late}", warning=True)
    turn.status = replace(turn.status, notice=None)


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
        turn.actions.append(Stop(number, rank.attempt, turn.spec.grace_seconds))
