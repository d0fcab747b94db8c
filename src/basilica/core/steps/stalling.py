"""Ranks that have fallen silent: what the book says of them, and which is restarted for it. The rule is in `stalls`."""

from dataclasses import replace

from basilica.core import stalls
from basilica.core.events import Reason
from basilica.core.incidents import IncidentKind
from basilica.core.phase import RankPhase
from basilica.core.seen import Stalled
from basilica.core.steps.turn import Trouble, Turn
from basilica.core.world import RankStatus

_COMING_OR_GOING = (RankPhase.WAITING, RankPhase.LAUNCHED, RankPhase.STOPPING)


def note(turn: Turn, rank: RankStatus, seen: Stalled | None) -> Stalled | None:
    """What the book says of a rank's silence after this look; its stack stays as it was first taken."""
    known = rank.stalled
    if rank.phase is RankPhase.STOPPING:
        return known
    if seen is not None and seen.since > turn.now:  # by a clock that is ahead: silent since we know, then
        seen = replace(seen, since=turn.now if known is None else known.since)
    if seen is None:
        if known is not None:
            turn.say(Reason.RANK_RESUMED, f"rank {rank.rank} reports again")
        return None
    if known is not None and seen.since < known.since + stalls.limit(known.usual_step_seconds):
        return _same_silence(turn, known, seen)
    turn.stalls.append((rank.rank, seen))
    return _with_room(turn, seen)


def _same_silence(turn: Turn, known: Stalled, seen: Stalled) -> Stalled:
    """Return a stall that was told already. Processes of one rank fall silent, and report again, one after the other;
    a rank that stalls once more has reported since the first stall was noticed.
    """
    if known.stack and seen.since >= known.since:
        return known
    if not seen.stack:
        return known if seen.since >= known.since else replace(known, since=seen.since)
    return _with_room(turn, replace(seen, since=min(known.since, seen.since)))


def _with_room(turn: Turn, seen: Stalled) -> Stalled:
    stacks = sum(r.stalled is not None and r.stalled.stack != "" for r in turn.ranks.values())
    return seen if stacks < stalls.STACKS_KEPT else replace(seen, stack="")


def tell(turn: Turn) -> None:
    """Of all that this look was the first to show, at once."""
    if turn.stalls:
        ordered = stalls.in_order(turn.stalls)
        what = stalls.announce(ordered)
        turn.say(Reason.RANK_STALLED, what, warning=True)
        turn.troubles.append(Trouble(IncidentKind.STALL, ordered[0][1].since, what, ordered[0][0]))


def first_due(turn: Turn) -> RankStatus | None:
    """The rank that fell silent first, once it is due to be restarted for it, if the spec asks for that.

    One at a time, and only while every rank is in sight: others may go on when it is back, so each has its full time
    again from when the world is whole.
    """
    if turn.spec.on_stall != "restart":
        return None
    wanted = turn.wanted()
    silent = {r.rank: r.stalled for r in wanted if r.stalled is not None and r.phase is RankPhase.RUNNING}
    missing = any(r.missing_since is not None for r in wanted)  # it may be what the silent ones wait for, or be one
    if not silent or missing or any(r.phase in _COMING_OR_GOING for r in wanted):
        return None
    number, stall = stalls.in_order(list(silent.items()))[0]
    was_whole = turn.before.ready == turn.before.world_target
    whole_at = turn.status.whole_at if was_whole and turn.status.whole_at is not None else turn.now
    due = max(stall.since, whole_at) + stalls.limit(stall.usual_step_seconds)
    return turn.ranks[number] if turn.due(due) else None
