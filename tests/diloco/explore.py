"""`python -m tests.diloco.explore --schedules 1000`: random lives of a run; the seeds of those that break a promise."""

import argparse
import random
import time
from collections import Counter

from tests.diloco.simulation import Schedule, Simulation, Violation


def schedule_of(seed: int) -> Schedule:
    """One of all the kinds of trouble."""
    chance = random.Random(seed)
    world = chance.randint(1, 5)
    return Schedule(
        seed=seed,
        world=world,
        rounds=chance.randint(1, 4),
        quorum=chance.choice((None, None, chance.randint(1, world))),
        faults=chance.randint(0, 12),
        crash=chance.choice((0.01, 0.05, 0.2)),
        stall=chance.choice((0.0, 0.01, 0.05)),
        error=chance.choice((0.0, 0.02, 0.1)),
        rot=chance.choice((0.0, 0.0, 0.02)),
        torn=chance.random() < 0.7,
        stale_listings=chance.random() < 0.5,
        other_numbers=chance.random() < 0.4,
        impostor=chance.random() < 0.15,
        leftovers=chance.random() < 0.15,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    began, broken = time.perf_counter(), 0
    seen: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.schedules):
        simulation = Simulation(schedule_of(seed))
        try:
            simulation.run()
        except Violation as violation:
            broken += 1
            print(
                f"seed {seed}: {violation} {[str(e)[:150] for e in simulation.errors[-3:]]}\n  {simulation.schedule}",
                *simulation.events,
                sep="\n  ",
                flush=True,
            )
        seen.update(type(error).__name__ for error in simulation.errors)
        seen["failed requests"] += len(simulation.failed)
        seen["faults"] += simulation.schedule.faults - simulation.faults
        seen["rounds finished"] += len(simulation.finished)
    print(f"{options.schedules} schedules in {time.perf_counter() - began:.1f} s, {broken} broken; {dict(seen)}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
