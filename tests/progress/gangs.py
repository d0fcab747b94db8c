"""Gangs of real processes that train with `basilica.Progress`, and are killed at chosen moments.

Processes are forked from a server that has torch imported, so a start takes milliseconds.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "basilica.progress.progress"])


@dataclass(frozen=True)
class Kill:
    """The moment at which a rank kills itself: the n-th time that it comes by this place."""

    rank: int
    place: str  # "step", "snapshot", "seal", "commit", "restore"
    after: int


@dataclass(frozen=True)
class Task:
    directory: str
    kind: str  # "ddp", "fsdp" or "plain"
    steps: int
    every: int | None = 1
    own_hosts: bool = False
    samples: int = 0
    kill: Kill | None = None
    environment: dict[str, str] = field(default_factory=dict)


def train(task: Task, rank: int, world: int, life: int) -> None:
    """The program of a rank."""
    import torch
    import torch.distributed as dist

    import basilica
    from basilica.progress import memory, restoring, snapshot_file
    from basilica.progress import progress as module

    host = f"{task.directory}/host{rank}" if task.own_hosts else f"{task.directory}/host"
    os.environ.update(task.environment | {"BASILICA_SNAPSHOT_DIR": host, "RANK": str(rank), "WORLD_SIZE": str(world)})
    torch.set_num_threads(1)
    passed = dict.fromkeys(("step", "snapshot", "seal", "commit", "restore"), 0)

    def pass_by(place: str) -> None:
        passed[place] += 1
        if task.kill is not None and (task.kill.rank, task.kill.place, task.kill.after) == (rank, place, passed[place]):
            os.kill(os.getpid(), signal.SIGKILL)

    _before(memory, "_copy", lambda: pass_by("snapshot"))
    _before(snapshot_file.Slot, "seal", lambda: pass_by("seal"))
    _before(restoring, "_from_bytes", lambda: pass_by("restore"))
    _before(module, "report", lambda: pass_by("commit"))

    dist.init_process_group("gloo", init_method=f"file://{task.directory}/store{life}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    random.seed(rank)
    model = _model(torch, task.kind, world)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "drawn": 0.0}
    progress = basilica.Progress(every=task.every, **parts)
    progress.restore()
    restored = progress.step
    while progress.step < task.steps:
        pass_by("step")
        inputs = torch.randn(4, 8)
        loss = ((model(inputs) - inputs[:, :2]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        if task.kind == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        schedule.step()
        progress["drawn"] += random.random()
        progress.commit(loss=loss)
        Path(f"{task.directory}/reached{rank}.{life}").write_text(str(progress.step))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest()
    end = {"digest": digest, "drawn": progress["drawn"], "random": torch.rand(1).item(), "restored": restored}
    Path(f"{task.directory}/end{rank}").write_text(json.dumps(end))
    dist.barrier()
    os._exit(0)


def _before(owner: Any, name: str, call: Any) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _model(torch: Any, kind: str, world: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    layers = torch.nn
    model = layers.Sequential(layers.Linear(8, 16), layers.BatchNorm1d(16), layers.Dropout(0.2), layers.Linear(16, 2))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if kind != "ddp":
        model[1] = layers.LayerNorm(16)  # without buffers, which differ from rank to rank
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


@dataclass
class Ends:
    """How a gang ended. `lives`: how often it was started; `lost`: steps that were taken again, by each restart."""

    digests: set[str]
    drawn: list[float]
    random: list[float]
    restored: list[int]
    lives: int
    lost: list[int]


def run_gang(
    task: Task, worlds: list[int], kills: list[Kill | None], between: Callable[[], None] = lambda: None
) -> Ends:
    """Run the gang to its end, and call `between` after each life that failed.

    Each life has its world, or else the last one of the list, and its kill, or else none.
    """
    lost = []
    for life in range(20):
        world = worlds[min(life, len(worlds) - 1)]
        kill = kills[life] if life < len(kills) else None
        given = Task(**{**vars(task), "kill": kill})
        ranks = [_context.Process(target=train, args=(given, rank, world, life)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        if _join(ranks):
            ends = [json.loads(Path(f"{task.directory}/end{rank}").read_text()) for rank in range(world)]
            lost += _lost(task.directory, life, ends[0]["restored"])
            return Ends(
                digests={end["digest"] for end in ends},
                drawn=[end["drawn"] for end in ends],
                random=[end["random"] for end in ends],
                restored=[end["restored"] for end in ends],
                lives=life + 1,
                lost=lost,
            )
        between()
    raise AssertionError("the gang does not get to its end")


def _lost(directory: str, life: int, restored: int) -> list[int]:
    reached = [int(path.read_text()) for path in Path(directory).glob(f"reached*.{life - 1}") if path.read_text()]
    return [max(0, max(reached) - restored)] if reached else []


def _join(ranks: Sequence[BaseProcess]) -> bool:
    """Wait for the end of all ranks; end the others as soon as one fails, as torchrun does. Return success."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(rank.exitcode is None for rank in ranks):
        waiting = [rank.sentinel for rank in ranks if rank.exitcode is None]
        multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if any(rank.exitcode for rank in ranks) or time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.join()
    assert time.monotonic() < deadline, "the gang hangs"
    return all(rank.exitcode == 0 for rank in ranks)
