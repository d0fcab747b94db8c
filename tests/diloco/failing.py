"""A replica that fails while an exchange is in flight, for tests that watch how it ends."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce

SYNC_EVERY, DELAY, ROUNDS = 10, 5, 4
FAILS_AT = SYNC_EVERY - DELAY + 2
"""Its part is given, and the result is not applied yet."""


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("loss is NaN")
    if how == "exit":
        sys.exit(3)
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


def steps(
    diloco: ArrayDiLoCo, array: np.ndarray[Any, Any], allreduce: ObjectStoreAllReduce, how: str, gate: str
) -> None:
    while diloco.round < ROUNDS:
        while gate and not Path(gate).exists():
            time.sleep(0.01)
        array -= np.float32(0.1) * (array - np.float32(np.sin(diloco.step_count) + allreduce.rank))
        diloco.step()
        if how and diloco.step_count == FAILS_AT:
            while not allreduce.store.list(f"run/rounds/fragment-0/00000000/part-{allreduce.rank:05d}"):
                time.sleep(0.01)
            fail(how)


def train(rendezvous_uri: str, how: str = "", gate: str = "", *, closed: bool = True, **options: Any) -> str:
    """The parameters in the end. It waits for the file `gate` before each step; `closed`: in a block, as it should."""
    rank, world = int(os.environ["REPLICA_RANK"]), int(os.environ["WORLD_SIZE"])
    array = np.zeros(1000, np.float32)
    allreduce = ObjectStoreAllReduce(rendezvous_uri, rank, world, timeout=600, **options)
    if closed:
        with allreduce, ArrayDiLoCo([array], allreduce, SYNC_EVERY, delay=DELAY) as diloco:
            steps(diloco, array, allreduce, how, gate)
    else:
        steps(ArrayDiLoCo([array], allreduce, SYNC_EVERY, delay=DELAY), array, allreduce, how, gate)
    return array.tobytes().hex()
