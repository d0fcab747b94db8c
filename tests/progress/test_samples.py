"""`basilica.Samples`: every sample once per epoch and the same global batches, whatever happens to the run."""

import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import basilica
from basilica.progress.samples import Samples

Batches = list[list[int]]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def gang(world: int, *arguments: Any, **options: Any) -> list[Samples]:
    return [Samples(*arguments, rank=rank, world=world, **options) for rank in range(world)]


def undisturbed(*arguments: Any, **options: Any) -> Batches:
    return list(Samples(*arguments, rank=0, world=1, **options))


def test_the_share_of_a_rank() -> None:
    samples = Samples(10, 4, shuffle=False, rank=1, world=3)
    assert list(samples) == [[1], [5], [8]]
    assert list(Samples(10, 4, shuffle=False, rank=0, world=3)) == [[0], [4], []]  # the last batch has two samples
    assert list(Samples(10, 4, shuffle=False, rank=2, world=3)) == [[2, 3], [6, 7], [9]]
    assert len(samples) == 3
    assert (samples.epoch, samples.position, samples.step, samples.remaining) == (1, 0, 3, 0)
    assert list(samples) == []


@given(
    length=st.integers(1, 200),
    batch=st.integers(1, 40),
    world=st.integers(1, 12),
    seed=st.integers(),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    mode=st.sampled_from(["shuffle", "sequence", "weights"]),
)
def test_any_world_has_the_same_global_batches(
    *, length: int, batch: int, world: int, seed: int, epochs: int, drop_last: bool, mode: str
) -> None:
    batch = max(batch, world)
    drop_last = drop_last and length >= batch
    options: dict[str, Any] = {"seed": seed, "epochs": epochs, "drop_last": drop_last}
    if mode == "sequence":
        options["shuffle"] = False
    if mode == "weights":
        options["weights"] = range(1, length + 1)
    expected = undisturbed(length, batch, **options)
    shares = zip(*gang(world, length, batch, **options), strict=True)
    assert [joined(share) for share in shares] == expected
    per_epoch = length // batch if drop_last else -(-length // batch)
    assert len(expected) == epochs * per_epoch
    if mode != "weights" and not drop_last:
        for epoch in range(epochs):
            used = joined(expected[epoch * per_epoch : (epoch + 1) * per_epoch])
            assert sorted(used) == list(range(length))


@pytest.mark.hunt
@pytest.mark.parametrize("seed", range(0, 1000, 50))
def test_resizes_and_kills_repeat_and_skip_nothing(seed: int) -> None:
    """1,000 runs: at any batch all ranks may die and go back to the last commit, in a world of another size."""
    for case in range(seed, seed + 50):
        dice = random.Random(case)
        length, batch, epochs = dice.randint(1, 120), dice.randint(8, 24), dice.randint(1, 3)
        options = {"seed": case, "epochs": epochs}
        expected = undisturbed(length, batch, **options)
        saved: dict[str, Any] | None = None
        counted: Batches = []
        trained: Batches = []
        while True:
            ranks = gang(dice.randint(1, 8), length, batch, **options)
            if saved is not None:
                for rank in ranks:
                    rank.load_state_dict(saved)
            trained = list(counted)
            iterators = [iter(rank) for rank in ranks]
            killed = False
            while (shares := [next(iterator, None) for iterator in iterators])[0] is not None:
                if dice.random() < 0.1:  # in the middle of a step
                    killed = True
                    break
                trained.append(joined(share for share in shares if share is not None))
                for rank in ranks:
                    rank.advance()
                if dice.random() < 0.6:  # a snapshot
                    saved, counted = dice.choice(ranks).state_dict(), list(trained)
                if dice.random() < 0.1:
                    killed = True
                    break
            if not killed:
                break
        assert trained == expected
        assert Counter(joined(trained)) == dict.fromkeys(range(length), epochs)


def test_a_batch_counts_when_the_next_one_is_requested_or_when_it_is_committed_and_once() -> None:
    samples = Samples(100, 10, rank=0, world=1)
    batches = iter(samples)
    samples.advance()
    assert samples.step == 0  # there was none
    next(batches)
    assert samples.step == 0
    samples.advance()
    samples.advance()
    assert samples.step == 1
    next(batches)
    assert (samples.step, samples.position) == (1, 10)
    next(batches)
    assert samples.step == 2
    assert sum(1 for _ in batches) == 7
    assert samples.step == 10


def test_a_batch_that_nobody_counted_is_handed_out_again_by_the_next_iteration() -> None:
    samples = Samples(100, 10, rank=0, world=1)
    first = next(iter(samples))
    assert next(iter(samples)) == first
    samples.advance()
    assert next(iter(samples)) == undisturbed(100, 10)[1]


def test_a_loaded_cursor_holds_at_once_also_in_the_middle_of_an_iteration() -> None:
    expected = undisturbed(100, 10, epochs=3)
    earlier, samples = Samples(100, 10, epochs=3, rank=0, world=1), Samples(100, 10, epochs=3, rank=0, world=1)
    for _ in zip(range(13), earlier, strict=False):
        earlier.advance()
    assert (earlier.epoch, earlier.position) == (1, 30)
    batches = iter(samples)
    next(batches)
    samples.load_state_dict(earlier.state_dict())
    assert list(batches) == expected[13:]


