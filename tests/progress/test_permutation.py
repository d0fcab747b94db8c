"""The order of samples: a bijection, well mixed, pinned, and the same with and without NumPy."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.progress import draws, permutation
from basilica.progress.draws import WeightedDraws, Weights
from basilica.progress.permutation import LONGEST, Permutation


@pytest.mark.parametrize("length", [*range(1, 130), 255, 256, 257, 1000, 4095, 4096, 4097, 5000])
def test_every_sample_is_there_once(length: int) -> None:
    order = Permutation(length, seed=length, epoch=1)
    assert sorted(order.index(i) for i in range(length)) == list(range(length))


@given(st.integers(1, 3000), st.integers(), st.integers(0, 10**6))
def test_every_sample_is_there_once_for_any_seed_and_epoch(length: int, seed: int, epoch: int) -> None:
    (row,) = Permutation(length, seed, epoch).rows(0, length, 1, length)
    assert sorted(row) == list(range(length))


@given(st.integers(1, LONGEST), st.integers(), st.integers(0, 50), st.data())
def test_numpy_changes_no_value(length: int, seed: int, count: int, data: st.DataObject) -> None:
    width = min(60, length)
    stride = data.draw(st.integers(0, max(0, (length - width) // max(1, count))))
    first = data.draw(st.integers(0, length - width - stride * max(0, count - 1)))
    order = Permutation(length, seed, 2)
    expected = [[order.index(first + row * stride + i) for i in range(width)] for row in range(count)]
    assert order.rows(first, stride, count, width) == expected
    assert all(0 <= found < length for row in expected for found in row)


def test_it_works_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(range(1, 1001), 1000)
    with_numpy = [order.rows(3, 100, 5, 90) for order in (Permutation(1000, 7, 3), WeightedDraws(weights, 7, 3))]
    monkeypatch.setattr(permutation, "numpy", lambda: None)
    monkeypatch.setattr(draws, "numpy", lambda: None)
    assert [o.rows(3, 100, 5, 90) for o in (Permutation(1000, 7, 3), WeightedDraws(weights, 7, 3))] == with_numpy


def test_the_order_is_a_promise() -> None:
    """A run that is resumed by a later release goes on with the same samples: these values must never change."""
    assert [Permutation(10, 0, 0).index(i) for i in range(10)] == [0, 4, 2, 8, 3, 7, 5, 6, 1, 9]
    assert [Permutation(10**9, 1, 2).index(i) for i in range(4)] == [772974391, 610910275, 97941008, 352586464]
    assert [Permutation(LONGEST, -5, 0).index(i) for i in (0, LONGEST - 1)] == [
        2191418224746133383,
        1518065163540389518,
    ]
    assert WeightedDraws(Weights([1, 2, 3, 4], 4), 3, 1).rows(0, 0, 1, 12) == [[3, 3, 0, 1, 2, 2, 3, 0, 2, 2, 3, 0]]


def chi_square(counts: list[int], expected: float) -> float:
    """The distance from an even distribution, in standard deviations of chance."""
    freedom = len(counts) - 1
    found = sum((count - expected) ** 2 / expected for count in counts)
    return float((found - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_likely(length: int) -> None:
    seen = Counter(tuple(Permutation(length, seed).rows(0, 0, 1, length)[0]) for seed in range(12_000))
    orders = list(permutations(range(length)))
    assert chi_square([seen[order] for order in orders], 12_000 / len(orders)) < 5


@pytest.mark.parametrize("length", [16, 100, 5000])
def test_a_sample_is_equally_likely_at_every_position(length: int) -> None:
    cells = 16
    counts, neighbours, epochs = Counter[tuple[int, int]](), 0, 400_000 // length // 4
    for epoch in range(epochs):
        (row,) = Permutation(length, 5, epoch).rows(0, 0, 1, length)
        counts.update((i * cells // length, found * cells // length) for i, found in enumerate(row))
        neighbours += sum(abs(a - b) == 1 for a, b in pairwise(row))
    sizes = Counter(i * cells // length for i in range(length))
    expected = {(a, b): sizes[a] * sizes[b] / length * epochs for a in sizes for b in sizes}
    distance = sum((counts[cell] - mean) ** 2 / mean for cell, mean in expected.items())
    freedom = (cells - 1) ** 2
    assert distance < freedom + 5 * (2 * freedom) ** 0.5
    chance = 2 * (length - 1) / length * epochs
    assert abs(neighbours - chance) < 5 * chance**0.5


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    rows = [Permutation(10_000, s, e).rows(0, 0, 1, 10_000)[0] for s, e in ((0, 0), (0, 1), (1, 0), (-1, 0))]
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10  # one is expected


def test_draws_follow_the_weights() -> None:
    weights = Weights([0, 1, 2, 0, 5, 0], 6)
    counts = Counter(i for e in range(10) for i in WeightedDraws(weights, 1, e).rows(0, 0, 1, 8000)[0])
    assert set(counts) == {1, 2, 4}
    for sample, weight in ((1, 1), (2, 2), (4, 5)):
        assert abs(counts[sample] - 10_000 * weight) < 600


@pytest.mark.parametrize(
    ("weights", "problem"),
    [([1.0], "1 entries for 2"), ([1, -1], r"weights\[1\]"), ([1, float("nan")], "finite"), ([0, 0], "positive")],
)
def test_weights_that_cannot_be_drawn_from_are_refused(weights: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Weights(weights, 2)
