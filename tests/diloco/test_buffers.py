"""Buffers are agreed on as parameters are; parameters that nobody trains are checked to be equal."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from basilica.diloco import DiLoCo, ObjectStoreAllReduce, RoundConflict
from basilica.diloco.bucket import Bucket
from basilica.diloco.stores import open_store
from tests.diloco.gang import fresh_uri, gang
from tests.diloco.golden.scenarios import inner_step, model, optimizer

H = 4
Bits = dict[str, bytes]


def convnet() -> nn.Sequential:
    """With running statistics, an integer counter, a mask that is a buffer, and layers that are not trained."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 2),
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    network.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))
    return network


def images(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 3, 8, 8, generator=generator) * (1 + rank) + rank, torch.randn(4, 2, generator=generator)


def train_on_images(
    allreduce: ObjectStoreAllReduce, steps: int, saved: bytes | None = None, **options: Any
) -> tuple[nn.Module, bytes]:
    """The network, and a checkpoint."""
    network = convnet()
    inner = torch.optim.SGD(network.parameters(), lr=0.01)
    with DiLoCo(network, inner, allreduce, sync_every=H, **options) as diloco:
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            network.load_state_dict(state["model"])
            diloco.load_state_dict(state["diloco"])
        while diloco.step_count < steps:
            inputs, targets = images(allreduce.rank, diloco.step_count)
            loss = nn.functional.mse_loss(network(inputs), targets)
            inner.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            inner.step()
            diloco.step(samples=1 + allreduce.rank)
        file = io.BytesIO()
        torch.save({"model": network.state_dict(), "diloco": diloco.state_dict()}, file)
    return network, file.getvalue()


def bits(network: nn.Module) -> Bits:
    return {name: tensor.numpy().tobytes() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("wire", [None, "int4"])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}], ids=["at once", "in fragments"])
def test_a_convnet_ends_with_the_same_bits_everywhere(wire: str | None, options: dict[str, Any]) -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> Bits:
        network = convnet()
        with DiLoCo(network, torch.optim.SGD(network.parameters(), lr=0.01), allreduce, H, **options) as diloco:
            while diloco.step_count < 3 * H:
                inputs, targets = images(allreduce.rank, diloco.step_count)
                nn.functional.mse_loss(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
                diloco._inner.step()
                diloco.step(samples=1 + allreduce.rank)
            diloco.take_agreed()
        assert torch.equal(network.get_buffer("mask"), convnet().get_buffer("mask")), (
            "what is the same everywhere stays as it is"
        )
        return bits(network)

    first, second, third = gang(3, replica, wire=wire)
    assert first == second == third
    assert first["1.running_mean"] != bits(convnet())["1.running_mean"]


def test_floats_are_averaged_with_the_weights_of_the_round_and_integers_are_the_greatest() -> None:
    class Counting(nn.Linear):
        mean: torch.Tensor
        turn: torch.Tensor
        count: torch.Tensor
        seen: torch.Tensor
        scratch: torch.Tensor

        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("mean", torch.zeros((), dtype=torch.bfloat16))
            self.register_buffer("turn", torch.tensor(1 + 0.5j))
            self.register_buffer("count", torch.tensor(2**62))
            self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def replica(allreduce: ObjectStoreAllReduce) -> list[Any]:
        rank = allreduce.rank
        network = Counting()
        diloco = DiLoCo(network, torch.optim.SGD(network.parameters(), lr=1.0), allreduce, sync_every=1)
        network.mean = torch.full((), 4.0 * rank, dtype=torch.bfloat16)  # as many models do: a new tensor each time
        network.turn = torch.tensor(complex(rank, -rank))
        network.count += rank
        network.seen[rank] = True
        network.scratch.fill_(rank)
        diloco.step(samples=(1.0, 3.0)[rank])
        diloco.close()
        return [getattr(network, name).tolist() for name in ("mean", "turn", "count", "seen", "scratch")]

    first, second = gang(2, replica)
    assert first[:4] == second[:4] == [3.0, 0.75 - 0.75j, 2**62 + 1, [True, True]]
    assert (first[4], second[4]) == ([0.0] * 2, [1.0] * 2), "what no checkpoint holds is left to each replica"


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0)])
def test_buffers_that_are_the_same_everywhere_stay_exactly_as_they_are(weights: tuple[float, ...]) -> None:
    same = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    same[:3] = (np.inf, -np.inf, np.nan)

    def replica(allreduce: ObjectStoreAllReduce) -> bytes:
        (_, found) = allreduce.allreduce([np.ones(3)], weights[allreduce.rank], buffers=[same])
        return bytes(found.tobytes())

    assert gang(3, replica, wire="int8") == [same.tobytes()] * 3


