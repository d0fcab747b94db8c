"""The same with models on a GPU. What was agreed on is on the host, so nothing of it may depend on the device.

Skipped where there is no GPU: `python -m pytest tests/diloco/test_cuda.py` on a machine that has one.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from basilica.diloco import DiLoCo, ObjectStoreAllReduce
from tests.diloco.gang import fresh_uri, gang
from tests.diloco.golden.scenarios import REPLICAS, SCENARIOS, STEPS, batch, model, optimizer
from tests.diloco.test_buffers import convnet, images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GOLDEN = Path(__file__).parent / "golden"
H = 4


def inner_step(
    network: nn.Module, inner: torch.optim.Optimizer, data: tuple[torch.Tensor, torch.Tensor], device: str
) -> float:
    inputs, targets = (part.to(device) for part in data)
    loss = nn.functional.mse_loss(network(inputs).float(), targets)
    inner.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    inner.step()
    return loss.item()


def flat(network: nn.Module) -> list[float]:
    return [number for parameter in network.parameters() for number in parameter.detach().float().reshape(-1).tolist()]


def bits(network: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.float().reshape(-1).tolist() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_it_is_the_reference_to_float_tolerance(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())

    def replica(allreduce: ObjectStoreAllReduce) -> tuple[list[float], list[float]]:
        network = model().cuda()
        inner = optimizer(network.parameters())
        losses = []
        with DiLoCo(network, inner, allreduce, **vars(SCENARIOS[name])) as diloco:
            for step in range(STEPS):
                losses.append(inner_step(network, inner, batch(allreduce.rank, step), "cuda"))
                diloco.step()
        assert {parameter.device.type for parameter in network.parameters()} == {"cuda"}
        return losses, flat(network)

    for rank, (losses, ends) in enumerate(gang(REPLICAS, replica)):
        np.testing.assert_allclose(losses, golden["losses"][rank], rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(ends, golden["ends"][rank], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", [None, "int4"])
def test_replicas_on_a_gpu_and_on_a_processor_agree_bit_by_bit(dtype: torch.dtype, wire: str | None) -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> list[float]:
        device = ("cuda", "cpu")[allreduce.rank % 2]
        network = model().to(device, dtype)
        inner = optimizer(network.parameters())
        with DiLoCo(network, inner, allreduce, sync_every=H) as diloco:
            for step in range(3 * H):
                inputs, targets = batch(allreduce.rank, step)
                inner_step(network, inner, (inputs.to(dtype), targets), device)
                diloco.step()
        return flat(network)

    found = gang(3, replica, wire=wire)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}], ids=["at once", "in fragments"])
def test_running_statistics_on_a_gpu_are_agreed_on(options: dict[str, Any]) -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> dict[str, list[float]]:
        network = convnet().cuda()
        inner = torch.optim.SGD(network.parameters(), lr=0.01)
        with DiLoCo(network, inner, allreduce, sync_every=H, **options) as diloco:
            for step in range(3 * H):
                inner_step(network, inner, images(allreduce.rank, step), "cuda")
                diloco.step()
            diloco.take_agreed()
        return bits(network)

    first, second = gang(2, replica)
    assert first == second
    assert first["1.num_batches_tracked"][0] > 0
    assert first["1.running_mean"] != bits(convnet())["1.running_mean"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_checkpoint_goes_on_wherever_it_is_loaded(device: str) -> None:
    """With a fragment under way; users give `map_location` for the model, and the rest of the file follows."""

    def steps(allreduce: ObjectStoreAllReduce, stop: int, saved: bytes | None) -> tuple[bytes, list[float]]:
        network = model().cuda()
        inner = optimizer(network.parameters())
        diloco = DiLoCo(network, inner, allreduce, sync_every=H, delay=2)
        if saved is not None:
            state = torch.load(io.BytesIO(saved), map_location=device, weights_only=True)
            network.load_state_dict(state["model"])
            diloco.load_state_dict(state["diloco"])
        while diloco.step_count < stop:
            inner_step(network, inner, batch(allreduce.rank, diloco.step_count), "cuda")
            diloco.step()
        file = io.BytesIO()
        torch.save({"model": network.state_dict(), "diloco": diloco.state_dict()}, file)
        diloco.close()
        return file.getvalue(), flat(network)

    whole = gang(2, lambda allreduce: steps(allreduce, 4 * H, None)[1])
    uri = fresh_uri()
    kept = gang(2, lambda allreduce: steps(allreduce, 2 * H - 1, None)[0], uri)
    found = gang(2, lambda allreduce: steps(allreduce, 4 * H, kept[allreduce.rank])[1], uri)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


def test_an_all_reduce_of_tensors_on_a_gpu_answers_there() -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> list[Any]:
        rank = float(allreduce.rank)
        arrays = [torch.full((3, 5), rank, device="cuda"), torch.full((7,), rank, device="cuda", dtype=torch.bfloat16)]
        counter = torch.tensor(10 + allreduce.rank, device="cuda")
        results = allreduce.submit(arrays, buffers=[counter]).result()
        assert {result.device.type for result in results} == {"cuda"}
        assert [result.dtype for result in results] == [torch.float32, torch.bfloat16, torch.int64]
        return [result.tolist() for result in results]

    assert gang(2, replica) == [[[[0.5] * 5] * 3, [0.5] * 7, 11]] * 2


def test_frozen_parameters_on_a_gpu_equal_those_on_a_processor() -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> int:
        network = nn.Sequential(nn.Linear(6, 8), model()).to(("cuda", "cpu")[allreduce.rank])
        with torch.no_grad():
            for parameter in network[0].parameters():
                parameter.fill_(0.1)
        network[0].requires_grad_(False)
        diloco = DiLoCo(network, optimizer(iter([*network[1].parameters()])), allreduce, sync_every=H)
        diloco.close()
        return diloco.step_count

    assert gang(2, replica) == [0, 0]


def test_the_processes_of_a_replica_speak_by_nccl(tmp_path: Path) -> None:
    """One process, since there is one GPU: what goes between processes passes the device all the same."""
    here = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=here)
    try:

        def replica(allreduce: ObjectStoreAllReduce, **options: Any) -> dict[str, list[float]]:
            network = convnet().cuda()
            inner = torch.optim.SGD(network.parameters(), lr=0.01)
            with DiLoCo(network, inner, allreduce, sync_every=H, **options) as diloco:
                for step in range(2 * H):
                    inner_step(network, inner, images(0, step), "cuda")
                    diloco.step()
            return bits(network)

        with_group = gang(1, lambda allreduce: replica(allreduce, group=dist.group.WORLD))
        assert with_group[0]["1.num_batches_tracked"] == [2 * H]
        alone = gang(1, replica)
        for name, numbers in alone[0].items():
            np.testing.assert_allclose(with_group[0][name], numbers, rtol=1e-3, atol=1e-4)
    finally:
        dist.destroy_process_group()
