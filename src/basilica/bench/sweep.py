"""The sweep: which sizes, how often each, when to stop, and what the times amount to. Pure.

An all-reduce of S bytes among n ranks takes t seconds: algorithm bandwidth is S/t, bus bandwidth 2(n-1)/n times that,
which counts the bytes that each rank really sends. With two ranks the factor is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
RANKS = 2
BUS_FACTOR = 2 * (RANKS - 1) / RANKS

WARM_UPS = 2
REPEATS_MIN = 5
REPEATS_MAX = 100
SIZE_SECONDS = 1.0  # more repeats than fit into this tell nothing new


@dataclass(frozen=True, slots=True)
class Measured:
    """How long each of the repeated all-reduces of one size took, in seconds."""

    size: int
    times: tuple[float, ...]

    def bus_gbps(self, share: float) -> float:
        """GB/s that this share of the repeats did not exceed: the slowest tenth is 0.1."""
        return self.algorithm_gbps(share) * BUS_FACTOR

    def algorithm_gbps(self, share: float) -> float:
        return self.size / percentile(self.times, 1 - share) / 1e9

    @property
    def latency_us(self) -> float:
        return percentile(self.times, 0.5) * 1e6


def percentile(values: Sequence[float], share: float) -> float:
    """With a line drawn between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def repeats(once: float, seconds_left: float) -> int:
    """How often to measure a size that takes `once` seconds."""
    fit = int(min(SIZE_SECONDS, seconds_left) / max(once, 1e-9))
    return max(REPEATS_MIN, min(REPEATS_MAX, fit))


def fits(size: int, before: Measured | None, seconds_left: float) -> bool:
    """Is there time for this size? What `size` takes is foretold from the size before it, as if all were bandwidth."""
    if before is None:
        return True
    once = percentile(before.times, 0.5) * size / before.size
    batches = (1 + WARM_UPS) + (1 + REPEATS_MIN)  # each begins with one that is not counted
    return once * batches <= seconds_left
