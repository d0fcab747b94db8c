"""Accounting for time: which cause each place of the wanted world is charged with, and since when.

`observe` books what a look showed of a running rank, by the times of the facts themselves; `account` books the rest at
the end of a turn. The rules of the ledger are in `core.goodput`.
"""

from collections.abc import Iterator
from dataclasses import replace

from basilica.core import goodput
from basilica.core.goodput import BLOCKABLE, LOSSES, Cause, Segment, microseconds
from basilica.core.phase import RankPhase
from basilica.core.seen import AnswerState, SeenAgent, SeenProgress, SeenRank, SeenRestore, SeenSaving, Stalled
from basilica.core.snapshots import RankSaving
from basilica.core.steps.turn import Blocked, Turn
from basilica.core.world import STALLED, RankStatus, Steps

UNKNOWN_STEP_SECONDS, SOON_SECONDS = 1.0, 0.2
"""The time that a step is taken to need before it is known, and the least time until the steps are read again."""

FOLLOWED = frozenset({Cause.TRAINING, Cause.RECOMPUTING, Cause.STALLED, Cause.CHANGING})
"""The causes of a reporting rank that silent ranks of the same gang share with it."""

REPORTS_AGAIN_SECONDS = 30.0
"""The time for which a rank that has reported before is expected to report again, before it follows the others."""

ENDS_THE_START = frozenset({Cause.RENDEZVOUS, Cause.RESTORING, Cause.TRAINING, Cause.RECOMPUTING})
"""The causes that show that what came before was the start; the end of a silent program shows nothing of the kind."""

_OF_PHASES = {
    RankPhase.SUCCEEDED: Cause.FINISHED,
    RankPhase.LOST: Cause.DEGRADED,
    RankPhase.DROPPED: Cause.CHANGING,
}


def observe(turn: Turn, rank: RankStatus, seen: SeenRank, stalled: Stalled | None) -> RankStatus:
    """Book the facts of a look at a rank that runs, or ran until it ended."""
    rank = _count_steps(turn, rank, seen)
    if rank.segment is None:
        return rank
    _measure_blocked(turn, rank, seen.saving)
    earlier, cause = 0.0, rank.segment.cause
    for at, cause in _facts(turn, rank, seen, stalled):
        earlier = max(earlier, min(at, turn.now))  # in order, even if a clock was set back between two facts
        if rank.segment is not None and earlier >= rank.segment.since and cause is not rank.segment.cause:
            rank = _enter(turn, rank, cause, earlier)
    follows = cause is Cause.UNATTRIBUTED and rank.segment is not None and rank.segment.cause in FOLLOWED
    if rank.segment is not None and rank.segment.cause is not cause and not follows:
        # It does again what it did before; or it fell silent before the look that showed it at work.
        rank = _enter(turn, rank, cause, earlier if cause is Cause.STALLED else turn.now)
    return rank


def _facts(turn: Turn, rank: RankStatus, seen: SeenRank, stalled: Stalled | None) -> Iterator[tuple[float, Cause]]:
    """Yield what the rank did, in the order of time. A fact from before the open segment is booked already."""
    executing = rank.started_at if rank.started_at is not None else turn.now
    yield executing, Cause.UNATTRIBUTED
    agent = seen.agent
    done_at = None if agent is None else _done_at(agent)
    if agent is not None and agent.meeting_since is not None:
        if done_at is None or agent.executing_since is not None:
            yield agent.meeting_since, Cause.RENDEZVOUS
        if agent.executing_since is None:
            if done_at is not None:
                yield done_at, Cause.FINISHED
            return
        executing = agent.executing_since
        yield executing, Cause.UNATTRIBUTED
    steps = rank.steps
    trains_at = seen.progress.first_at if seen.progress is not None and steps is not None else turn.now
    restores = [each for each in _restores(seen.saving) if each.began_at >= executing]
    for restore in restores:
        if restore.began_at <= trains_at:
            yield from _restored(restore, Cause.UNATTRIBUTED)
    if seen.progress is not None and steps is not None and seen.progress.first_at >= executing:
        repeats = seen.progress.first_step <= (_repeated_to(turn, rank) or seen.progress.first_step - 1)
        yield seen.progress.first_at, Cause.RECOMPUTING if repeats else Cause.TRAINING
        if repeats and steps.repeat_to is None:
            yield _caught_up_at(turn, rank, seen.progress), Cause.TRAINING
        for restore in restores:
            if restore.began_at > trains_at:
                yield from _restored(restore, Cause.TRAINING if steps.repeat_to is None else Cause.RECOMPUTING)
    if stalled is not None:
        yield stalled.since, Cause.STALLED
    if seen.answer is not None and seen.answer.state is AnswerState.READY:
        yield seen.answer.at, Cause.CHANGING
    if done_at is not None:
        yield done_at, Cause.FINISHED


