"""Weighted draws with replacement: each draw is a function of (seed, epoch, position) and of the weights."""

import hashlib
import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from basilica.progress.permutation import MASK, NUMPY_FROM, key_words, numpy

FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
UNIT = 2.0**-53


class Weights:
    """The weights of all samples, as cumulative sums, and a digest that tells other weights apart."""

    def __init__(self, weights: Iterable[float], length: int) -> None:
        values = array("d", (float(weight) for weight in weights))
        if len(values) != length:
            raise ValueError(f"weights has {len(values)} entries for {length} samples: give one weight for each sample")
        for number, value in enumerate(values):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"weights[{number}] is {value}: a weight is a finite number and not negative")
        self.sums = array("d", accumulate(values))
        if not 0 < self.sums[-1] < math.inf:
            raise ValueError("weights add up to nothing that can be drawn from: at least one has to be positive")
        self.last = max(number for number, value in enumerate(values) if value > 0)
        if sys.byteorder == "big":
            values.byteswap()
        self.digest = hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


class WeightedDraws:
    """The order of one epoch: at each position one sample, drawn by weight, regardless of earlier draws."""

    def __init__(self, weights: Weights, seed: int = 0, epoch: int = 0) -> None:
        self._weights = weights
        self._keys = key_words("draws", seed, epoch, 2)

    def index(self, position: int) -> int:
        z = ((position ^ self._keys[0]) * FIRST) & MASK
        z = ((z ^ (z >> 32) ^ self._keys[1]) * SECOND) & MASK
        z = ((z ^ (z >> 29)) * FIRST) & MASK
        point = (z >> 11) * UNIT * self._weights.sums[-1]
        return min(bisect_right(self._weights.sums, point), self._weights.last)

    def rows(self, first: int, stride: int, count: int, width: int) -> list[list[int]]:
        if count * width >= NUMPY_FROM and (np := numpy()) is not None:
            positions = np.arange(count, dtype=np.uint64)[:, None] * np.uint64(stride) + np.arange(
                first, first + width, dtype=np.uint64
            )
            found: list[list[int]] = self._drawn(np, positions).tolist()
            return found
        return [[self.index(first + row * stride + i) for i in range(width)] for row in range(count)]

    def _drawn(self, np: Any, positions: Any) -> Any:
        """Return the draws at an array of positions: `index` for all of them at once."""
        z = positions ^ np.uint64(self._keys[0])
        z *= np.uint64(FIRST)
        z ^= (z >> np.uint64(32)) ^ np.uint64(self._keys[1])
        z *= np.uint64(SECOND)
        z ^= z >> np.uint64(29)
        z *= np.uint64(FIRST)
        sums = np.frombuffer(self._weights.sums)
        points = (z >> np.uint64(11)).astype(np.float64) * UNIT * sums[-1]
        return np.minimum(np.searchsorted(sums, points, side="right"), self._weights.last)
