"""The start of a replica: its record of the run, the wait for a state, and the check of untrained parameters."""

import os
import time
from collections.abc import Sequence

from basilica.diloco.allreduce import ObjectStoreAllReduce
from basilica.diloco.bucket import Bucket, RunRecord, State
from basilica.diloco.errors import BarrierTimeout, RoundConflict
from basilica.diloco.fragments import Checksum, Options
from basilica.diloco.replica_entrypoint import arguments_of

GROWTH = 1.5
FIRST_LOOK = 0.05


def run_record(allreduce: ObjectStoreAllReduce, options: Options) -> RunRecord:
    """Return the record from which the run can be started again."""
    environment = {name: value for name, value in os.environ.items() if name != "REPLICA_ARGS_FILE"}
    return RunRecord(
        entrypoint=os.environ.get("ENTRYPOINT"),
        arguments=arguments_of(environment),
        world_size=allreduce.world_size,
        quorum=allreduce.quorum,
        settings=options.settings,
        created_at=time.time(),
    )


def wait_for_state(
    bucket: Bucket, allreduce: ObjectStoreAllReduce, name: str, *, at_least: int = 0, missing: tuple[int, ...] = ()
) -> State:
    """Wait for the newest state of a fragment; polls less and less often, so that a long wait costs few requests."""
    deadline = time.monotonic() + allreduce.timeout
    pause = min(FIRST_LOOK, allreduce.store.longest_pause)
    while True:
        found = bucket.newest(name, at_least)
        if found is not None:
            return found
        left = deadline - time.monotonic()
        if left <= 0:
            raise BarrierTimeout(f"the state of {name!r} in run {bucket.run_id!r}", missing, allreduce.timeout)
        allreduce.store.wait_for_change(f"{bucket.run_id}/states/", min(pause, left))
        pause = min(pause * GROWTH, allreduce.store.longest_pause)


def check_frozen(bucket: Bucket, part: str, rank: int, frozen: Sequence[Checksum]) -> None:
    """Check the untrained parameters: they are never sent, so they must equal those of rank 0 from the start.

    Rank 0 records its checksums before the first state, for which all others wait: so they are there to be compared.
    """
    theirs = bucket.frozen(part, list(frozen) if rank == 0 else None)
    if theirs is None or theirs == list(frozen):
        return
    where = f"the start of rank {rank} in run {bucket.run_id!r}"
    advice = (
        "it is never sent, so all replicas must load the same; if rank 0 had loaded the wrong one, use another run_id"
    )
    if len(theirs) != len(frozen):
        raise RoundConflict(
            where,
            f"it has {len(frozen)} frozen parameters (requires_grad=False) and rank 0 has {len(theirs)}: {advice}",
        )
    name = next(mine.name for mine, other in zip(frozen, theirs, strict=True) if mine.digest != other.digest)
    raise RoundConflict(where, f"the frozen parameter {name!r} differs from that of rank 0: {advice}")
