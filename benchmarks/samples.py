"""What the order of samples costs, beside shuffled lists of NumPy and torch in the same run."""

import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import torch

from basilica.progress.permutation import Permutation
from basilica.progress.samples import Samples
from benchmarks.harness import Figure, median

LONG = 10**9
LISTED = 10**7  # as long as the lists that are compared: 10**9 of them would need 8 GB
INDICES = 10**6
ROUNDS = 7


def run() -> Iterator[Figure]:
    next(iter(Samples(LONG, 512, rank=0, world=1)))  # imports NumPy
    far = {"position": LONG // 2 // 512 * 512}
    yield Figure("10^9 samples: construct and seek", _seconds(lambda: _at(far)) * 1e6, "us", "< 1000 us")
    yield Figure("10^9 samples: the first batch of 512 there", _seconds(lambda: next(iter(_at(far)))) * 1e6, "us")
    tracemalloc.start()
    _take(_at(far), 10**5)
    yield Figure("10^9 samples: memory, at most", tracemalloc.get_traced_memory()[1] / 1024, "KiB", "constant")
    tracemalloc.stop()
    for batch in (8, 64, 512, 4096):
        seconds = _seconds(lambda size=batch: _take(Samples(LONG, size, rank=0, world=1), INDICES))  # type: ignore[misc]
        goal = "> 1 M/s" if batch == 512 else ""
        yield Figure(f"10^9 samples: indices in batches of {batch}", INDICES / seconds / 1e6, "M/s", goal)
    share = _seconds(lambda: _take(Samples(LONG, 4096, rank=7, world=64), INDICES // 10))
    yield Figure("10^9 samples: indices of one rank of 64", INDICES / 10 / share / 1e6, "M/s")
    order = Permutation(LONG)
    plain = _seconds(lambda: [order.index(position) for position in range(INDICES // 10)])
    yield Figure("10^9 samples: indices without NumPy", INDICES / 10 / plain / 1e6, "M/s")
    ours = _seconds(lambda: _take(Samples(LISTED, 512, rank=0, world=1), LISTED // 10)) * 10
    numpy = _seconds(lambda: _lists(np.random.default_rng(0).permutation(LISTED)))
    torchs = _seconds(lambda: _lists(torch.randperm(LISTED)))
    yield Figure("10^7 samples in lists of 512: against numpy.permutation", ours / numpy, "times")
    yield Figure("10^7 samples in lists of 512: against torch.randperm", ours / torchs, "times")
    first = _seconds(lambda: next(iter(Samples(LISTED, 512, rank=0, world=1))))
    listed = _seconds(lambda: _first(np.random.default_rng(0).permutation(LISTED)))
    yield Figure("10^7 samples, until the first batch: against numpy", first / listed, "times")


def _at(cursor: dict[str, int]) -> Samples:
    samples = Samples(LONG, 512, rank=0, world=1)
    samples.load_state_dict(samples.state_dict() | cursor)
    return samples


def _take(samples: Samples, indices: int) -> None:
    for batch in samples:
        indices -= len(batch)
        if indices <= 0:
            return


def _lists(order: "np.ndarray[tuple[int], np.dtype[np.int64]] | torch.Tensor") -> None:
    for begin in range(0, LISTED, 512):
        order[begin : begin + 512].tolist()


def _first(order: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[int]:
    found: list[int] = order[:512].tolist()
    return found


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return median(times)
