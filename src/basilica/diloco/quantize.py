"""Numbers in 8 or 4 bits: blocks of integers with a scale each. Deterministic, and vectorised by NumPy.

A block of x travels as scale = max|x| / limit and the integers nearest to x / scale, with limit 127 or 7. The rounding
error is the *residual*; a sender that adds it to its next values (error feedback) loses nothing in the long run. A
block that contains a NaN or an infinity arrives as NaN: a diverged training must be visible, not clipped.

Blocks are interleaved in tiles of 256: number i of every block of a tile, then number i + 1 of every block. So each
step of the arithmetic runs over 256 neighbours, several times as fast as with blocks in sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LANES = 256
TINY = np.float32(1e-30)
"""Blocks whose largest number is below this travel as zeros: the inverse of their scale would overflow."""
ROUNDING = np.float32(3 << 22)
"""A constant whose sum with a small float has the nearest integer (ties to even) in its lowest bits."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A run of numbers in tiles of the same width, with the offsets of its scales and integers on the wire."""

    start: int
    stop: int
    count: int
    lanes: int
    scales_at: int
    integers_at: int
    end: int


class BlockQuantizer:
    """The encoder and decoder of one format. It owns scratch memory, so each thread needs its own."""

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.block = bits, block
        self._limit = np.float32(2 ** (bits - 1) - 1)
        self._wanted: Floats = np.empty(0, np.float32)
        self._work: Floats = np.empty(0, np.float32)

    def wire_bytes(self, count: int) -> int:
        """Return the length of `count` numbers on the wire."""
        return max((tiles.end for tiles in self._cut(count)), default=0)

    def encode(self, values: Floats, out: Bytes, residual: Floats | None = None) -> None:
        """Write `values` plus `residual` to `out`; `residual` becomes the rounding error of this call."""
        for tiles in self._cut(len(values)):
            part = slice(tiles.start, tiles.stop)
            self._encode(tiles, values[part], out, None if residual is None else residual[part])

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode as many numbers as `out` has room for."""
        for tiles in self._cut(len(out)):
            self._decode(tiles, wire, out[tiles.start : tiles.stop])

    def _cut(self, count: int) -> Iterator[_Tiles]:
        """Yield the whole tiles, then the remainder as one tile of as few blocks as possible."""
        whole = count // (self.block * LANES)
        at = 0
        for start, stop, tiles, lanes in (
            (0, whole * self.block * LANES, whole, LANES),
            (whole * self.block * LANES, count, 1, -(-(count - whole * self.block * LANES) // self.block)),
        ):
            if stop > start:
                integers_at = at + 4 * tiles * lanes
                end = integers_at + tiles * lanes * self.block * self.bits // 8
                yield _Tiles(start, stop, tiles, lanes, at, integers_at, end)
                at = end

    def _encode(self, tiles: _Tiles, values: Floats, out: Bytes, residual: Floats | None) -> None:
        shape = (tiles.count, self.block, tiles.lanes)
        wanted, work = self._scratch(tiles.count * self.block * tiles.lanes)
        wanted[len(values) :] = 0
        if residual is None:
            wanted[: len(values)] = values
        else:
            np.add(values, residual, out=wanted[: len(values)])
        np.abs(wanted, out=work)
        largest: Floats = work.reshape(shape).max(axis=1)
        broken = ~np.isfinite(largest)
        scales = largest / self._limit
        scales[broken] = np.nan
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            inverse = np.where(broken | (largest < TINY), np.float32(0), self._limit / largest)
        with np.errstate(invalid="ignore"):
            np.multiply(wanted.reshape(shape), inverse[:, None, :], out=work.reshape(shape))
        np.add(work, ROUNDING, out=work)
        out[tiles.scales_at : tiles.integers_at].view(np.float32)[:] = scales.reshape(-1)
        self._pack(work.view(np.int32).reshape(shape), out[tiles.integers_at : tiles.end])
        if residual is not None:
            np.subtract(work, ROUNDING, out=work)
            np.multiply(work.reshape(shape), scales[:, None, :], out=work.reshape(shape))
            np.subtract(wanted[: len(values)], work[: len(values)], out=residual)
            if broken.any():
                residual[~np.isfinite(residual)] = 0

    def _decode(self, tiles: _Tiles, wire: Bytes, out: Floats) -> None:
        shape = (tiles.count, self.block, tiles.lanes)
        whole = len(out) == tiles.count * self.block * tiles.lanes
        numbers = out if whole else self._scratch(tiles.count * self.block * tiles.lanes)[0]
        scales = wire[tiles.scales_at : tiles.integers_at].view(np.float32).reshape(tiles.count, 1, tiles.lanes)
        self._unpack(wire[tiles.integers_at : tiles.end], numbers.reshape(shape))
        np.multiply(numbers.reshape(shape), scales, out=numbers.reshape(shape))
        if not whole:
            out[:] = numbers[: len(out)]

    def _scratch(self, count: int) -> tuple[Floats, Floats]:
        if len(self._wanted) < count:
            self._wanted, self._work = np.empty(count, np.float32), np.empty(count, np.float32)
        return self._wanted[:count], self._work[:count]

    def _pack(self, integers: NDArray[np.int32], out: Bytes) -> None:
        if self.bits == 8:
            np.copyto(out.view(np.int8).reshape(integers.shape), integers, casting="unsafe")
            return
        # The first half of each block lies in the low nibbles and the second in the high ones.
        low, high = integers[:, : self.block // 2], integers[:, self.block // 2 :]
        packed = out.reshape(low.shape)
        np.copyto(packed, low, casting="unsafe")
        np.bitwise_and(packed, 0x0F, out=packed)
        shifted = high.astype(np.uint8)
        np.left_shift(shifted, 4, out=shifted)
        np.bitwise_or(packed, shifted, out=packed)

    def _unpack(self, packed: Bytes, numbers: Floats) -> None:
        if self.bits == 8:
            np.copyto(numbers, packed.view(np.int8).reshape(numbers.shape))
            return
        half = self.block // 2
        nibbles = packed.view(np.int8).reshape(len(numbers), half, -1)
        low = np.left_shift(nibbles, 4)
        np.right_shift(low, 4, out=low)  # arithmetic, so the sign comes back
        np.copyto(numbers[:, :half], low)
        np.copyto(numbers[:, half:], np.right_shift(nibbles, 4))


def int8() -> BlockQuantizer:
    return BlockQuantizer(bits=8, block=128)


def int4() -> BlockQuantizer:
    return BlockQuantizer(bits=4, block=64)