def _restores(saving: SeenSaving | None) -> Iterator[SeenRestore]:
    """Yield the restores that are known of a process, the last of which may be going on: its end is then unknown."""
    if saving is None:
        return
    if saving.restored is not None:
        yield saving.restored
    if saving.restoring_since is not None:
        began = saving.restoring_since
        yield SeenRestore(step=None, tier="", seconds=0.0, began_at=began, at=float("inf"))


def _restored(restore: SeenRestore, then: Cause) -> Iterator[tuple[float, Cause]]:
    yield restore.began_at, Cause.RESTORING
    if restore.at < float("inf"):
        yield restore.at, then


def _done_at(agent: SeenAgent) -> float | None:
    """Return when the last worker of the agent had exited 0: it has then only to end itself. None before that."""
    done = {exit.worker: exit.at for exit in agent.exits if exit.round == agent.round and exit.exit_code == 0}
    return max(done.values()) if 0 < agent.nproc <= len(done) else None


def _enter(turn: Turn, rank: RankStatus, cause: Cause, at: float, *, resolvable: bool | None = None) -> RankStatus:
    segment = rank.segment or Segment(cause, at)
    if cause in ENDS_THE_START:
        segment = goodput.resolve(segment, Cause.STARTING)
    elif rank.segment is not None and segment.cause in BLOCKABLE:
        rank, segment = _book_part(turn, rank, segment, cause, at)
    unknown = cause is Cause.UNATTRIBUTED if resolvable is None else resolvable
    ledger, segment = goodput.enter(turn.status.ledger, segment, cause, at, resolvable=unknown)
    turn.status = replace(turn.status, ledger=ledger)
    return replace(rank, segment=segment)


# ---- snapshots -------------------------------------------------------------------------------------------------------


def _measure_blocked(turn: Turn, rank: RankStatus, seen: SeenSaving | None) -> None:
    """Take note of how long snapshots have blocked the rank since that was last booked.

    A process that began after all that is booked counts from 0. Any other that is not the booked one worked beside it,
    and its time is the same time.
    """
    if seen is None:
        return
    known = rank.saving or RankSaving()
    total = microseconds(seen.blocked_seconds)
    if known.is_of(seen.process_at):
        amount, since = total - known.blocked, known.at
    elif known.process_at is None or seen.process_at > known.at:
        amount, since = total, seen.process_at
    else:
        amount, since = 0, known.at
    if amount > 0 or not known.is_of(seen.process_at):
        turn.blocked[rank.rank] = Blocked(max(0, amount), total, since, seen.at, seen.process_at)


def _book_part(turn: Turn, rank: RankStatus, segment: Segment, cause: Cause, at: float) -> tuple[RankStatus, Segment]:
    """Charge a segment that ends with its part of the blocked time: by time, where the next one may have the rest."""
    blocked = turn.blocked.get(rank.rank)
    if blocked is None:
        return rank, segment
    begin = max(blocked.since, segment.since)
    if cause not in BLOCKABLE or at >= blocked.until:
        return _book(turn, rank, segment, blocked, blocked.amount, at)
    share = max(0.0, at - begin) / (blocked.until - begin) if blocked.until > begin else 1.0
    return _book(turn, rank, segment, blocked, round(blocked.amount * min(1.0, share)), at)


def _book(  # noqa: PLR0917
    turn: Turn, rank: RankStatus, segment: Segment, blocked: Blocked, amount: int, until: float
) -> tuple[RankStatus, Segment]:
    charged = goodput.block(segment, amount, until)
    if segment.cause not in LOSSES:
        turn.newly_lost += charged.blocked - segment.blocked
    left = blocked.amount - amount
    if left:
        turn.blocked[rank.rank] = replace(blocked, amount=left)
    else:
        del turn.blocked[rank.rank]
    known = rank.saving or RankSaving()
    at = max(known.at, blocked.until)
    total = blocked.total - left
    return replace(rank, saving=replace(known, process_at=blocked.process_at, at=at, blocked=total)), charged


