"""What the sweep is done with: an all-reduce by torch (nccl, gloo), or its traffic alone over plain TCP."""

import importlib
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from basilica.bench.link import STALL_S, Link, ProbeError

NCCL, GLOO, TCP = "nccl", "gloo", "tcp"
BEST_FIRST = (NCCL, GLOO, TCP)
SIOCGIFADDR = 0x8915


class Method(Protocol):
    def times(self, size: int, repeats: int) -> tuple[float, ...]:
        """Seconds that each of so many all-reduces took. One more, not counted, brings both ends into step."""
        ...

    def close(self) -> None: ...


def usable(wanted: str) -> list[str]:
    """The methods that this process can use, best first. `wanted` is one of them, or `auto` for all."""
    found = [TCP]
    if wanted != TCP:
        with suppress(ImportError, OSError):  # OSError: a shared library of torch's is missing
            dist = importlib.import_module("torch.distributed")
            if dist.is_available() and dist.is_gloo_available():
                found.append(GLOO)
            torch = importlib.import_module("torch")
            if dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available():
                found.append(NCCL)
    if wanted == "auto":
        return [name for name in BEST_FIRST if name in found]
    if wanted not in found:
        needs = "torch with nccl, and a GPU" if wanted == NCCL else "torch"
        raise ProbeError(f"method {wanted} needs {needs}, which this probe does not have")
    return [wanted]


def agree(ours: list[str], theirs: list[str]) -> str:
    """The best that both can."""
    for name in ours:
        if name in theirs:
            return name
    raise ProbeError(f"one probe can use {', '.join(ours)}, the other {', '.join(map(str, theirs))}: nothing in common")


def method(name: str, rank: int, link: Link) -> Method:
    return TcpExchange(link) if name == TCP else TorchAllReduce(name, rank, link)


class TcpExchange:
    """The traffic of a ring all-reduce of two, over one TCP connection.

    Each end sends half of the data and receives the other half (reduce-scatter), and then the same again (all-gather).
    Nothing is added up: that would measure this interpreter rather than the link.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def times(self, size: int, repeats: int) -> tuple[float, ...]:
        half = size // 2
        out = memoryview(os.urandom(min(half, 1 << 20)) * max(1, half >> 20))  # a link may compress what repeats
        into = memoryview(bytearray(half))
        taken = []
        for _ in range(1 + repeats):
            begin = time.perf_counter()
            self._link.exchange(out, into)
            self._link.exchange(out, into)
            taken.append(time.perf_counter() - begin)
        return tuple(taken[1:])

    def close(self) -> None:
        """The link is its owner's."""


class TorchAllReduce:
    """All-reduce of 32-bit floats by torch, over the interface of the link unless the environment names another."""

    def __init__(self, name: str, rank: int, link: Link) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._link = link
        interface = interface_of(link.own_host)
        if interface is not None:
            os.environ.setdefault(f"{name.upper()}_SOCKET_IFNAME", interface)
        self._torch.set_num_threads(1)
        self._device = "cuda:0" if name == NCCL else "cpu"
        stall = timedelta(seconds=STALL_S)
        try:
            if name == NCCL:
                self._torch.cuda.set_device(self._device)
            if rank == 0:
                self._store = self._dist.TCPStore(link.own_host, 0, 2, True, stall, wait_for_workers=False)
                link.tell(store=self._store.port)
            else:
                self._store = self._dist.TCPStore(link.peer_host, link.hear()["store"], 2, False, stall)
            self._dist.init_process_group(name, store=self._store, rank=rank, world_size=2, timeout=stall)
        except (RuntimeError, ValueError, OSError) as error:
            raise ProbeError(f"{name} cannot connect to {link.peer}: {_first_line(error)}") from None
        self._name = name

    def times(self, size: int, repeats: int) -> tuple[float, ...]:
        taken = []
        try:
            data = self._torch.rand(size // 4, device=self._device)
            for _ in range(1 + repeats):
                self._finish()
                begin = time.perf_counter()
                # The maximum moves the same bytes as a sum, and repeated it does not grow without bounds.
                self._dist.all_reduce(data, op=self._dist.ReduceOp.MAX)
                self._finish()
                taken.append(time.perf_counter() - begin)
        except RuntimeError as error:
            raise ProbeError(f"{self._name} failed with {self._link.peer}: {_first_line(error)}") from None
        return tuple(taken[1:])

    def _finish(self) -> None:
        """A GPU has done nothing yet when the call returns."""
        if self._name == NCCL:
            self._torch.cuda.synchronize()

    def close(self) -> None:
        self._dist.destroy_process_group()


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None where that cannot be told."""
    if sys.platform != "linux":
        return None
    fcntl = importlib.import_module("fcntl")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
