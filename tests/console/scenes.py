"""Runs worth looking at: one that trains, one that failed, one that has stalled. For tests and for pictures."""

import math
import time
from collections.abc import Callable
from typing import Any

from basilica.core.phase import BenchPhase
from basilica.core.seen import (
    AnswerState,
    BenchPoint,
    BenchResult,
    Ended,
    SeenAgent,
    SeenBench,
    SeenWorkerExit,
    Stalled,
)
from tests.console.stage import Stage

TRACEBACK = """Traceback (most recent call last):
  File "/srv/llama/train.py", line 214, in <module>
    main()
  File "/srv/llama/train.py", line 187, in main
    loss = step(model, batch)
  File "/srv/llama/train.py", line 93, in step
    logits = model(batch.tokens)
RuntimeError: CUDA error: an illegal memory access was encountered"""
LAST_LINES = ("step 411 loss 1.7702", "step 412 loss 1.7644", *TRACEBACK.splitlines())


def training(
    stage: Stage,
    name: str = "llama-8b",
    *,
    ranks: int = 16,
    steps: int = 60,
    clock: Callable[[float], None] = lambda _: None,
) -> str:
    """A run that reports a loss, a learning rate and a gradient norm, was resized, and lost a rank on the way.

    `clock` is told how many seconds ago each part of it happens.
    """
    clock(3000)
    instance = stage.deploy(name, target=ranks - 4, min=2, max=ranks + 8, restarts=3, bench=True, gpus=8)
    stage.call(stage.actors.measured, instance, bench_result())
    stage.do(stage.world.until(instance, lambda d: d.status.bench is not None and d.status.bench.result is not None))
    clock(2960)
    trained(stage, instance, 0)
    clock(2100)
    trained(stage, instance, 200)
    stage.do(stage.world.plane.scale("ann", instance, ranks))
    stage.do(stage.world.until(instance, lambda d: d.status.ready == ranks))
    clock(2000)
    trained(stage, instance, 220, first=220)
    clock(900)
    trained(stage, instance, 420)
    stage.actors.resume[instance] = 380
    stage.call(stage.actors.exit, instance, 5, 137, "OOMKilled")
    stage.do(stage.world.until(instance, lambda d: any(r.restarts for r in d.status.ranks)))
    clock(840)
    stage.do(stage.world.until(instance, lambda d: d.status.ready == ranks))
    clock(590)
    trained(stage, instance, 421)
    clock(0)
    trained(stage, instance, 590)
    for step in range(steps):
        for rank in range(ranks):
            noise = math.sin(step * 1.7 + rank * 2.3) * 0.06
            stage.call(
                stage.actors.report,
                instance,
                rank,
                step * 10,
                loss=2.2 * math.exp(-step / 25) + 0.6 + noise,
                lr=3e-4 * min(1.0, step / 10) * (1 - step / 120),
                grad_norm=1.0 + 0.4 * math.cos(step / 6 + rank) + noise,
            )
    return instance


def trained(stage: Stage, instance: str, step: int, first: int = 0) -> None:
    """All ranks have come to this step, and the controller has booked it."""
    stage.call(stage.actors.trains, instance, step, first=first)
    stage.do(
        stage.world.until(
            instance,
            lambda d: all(
                r.steps is not None and r.steps.step == step and r.segment is not None and r.segment.cause == "training"
                for r in d.status.ranks
            ),
        )
    )


def agent_of(rank: int, *exits: SeenWorkerExit, round: int = 1, nproc: int = 4, agents: int = 4) -> SeenAgent:
    return SeenAgent(
        pid=4000 + rank,
        nproc=nproc,
        round=round,
        group_rank=rank,
        agents=agents,
        world=nproc * agents,
        first_torch_rank=nproc * rank,
        pids=tuple(5000 + 100 * rank + 10 * round + n for n in range(nproc)),
        meeting_since=time.time() - 30,
        executing_since=time.time() - 20,
        exits=exits,
    )


def worker_exit(number: int, at: float, **changes: Any) -> SeenWorkerExit:
    """Worker 1 of rank 2 fails."""
    facts: dict[str, Any] = {
        "worker": 1,
        "torch_rank": 9,
        "pid": 5211,
        "exit_code": 1,
        "reason": "Error",
        "message": TRACEBACK.splitlines()[-1],
        "traceback": TRACEBACK,
        "log_tail": LAST_LINES,
    } | changes
    return SeenWorkerExit(number=number, at=at, **facts)


def torchrun(stage: Stage, name: str = "gemma-2b", *, crashes: int = 0, restarts: int = 3, **world: Any) -> str:
    """A run of torchrun agents, of which worker 1 of rank 2 has failed so many times, every 8 seconds."""
    instance = stage.deploy(name, target=4, restarts=restarts, gpus=4, **world)
    for rank in range(4):
        stage.call(stage.actors.works, instance, rank, agent_of(rank))
    stage.do(stage.world.until(instance, lambda d: all(r.agent is not None and r.agent.round for r in d.status.ranks)))
    exits = [worker_exit(n + 1, time.time() - 8 * (crashes - n)) for n in range(crashes)]
    if exits:
        stage.call(stage.actors.works, instance, 2, agent_of(2, *exits, round=1 + crashes))
        stage.do(stage.world.until(instance, lambda d: d.status.ranks[2].crashes is not None))
    return instance


