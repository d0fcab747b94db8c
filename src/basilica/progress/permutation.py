"""A seeded permutation of `range(length)`, computed index by index in constant memory.

The permutation is a Feistel network over pairs: a position is split into (left, right) of a grid that is about as wide
as high, and each round adds a keyed hash of one half to the other one, modulo its side. The grid has fewer than
sqrt(length) cells too many; a position that lands on one of these goes through the network again (cycle walking), which
almost never happens.

The order is a promise: a run that is resumed with a later release goes on with the same samples, so the values that a
test pins must not change. NumPy makes long ranges quick. It is optional and gives exactly the same values.
"""

import hashlib
from importlib.util import find_spec
from math import isqrt
from typing import Any

__all__ = ["LONGEST", "MASK", "NUMPY_FROM", "Permutation", "key_words", "numpy"]

LONGEST = 2**62  # both sides of the grid have to fit into 32 bits
ROUNDS, ROUNDS_IF_SMALL = 8, 32
SMALL = 4096  # so few samples leave a round little to mix: more rounds make all orders equally likely
MASK = 2**64 - 1
FIRST, SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd constants that spread every bit over the upper half
NUMPY_FROM = 48  # indices; for fewer, Python's own integers are quicker


def numpy() -> Any:
    """Return NumPy, or None where it is not installed. The import waits for the first long range."""
    if find_spec("numpy") is None:
        return None
    import numpy as found  # noqa: PLC0415 (optional, and slow to import)

    return found


def key_words(purpose: str, seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """Return 64-bit words that depend on the purpose, the seed and the epoch."""
    digest = hashlib.shake_256(f"basilica.Samples 1 {purpose} {seed} {epoch}".encode()).digest(8 * count)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 8 * count, 8))


class Permutation:
    """The order of one epoch: a bijection of `range(length)` that is chosen by (seed, epoch)."""

    def __init__(self, length: int, seed: int = 0, epoch: int = 0) -> None:
        self.length = length
        self._high = isqrt(length - 1) + 1
        self._wide = -(-length // self._high)
        self._keys = key_words("permutation", seed, epoch, ROUNDS if length > SMALL else ROUNDS_IF_SMALL)

    def index(self, position: int) -> int:
        """Return the sample at a position of the order."""
        wide, high, keys = self._wide, self._high, self._keys
        while True:
            left, right = divmod(position, wide)
            for i in range(0, len(keys), 2):
                z = ((right ^ keys[i]) * FIRST) & MASK
                z = ((z ^ (z >> 32)) * SECOND) & MASK
                left += ((z >> 32) * high) >> 32
                if left >= high:
                    left -= high
                z = ((left ^ keys[i + 1]) * FIRST) & MASK
                z = ((z ^ (z >> 32)) * SECOND) & MASK
                right += ((z >> 32) * wide) >> 32
                if right >= wide:
                    right -= wide
            position = left * wide + right
            if position < self.length:
                return position

    def rows(self, first: int, stride: int, count: int, width: int) -> list[list[int]]:
        """Return the samples at `width` positions from `first`, then from `first + stride`, and so on, `count` rows."""
        if count * width >= NUMPY_FROM and (np := numpy()) is not None:
            positions = np.arange(count, dtype=np.uint64)[:, None] * np.uint64(stride) + np.arange(
                first, first + width, dtype=np.uint64
            )
            found: list[list[int]] = self._permuted(np, positions).tolist()
            return found
        starts = range(first, first + count * stride, stride) if stride else [first] * count
        return [[self.index(position) for position in range(start, start + width)] for start in starts]

    def _permuted(self, np: Any, positions: Any) -> Any:
        """Return the samples at an array of positions: `index` for all of them at once."""
        wide, high = np.uint64(self._wide), np.uint64(self._high)
        left = positions // wide
        right = positions - left * wide
        for i in range(0, len(self._keys), 2):
            left = _added(np, left, right, self._keys[i], high)
            right = _added(np, right, left, self._keys[i + 1], wide)
        found = left * wide + right
        outside = found >= np.uint64(self.length)
        if outside.any():
            found[outside] = self._permuted(np, found[outside])
        return found


def _added(np: Any, half: Any, other: Any, key: int, side: Any) -> Any:
    """Return `half` plus a keyed hash of the other half, modulo the side of the grid."""
    half_word = np.uint64(32)
    z = other ^ np.uint64(key)
    z *= np.uint64(FIRST)
    z ^= z >> half_word
    z *= np.uint64(SECOND)
    z >>= half_word
    z *= side
    z >>= half_word
    z += half
    return np.minimum(z, z - side)  # below the side, the difference wraps around to a large number
