"""One step of a run's life, decided: spec, status, what was seen and the time in; a Plan out.

Total and deterministic. A settled run, or one of which nothing changed, gets its own status back and no actions, so
turning the controller once more is always safe. The order of a turn:

    take in what was seen  →  obey the spec  →  judge  →  deadlines  →  launch and stop  →  phase, gate, bench
                           →  ledger, snapshots, incidents, metering
"""

from dataclasses import replace

from basilica.core import metering
from basilica.core.actions import Plan, Remove, Stop
from basilica.core.failing import without_failure
from basilica.core.seen import Sighting
from basilica.core.spec import DeploymentSpec
from basilica.core.status import DeploymentStatus
from basilica.core.steps.accounting import account
from basilica.core.steps.bench import follow_the_bench
from basilica.core.steps.ending import wind_down
from basilica.core.steps.gate import open_the_gate
from basilica.core.steps.incidents import follow_incidents
from basilica.core.steps.naming import name_the_phase, sample_the_world
from basilica.core.steps.notices import admit_newcomers, heed_leaving_ranks, release_ranks
from basilica.core.steps.shaping import RELAUNCH_DELAY, shape_the_world, watch_the_stopping
from basilica.core.steps.sightings import take_in
from basilica.core.steps.snapshots import announce_restores, follow_snapshots
from basilica.core.steps.spec_changes import obey_spec
from basilica.core.steps.turn import Turn
from basilica.core.steps.verdicts import announce_deadlines, judge, keep_deadlines, notice_readiness

__all__ = ["RELAUNCH_DELAY", "reconcile"]


def reconcile(spec: DeploymentSpec, status: DeploymentStatus, seen: Sighting, now: float) -> Plan:
    """Decide one step."""
    turn = Turn(spec, status, seen, now)
    take_in(turn)
    if not turn.ended:
        release_ranks(turn)
        obey_spec(turn)
    if not turn.ended:
        notice_readiness(turn)
        judge(turn)  # before the deadlines: a run that is done by now is done, however late the look
    if not turn.ended:
        heed_leaving_ranks(turn)
        keep_deadlines(turn)
    if turn.ended:
        wind_down(turn)
    else:
        shape_the_world(turn)
        admit_newcomers(turn)
        announce_deadlines(turn)
        name_the_phase(turn)
        open_the_gate(turn)
    watch_the_stopping(turn)
    follow_the_bench(turn)
    account(turn)
    announce_restores(turn)
    follow_snapshots(turn)
    follow_incidents(turn)
    return _plan(turn)


def _has_changed(turn: Turn) -> bool:
    """Return whether the run has changed. The silence or the return of its rendezvous is no observation of ranks."""
    return turn.status != replace(turn.before, rendezvous_silent_since=turn.status.rendezvous_silent_since)


def _plan(turn: Turn) -> Plan:
    turn.write_ranks()
    sample_the_world(turn)
    if turn.status.settled:
        turn.status = replace(without_failure(turn.status), rendezvous_silent_since=None)
    if _has_changed(turn) and not turn.ended:
        for number in turn.running:
            if turn.ranks[number].phase.may_run:
                turn.ranks[number] = metering.advance(turn.ranks[number], turn.now)
        turn.write_ranks()
    if turn.removable and any(isinstance(a, Stop) for a in turn.actions):
        turn.wakes.append(turn.now + RELAUNCH_DELAY)  # first the stop, then a look, then the removal
    elif turn.removable:
        turn.actions.append(Remove())
    wake_at = min(turn.wakes, default=None)
    return Plan(turn.status, tuple(turn.actions), tuple(turn.events), wake_at)
