"""The plan of all samples: which samples each global batch has, as a pure function, and each rank's share of one.

A global batch has a number that counts from the begin of the first epoch. Its samples depend on that number and on the
settings of the plan, never on the world. Ranks take contiguous shares of it whose sizes differ by one at most.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from basilica.progress.draws import WeightedDraws, Weights
from basilica.progress.permutation import Permutation

BLOCK = 2048  # indices that are computed at once


class Order(Protocol):
    """The samples of one epoch in their order."""

    def rows(self, first: int, stride: int, count: int, width: int) -> list[list[int]]:
        """Return the samples at `width` positions from `first`, then from `first + stride`, and so on, `count` rows."""
        ...


class Sequential:
    """The samples in the order of the dataset."""

    def rows(self, first: int, stride: int, count: int, width: int) -> list[list[int]]:
        return [list(range(first + row * stride, first + row * stride + width)) for row in range(count)]


def share_of(size: int, rank: int, world: int) -> range:
    """Return the part of a batch of that size that a rank takes. It is empty if the batch is smaller than the world."""
    return range(rank * size // world, (rank + 1) * size // world)


@dataclass(frozen=True)
class Plan:
    """The settings that decide about global batches."""

    length: int
    global_batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    weights: Weights | None

    @property
    def batches(self) -> int:
        """The number of global batches in an epoch."""
        full, rest = divmod(self.length, self.global_batch)
        return full + bool(rest and not self.drop_last)

    def size(self, number: int) -> int:
        """Return how many samples a global batch has; the last one of an epoch may have fewer."""
        begin = number % self.batches * self.global_batch
        return min(self.global_batch, self.length - begin)

    def order(self, epoch: int) -> Order:
        if self.weights is not None:
            return WeightedDraws(self.weights, self.seed, epoch)
        return Permutation(self.length, self.seed, epoch) if self.shuffle else Sequential()

    def shares(self, number: int, rank: int, world: int) -> Iterator[list[int]]:
        """Yield a rank's shares from a global batch to the end of its epoch; only their own indices are computed."""
        epoch, batch = divmod(number, self.batches)
        order, full = self.order(epoch), self.length // self.global_batch
        share = share_of(self.global_batch, rank, world)
        at_once = max(1, BLOCK // max(1, len(share)))
        while batch < full:
            count = min(at_once, full - batch)
            begin = batch * self.global_batch
            yield from order.rows(begin + share.start, self.global_batch, count, len(share))
            batch += count
        if batch < self.batches:
            begin = batch * self.global_batch
            share = share_of(self.length - begin, rank, world)
            yield from order.rows(begin + share.start, self.global_batch, 1, len(share))
