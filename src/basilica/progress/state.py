"""The state of a training as arrays and a rest: what a snapshot holds, and how it is put back into live objects.

The parts of a training are objects with `state_dict` and `load_state_dict`, or plain values. Tensors and NumPy arrays
found in their states become arrays of the snapshot, each under a name such as `optimizer/state/0/exp_avg`; everything
else is pickled, with the names in place of the arrays. The random generators of Python, NumPy and torch are a part too.

An array of which a rank holds one piece (a DTensor) is restored by its place in the whole: a rank of another world, or
of another layout, reads the pieces that overlap its own (`overlap`).
"""

import io
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

RANDOM = "basilica.random"

Parts = Mapping[str, Any]
Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of a rank's piece in the whole array."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole


@dataclass(frozen=True, slots=True)
class Array:
    """One array of the state. `bytes`: its memory on the host, or None until it was copied there from a device.

    `shared`: all ranks have the same, so that one of each host keeps it.
    """

    name: str
    value: Any
    dtype: str
    piece: Piece
    shared: bool


@dataclass(frozen=True, slots=True)
class State:
    arrays: tuple[Array, ...]
    skeleton: bytes
    sharded: bool


# ---- taking ----------------------------------------------------------------------------------------------------------


def take(parts: Parts, extra: Mapping[str, Any]) -> State:
    """Return the present state of the parts. Arrays are not copied: they change with the next step."""
    states = {name: state_of(part) for name, part in parts.items()}
    shared = _shared_parts(parts)
    named: dict[int, str] = {}
    arrays: dict[str, Array] = {}
    keep_alive = []  # objects whose ids are in `named`

    def add(name: str, value: Any, part: str) -> None:
        named[id(value)] = name
        keep_alive.append(value)
        arrays[name] = _array(name, value, part in shared)

    for part, state in states.items():
        for path, value in _walk(state, ()):
            add("/".join(map(str, (part, *path))), value, part)
    file = io.BytesIO()
    pickler = _Pickler(file, named, lambda value: add(f"unnamed/{len(arrays)}", value, ""))
    pickler.dump({"parts": states, RANDOM: random_state(), **extra})
    found = tuple(arrays.values())
    return State(found, file.getvalue(), sharded=not all(array.shared for array in found))


