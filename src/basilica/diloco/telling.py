"""What a replica says of each of its rounds, with `basilica.report`'s means: the console puts the rows together.

All numbers of a round are told at once, every time: so the last values of a rank are of one round, and so are the
points of its series that stand at one moment. Outside a deployment this does nothing.
"""

from basilica.diloco.allreduce import RoundStats
from basilica.reporting import note

NOBODY = -1
MILLISECONDS = 3  # digits: more would only make the report longer


def tell_round(stats: RoundStats, *, replica: int, world: int, fragment: int) -> None:
    """`world`: how many replicas the run has; `fragment`: which part of the model this round was of."""
    outcome = stats.outcome
    note(
        diloco_round=outcome.round,
        diloco_fragment=fragment,
        diloco_replica=replica,
        diloco_counted=outcome.counted,
        diloco_weight=outcome.weights.get(replica, 0.0),
        diloco_members=len(outcome.weights),
        diloco_world=world,
        diloco_bytes_up=stats.bytes_up,
        diloco_bytes_down=stats.bytes_down,
        diloco_wait_s=round(stats.waited, MILLISECONDS),
        diloco_waited_for=NOBODY if outcome.waited_for is None else outcome.waited_for,
        diloco_round_s=round(stats.seconds, MILLISECONDS),
    )
