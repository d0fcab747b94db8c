"""DiLoCo computes what it should: as the reference does, and in the cases whose outcome is known beforehand."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from basilica.diloco import DiLoCo, ObjectStoreAllReduce
from basilica.diloco.outer import OuterSGD
from tests.diloco.gang import gang
from tests.diloco.golden.scenarios import REPLICAS, SCENARIOS, STEPS, flat, inner_step, model, optimizer

GOLDEN = Path(__file__).parent / "golden"


def course(
    allreduce: ObjectStoreAllReduce,
    *,
    steps: int = STEPS,
    data: int | None = None,
    network: nn.Module | None = None,
    **settings: Any,
) -> tuple[list[float], list[float]]:
    """One replica's losses and its last parameters. `data`: whose data it sees."""
    network = network or model()
    inner = optimizer(network.parameters())
    losses = []
    with DiLoCo(network, inner, allreduce, **settings) as diloco:
        for step in range(steps):
            losses.append(inner_step(network, inner, allreduce.rank if data is None else data, step))
            diloco.step()
    return losses, flat(network)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_it_is_the_reference_to_float_tolerance(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    found = gang(REPLICAS, lambda allreduce: course(allreduce, **vars(SCENARIOS[name])))
    for rank, (losses, ends) in enumerate(found):
        np.testing.assert_allclose(losses, golden["losses"][rank], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(ends, golden["ends"][rank], rtol=2e-5, atol=2e-6)


def test_every_replica_ends_with_the_same_bits() -> None:
    (_, first), (_, second), (_, third) = gang(3, lambda allreduce: course(allreduce, sync_every=4))
    assert first == second == third


def test_equal_replicas_are_one() -> None:
    alone = gang(1, lambda allreduce: course(allreduce, sync_every=4, data=0))[0]
    for losses, ends in gang(4, lambda allreduce: course(allreduce, sync_every=4, data=0)):
        np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
        np.testing.assert_allclose(ends, alone[1], rtol=1e-5, atol=1e-7)


def test_one_replica_with_outer_lr_1_and_no_momentum_is_plain_training() -> None:
    network = model()
    inner = optimizer(network.parameters())
    losses = [inner_step(network, inner, 0, step) for step in range(STEPS)]
    (found,) = gang(
        1, lambda allreduce: course(allreduce, sync_every=5, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
    )
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    np.testing.assert_allclose(found[1], flat(network), rtol=1e-5, atol=1e-6)


def test_outer_lr_1_and_no_momentum_is_plain_averaging() -> None:
    each = []
    for rank in range(3):
        network = model()
        inner = optimizer(network.parameters())
        for step in range(4):
            inner_step(network, inner, rank, step)
        each.append(flat(network))
    settings: dict[str, Any] = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    for _, ends in gang(3, lambda allreduce: course(allreduce, steps=4, **settings)):
        np.testing.assert_allclose(ends, np.mean(each, axis=0), rtol=1e-5, atol=1e-7)


def test_replicas_count_by_the_samples_they_saw() -> None:
    weights = (1.0, 3.0)

    def replica(allreduce: ObjectStoreAllReduce) -> tuple[float, float]:
        network = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            network.weight.fill_(0.0)
        diloco = DiLoCo(
            network,
            torch.optim.SGD(network.parameters(), lr=1.0),
            allreduce,
            sync_every=1,
            outer_lr=1.0,
            outer_momentum=0.0,
            nesterov=False,
        )
        with torch.no_grad():
            network.weight.fill_(float(allreduce.rank))
        diloco.step(samples=weights[allreduce.rank])
        diloco.close()
        return network.weight.item(), diloco.samples

    assert gang(2, replica) == [(0.75, 4.0)] * 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_optimizer_is_torchs_sgd(momentum: float, nesterov: bool) -> None:
    generator = np.random.default_rng(3)
    shapes = [(70_000,), (3, 5), ()]
    ours = [np.asarray(generator.normal(size=shape), np.float32) for shape in shapes]
    theirs = [nn.Parameter(torch.from_numpy(array.copy())) for array in ours]
    reference = torch.optim.SGD(theirs, lr=0.7, momentum=momentum, nesterov=nesterov and momentum > 0)
    outer = OuterSGD(0.7, momentum, nesterov)
    velocity = None
    for _ in range(5):
        gradients = [np.asarray(generator.normal(size=shape), np.float32) for shape in shapes]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient)
        reference.step()
        velocity = outer.step(ours, gradients, velocity)
    for mine, parameter in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_warming_up_begins_with_plain_averaging_and_becomes_what_was_asked_for() -> None:
    outer = OuterSGD(0.7, 0.9, warmup=3.0)
    assert outer.at(0) == (1.0, 0.0)
    assert outer.at(3) == pytest.approx((1 - 0.3 * 0.5 / 0.9, 0.5))
    assert outer.at(27) == outer.at(1000) == pytest.approx((0.7, 0.9))
    assert OuterSGD(0.7, 0.9).at(0) == (0.7, 0.9)
    assert OuterSGD(0.5, 0.0, warmup=3.0).at(0) == (0.5, 0.0), "without momentum there is nothing to warm up"


def test_the_first_round_of_a_warm_up_is_the_mean_and_later_ones_have_momentum() -> None:
    settings: dict[str, Any] = {"sync_every": 4, "outer_warmup": 3.0}
    plain: dict[str, Any] = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    for steps, same in ((4, True), (8, False)):
        warm = gang(2, partial(course, steps=steps, **settings))
        mean = gang(2, partial(course, steps=steps, **plain))
        assert warm[0][1] == warm[1][1]
        assert np.allclose(warm[0][1], mean[0][1], rtol=1e-6, atol=1e-7) is same


def test_narrow_parameters_keep_their_outer_state_wide() -> None:
    """A step too small for bfloat16 is not lost: it adds up where the outer optimizer keeps it."""

    def replica(allreduce: ObjectStoreAllReduce) -> float:
        network = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            network.weight.fill_(1.0)
        options: dict[str, Any] = {"outer_lr": 0.1, "outer_momentum": 0.0, "nesterov": False}
        diloco = DiLoCo(network, torch.optim.SGD(network.parameters(), lr=1.0), allreduce, sync_every=1, **options)
        for _ in range(40):
            with torch.no_grad():
                network.weight.sub_(0.0078125)
            diloco.step()
        diloco.close()
        return network.weight.item()

    (end,) = gang(1, replica)
    assert end == pytest.approx(1.0 - 40 * 0.1 * 0.0078125, abs=0.005)
