"""The reports of a replica's rounds: to the console, in the bucket's log, and in the error of one that failed.

The console assembles its rows from values that are reported as `basilica.report` does. All numbers of a round are
reported at once, every time: so the last values of a rank are of one round, and so are the points of its series with
one timestamp. Outside a deployment this does nothing.
"""

import time
from contextlib import suppress

from basilica.diloco.allreduce import RoundStats
from basilica.diloco.bucket import Bucket, LogEntry
from basilica.diloco.errors import BarrierTimeout
from basilica.diloco.fragments import Fragment
from basilica.reports.writer import note

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


def log_entry(fragment: Fragment, stats: RoundStats) -> LogEntry:
    """Return the permanent record of a round in the bucket."""
    return LogEntry(
        name=fragment.name,
        round=stats.outcome.round,
        attempt=stats.outcome.attempt,
        weights={str(rank): weight for rank, weight in stats.outcome.weights.items()},
        samples=fragment.samples,
        chain=stats.outcome.chain,
        digest=fragment.digest,
        array_bytes=stats.array_bytes,
        bytes_up=stats.bytes_up,
        bytes_down=stats.bytes_down,
        requests=dict(stats.requests),
        seconds=stats.seconds,
        waited=stats.waited,
        at=time.time(),
        troubles=stats.troubles,
    )


def add_ends(error: BarrierTimeout, bucket: Bucket) -> None:
    """Say of the ranks that did not come how their last start ended, as far as the bucket knows."""
    with suppress(Exception):  # the bucket may be what is out of reach; that they did not come is what counts
        ends = {(fields["rank"], fields["incarnation"]): fields for fields in bucket.documents("exits")}
        starts = {fields["rank"]: fields["incarnation"] for fields in bucket.documents("members")}
        for rank in error.missing:
            end = ends.get((rank, starts.get(rank)))
            if rank not in starts:
                error.add_note(f"Rank {rank} has never begun.")
            elif end is not None:
                error.add_note(f"Rank {rank} has {end['outcome']}: {end.get('error', 'it made all its steps')}")
