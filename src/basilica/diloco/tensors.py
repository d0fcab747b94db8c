"""NumPy arrays and torch tensors as flat rows of numbers, and back. Torch is never imported here."""

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from basilica.diloco.wire import state_kind

Array = NDArray[Any]
INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


class Row(NamedTuple):
    """The numbers of one array: contiguous, one-dimensional, and of a kind that `wire` supports."""

    kind: str
    numbers: Array


def is_tensor(thing: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def row(thing: Any) -> Row:
    """Return the numbers of an array or tensor: a view if contiguous, native and in host memory, else a copy."""
    if is_tensor(thing):
        return _tensor_row(thing.detach().cpu().contiguous())
    array = np.ascontiguousarray(thing)
    if array.dtype.kind not in "fciub" or array.dtype.name in ("float128", "complex256"):
        raise TypeError(
            f"arrays of {array.dtype} cannot be averaged; give floats, complex numbers, integers or booleans"
        )
    kind = array.dtype.newbyteorder("=").name
    return Row(kind, array.astype(kind, copy=False).reshape(-1))


def state_row(thing: Any) -> Row:
    """Return the same for state numbers: see `wire`. A complex number is two floats."""
    kind, numbers = row(thing)
    if kind.startswith("complex"):
        kind = f"float{4 * numbers.itemsize}"
        numbers = numbers.view(kind)
    return Row(state_kind(kind), numbers)


def _tensor_row(tensor: Any) -> Row:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind == "bfloat16":
        return Row(kind, tensor.view(sys.modules["torch"].int16).numpy().view(np.uint16).reshape(-1))
    if not (tensor.is_floating_point() or tensor.is_complex() or kind in INTEGERS):
        raise TypeError(
            f"tensors of {tensor.dtype} cannot be averaged; give floats, complex numbers, integers or booleans"
        )
    return Row(kind, tensor.numpy().reshape(-1))


def empty_like(thing: Any) -> Any:
    """Return uninitialized host memory of the same type, dtype and shape."""
    if is_tensor(thing):
        torch = sys.modules["torch"]
        return torch.empty(thing.shape, dtype=thing.dtype, device="cpu")
    return np.empty(np.shape(thing), np.asarray(thing).dtype.newbyteorder("="))


def check_out(out: Any, thing: Any) -> None:
    """Raise unless the mean of `thing` can be written to `out`."""
    if is_tensor(out) != is_tensor(thing) or out.shape != thing.shape or out.dtype != thing.dtype:
        raise ValueError("each array of `out` must have the type, dtype and shape of its array")
    if np.shares_memory(row(out).numbers, row(thing).numbers):
        raise ValueError("`out` must not share memory with the arrays: they are needed until the round is over")
    direct = out.is_contiguous() and out.device.type == "cpu" if is_tensor(out) else out.flags.c_contiguous
    if not direct:
        raise ValueError("each array of `out` must lie in one piece in this machine's memory")


def like(result: Any, thing: Any) -> Any:
    """Return the result on the device of the original."""
    return result.to(thing.device) if is_tensor(thing) else result
