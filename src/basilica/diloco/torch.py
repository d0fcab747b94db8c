"""DiLoCo for torch: three lines around an ordinary training loop.

    allreduce = ObjectStoreAllReduce("s3://bucket/run-7", rank, world_size)
    diloco = DiLoCo(model, optimizer, allreduce, sync_every=100)
    for inputs, targets in batches:
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.step(samples=len(inputs))

The inner loop runs on the model's device. The agreed state and the outer optimizer are kept in the memory of the host
and computed there, so that all replicas get the same bits whatever accelerator they have.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
import xxhash
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from basilica.diloco.allreduce import ObjectStoreAllReduce
from basilica.diloco.fragments import Checksum, Options, Team
from basilica.diloco.outer import Array, OuterSGD
from basilica.diloco.replica import Replica
from basilica.diloco.trainer import Face


class DiLoCo(Face):
    """`sync_every` (H) inner steps, then a mean over all replicas and an outer step; see the module for the loop.

    `outer_warmup`: begin with plain averaging; after so many rounds the outer momentum has reached a half. 0: at once.
    `fragments`: synchronize the model in so many parts, one after the other, evenly over the `sync_every` steps.
    `delay`: inner steps between sending a part and applying the result; the round runs meanwhile. 0 waits for it.
    `mix`: the share of this replica's own progress during the delay that is kept when the result is applied.
    `checkpoint_every`: the number of rounds between two writes of the agreed state to the bucket; 0: never.
    `group`: the processes of this replica, if there are several (DDP, FSDP). With DDP only the first of them uses the
    store, and `allreduce` is None in the others. With FSDP each synchronizes its own shard.

    The constructor joins the run: parameters and buffers become those of rank 0, or the last agreed ones if the run has
    begun already; `step_count` is the run's step. Parameters that are not trained must be equal from the start.
    Buffers are synchronized with the last fragment: the mean of floats, the maximum of integers.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        allreduce: ObjectStoreAllReduce | None,
        sync_every: int,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_warmup: float = 0.0,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        checkpoint_every: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        values = TensorValues(model)
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters() if parameter.requires_grad)
        member = torch.distributed.get_rank(group) if group is not None else 0
        options = Options(
            sync_every=sync_every,
            outer=OuterSGD(outer_lr, outer_momentum, nesterov, outer_warmup),
            fragments=fragments,
            delay=delay,
            mix=mix,
            checkpoint_every=checkpoint_every,
            part=f"-shard-{member}" if sharded else "",
        )
        team: Team | None = None if group is None or sharded else ProcessTeam(group)
        self._inner = inner_optimizer
        self._replica = Replica(values, allreduce, options, team=team)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, beside the model's: both optimizers, round, step, and the all-reduce."""
        return {"inner": self._inner.state_dict(), "outer": _each(self._replica.state_dict(), np.ndarray, _tensor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, after the model has loaded its own state.

        If the bucket's state is newer, it takes precedence: then only the inner optimizer's state is loaded.
        """
        self._inner.load_state_dict(state["inner"])
        self._replica.load_state_dict(_each(state["outer"], torch.Tensor, lambda tensor: tensor.cpu().numpy()))


class Buffer(NamedTuple):
    """A persistent buffer, found by its name: models replace the tensors of their buffers."""

    path: str
    module: nn.Module
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """Return the numbers of the buffer in this process; a complex number is two floats."""
        found = self.module.get_buffer(self.name)
        if (found.shape, found.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"buffer {self.path!r} was {self.dtype} of shape {tuple(self.shape)} and is {found.dtype} of "
                f"{tuple(found.shape)} now; one that changes cannot be agreed on: register it with persistent=False"
            )
        return torch.view_as_real(_local(found)) if found.is_complex() else _local(found)


class TensorValues:
    """The parameters and buffers of a module; of a sharded module, the local shards."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._buffers = _buffers_of(model)
        self.sizes = [_local(parameter).nbytes for parameter in self._parameters]

    def read(self, index: int) -> Array:
        return _copy(_local(self._parameters[index]))

    def write(self, index: int, value: Array) -> None:
        _local(self._parameters[index]).copy_(torch.from_numpy(value))

    def seen(self, index: int, agreed: Array) -> Array:
        own = self._parameters[index].dtype
        given = torch.from_numpy(agreed)
        if given.dtype == own:
            return agreed
        rounded: Array = given.to(own).to(given.dtype).numpy()
        return rounded

    def buffers(self) -> list[Array]:
        return [_copy(buffer.tensor()) for buffer in self._buffers]

    def write_buffers(self, values: Sequence[Array]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.tensor().copy_(torch.from_numpy(value))

    def frozen(self) -> list[Checksum]:
        return [Checksum(name, _digest(_local(parameter))) for name, parameter in self._frozen]


class ProcessTeam:
    """The processes of a replica that hold the same parameters, as with DDP."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._source = torch.distributed.get_global_rank(group, 0)
        self.leads = torch.distributed.get_rank(group) == 0
        # NCCL moves only tensors on its device; every other backend takes tensors in host memory.
        nccl = "nccl" in torch.distributed.get_backend(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def tell(self, words: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(words), dtype=torch.int64, device=self._device)
        torch.distributed.broadcast(tensor, self._source, group=self._group)
        return [int(word) for word in tensor.tolist()]

    def share(self, arrays: Sequence[Array]) -> None:
        for array in arrays:
            here = torch.from_numpy(array)
            there = here.to(self._device)
            torch.distributed.broadcast(there, self._source, group=self._group)
            here.copy_(there)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a parameter in this process, detached: writing to them changes the parameter."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(tensor: torch.Tensor) -> Array:
    """Return a copy in host memory, with floats in float32 or wider."""
    narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    copy = torch.empty(tensor.shape, dtype=torch.float32 if narrow else tensor.dtype, device="cpu")
    array: Array = copy.copy_(tensor).numpy()
    return array


def _digest(tensor: torch.Tensor) -> str:
    """Return a checksum of every bit of the tensor."""
    numbers = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return xxhash.xxh3_128_hexdigest(numbers)  # type: ignore[arg-type]  # their stubs hide that arrays are buffers


def _buffers_of(model: nn.Module) -> list[Buffer]:
    """Return the buffers in the model's state; each replica makes the others anew, such as masks."""
    found: dict[int, Buffer] = {}
    for prefix, module in model.named_modules():
        for name, tensor in module.named_buffers(recurse=False):
            if name not in getattr(module, "_non_persistent_buffers_set", ()):  # a scripted module has none
                path = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(tensor), Buffer(path, module, name, tensor.shape, tensor.dtype))
    return list(found.values())


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor with a copy of the array: a checkpoint must not change while it is written."""
    return torch.from_numpy(np.array(array))


def _each(thing: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with every object of one type converted, to and from the types of `torch.save`."""
    if isinstance(thing, kind):
        return change(thing)
    if isinstance(thing, Mapping):
        return {name: _each(value, kind, change) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_each(value, kind, change) for value in thing]
    return thing
