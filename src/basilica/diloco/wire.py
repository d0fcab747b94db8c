"""The wire form of an array: its own bytes, a narrower float, or quantized blocks; and the type of its sums.

A *kind* names the type of numbers in memory ("float32", "bfloat16", "int64" …), a *wire* the form in which they travel.
Sums are computed in the kind's *value* type: float32 for floats of up to 32 bits, float64 for wider ones and for
integers, complex for complex. NumPy has no bfloat16: it is stored as uint16.

A kind that ends in " state" is for numbers that are measured rather than trained, such as the running statistics of a
network: they always travel unchanged, and integers among them are compared, not added.
"""

from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from basilica.diloco.quantize import BlockQuantizer, int4, int8

Array = NDArray[Any]
WIRES = ("fp32", "fp16", "bf16", "int8", "int4")
QUANTIZED = {"int8": "blocks of int8", "int4": "blocks of int4"}
"""The names of quantized forms, distinct from the names of kinds: plain int8 is another form."""
BLOCK = 4096
"""Chunks are multiples of this many numbers, and so of every block of a quantizer."""

_FLOAT_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
_NARROW = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_EXACT_INTEGERS = 1 << 53
_STATE = " state"


def state_kind(kind: str) -> str:
    return kind + _STATE


def is_state(kind: str) -> bool:
    return kind.endswith(_STATE)


def _type(kind: str) -> str:
    return kind.removesuffix(_STATE)


def storage(kind: str) -> np.dtype[Any]:
    """Return the NumPy type that stores numbers of this kind."""
    return np.dtype(np.uint16 if _type(kind) == "bfloat16" else _type(kind))


@cache
def value_type(kind: str) -> np.dtype[Any]:
    """Return the type in which sums of this kind are computed."""
    dtype = storage(kind)
    if _type(kind) in _FLOAT_BITS:
        return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    if dtype.kind == "c" or is_state(kind):
        return dtype
    return np.dtype(np.float64)


def wire_of(kind: str, wire: str | None) -> str:
    """Return the form in which numbers of this kind travel if the caller requests `wire`: never wider than the kind."""
    if wire is None or kind not in _FLOAT_BITS:
        return kind
    if wire in QUANTIZED:
        return QUANTIZED[wire]
    narrow = _NARROW[wire]
    return narrow if _FLOAT_BITS[narrow] < _FLOAT_BITS[kind] else kind


class Codec(Protocol):
    """A conversion of stored numbers to wire bytes and back. It may own scratch memory: use one for each thread."""

    plain: bool
    """True if the wire form is the stored form, so that no byte needs a conversion."""

    def wire_bytes(self, count: int) -> int: ...

    def encode(self, kept: Array, out: Array, residual: Array | None) -> None:
        """Encode stored numbers to bytes."""
        ...

    def values(self, wire: Array, count: int) -> Array:
        """Return the bytes as numbers to compute with: a view, or scratch memory that the next call overwrites."""
        ...

    def seal(self, values: Array, out: Array, residual: Array | None) -> None:
        """Encode computed numbers to bytes."""
        ...

    def restore(self, wire: Array, kept: Array) -> None:
        """Decode bytes to stored numbers."""
        ...


class PlainCodec:
    """A codec whose wire form is an array of some kind: the stored one, or a narrower float."""

    def __init__(self, kind: str, wire: str) -> None:
        self._kind, self._wire = kind, wire
        self._value, self._storage = value_type(kind), storage(wire)
        self._scratch: Array = np.empty(0, self._value)
        self.plain = kind == wire

    def wire_bytes(self, count: int) -> int:
        return count * self._storage.itemsize

    def encode(self, kept: Array, out: Array, residual: Array | None) -> None:
        if self.plain:
            if not is_state(self._kind):
                _check_exact(kept)
            out.view(self._storage)[: len(kept)] = kept
        else:
            _from_values(_to_values(kept, self._kind), self._wire, out.view(self._storage)[: len(kept)])

    def values(self, wire: Array, count: int) -> Array:
        numbers = wire.view(self._storage)[:count]
        if self._storage == self._value:
            return numbers
        if len(self._scratch) < count:
            self._scratch = np.empty(count, self._value)
        scratch = self._scratch[:count]
        scratch[:] = _to_values(numbers, self._wire)
        return scratch

    def seal(self, values: Array, out: Array, residual: Array | None) -> None:
        _from_values(values, self._wire, out.view(self._storage)[: len(values)])

    def restore(self, wire: Array, kept: Array) -> None:
        numbers = wire.view(self._storage)[: len(kept)]
        if self.plain:
            kept[:] = numbers
        else:
            _from_values(_to_values(numbers, self._wire), self._kind, kept)


class QuantizedCodec:
    """A codec whose wire form is blocks of small integers."""

    plain = False

    def __init__(self, kind: str, quantizer: BlockQuantizer) -> None:
        self._kind, self._quantizer = kind, quantizer
        self._scratch: NDArray[np.float32] = np.empty(0, np.float32)

    def wire_bytes(self, count: int) -> int:
        return self._quantizer.wire_bytes(count)

    def encode(self, kept: Array, out: Array, residual: Array | None) -> None:
        self._quantizer.encode(_to_values(kept, self._kind).astype(np.float32, copy=False), out, residual)

    def values(self, wire: Array, count: int) -> Array:
        if len(self._scratch) < count:
            self._scratch = np.empty(count, np.float32)
        self._quantizer.decode(wire, self._scratch[:count])
        return self._scratch[:count]

    def seal(self, values: Array, out: Array, residual: Array | None) -> None:
        self._quantizer.encode(values.astype(np.float32, copy=False), out, residual)

    def restore(self, wire: Array, kept: Array) -> None:
        if kept.dtype == np.float32:
            self._quantizer.decode(wire, kept)
        else:
            _from_values(self.values(wire, len(kept)), self._kind, kept)


def codec(kind: str, wire: str) -> Codec:
    """Return a new codec for numbers of this kind; `wire` comes from `wire_of`."""
    if wire == QUANTIZED["int8"]:
        return QuantizedCodec(kind, int8())
    if wire == QUANTIZED["int4"]:
        return QuantizedCodec(kind, int4())
    return PlainCodec(kind, wire)


def _to_values(numbers: Array, kind: str) -> Array:
    if _type(kind) == "bfloat16":
        widened: Array = np.left_shift(numbers.astype(np.uint32), 16).view(np.float32)
        return widened
    return numbers.astype(value_type(kind), copy=False)


def _from_values(values: Array, kind: str, out: Array) -> None:
    """Round to the nearest number of the kind, ties to even."""
    if _type(kind) == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
        rounded[np.isnan(values)] = 0x7FC0  # rounding must not turn a NaN into an infinity
        np.copyto(out, rounded, casting="unsafe")
    elif values.dtype == out.dtype:
        np.copyto(out, values)
    elif out.dtype.kind in "iub":
        np.copyto(out, np.rint(values), casting="unsafe")
    else:
        with np.errstate(over="ignore"):  # values beyond the largest float16 become infinity, as usual
            np.copyto(out, values, casting="unsafe")


def _check_exact(kept: Array) -> None:
    wide = kept.dtype.kind in "iu" and kept.dtype.itemsize == 8 and kept.size
    if wide and (int(kept.max()) > _EXACT_INTEGERS or int(kept.min()) < -_EXACT_INTEGERS):
        raise ValueError("64-bit integers beyond 2**53 cannot be averaged exactly; give them as float64")
