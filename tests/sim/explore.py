"""Random walks through the life of a run, thousands a minute: `python -m tests.sim.explore --seed N --steps N`.

Walk number i has the seed N + i, printed when it fails; `--seed THAT --runs 1 --trace` makes it again, move by move.
"""

import argparse
import random
import sys
import time
import traceback
from collections import Counter

from .moves import WEIGHTS, Move, make_spec
from .simulation import Simulation

MOVES: list[Move] = list(WEIGHTS)


def walk(seed: int, steps: int, *, trace: bool = False) -> Simulation:
    """One walk; everything in it follows from `seed` and `steps`."""
    rng = random.Random(seed)
    spec = make_spec(
        rng.randint(1, 3),
        rng.randint(0, 2),
        rng.randint(0, 2),
        rng.randint(0, 3),
        rng.randint(0, 1),
        rng.choice((0, 0, 1, 2)),
        rng.choice((0, 0, 1, 2)),
        rng.choice((0, 0, 0, 1)),
        rng.choice((0, 0, 0, 1)),
    )
    sim = Simulation(spec, tombstones_show=rng.random() < 0.5, starts_at_once=rng.random() < 0.5)
    # A walk leaves some kinds of trouble out altogether, so that quiet lives are walked too.
    weights = [w if w >= 10 or rng.random() < 0.6 else 0 for w in WEIGHTS.values()]
    if trace:
        print(f"{spec}\ntombstones_show={sim.tombstones_show} starts_at_once={sim.starts_at_once}")
    for move in rng.choices(MOVES, weights, k=rng.randint(1, steps)):
        n = rng.randrange(1000)
        if trace:
            print(f"{sim.now:9.2f} {move.__name__}({n})")
        move(sim, n)
        if trace:
            ranks = " ".join(f"{r.rank}.{r.attempt}:{r.phase}" for r in sim.status.ranks)
            print(f"          {sim.status.phase} {ranks} exits={len(sim.status.exits)}")
    sim.settle()
    return sim


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--steps", type=int, default=60, help="at most so many moves in a walk")
    parser.add_argument("--runs", type=int, default=None, help="so many walks (default: until --seconds are over)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    first = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    print(f"seed {first}, up to {args.steps} steps a walk", flush=True)
    began, runs, failures, ends = time.monotonic(), 0, 0, Counter[str]()
    while runs != args.runs and (args.runs is not None or time.monotonic() - began < args.seconds):
        try:
            ends[walk(first + runs, args.steps, trace=args.trace).status.phase] += 1
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a find)
            failures += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"\nFAILED: --seed {first + runs} --steps {args.steps} --runs 1 --trace\n  at {where.name}: {error}")
            if failures >= args.failures:
                break
        runs += 1
    elapsed = time.monotonic() - began
    print(f"{runs} walks in {elapsed:.1f} s ({runs / elapsed * 60:.0f} a minute), {failures} failed; ends {dict(ends)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
