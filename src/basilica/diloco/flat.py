"""Arrays of one kind as one long row of numbers, without moving them together."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Flat:
    """The numbers of several one-dimensional arrays, one behind the other."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = [array for array in arrays if array.size]
        self._starts = [0, *accumulate(array.size for array in self._arrays)]

    @property
    def count(self) -> int:
        return self._starts[-1]

    def view(self, start: int, stop: int) -> Array | None:
        """The numbers where they lie, if they lie in one array."""
        index = bisect_right(self._starts, start) - 1
        if start < stop <= self._starts[-1] and stop <= self._starts[index + 1]:
            offset = self._starts[index]
            return self._arrays[index][start - offset : stop - offset]
        return None

    def read(self, start: int, stop: int) -> Array:
        """The numbers together: where they lie if possible, else copied."""
        view = self.view(start, stop)
        if view is None:
            pieces = list(self._pieces(start, stop))
            return np.concatenate(pieces)
        return view

    def write(self, start: int, values: Array) -> None:
        """Put the numbers where they belong."""
        for piece in self._pieces(start, start + len(values)):
            piece[:] = values[: len(piece)]
            values = values[len(piece) :]

    def _pieces(self, start: int, stop: int) -> Iterator[Array]:
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            offset = self._starts[index]
            end = min(stop, self._starts[index + 1])
            yield self._arrays[index][start - offset : end - offset]
            start, index = end, index + 1
