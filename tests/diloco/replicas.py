"""What replicas of the tests run in processes of their own: a small regression, alone or with DDP or FSDP inside."""

import os
import time
from typing import Any

import numpy as np

from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce

FEATURES, HIDDEN, BATCH = 8, 16, 16


def data(seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A batch of a function that is the same for everybody."""
    truth = np.random.default_rng(0).normal(size=(FEATURES, 1)).astype(np.float32)
    inputs = np.random.default_rng(seed).normal(size=(BATCH, FEATURES)).astype(np.float32)
    return inputs, np.tanh(inputs @ truth)


class Network:
    """Two layers, trained by hand."""

    def __init__(self) -> None:
        generator = np.random.default_rng(1)
        self.parameters = [
            (generator.normal(size=(FEATURES, HIDDEN)) / 3).astype(np.float32),
            np.zeros(HIDDEN, np.float32),
            (generator.normal(size=(HIDDEN, 1)) / 4).astype(np.float32),
        ]

    def step(self, seed: int, lr: float = 0.05) -> float:
        first, bias, last = self.parameters
        inputs, targets = data(seed)
        hidden = np.tanh(inputs @ first + bias)
        error = hidden @ last - targets
        back = (error @ last.T) * (1 - hidden**2)
        gradients = [inputs.T @ back, back.sum(0), hidden.T @ error]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter[...] -= np.float32(lr / BATCH) * gradient
        return float(np.mean(error**2))

    def loss(self) -> float:
        first, bias, last = self.parameters
        batches = [data(10_000_000 + seed) for seed in range(64)]
        return float(np.mean([np.mean((np.tanh(x @ first + bias) @ last - y) ** 2) for x, y in batches]))


def regression(rendezvous_uri: str, rounds: int, sync_every: int = 10, pause: float = 0.0, **options: Any) -> float:
    """The loss after that many rounds. With `pause` a step takes so long, so that there is time to kill somebody."""
    rank, world = int(os.environ["REPLICA_RANK"]), int(os.environ["WORLD_SIZE"])
    network = Network()
    with (
        ObjectStoreAllReduce(rendezvous_uri, rank, world, **options) as allreduce,
        ArrayDiLoCo(network.parameters, allreduce, sync_every) as diloco,
    ):
        while diloco.round < rounds:
            network.step(1_000_000 * rank + diloco.step_count)
            time.sleep(pause)
            if diloco.step(samples=BATCH):
                print(f"round {diloco.round}", flush=True)
        return network.loss()


def in_processes(
    rendezvous_uri: str, kind: str, steps: int, port: int, member: int, *, norm: bool = False
) -> list[float]:
    """One of two processes that make up a replica; its parameters and buffers at the end. `norm`: it has buffers."""
    import torch
    import torch.distributed as dist

    from basilica.diloco import DiLoCo
    from tests.diloco.golden.scenarios import inner_step, model, optimizer

    rank, world = int(os.environ["REPLICA_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port + rank}", rank=member, world_size=2)
    network: torch.nn.Module = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(6)) if norm else model()
    if kind == "ddp":
        network = torch.nn.parallel.DistributedDataParallel(network)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(network)
    inner = optimizer(network.parameters())
    leads = member == 0 or kind == "fsdp"
    allreduce = ObjectStoreAllReduce(rendezvous_uri, rank, world, timeout=60) if leads else None
    diloco = DiLoCo(network, inner, allreduce, sync_every=4, group=dist.group.WORLD)
    for _ in range(steps):
        inner_step(network, inner, 2 * rank + member, diloco.step_count)
        diloco.step()
    diloco.close()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
    ends = [float(number) for tensor in [*whole, *network.buffers()] for number in tensor.detach().reshape(-1)]
    dist.destroy_process_group()
    return ends