def state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else part


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the arrays in nested dictionaries, lists and tuples."""
    if is_array(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _walk(item, (*path, number))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, named: dict[int, str], add: Callable[[Any], None]) -> None:
        super().__init__(file, protocol=5)
        self._named, self._add = named, add

    def persistent_id(self, value: Any) -> str | None:
        if not is_array(value):
            return None
        if id(value) not in self._named:  # inside an object of a class of its own
            self._add(value)
        return self._named[id(value)]


def is_array(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return type(value) in (torch.Tensor, torch.nn.Parameter) or hasattr(value, "device_mesh")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def _array(name: str, value: Any, shared: bool) -> Array:
    if hasattr(value, "device_mesh"):
        local = value.to_local()
        return Array(name, local, str(local.dtype), piece_of(value), shared=False)
    shape = tuple(value.shape)
    dtype = str(value.dtype) if hasattr(value, "is_cuda") else value.dtype.str
    return Array(name, value, dtype, Piece(shape, (0,) * len(shape), shape), shared)


def piece_of(value: Any) -> Piece:
    """Return the place of this rank's piece of a tensor; all of it unless it is a DTensor."""
    whole = tuple(value.shape)
    if not hasattr(value, "device_mesh"):
        return Piece(whole, (0,) * len(whole), whole)
    chunks = value.__create_chunk_list__()
    if not chunks:  # the rank is not in the mesh
        return Piece(whole, (0,) * len(whole), (0,) * len(whole))
    return Piece(whole, tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def _shared_parts(parts: Parts) -> set[str]:
    """Return the parts that DistributedDataParallel keeps equal on all ranks: wrapped models, and their optimizers."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return set()
    wrapped = {
        name: part
        for name, part in parts.items()
        if isinstance(part, torch.nn.parallel.DistributedDataParallel)
        and (part.broadcast_buffers or not any(True for _ in part.buffers()))
    }
    parameters = {id(parameter) for part in wrapped.values() for parameter in part.parameters()}
    optimizers = {
        name
        for name, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
        and type(part).__module__.startswith("torch.optim.")  # others may shard their state
        and all(id(parameter) in parameters for group in part.param_groups for parameter in group["params"])
    }
    return set(wrapped) | optimizers


def layout_of(parts: Parts) -> str:
    """Return a text that is equal for programs whose ranks hold the same pieces of every model."""
    found = []
    for name, part in parts.items():
        if hasattr(part, "named_parameters"):
            for path, value in part.named_parameters():
                if hasattr(value, "device_mesh"):
                    found.append(
                        f"{name}/{path}:{tuple(value.shape)}{value.placements}{tuple(value.device_mesh.shape)}"
                    )
    if not found:
        return ""
    import hashlib  # noqa: PLC0415

    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


# ---- putting back ----------------------------------------------------------------------------------------------------


def load(skeleton: bytes, array: Callable[[str], Any]) -> dict[str, Any]:
    """Return the pickled rest of a state with its arrays, which `array` returns by name."""
    return dict(_Unpickler(io.BytesIO(skeleton), array).load())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, array: Callable[[str], Any]) -> None:
        super().__init__(file)
        self._array = array

    def persistent_load(self, name: str) -> Any:
        return self._array(name)


def templates_of(parts: Parts) -> dict[str, Any]:
    """Return the live DTensors by the names of the arrays that belong into their layout.

    The state of an optimizer has the layout of its parameters, which it has before it has any state.
    """
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if hasattr(part, "param_groups"):
            numbers = (parameter for group in part.param_groups for parameter in group["params"])
            for number, parameter in enumerate(numbers):
                if hasattr(parameter, "device_mesh"):
                    found[f"{name}/state/{number}/"] = parameter
        elif hasattr(part, "named_parameters"):
            for path, value in _walk(part.state_dict(), ()):
                if hasattr(value, "device_mesh"):
                    found["/".join(map(str, (name, *path)))] = value
    return found


def template_for(name: str, whole: tuple[int, ...], templates: Mapping[str, Any]) -> Any | None:
    """Return the live DTensor whose layout the array has to take; None if it is restored as a whole."""
    found = templates.get(name, templates.get(name.rpartition("/")[0] + "/"))
    return found if found is not None and tuple(found.shape) == whole else None


def put_back(parts: Parts, states: Mapping[str, Any]) -> dict[str, Any]:
    """Load the states into the parts; return the plain values among them."""
    values = {}
    for name, part in parts.items():
        if name not in states:
            continue
        if hasattr(part, "load_state_dict"):
            part.load_state_dict(states[name])
        else:
            values[name] = states[name]
            if isinstance(part, dict):
                part.clear()
                part.update(states[name])
            elif isinstance(part, list):
                part[:] = states[name]
    return values


def overlap(piece: Piece, other: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where the two pieces of one array meet, as slices of the first and of the second; None if nowhere."""
    mine, theirs = [], []
    for at, size, other_at, other_size in zip(piece.offsets, piece.shape, other.offsets, other.shape, strict=True):
        begin, end = max(at, other_at), min(at + size, other_at + other_size)
        if begin >= end:
            return None
        mine.append(slice(begin - at, end - at))
        theirs.append(slice(begin - other_at, end - other_at))
    return tuple(mine), tuple(theirs)


# ---- random generators -----------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    found: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def restore_random_state(found: Mapping[str, Any]) -> None:
    random.setstate(found["python"])
    if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(found["numpy"])
    if (torch := sys.modules.get("torch")) is not None:
        if "torch" in found:
            torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
        if "cuda" in found and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(found["cuda"]), dtype=torch.uint8))
