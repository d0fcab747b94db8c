"""Makes the golden files with torchft's own DiLoCo: `python -m tests.diloco.golden.make`.

It needs `torchft` 0.2.0, which is no dependency of this project. Its `local_sgd.DiLoCo` runs as it is published; only
its manager is replaced, which would need servers: ours takes the mean between the threads of one process.
"""

import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.diloco.golden.scenarios import REPLICAS, SCENARIOS, STEPS, Scenario, flat, inner_step, model, optimizer


class Meeting:
    """The mean of one tensor of each thread."""

    def __init__(self, threads: int) -> None:
        self._tensors: list[torch.Tensor | None] = [None] * threads
        self._barrier = threading.Barrier(threads)

    def mean(self, rank: int, tensor: torch.Tensor) -> None:
        self._tensors[rank] = tensor.clone()
        self._barrier.wait()
        total = torch.stack([t for t in self._tensors if t is not None]).sum(0)
        self._barrier.wait()
        tensor.copy_(total / len(self._tensors))


class Done:
    def wait(self, timeout: object = None) -> bool:
        return True


class Manager:
    """What `DiLoCo` asks of torchft's manager, if nothing ever fails."""

    _use_async_quorum = False

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting, self._step = rank, meeting, 0

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Done:
        self._meeting.mean(self._rank, tensor)
        return Done()

    def current_step(self) -> int:
        return self._step

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def start_quorum(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def register_state_dict_fn(self, *_: Any) -> None: ...


def replica(rank: int, scenario: Scenario, network: nn.Sequential, meeting: Meeting, losses: list[float]) -> None:
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    parts = [network] if scenario.fragments == 1 else [network[0], network[2]]
    outer = [
        torch.optim.SGD(
            part.parameters(),
            lr=scenario.outer_lr,
            momentum=scenario.outer_momentum,
            nesterov=scenario.nesterov,
        )
        for part in parts
    ]
    inner = optimizer(network.parameters())
    with DiLoCo(
        Manager(rank, meeting),
        parts,
        inner,
        outer,
        sync_every=scenario.sync_every,
        fragment_sync_delay=scenario.delay,
        fragment_update_alpha=scenario.mix,
    ):
        for step in range(STEPS):
            losses.append(inner_step(network, inner, rank, step))


def main() -> None:
    for name, scenario in SCENARIOS.items():
        meeting = Meeting(REPLICAS)
        networks = [model() for _ in range(REPLICAS)]
        losses: list[list[float]] = [[] for _ in range(REPLICAS)]
        threads = [
            threading.Thread(target=replica, args=(rank, scenario, networks[rank], meeting, losses[rank]))
            for rank in range(REPLICAS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ends = [flat(network) for network in networks]
        path = Path(__file__).with_name(f"{name}.json")
        path.write_text(json.dumps({"made_with": "torchft 0.2.0", "losses": losses, "ends": ends}, indent=1) + "\n")
        print(path.name)


if __name__ == "__main__":
    main()
