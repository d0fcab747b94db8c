"""torchrun's rendezvous, driven by us and left alone: from a change of the world to the first step of the new one.

Each figure is from the moment at which the target is written, just before agents are started or stopped, to the moment
at which every rank of the new world has done an all-reduce. A killed agent's successor is started at once. Both kinds
use the same agents, on the same rendezvous.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import Figure, median
from tests.support.agents import Agent, Fleet, driven

ROUNDS = 3
GOALS = {"start of (2, 2, 4)": "< 4", "a third agent joins": "< 5", "scale down to 2": "< 3", "an agent is killed": ""}


def run() -> Iterator[Figure]:
    ours: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="basilica-bench-") as folder, _rendezvous(Path(folder)) as endpoint:
        for n in range(ROUNDS):
            for change, seconds in _changes(endpoint, f"driven-{n}", Path(folder), driver=True):
                ours.setdefault(change, []).append(seconds)
        for change, all_seconds in ours.items():
            yield Figure(f"{change}, driven", median(all_seconds), "s", GOALS[change])
        for change, seconds in _changes(endpoint, "plain", Path(folder), driver=False):
            yield Figure(f"{change}, plain torchrun", seconds, "s")
            yield Figure(f"{change}, plain against driven", seconds / median(ours[change]), "times")


def _changes(endpoint: str, run_id: str, folder: Path, *, driver: bool) -> Iterator[tuple[str, float]]:
    with Fleet(endpoint, run_id, folder / run_id, nodes=(2, 4)) as fleet, ExitStack() as stack:
        if driver:
            stack.enter_context(driven(endpoint, run_id))
        agents: list[Agent] = []

        def start(count: int) -> None:
            agents.extend(fleet.start(count))

        yield "start of (2, 2, 4)", _timed(fleet, 2, lambda: start(2))
        yield "a third agent joins", _timed(fleet, 3, lambda: start(1))
        yield "scale down to 2", _timed(fleet, 2, lambda: agents.pop().terminate())
        agents.pop().kill()
        yield "an agent is killed", _timed(fleet, 2, lambda: start(1))


def _timed(fleet: Fleet, world: int, change: Callable[[], None]) -> float:
    fleet.want(world)
    began = time.time()
    change()
    return fleet.first_step(world, began) - began


@contextmanager
def _rendezvous(folder: Path) -> Iterator[str]:
    """Our service on a port of its own choice."""
    argv = [sys.executable, "-m", "basilica.rendezvous", "--port", "0", "--data-dir", str(folder / "keys")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().partition("http://")[2].partition("/")[0]
    finally:
        process.kill()
        process.communicate()
