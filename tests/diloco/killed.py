"""A replica that trains something trivial through files, for tests that kill it: `python -m tests.diloco.killed …`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from basilica.diloco.allreduce import ObjectStoreAllReduce

NUMBERS = 200_000


def numbers(rank: int, round: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng((rank, round)).integers(-8, 8, NUMBERS).astype(np.float32)


def main(directory: Path, rank: int, world: int, rounds: int) -> None:
    """Each round's mean goes to a file; what is known before each round is saved as a checkpoint would be."""
    saved = directory / f"state-{rank}.json"
    with ObjectStoreAllReduce(f"file://{directory}/bucket", rank, world, timeout=60) as allreduce:
        if saved.exists():
            allreduce.load_state_dict(json.loads(saved.read_text()))
        while (round := allreduce.state_dict().get("default", {"round": 0})["round"]) < rounds:
            (mean,) = allreduce.allreduce([numbers(rank, round)], weight=1.0 + rank)
            np.save(directory / f"mean-{rank}-{round}.npy", mean)
            fresh = saved.with_suffix(".fresh")
            fresh.write_text(json.dumps(allreduce.state_dict()))
            os.replace(fresh, saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:5]))