def book_blocked(turn: Turn, rank: RankStatus, until: float) -> RankStatus:
    """Book the blocked time of a rank that is not booked yet, as a part of its open segment."""
    blocked = turn.blocked.get(rank.rank)
    if blocked is None or rank.segment is None or rank.segment.cause not in BLOCKABLE:
        return rank
    rank, segment = _book(turn, rank, rank.segment, blocked, blocked.amount, until)
    return replace(rank, segment=segment)


# ---- steps -----------------------------------------------------------------------------------------------------------


def _count_steps(turn: Turn, rank: RankStatus, look: SeenRank) -> RankStatus:
    """Book the steps that the rank has reported, and count those that were taken before."""
    seen, steps = look.progress, rank.steps
    if seen is None:
        return rank
    if steps is not None and _is_beside(steps, look):
        steps = replace(steps, process_at=seen.first_at)
    elif steps is None or not steps.is_of(seen.first_at):
        reached = _reached(turn, seen.first_at) if steps is None else steps.reached
        repeat_to = reached if reached is not None and seen.first_step <= reached else None
        known = seen.first_step if steps is None else steps.reached
        count_repeated(turn, rank)
        steps = Steps(reached=known, process_at=seen.first_at, first=seen.first_step, repeat_to=repeat_to)
    steps = replace(steps, reached=max(steps.reached, seen.step), step=seen.step, at=seen.at)
    if steps.repeat_to is not None and seen.step > steps.repeat_to:
        turn.caught_up[rank.rank] = steps.repeat_to
        steps = _add_repeated(turn, steps, steps.repeat_to)
    elif steps.repeat_to is not None:
        left = (steps.repeat_to + 1 - seen.step) * (seen.step_seconds or UNKNOWN_STEP_SECONDS)
        turn.wakes.append(max(seen.at + left, turn.now + SOON_SECONDS))
    return replace(rank, steps=steps)


def _is_beside(steps: Steps, look: SeenRank) -> bool:
    """Return whether another worker of the same start reports in place of the known one: it repeats nothing."""
    if look.progress is None or steps.process_at is None or steps.is_of(look.progress.first_at):
        return False
    executing = None if look.agent is None else look.agent.executing_since
    return look.progress.first_at <= steps.at or (executing is not None and steps.process_at >= executing)


def _reached(turn: Turn, moment: float) -> int | None:
    """Return the highest step of any rank at that moment: what a rank that begins to report is compared with.

    Ranks that began with it are ahead of it only in the book.
    """
    known = (rank.steps for rank in turn.ranks.values() if rank.steps is not None)
    return max((steps.reached_before(moment) for steps in known), default=None)


def _repeated_to(turn: Turn, rank: RankStatus) -> int | None:
    steps = rank.steps
    return turn.caught_up.get(rank.rank) if steps is None or steps.repeat_to is None else steps.repeat_to


def _caught_up_at(turn: Turn, rank: RankStatus, seen: SeenProgress) -> float:
    """Return when the rank took its first step that nobody had taken before, by its usual step time."""
    beyond = seen.step - turn.caught_up.get(rank.rank, seen.step) - 1
    return max(seen.first_at, seen.at - max(0, beyond) * (seen.step_seconds or 0.0))


def count_repeated(turn: Turn, rank: RankStatus) -> None:
    """Count the repeated steps of a process that is gone before it had caught up."""
    if rank.steps is not None and rank.steps.repeat_to is not None:
        _add_repeated(turn, rank.steps, min(rank.steps.step, rank.steps.repeat_to))


def _add_repeated(turn: Turn, steps: Steps, last: int) -> Steps:
    ledger = turn.status.ledger
    more = max(0, last - steps.first + 1)
    turn.status = replace(turn.status, ledger=replace(ledger, steps_recomputed=ledger.steps_recomputed + more))
    return replace(steps, repeat_to=None)


# ---- the end of a turn -----------------------------------------------------------------------------------------------


def account(turn: Turn) -> None:
    """Charge every place of the wanted world, and close the segments of places that it has no more."""
    target, over = turn.status.world_target, turn.status.terminal_at
    for number in sorted(turn.ranks):
        rank = turn.ranks[number]
        if number < target and turn.before.terminal_at is None:
            rank = _charge(turn, rank)
        if rank.segment is not None and (number >= target or over is not None):
            rank = book_blocked(turn, rank, over or turn.now)
            assert rank.segment is not None
            ledger, _ = goodput.enter(turn.status.ledger, rank.segment, rank.segment.cause, over or turn.now)
            turn.status = replace(turn.status, ledger=ledger)
            rank = replace(rank, segment=None)
        if rank is not turn.ranks[number]:
            turn.ranks[number] = rank
    if over is None:
        _follow_the_leader(turn)
    elif turn.before.terminal_at is None:
        _charge_the_unlaunched(turn, over)


