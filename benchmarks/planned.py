"""A planned resize under torchrun: what it costs a script that saves on notice, beside one that is not told.

Both scripts train in lockstep with a step of 50 ms and save every 100 steps; the first saves on notice as well. Each
figure is of one resize, from 2 to 3 ranks and back: the time without a step of anybody, the time from the request to
the first step of the new world, and the steps that are taken twice.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from basilica import BasilicaClient, DistributedTraining, WorldSize
from benchmarks.harness import PYTHON, Figure, server

STEP_SECONDS = 0.05
SAVE_EVERY = 100
TRAIN = """
import os, time
import torch, torch.distributed as dist
import basilica

folder = os.environ["STEPS"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
saved = os.path.join(folder, "saved")
step = int(open(saved).read()) if os.path.exists(saved) else 0
ones = torch.ones(1)


def save():
    if rank == 0:
        with open(f"{saved}.new", "w") as file:
            file.write(str(step))
        os.replace(f"{saved}.new", saved)


while not os.path.exists(os.path.join(folder, "stop")):
    time.sleep(%(step)s)
    dist.all_reduce(ones)
    ones /= world
    step += 1
    basilica.report(step=step)
    if rank == 0:
        with open(os.path.join(folder, "steps"), "a") as file:
            file.write(f"{time.time()} {world} {step}\\n")
    if step %% %(every)s == 0:
        save()
    if %(listens)s and (notice := basilica.notice()):
        save()
        notice.ready()
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class Step:
    at: float
    world: int
    number: int


@dataclass(frozen=True, slots=True)
class Resize:
    """The cost of one resize."""

    pause: float
    until_new_world: float
    repeated: int


def run() -> Iterator[Figure]:
    found = {listens: _resizes(listens=listens) for listens in (True, False)}
    for kind, (grown, shrunk) in {"told": found[True], "not told": found[False]}.items():
        for change, cost in (("2 to 3", grown), ("3 to 2", shrunk)):
            goal = "0" if kind == "told" else ""
            yield Figure(f"{change} ranks, {kind}: from the request to the new world", cost.until_new_world, "s")
            yield Figure(f"{change} ranks, {kind}: without a step", cost.pause, "s")
            yield Figure(f"{change} ranks, {kind}: steps taken twice", cost.repeated, "steps", goal)


def _resizes(*, listens: bool) -> tuple[Resize, Resize]:
    script = TRAIN % {"step": STEP_SECONDS, "every": SAVE_EVERY, "listens": listens}
    with (
        server() as process,
        BasilicaClient(process.url, process.key) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        training = client.deploy_distributed(
            "planned",
            source=script,
            launcher="torchrun",
            world_size=WorldSize(1, 2, 3),
            gpu_count=0,
            env={"STEPS": folder, "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"},
            wait=False,
        )
        _wait_for(Path(folder), world=2, count=SAVE_EVERY + 20)
        grown = _resize(training, Path(folder), 3)
        shrunk = _resize(training, Path(folder), 2)
        (Path(folder) / "stop").touch()
        training.join()
    return grown, shrunk


def _resize(training: DistributedTraining, folder: Path, target: int) -> Resize:
    before = len(_steps(folder))
    asked = time.time()
    training.scale(target)
    steps = _wait_for(folder, world=target, count=20, after=before)
    first = next(n for n, step in enumerate(steps) if n >= before and step.world == target)
    highest = max(step.number for step in steps[:first])
    return Resize(
        pause=steps[first].at - steps[first - 1].at,
        until_new_world=steps[first].at - asked,
        repeated=max(0, highest - steps[first].number + 1),
    )


def _wait_for(folder: Path, *, world: int, count: int, after: int = 0) -> list[Step]:
    """Return all steps once there are that many of the world, later than the first `after`."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        steps = _steps(folder)
        if sum(step.world == world for step in steps[after:]) >= count:
            return steps
        time.sleep(0.05)
    raise TimeoutError(f"no {count} steps of a world of {world} after two minutes")


def _steps(folder: Path) -> list[Step]:
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (line.split() for line in lines)
    return [Step(float(at), int(world), int(number)) for at, world, number in (row for row in rows if len(row) == 3)]
