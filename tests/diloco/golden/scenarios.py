"""The small trainings that the golden files tell of: the same models, data and seeds for the reference and for us."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

REPLICAS = 2
STEPS = 24
BATCH = 8


@dataclass(frozen=True)
class Scenario:
    """Settings as the reference and we take them. `mix` is what the reference calls `fragment_update_alpha`."""

    sync_every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0


SCENARIOS = {
    "nesterov": Scenario(sync_every=4),
    "momentum": Scenario(sync_every=6, nesterov=False),
    "plain": Scenario(sync_every=3, outer_lr=1.0, outer_momentum=0.0, nesterov=False),
    "streaming": Scenario(sync_every=8, fragments=2, delay=1, mix=0.5),
    "late": Scenario(sync_every=6, delay=3),
}


def model() -> nn.Sequential:
    """Two layers of about the same size, so that two fragments are one layer each. The same in whichever thread."""
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return network


def optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each replica sees data of its own."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(BATCH, 6, generator=generator)
    return inputs, torch.sin(inputs.flip(1)) + 0.1 * rank


def inner_step(network: nn.Module, inner: torch.optim.Optimizer, rank: int, step: int) -> float:
    """Forward, backward, and a step of the inner optimizer."""
    inputs, targets = batch(rank, step)
    loss = nn.functional.mse_loss(network(inputs), targets)
    inner.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    inner.step()
    return loss.item()


def flat(network: nn.Module) -> list[float]:
    """All parameters in one row."""
    return [float(number) for parameter in network.parameters() for number in parameter.detach().reshape(-1)]
