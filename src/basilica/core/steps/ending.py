"""The end of a run: entering it, and winding down until nothing of the run is left that could run."""

from dataclasses import replace

from basilica.core import metering
from basilica.core.actions import EndRendezvous, PersistSnapshots
from basilica.core.ends import CANCELLED
from basilica.core.events import Reason
from basilica.core.phase import Phase, RankPhase
from basilica.core.spec import Wanted
from basilica.core.steps.exits import record_last_failure
from basilica.core.steps.shaping import stop
from basilica.core.steps.turn import Turn

_EVENTS = {
    Phase.SUCCEEDED: Reason.SUCCEEDED,
    Phase.FAILED: Reason.FAILED,
    Phase.CANCELLED: Reason.CANCELLED,
}


def end(turn: Turn, phase: Phase, message: str, *, stop_reason: str = CANCELLED) -> None:
    """Enter a terminal phase: what is known is recorded with it, what still runs is stopped."""
    for rank in list(turn.ranks.values()):
        if rank.phase is RankPhase.WAITING:
            turn.ranks[rank.rank] = replace(rank, phase=RankPhase.DROPPED, restart_at=None)
            record_last_failure(turn, rank)
        elif rank.phase.may_run:
            # Metering stops at this moment.
            metered = metering.advance(rank, turn.now) if rank.rank in turn.running else rank
            reason = rank.stop_reason or stop_reason
            turn.ranks[rank.rank] = replace(metered, phase=RankPhase.STOPPING, stop_reason=reason)
    turn.status = replace(turn.status, phase=phase, message=message, terminal_at=turn.now, notice=None)
    turn.milestone(phase.value)
    turn.condition("Ready", False, _EVENTS[phase].value)
    turn.say(_EVENTS[phase], message, warning=phase is Phase.FAILED)


def wind_down(turn: Turn) -> None:
    """Stop what is left; the run is settled when nothing of it can run any more."""
    generation = turn.spec.generation
    if generation not in (turn.status.observed_generation, turn.status.ignored_generation):
        if turn.spec.wanted is Wanted.DELETE:
            turn.status = replace(turn.status, observed_generation=generation)
        else:  # nothing was done about it, so nobody may take it for done
            turn.status = replace(turn.status, ignored_generation=generation)
        if turn.spec.wanted is Wanted.RUN:
            text = f"the run has ended ({turn.status.phase}); this change of its spec has no effect"
            turn.say(Reason.UD_TERMINAL_STATE, text, warning=True)
    for rank in list(turn.ranks.values()):
        if rank.phase.may_run:
            stop(turn, rank)
    busy = turn.strangers or any(r.phase.may_run for r in turn.ranks.values())
    turn.status = replace(turn.status, settled=turn.status.settled or not busy)
    turn.removable = not busy and turn.spec.wanted is Wanted.DELETE
    if not busy and turn.seen.rendezvous is not None:
        turn.actions.append(EndRendezvous())
    if not busy and turn.seen.in_memory and not turn.removable:
        turn.actions.append(PersistSnapshots())
