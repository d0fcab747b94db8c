"""A round of the all-reduce through an object store, beside gloo's between the same processes in the same run."""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from basilica.diloco.allreduce import ObjectStoreAllReduce
from benchmarks.harness import Figure, median

MIB = 1 << 20
CASES = ((2, 64), (4, 64), (8, 64), (2, 256))
WIRES = (None, "int8", "int4")
ROUNDS = 9
WARM_UP = 2
S3_CASE = (4, 8)
S3_KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class Seen:
    """What one replica measured, by wire: seconds of each round, and the traffic and memory of the last."""

    seconds: dict[str, list[float]]
    up: dict[str, float]
    down: dict[str, float]
    requests: dict[str, dict[str, int]]
    grown: dict[str, float]


def run() -> Iterator[Figure]:
    for world, size in CASES:
        with tempfile.TemporaryDirectory(prefix="basilica-bench-", dir=_memory()) as directory:
            seen = _replicas(f"file://{directory}", world, size, WIRES, _free_port())
        yield from _figures(f"{world} x {size} MiB", seen)
    yield from _on_s3()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _figures(case: str, seen: list[Seen]) -> Iterator[Figure]:
    gloo = _time(seen, "gloo") if "gloo" in seen[0].seconds else None
    if gloo is not None:
        yield Figure(f"{case}, gloo", gloo * 1000, "ms")
    for wire in seen[0].up:
        what = f"{case}, {wire}"
        ours = _time(seen, wire)
        exact = wire == "fp32"
        yield Figure(f"{what}: a round", ours * 1000, "ms")
        if gloo is not None:
            yield Figure(f"{what}: against gloo", ours / gloo, "times", "< 2" if exact else "")
        yield Figure(f"{what}: up", max(s.up[wire] for s in seen), "x size", "<= 1.1" if exact else "")
        yield Figure(f"{what}: down", max(s.down[wire] for s in seen), "x size", "<= 2.1" if exact else "")
        yield Figure(f"{what}: memory beyond arrays and mean", max(s.grown[wire] for s in seen), "MiB")
        for kind in ("put", "get", "list"):
            yield Figure(f"{what}: {kind}", max(s.requests[wire].get(kind, 0) for s in seen), "requests")


def _time(seen: list[Seen], wire: str) -> float:
    """The median over rounds; a round takes as long as its slowest replica."""
    return median([max(rounds) for rounds in zip(*(s.seconds[wire] for s in seen), strict=True)])


def _replicas(uri: str, world: int, size: int, wires: tuple[str | None, ...], port: int | None = None) -> list[Seen]:
    """Replicas in processes of their own; with a port they also reduce by gloo, which meets there."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(world), context.Queue()
    shared = (uri, world, size, wires, port, barrier, answers)
    processes = [context.Process(target=_replica, args=(rank, *shared), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        return [answers.get(timeout=300) for _ in processes]
    finally:
        for process in processes:
            process.join(30)


def _replica(rank: int, *shared: Any) -> None:
    uri, world, size, wires, port, barrier, answers = shared
    mine = np.random.default_rng(rank).standard_normal(size * MIB // 4, dtype=np.float32)
    mean = np.zeros_like(mine)
    seconds, grown = _measure(lambda **how: ObjectStoreAllReduce(uri, rank, world, **how), wires, (mine, mean), barrier)
    history = {wire: stats for wire, (_, stats) in seconds.items()}
    times = {wire: rounds for wire, (rounds, _) in seconds.items()}
    if port is not None:
        times["gloo"] = _gloo(rank, world, port, mine, barrier)
    answers.put(
        Seen(
            times,
            {wire: stats.bytes_up / mine.nbytes for wire, stats in history.items()},
            {wire: stats.bytes_down / mine.nbytes for wire, stats in history.items()},
            {wire: dict(stats.requests) for wire, stats in history.items()},
            grown,
        )
    )


def _measure(
    join: Callable[..., ObjectStoreAllReduce], wires: tuple[str | None, ...], arrays: tuple[Any, Any], barrier: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """By wire: the seconds of each round with the last one's statistics, and by how much the process grew."""
    measured: dict[str, Any] = {}
    grown: dict[str, float] = {}
    for wire in wires:
        name = wire or "fp32"
        with join(run_id=name, wire=wire, retain=0, timeout=120) as allreduce:
            before = _forget_peak()
            rounds = []
            for _ in range(WARM_UP + ROUNDS):
                barrier.wait()
                began = time.perf_counter()
                allreduce.allreduce([arrays[0]], out=[arrays[1]])
                rounds.append(time.perf_counter() - began)
            measured[name] = (rounds[WARM_UP:], allreduce.history[-1])
            grown[name] = (_status("VmHWM") - before) / 1024
    return measured, grown


def _forget_peak() -> int:
    """What the process has now, in KiB; its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _gloo(rank: int, world: int, port: int, mine: Any, barrier: Any) -> list[float]:
    import torch  # noqa: PLC0415  # not before: it is not to be counted as memory of ours
    from torch import distributed  # noqa: PLC0415

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    tensor, rounds = torch.from_numpy(mine), []
    for _ in range(WARM_UP + ROUNDS):
        barrier.wait()
        began = time.perf_counter()
        distributed.all_reduce(tensor)
        rounds.append(time.perf_counter() - began)
    barrier.wait()
    distributed.destroy_process_group()
    return rounds[WARM_UP:]


def _on_s3() -> Iterator[Figure]:
    import boto3  # noqa: PLC0415
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(S3_KEYS, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    try:
        boto3.client("s3").create_bucket(Bucket="bench")
        world, size = S3_CASE
        yield from _figures(f"S3, {world} x {size} MiB", _replicas("s3://bench/run", world, size, (None, "int8")))
    finally:
        server.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
