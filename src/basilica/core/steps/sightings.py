"""Taking in what was seen: who is up, who has ended, who is missing, and who has no business to be there."""

from dataclasses import replace

from basilica.core import policy
from basilica.core.actions import Stop
from basilica.core.ends import NODE_LOST, UNKNOWN
from basilica.core.notice_rules import Listener
from basilica.core.phase import RankPhase
from basilica.core.seen import AnswerState, Ended, SeenRank, Sight
from basilica.core.steps import accounting, exits, snapshots, stalling, workers
from basilica.core.steps.turn import Turn
from basilica.core.world import RankStatus


def take_in(turn: Turn) -> None:
    for seen in turn.seen.ranks:
        rank = turn.ranks.get(seen.rank)
        if rank is None or seen.attempt != rank.attempt or not rank.phase.may_run:
            _fence(turn, seen)
        else:
            turn.present.add(rank.rank)
            _update(turn, rank, seen)
    for rank in list(turn.ranks.values()):
        if rank.phase.may_run and rank.rank not in turn.present:
            _miss(turn, rank)
    stalling.tell(turn)
    workers.blame_early_exits(turn)
    _listen_to_the_rendezvous(turn)
    for reason, message in turn.seen.warnings:
        if reason not in turn.status.warned:
            turn.status = replace(turn.status, warned=(*turn.status.warned, reason))
            turn.say(reason, message, warning=True)


def _fence(turn: Turn, seen: SeenRank) -> None:
    """What the book does not know, or holds for ended (its last stop may have been lost), must not stay."""
    if seen.sight is not Sight.ENDED:
        turn.strangers += 1
        turn.actions.append(Stop(seen.rank, seen.attempt, turn.spec.grace_seconds))


def _update(turn: Turn, rank: RankStatus, seen: SeenRank) -> None:
    rank = replace(
        rank,
        missing_since=None,
        node=seen.node or rank.node,
        pod_name=seen.pod_name or rank.pod_name,
        provider=seen.provider or rank.provider,
        region=seen.region or rank.region,
        gpus=seen.gpus or rank.gpus,
        started_at=rank.started_at if rank.started_at is not None else _started(turn, rank, seen.started_at),
        silent_since=_silent_since(rank, seen),
    )
    match seen.sight:
        case Sight.RUNNING:
            turn.running.add(rank.rank)
            started = turn.now if rank.started_at is None else rank.started_at
            phase = RankPhase.RUNNING if rank.phase is RankPhase.LAUNCHED else rank.phase
            stalled = stalling.note(turn, rank, seen.stalled)
            rank = replace(rank, phase=phase, started_at=started, note="", stalled=stalled)
            rank = _listen(turn, workers.book_workers(turn, rank, seen.agent), seen)
            rank = accounting.observe(turn, snapshots.book_notes(turn, rank, seen.saving), seen, stalled)
        case Sight.QUEUED | Sight.STARTING:
            rank = replace(rank, note=seen.note)
            if seen.sight is Sight.QUEUED:
                turn.queued.add(rank.rank)
        case Sight.ENDED if seen.ended is not None:
            rank = snapshots.book_notes(turn, workers.book_workers(turn, rank, seen.agent), seen.saving)
            if rank.started_at is not None:
                rank = accounting.observe(turn, rank, seen, rank.stalled)
            exits.book(turn, rank, seen.ended)
            return
        case _:
            pass
    turn.ranks[rank.rank] = rank


def _listen(turn: Turn, rank: RankStatus, seen: SeenRank) -> RankStatus:
    """Take in whether the rank's program reads notices, and its answer; and whether the platform takes its place."""
    if rank.phase is RankPhase.RUNNING:
        if seen.answer is not None:
            turn.listeners[rank.rank] = Listener(rank=rank.rank, answer=seen.answer, progress=seen.progress)
        if seen.leaving is not None:
            turn.leaving[rank.rank] = seen.leaving
    ready = seen.answer is not None and seen.answer.state is AnswerState.READY
    number = seen.answer.number if seen.answer is not None and ready else 0
    return replace(rank, listens=seen.answer is not None, ready_for=number)


def _started(turn: Turn, rank: RankStatus, told: float | None) -> float | None:
    """When a rank started, by a clock that may be wrong: not before it was launched by ours, and not after now."""
    if told is None:
        return None
    return min(max(told, told if rank.launched_at is None else rank.launched_at), turn.now)


def _silent_since(rank: RankStatus, seen: SeenRank) -> float | None:
    """As it was first seen: each look computes it anew, and a status changes only when something does."""
    return rank.silent_since if seen.silent_since is not None and rank.silent_since is not None else seen.silent_since


def _listen_to_the_rendezvous(turn: Turn) -> None:
    since = None if turn.seen.rendezvous is None else turn.seen.rendezvous.silent_since
    known = turn.status.rendezvous_silent_since
    kept = known if since is not None and known is not None else since
    turn.status = replace(turn.status, rendezvous_silent_since=kept)


def _miss(turn: Turn, rank: RankStatus) -> None:
    """A rank that was up and is not there: gone for good only after a while without a sign of it.

    One whose node is lost has been waited for already, until nothing could run there any more.
    """
    if rank.phase is RankPhase.LAUNCHED and rank.started_at is None:
        return  # never seen: its launch is asked for again
    since = turn.now if rank.missing_since is None else min(rank.missing_since, turn.now)
    node_is_lost = rank.rank in turn.seen.nodes_lost
    if turn.now - since < policy.LOST_AFTER and not node_is_lost:
        turn.ranks[rank.rank] = replace(rank, missing_since=since)
        turn.wakes.append(since + policy.LOST_AFTER)
        return
    turn.actions.append(Stop(rank.rank, rank.attempt, 0.0))  # should it be there after all, it must not stay
    stopped = rank.phase is RankPhase.STOPPING
    reason = NODE_LOST if node_is_lost else UNKNOWN
    ended = Ended(exit_code=None, reason=reason, finished_at=since, by_platform=True, stopped=stopped)
    exits.book(turn, rank, ended)
