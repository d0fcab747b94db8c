"""The processes that train one model together, as `Progress` needs them: their number, and agreement between them.

Messages travel in a process group of their own on gloo, so that they never mix with the collectives of the training,
and need no accelerator.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol


class Gang(Protocol):
    rank: int
    world: int
    apart: bool

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks. All ranks call it."""
        ...

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Return the minimum over all ranks of each number. All ranks call it."""
        ...

    def send(self, data: Any, receiver: int) -> None: ...

    def receive(self, data: Any, source: int) -> None:
        """Fill a writable buffer with what `source` sends."""
        ...


class Alone:
    """A program of one process. `apart`: its neighbours train models of their own, and may share its directory."""

    world = 1

    def __init__(self, rank: int = 0, *, apart: bool = False) -> None:
        self.rank = rank
        self.apart = apart

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def least(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def send(self, data: Any, receiver: int) -> None:
        raise AssertionError("nobody to send to")

    receive = send


class TorchGang:
    """The ranks of torch's default process group."""

    apart = False

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._dist = torch.distributed
        self.rank: int = self._dist.get_rank()
        self.world: int = self._dist.get_world_size()
        self._group = self._dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        self._dist.all_gather_object(found, value, group=self._group)
        return found

    def least(self, numbers: Sequence[int]) -> list[int]:
        tensor = self._torch.tensor(numbers, dtype=self._torch.int64)
        self._dist.all_reduce(tensor, op=self._dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in tensor]

    def send(self, data: Any, receiver: int) -> None:
        self._dist.send(self._tensor(data), receiver, group=self._group)

    def receive(self, data: Any, source: int) -> None:
        self._dist.recv(self._tensor(data), source, group=self._group)

    def _tensor(self, data: Any) -> Any:
        return self._torch.frombuffer(data, dtype=self._torch.uint8)


def find_gang(*, together: bool) -> Gang:
    """Return the gang of this process: torch's default group if there is one."""
    torch = sys.modules.get("torch")
    dist = None if torch is None else torch.distributed
    if together and dist is not None and dist.is_available() and dist.is_initialized():
        return TorchGang(torch)
    world = _number("WORLD_SIZE", 1)
    if together and world > 1 and torch is not None:
        raise RuntimeError(
            f"WORLD_SIZE is {world} and torch.distributed is not initialised: call"
            " torch.distributed.init_process_group before Progress.restore(),"
            " or pass together=False if each rank trains a model of its own"
        )
    return Alone(_number("RANK", 0), apart=not together or world > 1)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default