def _charge_the_unlaunched(turn: Turn, over: float) -> None:
    """Charge the places of a run that ended before it had ranks for them."""
    missing = sum(number not in turn.ranks for number in range(turn.status.world_target))
    since = turn.status.created_at if turn.before.world_target == 0 else turn.now
    amount = missing * goodput.length(Segment(Cause.QUEUED, since), over)
    turn.status = replace(turn.status, ledger=turn.status.ledger.add(Cause.QUEUED, amount))


def _charge(turn: Turn, rank: RankStatus) -> RankStatus:
    """Charge the place of a rank with what its phase says; what a running one does was observed."""
    if rank.segment is None:
        first = turn.before.world_target == 0
        rank = replace(rank, segment=Segment(Cause.QUEUED, turn.status.created_at if first else turn.now))
    if rank.rank in turn.ends:
        rank = _enter(turn, rank, _after_the_end(rank), turn.ends[rank.rank])
    cause = _cause_of(turn, rank)
    since = next((at for at in (rank.missing_since, rank.silent_since) if at is not None), turn.now)
    if cause is not None and rank.segment is not None and cause is not rank.segment.cause:
        rank = _enter(turn, rank, cause, since, resolvable=False)
    return rank


def _cause_of(turn: Turn, rank: RankStatus) -> Cause | None:
    match rank.phase:
        case RankPhase.WAITING:
            if rank.attempt == 0:
                return Cause.QUEUED
            return Cause.CHANGING if rank.restart_at is None else Cause.DEGRADED
        case RankPhase.LAUNCHED:
            return Cause.QUEUED if rank.rank in turn.queued else Cause.STARTING
        case RankPhase.STOPPING:
            return Cause.DEGRADED if rank.stop_reason == STALLED else Cause.CHANGING
        case RankPhase.RUNNING:
            return Cause.UNATTRIBUTED if _is_out_of_sight(rank) else None
        case _:
            return _OF_PHASES[rank.phase]


def _is_out_of_sight(rank: RankStatus) -> bool:
    return rank.missing_since is not None or rank.silent_since is not None


def _after_the_end(rank: RankStatus) -> Cause:
    match rank.phase:
        case RankPhase.SUCCEEDED:
            return Cause.FINISHED
        case RankPhase.LOST:
            return Cause.DEGRADED
        case RankPhase.WAITING if rank.restart_at is not None:
            return Cause.DEGRADED
        case _:
            return Cause.CHANGING


def _follow_the_leader(turn: Turn) -> None:
    """Charge ranks that report nothing with what the lowest reporting rank of their gang does: they work together."""
    running = [r for r in turn.wanted() if r.phase is RankPhase.RUNNING and not _is_out_of_sight(r)]
    leads = next((rank.segment for rank in running if _reports(rank)), None)
    leads = leads if leads is not None and leads.cause in FOLLOWED else None
    agents = any(rank.agent is not None for rank in running)
    for rank in running:
        if rank.segment is None or _reports(rank) or (agents and (rank.agent is None or rank.agent.round == 0)):
            continue
        if _is_expected_to_report(turn, rank, rank.segment):
            continue
        if leads is not None and rank.segment.cause in (FOLLOWED | {Cause.UNATTRIBUTED}) - {leads.cause}:
            turn.ranks[rank.rank] = _enter(turn, rank, leads.cause, leads.since)
        elif leads is None and rank.segment.cause in FOLLOWED:
            turn.ranks[rank.rank] = _enter(turn, rank, Cause.UNATTRIBUTED, turn.now, resolvable=False)


def _is_expected_to_report(turn: Turn, rank: RankStatus, segment: Segment) -> bool:
    """Return whether the rank has begun again and did report before: it starts until it says what it does."""
    return segment.resolvable and rank.steps is not None and not turn.due(segment.since + REPORTS_AGAIN_SECONDS)


def _reports(rank: RankStatus) -> bool:
    """Return whether the rank has said of itself, in this attempt, what it does."""
    steps = rank.steps is not None and rank.steps.process_at is not None
    return steps or rank.stalled is not None or rank.ready_for > 0
