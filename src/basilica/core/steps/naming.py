"""How a run that has not ended is shown: its phase, its conditions, and since when its world is whole."""

from dataclasses import replace

from basilica.core.events import Reason
from basilica.core.phase import Phase
from basilica.core.seen import Sight
from basilica.core.status import HISTORY_MAX, WorldSample
from basilica.core.steps.turn import Turn


def name_the_phase(turn: Turn) -> None:
    turn.write_ranks()
    ready, world = turn.status.ready, turn.spec.world
    before = turn.status.phase
    if ready >= world.min:
        phase = Phase.READY
    elif turn.status.was_ready:
        phase = Phase.DEGRADED
    else:
        phase = _starting_phase(turn)
    if phase is Phase.READY and before is Phase.DEGRADED:
        turn.say(Reason.WORLD_RECOVERED, f"the world is at its minimum of {world.min} again")
    elif phase is Phase.DEGRADED and before is not Phase.DEGRADED:
        turn.say(Reason.WORLD_SHRUNK_BELOW_MIN, f"the world is below its minimum of {world.min}", warning=True)
    whole = ready == turn.status.world_target
    was_whole = turn.before.ready == turn.before.world_target and turn.before.world_target > 0
    turn.status = replace(
        turn.status,
        phase=phase,
        whole_at=turn.now if whole and not was_whole else turn.status.whole_at,
    )
    turn.condition("Ready", ready >= world.min, "RanksReady" if ready >= world.min else "RanksMissing")
    turn.condition("BelowMinimum", ready < world.min, "RanksMissing" if ready < world.min else "RanksReady")


def _starting_phase(turn: Turn) -> Phase:
    wanted = [s for s in turn.seen.ranks if s.rank < turn.status.world_target]
    up = any(s.sight in (Sight.STARTING, Sight.RUNNING) for s in wanted)
    return Phase.STARTING if up else Phase.PENDING


def sample_the_world(turn: Turn) -> None:
    """The history grows when the world has changed."""
    sample = (turn.status.world_target, turn.status.ready)
    if turn.ended or sample == (turn.before.world_target, turn.before.ready):
        return
    history = (*turn.status.history, WorldSample(turn.now, *sample))[-HISTORY_MAX:]
    turn.status = replace(turn.status, history=history)