def failed_worker(stage: Stage, name: str = "gemma-ft") -> str:
    """A run that has failed: a worker was killed for memory, and its agent gave up."""
    instance = torchrun(stage, name, restarts=0, min=4, max=4)
    now = time.time()
    killed = worker_exit(1, now, exit_code=137, signal="SIGKILL", reason="OOMKilled", traceback="", message="")
    stage.call(stage.actors.works, instance, 2, agent_of(2, killed))
    stage.do(stage.world.until(instance, lambda d: len(d.status.failures) == 1))
    stage.fail(instance, 2, Ended(exit_code=1, reason="Error", finished_at=now + 0.1))
    stage.do(stage.world.settled(instance))
    return instance


def planned(stage: Stage, name: str = "resizing") -> str:
    """A run that is about to be resized: ranks 0 and 2 are ready for it, ranks 1 and 3 are not."""
    instance = stage.deploy(name, target=4)
    trained(stage, instance, 1240)
    stage.call(stage.actors.answers, instance, AnswerState.LISTENING)
    stage.do(stage.world.until(instance, lambda d: all(r.listens for r in d.status.ranks)))
    stage.do(stage.world.plane.scale("ann", instance, 2))
    found = stage.do(stage.world.until(instance, lambda d: d.status.notice is not None))
    assert found.status.notice is not None
    number = found.status.notice.number
    stage.call(stage.actors.answers, instance, AnswerState.SEEN, 1, 3, number=number)
    stage.call(stage.actors.answers, instance, AnswerState.READY, 0, 2, number=number)
    stage.do(stage.world.until(instance, lambda d: sum(r.ready_for == number for r in d.status.ranks) == 2))
    return instance


def round_of(round: int, replica: int, world: int, missing: tuple[int, ...] = (), **changes: float) -> dict[str, float]:
    """What a replica reports of a round in which these were not counted: 8 MB of model through a slow link."""
    slowest = missing[0] if missing else (round * 7) % world
    wait = 0.0 if replica == slowest else 5.0 if missing else 0.2 + 0.1 * ((round + replica) % 9)
    told = {
        "round": round,
        "fragment": 0,
        "replica": replica,
        "counted": float(replica not in missing),
        "weight": 0.0 if replica in missing else 6400 + 64 * (replica % 5),
        "members": world - len(missing),
        "world": world,
        "bytes_up": 8.1e6,
        "bytes_down": 14.2e6 + 1000 * replica,
        "wait_s": wait,
        "waited_for": -1 if replica == slowest else slowest,
        "round_s": 1.4 + wait,
    } | changes
    return {f"diloco_{name}": value for name, value in told.items()}


def rounds(
    stage: Stage,
    name: str = "diloco-1b",
    *,
    replicas: int = 8,
    count: int = 120,
    seconds: float = 20.0,
) -> str:
    """A DiLoCo run in which replica 2 was away for a while, and one comes too late now and then."""
    instance = stage.deploy(name, target=replicas, min=1, max=replicas)
    begin = time.time() - seconds * count
    gone = math.ceil(count * 0.9)

    def tell() -> None:
        for number in range(count):
            away = (2,) if gone <= number < gone + 4 else ()
            # Only the first round waits for it: the others do not expect it any more.
            known = {"wait_s": 0.6, "waited_for": 4.0, "round_s": 2.0} if away and number > gone else {}
            late = (replicas - 3,) if number % 29 == 27 else ()
            for replica in range(replicas):
                if replica in away:
                    continue
                stage.actors.told(
                    instance,
                    replica,
                    begin + number * seconds + 0.01 * replica,
                    100 * (number + 1),
                    loss=2.2 * math.exp(-number / 40) + 0.6 + 0.02 * math.sin(number + replica),
                    **round_of(number, replica, replicas, away + late, **known),
                )

    stage.call(tell)
    return instance


def failed(stage: Stage, name: str = "mistral-ft", *, ranks: int = 8) -> str:
    instance = stage.deploy(name, target=ranks, min=ranks, max=ranks)
    now = time.time()
    ended = Ended(exit_code=1, reason="Error", finished_at=now, log_tail=LAST_LINES, traceback=TRACEBACK)
    stage.fail(instance, 3, ended)
    stage.do(stage.world.settled(instance))
    return instance


def stalled(stage: Stage, name: str = "vit-sweep", *, ranks: int = 4) -> str:
    instance = stage.deploy(name, target=ranks)
    stack = (
        'Thread 1 (main): "MainThread"\n  all_reduce (torch/distributed/distributed_c10d.py:2825)\n  step (train.py:93)'
    )
    told = Stalled(
        since=time.time() - 40, usual_step_seconds=0.4, where="all_reduce (distributed_c10d.py:2825)", stack=stack
    )
    stage.call(stage.actors.stall, instance, 2, told)
    stage.do(stage.world.until(instance, lambda d: d.status.ranks[2].stalled is not None))
    return instance


def bench_result() -> SeenBench:
    sizes = [1 << n for n in range(12, 29, 2)]
    sweep = tuple(
        BenchPoint(
            size_bytes=size,
            algbw_gbps=90 * size / (size + 3e6),
            busbw_gbps=90 * size / (size + 3e6),
            latency_us=18 + size / 90e3,
            repeats=20,
        )
        for size in sizes
    )
    result = BenchResult(
        measured_at=time.time(),
        probe_node_a="node-0",
        probe_node_b="node-1",
        busbw_gbps_p10=84.1,
        busbw_gbps_p50=88.9,
        busbw_gbps_p90=90.2,
        algbw_gbps_p50=88.9,
        latency_us_at_1mib=29.7,
        size_bytes_swept=tuple(sizes),
        method="nccl",
        sweep=sweep,
    )
    return SeenBench(phase=BenchPhase.SUCCEEDED, result=result)