def test_more_epochs_may_follow() -> None:
    samples = Samples(10, 5, epochs=2, rank=0, world=1)
    first = list(samples)
    more = Samples(10, 5, epochs=3, rank=0, world=1)
    more.load_state_dict(samples.state_dict())
    assert first + list(more) == undisturbed(10, 5, epochs=3)
    endless = Samples(10, 5, epochs=None, rank=0, world=1)
    assert [next(i) for i in [iter(endless)] for _ in range(6)] == undisturbed(10, 5, epochs=3)
    assert endless.remaining is None


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"length": 101}, "length=101, and here it is 100"),
        ({"global_batch": 20}, "global_batch=20"),
        ({"seed": 1}, "Use seed=1, or start without"),
        ({"shuffle": False}, "shuffle=False"),
        ({"drop_last": True}, "drop_last=True"),
        ({"weights": [1.0] * 100}, "other weights"),
    ],
)
def test_a_state_of_other_settings_is_refused_and_the_setting_named(other: dict[str, Any], named: str) -> None:
    state = Samples(**{"length": 100, "global_batch": 10, **other}).state_dict()
    samples = Samples(100, 10)
    with pytest.raises(ValueError, match=named):
        samples.load_state_dict(state)
    assert samples.step == 0


@pytest.mark.parametrize("damage", [{"position": 5}, {"position": 100}, {"epoch": -1}, {"epoch": "x"}])
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    samples = Samples(100, 10)
    with pytest.raises(ValueError, match="damaged"):
        samples.load_state_dict(samples.state_dict() | damage)
    with pytest.raises(ValueError, match="not saved by Samples"):
        samples.load_state_dict({"epoch": 0, "position": 0})


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 9), st.integers(1, 30))
def test_micro_batches_and_weights_give_the_mean_over_the_global_batch(
    length: int, batch: int, world: int, micro: int
) -> None:
    ranks = gang(world, length, max(batch, world), micro_batch=micro)
    loss = [random.Random(sample).random() for sample in range(length)]
    for shares in zip(*ranks, strict=True):
        every = joined(shares)
        parts = [rank.split(share) for rank, share in zip(ranks, shares, strict=True)]
        assert len({len(part) for part in parts}) == 1
        assert all(len(one) <= micro for part in parts for one in part)
        assert [joined(part) for part in parts] == list(shares)
        assert all(part[-1] for part, share in zip(parts, shares, strict=True) if share)
        mean = sum(loss[i] for i in every) / len(every)
        whole = [r.weight * sum(loss[i] for i in s) / len(s) if s else 0.0 for r, s in zip(ranks, shares, strict=True)]
        assert sum(whole) / world == pytest.approx(mean)
        by_part = [
            sum(r.weight_of(one) * sum(loss[i] for i in one) / len(one) for one in part if one)
            for r, part in zip(ranks, parts, strict=True)
        ]
        assert sum(by_part) / world == pytest.approx(mean)
        assert [rank.weight == 0 for rank in ranks] == [not share for share in shares]


def test_a_smaller_world_takes_more_micro_batches() -> None:
    assert [Samples(10**6, 512, micro_batch=16, rank=0, world=w).micro_batches for w in (32, 16, 5, 1)] == [1, 2, 7, 32]


def test_the_world_is_that_of_the_environment_at_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    samples = basilica.Samples(8, 4, shuffle=False)
    assert next(iter(samples)) == [0, 1, 2, 3]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert next(iter(samples)) == [2, 3]
    assert (samples.rank, samples.world) == (1, 2)
    monkeypatch.setenv("WORLD_SIZE", "five")
    with pytest.raises(ValueError, match="WORLD_SIZE=five"):
        iter(samples)


def test_torch_decides_about_the_world_where_it_is_initialised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch.distributed as dist

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    samples = Samples(8, 4, shuffle=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert next(iter(samples)) == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()
    assert next(iter(samples)) == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"length": 0}, "length=0 is less than 1: a dataset without samples"),
        ({"length": -3}, "length=-3"),
        ({"length": 2.5}, "length=2.5 is not a whole number"),
        ({"length": True}, "not a whole number"),
        ({"length": 2**70}, "can be ordered"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": "8"}, "global_batch='8'"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"epochs": 0}, "None is for ever"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"rank": 0}, "rank and world belong together"),
        ({"rank": 2, "world": 2}, "ranks count from 0 to 1"),
        ({"drop_last": True, "length": 7}, "drop_last leaves no batch"),
        ({"weights": [1.0] * 100, "shuffle": False}, "leave one of them out"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Samples(**{"length": 100, "global_batch": 8, **arguments})


def test_a_global_batch_smaller_than_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"global_batch=8 is smaller than the world of 9.*at least 9"):
        iter(Samples(100, 8, rank=0, world=9))


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    import numpy as np

    assert list(Samples(np.int64(4), np.int32(2), rank=0, world=1)) == undisturbed(4, 2)  # type: ignore[arg-type]


def test_memory_does_not_grow_with_the_dataset() -> None:
    list(Samples(10_000, 512, rank=0, world=1))  # NumPy is imported by now
    tracemalloc.start()
    try:
        samples = Samples(10**12, 512, rank=0, world=1)
        samples.load_state_dict(samples.state_dict() | {"position": 512 * 10**9})
        for _ in zip(range(50), samples, strict=False):
            pass
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_torch_is_not_imported() -> None:
    import subprocess

    code = "import sys, basilica; next(iter(basilica.Samples(10, 2))); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
