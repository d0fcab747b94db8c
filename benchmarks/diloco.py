"""A round of the all-reduce through an object store, beside gloo's between the same processes in the same run."""

import logging
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from basilica.diloco.allreduce import ObjectStoreAllReduce, RoundStats
from benchmarks.harness import Figure, median

MIB = 1 << 20
CASES = ((2, 64), (4, 64), (8, 64), (2, 256))
WIRES = (None, "int8", "int4")
ROUNDS = 5
WARM_UP = 2
S3_CASE = (4, 8)
S3_KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}


@dataclass
class Seen:
    """What one replica measured, by way: the seconds of each round and those of its processor, and what one cost."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)
    stats: dict[str, RoundStats] = field(default_factory=dict)

    def measure(self, way: str, reduce: Callable[[], object]) -> None:
        began, used = time.perf_counter(), time.process_time()
        reduce()
        self.seconds.setdefault(way, []).append(time.perf_counter() - began)
        self.cpu.setdefault(way, []).append(time.process_time() - used)


def run() -> Iterator[Figure]:
    for world, size in CASES:
        with tempfile.TemporaryDirectory(prefix="basilica-bench-", dir=_memory()) as directory:
            seen = _replicas(f"file://{directory}", world, size, WIRES, _free_port())
        yield from _figures(f"{world} x {size} MiB", seen)
    yield from _on_s3()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _figures(case: str, seen: list[Seen]) -> Iterator[Figure]:
    times = {way: _slowest([s.seconds[way] for s in seen]) for way in seen[0].seconds}
    cpu = {way: median([value for s in seen for value in s.cpu[way]]) for way in seen[0].cpu}
    for way, seconds in times.items():
        yield Figure(f"{case}, {way}: a round", seconds * 1000, "ms")
        yield Figure(f"{case}, {way}: processor time of a replica", cpu[way] * 1000, "ms")
    for way in seen[0].stats:
        exact = way == "fp32"
        what, all_stats = f"{case}, {way}", [s.stats[way] for s in seen]
        if "gloo" in times:
            yield Figure(f"{what}: against gloo", times[way] / times["gloo"], "times", "< 2" if exact else "")
            yield Figure(f"{what}: processor time against gloo", cpu[way] / cpu["gloo"], "times")
        up, down = (max(getattr(s, name) / s.array_bytes for s in all_stats) for name in ("bytes_up", "bytes_down"))
        yield Figure(f"{what}: up", up, "x size", "<= 1.1" if exact else "")
        yield Figure(f"{what}: down", down, "x size", "<= 2.1" if exact else "")
        yield Figure(f"{what}: memory beyond arrays and mean", max(s.grown[way] for s in seen), "MiB")
        for kind in ("put", "get", "list"):
            yield Figure(f"{what}: {kind}", max(s.requests.get(kind, 0) for s in all_stats), "requests")


def _slowest(replicas: list[list[float]]) -> float:
    """The median over rounds; a round takes as long as its slowest replica."""
    return median([max(rounds) for rounds in zip(*replicas, strict=True)])


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
    """The ways take turns, so that whatever else the machine does meanwhile, it does to all of them."""
    uri, world, size, wires, port, barrier, answers = shared
    mine = np.random.default_rng(rank).standard_normal(size * MIB // 4, dtype=np.float32)
    mean, seen = np.zeros_like(mine), Seen()
    ways: dict[str, Callable[[], object]] = {}
    with ExitStack() as opened:
        for wire in wires:
            how = {"run_id": wire or "fp32", "wire": wire, "retain": 0, "timeout": 120}
            allreduce = opened.enter_context(ObjectStoreAllReduce(uri, rank, world, **how))
            ways[allreduce.run_id] = partial(allreduce.allreduce, [mine], out=[mean])
            before = _forget_peak()
            for _ in range(WARM_UP):
                ways[allreduce.run_id]()
            seen.grown[allreduce.run_id] = (_status("VmHWM") - before) / 1024
            seen.stats[allreduce.run_id] = allreduce.history[-1]
        if port is not None:
            ways["gloo"] = opened.enter_context(_gloo(rank, world, port, mine.copy()))
        for _ in range(ROUNDS):
            for way, reduce in ways.items():
                barrier.wait()
                seen.measure(way, reduce)
        barrier.wait()
    answers.put(seen)


@contextmanager
def _gloo(rank: int, world: int, port: int, mine: Any) -> Iterator[Callable[[], object]]:
    import torch  # noqa: PLC0415  # not before: it is not to be counted as memory of ours
    from torch import distributed  # noqa: PLC0415

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    tensor = torch.from_numpy(mine)
    distributed.all_reduce(tensor)
    yield partial(distributed.all_reduce, tensor)
    distributed.destroy_process_group()


def _forget_peak() -> int:
    """What the process has now, in KiB; its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _on_s3() -> Iterator[Figure]:
    import boto3  # noqa: PLC0415
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or it tells of every request
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