def test_who_joins_late_takes_the_buffers_from_the_bucket() -> None:
    whole = [bits(network) for network, _ in gang(2, lambda allreduce: train_on_images(allreduce, 4 * H))]
    uri = fresh_uri()
    gang(2, lambda allreduce: train_on_images(allreduce, 2 * H), uri)
    parts = [bits(network) for network, _ in gang(2, lambda allreduce: train_on_images(allreduce, 4 * H), uri)]
    assert whole[0] == whole[1] == parts[0] == parts[1]


@pytest.mark.parametrize("at", [2 * H - 1, 2 * H + 1])
def test_a_checkpoint_holds_the_buffers_of_what_is_under_way(at: int) -> None:
    options: dict[str, Any] = {"delay": 2}
    whole = [bits(n) for n, _ in gang(2, lambda allreduce: train_on_images(allreduce, 4 * H, **options))]
    uri = fresh_uri()
    kept = [saved for _, saved in gang(2, lambda allreduce: train_on_images(allreduce, at, **options), uri)]
    found = gang(2, lambda allreduce: train_on_images(allreduce, 4 * H, kept[allreduce.rank], **options), uri)
    assert [bits(network) for network, _ in found] == whole


def test_a_run_without_buffers_is_written_as_it_was_before_there_were_any() -> None:
    """The state and the parts of it: replicas of an earlier version can join, and be joined."""
    uri = fresh_uri()

    def replica(allreduce: ObjectStoreAllReduce) -> None:
        network = model()
        inner = optimizer(network.parameters())
        with DiLoCo(network, inner, allreduce, sync_every=H) as diloco:
            for step in range(H):
                inner_step(network, inner, allreduce.rank, step)
                diloco.step()

    gang(1, replica, uri)
    store = open_store(uri)
    fields = Bucket(store).newest_fields("fragment-0")
    assert fields is not None
    known = {"arrays", "chain", "digest", "expected", "kind", "name", "round", "run", "samples", "start", "stop"}
    assert set(fields) == {*known, "velocity", "size"}
    assert not store.list("run/frozen")


def test_a_run_with_other_buffers_is_refused() -> None:
    uri = fresh_uri()

    def replica(network: nn.Module) -> Callable[[ObjectStoreAllReduce], None]:
        return lambda allreduce: DiLoCo(network, torch.optim.SGD(network.parameters()), allreduce, H).close()

    gang(1, replica(nn.BatchNorm1d(3)), uri)
    with pytest.raises(RoundConflict, match="other buffers than this model"):
        gang(1, replica(nn.BatchNorm1d(3, track_running_stats=False)), uri)


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> None:
        network = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        diloco = DiLoCo(network, torch.optim.SGD(network.parameters()), allreduce, sync_every=1)
        network[1].running_mean = torch.zeros(2)
        diloco.step()

    with pytest.raises(ValueError, match=r"buffer '1.running_mean' was .* of shape \(1,\) and is .* of \(2,\) now"):
        gang(1, replica)


# Parameters that are not trained.


def adapted(seed: int) -> nn.Sequential:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network[0].parameters():
            parameter.uniform_(generator=generator)
    network[0].requires_grad_(False)
    return network


def joined(allreduce: ObjectStoreAllReduce, network: nn.Module) -> None:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    DiLoCo(network, torch.optim.SGD(trained), allreduce, sync_every=H).close()


def test_frozen_parameters_that_are_equal_are_fine_and_checked_again_at_a_restart() -> None:
    uri = fresh_uri()
    gang(2, lambda allreduce: joined(allreduce, adapted(1)), uri)
    gang(2, lambda allreduce: joined(allreduce, adapted(1)), uri)
    with pytest.raises(RoundConflict, match=r"frozen parameter '0.weight' differs from that of rank 0"):
        gang(1, lambda allreduce: joined(allreduce, adapted(2)), uri)


def test_a_replica_with_other_frozen_parameters_is_refused() -> None:
    with pytest.raises(
        RoundConflict, match=r"the start of rank 1 .* frozen parameter '0.weight' differs .* load the same"
    ):
        gang(2, lambda allreduce: joined(allreduce, adapted(1 + allreduce.rank)))


def test_thousands_of_frozen_parameters_are_compared() -> None:
    def network(last: float) -> nn.ParameterList:
        parameters = nn.ParameterList(nn.Parameter(torch.zeros(1), requires_grad=False) for _ in range(5000))
        parameters.append(nn.Parameter(torch.full((1,), last), requires_grad=False))
        parameters.append(nn.Parameter(torch.zeros(1)))
        return parameters

    uri = fresh_uri()
    gang(2, lambda allreduce: joined(allreduce, network(0.0)), uri)
    with pytest.raises(RoundConflict, match="'5000' differs"):
        gang(1, lambda allreduce: joined(allreduce, network(1.0)), uri)
