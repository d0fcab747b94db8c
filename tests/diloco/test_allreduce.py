"""The mean over replicas that are threads here: types, forms, weights, names, restarts, elasticity."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from basilica.diloco.allreduce import ObjectStoreAllReduce
from basilica.diloco.effects import Range
from basilica.diloco.errors import BarrierTimeout, CorruptPart, RoundConflict, RoundGone
from basilica.diloco.stores.memory import MemoryStore

SECONDS = 60.0
KINDS = ["float32", "float64", "float16", "complex64", "complex128", "int8", "uint16", "int32", "int64"]


def together(actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """All at once, one thread each."""
    with ThreadPoolExecutor(len(actions)) as threads:
        return [future.result(60) for future in [threads.submit(action) for action in actions]]


def world(size: int, store: MemoryStore | None = None, **options: Any) -> list[ObjectStoreAllReduce]:
    store = store or MemoryStore()
    return [ObjectStoreAllReduce("memory://", rank, size, store=store, timeout=30, **options) for rank in range(size)]


def reduce_all(replicas: Sequence[ObjectStoreAllReduce], arrays: Sequence[Any], **options: Any) -> list[Any]:
    return together([partial(r.allreduce, a, **options) for r, a in zip(replicas, arrays, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_mean_of_any_type_is_right_and_the_same_everywhere(kind: str, size: int) -> None:
    chance = np.random.default_rng(size)
    arrays = [
        [chance.integers(0, 100, shape).astype(kind) for shape in ((7,), (), (3, 0), (40, 50))] for _ in range(size)
    ]
    results = reduce_all(world(size), arrays)
    for position in range(4):
        everywhere = [result[position] for result in results]
        wide = np.complex128 if np.dtype(kind).kind == "c" else np.float64
        mean = np.mean([array[position].astype(wide) for array in arrays], axis=0)
        if np.dtype(kind).kind in "iu":
            mean = np.rint(mean)
        np.testing.assert_allclose(everywhere[0].astype(wide), mean, rtol=2e-3)
        assert {(a.dtype.name, a.shape, a.tobytes()) for a in everywhere} == {
            (kind, arrays[0][position].shape, everywhere[0].tobytes())
        }


def test_many_arrays_of_mixed_types_and_strides(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    shapes = [(int(n),) for n in chance.integers(1, 3000, 60)]

    def arrays(rank: int) -> list[Any]:
        mine = np.random.default_rng(rank)
        return [mine.standard_normal(s).astype("f4" if i % 3 else "f8") for i, s in enumerate(shapes)] + [
            mine.standard_normal((30, 20)).astype("f4").T[::2]
        ]

    uri = f"file://{tmp_path}"
    replicas = [ObjectStoreAllReduce(uri, rank, 3, timeout=30) for rank in range(3)]
    results = reduce_all(replicas, [arrays(rank) for rank in range(3)])
    for position, parts in enumerate(zip(*(arrays(rank) for rank in range(3)), strict=True)):
        np.testing.assert_allclose(results[0][position], np.mean(parts, axis=0), rtol=1e-5, atol=1e-6)
        assert len({result[position].tobytes() for result in results}) == 1


def test_torch_tensors_come_back_as_tensors() -> None:
    torch = pytest.importorskip("torch")
    arrays = [[torch.full((5, 3), float(rank), dtype=torch.bfloat16), torch.full((4,), rank)] for rank in (1, 3)]
    for result in reduce_all(world(2), arrays):
        assert result[0].dtype == torch.bfloat16
        assert torch.equal(result[0], torch.full((5, 3), 2.0, dtype=torch.bfloat16))
        assert torch.equal(result[1], torch.full((4,), 2))


@pytest.mark.parametrize(
    ("wire", "error", "share"), [("fp16", 1e-3, 0.5), ("bf16", 8e-3, 0.5), ("int8", 0.02, 0.26), ("int4", 0.35, 0.15)]
)
def test_narrow_forms_are_close_the_same_everywhere_and_smaller(wire: str, error: float, share: float) -> None:
    arrays = [[np.random.default_rng(rank).standard_normal(400_000).astype(np.float32)] for rank in range(4)]
    replicas = world(4, wire=wire)
    results = reduce_all(replicas, arrays)
    assert len({result[0].tobytes() for result in results}) == 1
    mean = np.mean([array[0] for array in arrays], axis=0)
    assert np.abs(results[0][0] - mean).max() < 2 * error * 4
    for replica in replicas:
        stats = replica.history[-1]
        assert stats.bytes_up <= 1.01 * share * stats.array_bytes
        assert stats.bytes_down <= 1.6 * share * stats.array_bytes


@pytest.mark.parametrize("size", [2, 4, 8])
def test_up_goes_once_the_size_and_down_less_than_twice_whatever_the_world(size: int) -> None:
    arrays = [[np.full(1 << 18, rank, np.float32)] for rank in range(size)]
    replicas = world(size)
    reduce_all(replicas, arrays)
    for replica in replicas:
        stats = replica.history[-1]
        assert stats.bytes_up <= 1.1 * stats.array_bytes
        assert stats.bytes_down <= 2.1 * stats.array_bytes


def test_weights_count_and_weight_zero_does_not() -> None:
    arrays = [[np.array([1.0])], [np.array([4.0])], [np.array([np.nan])]]
    replicas = world(3)
    weights = (1.0, 3.0, 0.0)
    results = together([partial(r.allreduce, a, w) for r, a, w in zip(replicas, arrays, weights, strict=True)])
    assert [result[0][0] for result in results] == [3.25] * 3
    assert dict(replicas[0].history[-1].outcome.weights) == {0: 1.0, 1: 3.0, 2: 0.0}


def test_named_all_reduces_run_at_the_same_time() -> None:
    replicas = world(2)
    futures = [
        [r.submit([np.full(1000, i + r.rank, np.float32)], name=f"fragment-{i}") for i in range(8)] for r in replicas
    ]
    for mine in futures:
        for i, future in enumerate(mine):
            assert future.result(30)[0][0] == i + 0.5
    for replica in replicas:
        replica.close()


def test_the_mean_can_be_put_into_memory_that_is_there() -> None:
    outs = [[np.empty(5000, np.float32)] for _ in range(2)]
    arrays = [[np.full(5000, rank, np.float32)] for rank in range(2)]
    replicas = world(2)
    results = together([partial(r.allreduce, a, out=o) for r, a, o in zip(replicas, arrays, outs, strict=True)])
    assert all(result[0] is out[0] and out[0][0] == 0.5 for result, out in zip(results, outs, strict=True))
    with pytest.raises(ValueError, match="share memory"):
        replicas[0].allreduce(arrays[0], out=arrays[0])


def test_a_missing_rank_is_named_and_the_call_can_be_repeated() -> None:
    store = MemoryStore()
    alone, other = (
        ObjectStoreAllReduce("memory://", rank, 2, store=store, timeout=t) for rank, t in ((0, 0.2), (1, 30))
    )
    with pytest.raises(BarrierTimeout, match="rank 1 ") as caught:
        alone.allreduce([np.zeros(10)])
    assert caught.value.missing == (1,)
    patient = ObjectStoreAllReduce("memory://", 0, 2, store=store, timeout=30)
    results = reduce_all([patient, other], [[np.zeros(10)], [np.ones(10)]])
    assert [result[0][0] for result in results] == [0.5, 0.5]


def test_a_replica_started_again_with_the_same_numbers_joins_the_round_where_it_was() -> None:
    store = MemoryStore()
    arrays = [[np.full(10, rank, np.float32)] for rank in range(2)]
    with pytest.raises(BarrierTimeout):
        ObjectStoreAllReduce("memory://", 0, 2, store=store, timeout=0.1).allreduce(arrays[0])
    results = reduce_all(world(2, store), arrays)
    again = ObjectStoreAllReduce("memory://", 0, 2, store=store).allreduce(arrays[0])
    assert results[0][0].tobytes() == again[0].tobytes()


def test_two_replicas_with_one_rank() -> None:
    store = MemoryStore()
    first = ObjectStoreAllReduce("memory://", 0, 2, store=store, timeout=0.1)
    with pytest.raises(BarrierTimeout):
        first.allreduce([np.zeros(10)])
    with pytest.raises(RoundConflict, match="two replicas claim this rank"):
        ObjectStoreAllReduce("memory://", 0, 2, store=store, timeout=0.1).allreduce([np.ones(10)])


def test_other_numbers_are_welcome_from_a_higher_incarnation() -> None:
    store = MemoryStore()
    with pytest.raises(BarrierTimeout):
        ObjectStoreAllReduce("memory://", 0, 2, store=store, timeout=0.1).allreduce([np.zeros(10)])
    again = ObjectStoreAllReduce("memory://", 0, 2, store=store, timeout=30, incarnation=1)
    other = ObjectStoreAllReduce("memory://", 1, 2, store=store, timeout=30)
    results = reduce_all([again, other], [[np.ones(10)], [np.ones(10)]])
    assert [result[0][0] for result in results] == [1.0, 1.0]


def test_a_part_that_is_replaced_while_it_is_read_is_no_damage() -> None:
    """Rank 0 has died after all had agreed on its part, and comes back with other numbers in the middle of the sum."""
    restarted = threading.Event()
    began_to_read = threading.Event()

    class Died(Exception):
        pass

    class Slow(MemoryStore):
        def put_if_absent(self, key: str, size: int, buffers: Any) -> bool:
            created = super().put_if_absent(key, size, buffers)
            if "result-000" in key and threading.current_thread().name == "first start":
                raise Died
            return created

        def read(self, range: Range) -> memoryview | None:
            if range.key.endswith("part-00000") and range.start == 0 and threading.current_thread().name == "rank 1":
                began_to_read.set()
                assert restarted.wait(SECONDS)
            return super().read(range)

        def put(self, key: str, size: int, buffers: Any) -> None:
            super().put(key, size, buffers)
            restarted.set()

    store = Slow()
    found: dict[str, Any] = {}

    def replica(rank: int, value: float, incarnation: int = 0) -> None:
        mine = ObjectStoreAllReduce("memory://", rank, 2, store=store, timeout=SECONDS, incarnation=incarnation)
        try:
            found[threading.current_thread().name] = mine.allreduce([np.full(100_000, value, np.float32)])[0][0]
        except Exception as error:  # noqa: BLE001  it is looked at
            found[threading.current_thread().name] = error

    threads = [
        threading.Thread(target=replica, args=(0, 1.0), name="first start"),
        threading.Thread(target=replica, args=(1, 3.0), name="rank 1"),
        threading.Thread(target=replica, args=(0, 5.0, 1), name="second start"),
    ]
    threads[0].start()
    threads[1].start()
    assert began_to_read.wait(SECONDS)
    threads[2].start()
    for thread in threads:
        thread.join(SECONDS)
    assert {name: found[name] for name in ("rank 1", "second start")} == {"rank 1": 4.0, "second start": 4.0}


def test_replicas_with_other_settings_all_get_the_same_error() -> None:
    replicas = world(2)

    def attempt(replica: ObjectStoreAllReduce, every: int) -> str:
        with pytest.raises(RoundConflict, match="disagree: sync_every is") as caught:
            replica.allreduce([np.zeros(10)], settings={"outer_lr": 0.7, "sync_every": every})
        return str(caught.value)

    assert len(set(together([lambda: attempt(replicas[0], 10), lambda: attempt(replicas[1], 20)]))) == 1


def test_replicas_that_disagree_about_the_arrays_all_get_the_same_error() -> None:
    replicas = world(2)

    def attempt(replica: ObjectStoreAllReduce, count: int) -> str:
        with pytest.raises(RoundConflict, match="layout") as caught:
            replica.allreduce([np.zeros(count)])
        return str(caught.value)

    assert len(set(together([lambda: attempt(replicas[0], 10), lambda: attempt(replicas[1], 11)]))) == 1


def test_a_part_that_rots_is_an_error_and_the_repeated_call_gives_the_mean() -> None:
    class Rotting(MemoryStore):
        rotten = False

        def put_if_absent(self, key: str, size: int, buffers: Any) -> bool:
            data = bytearray(b"".join(buffers))
            if key.endswith("part-00001") and not self.rotten:
                self.rotten = True
                data[3] ^= 1
            return super().put_if_absent(key, size, [memoryview(data)])

    store = Rotting()
    replicas = world(2, store)
    arrays = [[np.full(10_000, rank, np.float32)] for rank in range(2)]

    def until_it_works(replica: ObjectStoreAllReduce, mine: list[Any]) -> list[Any]:
        with pytest.raises(CorruptPart, match="rank 1"):
            replica.allreduce(mine)
        return replica.allreduce(mine)

    results = together([partial(until_it_works, r, a) for r, a in zip(replicas, arrays, strict=True)])
    assert all(result[0][0] == 0.5 for result in results)


def test_a_quorum_goes_on_without_the_straggler_who_reads_the_same_mean_later() -> None:
    store = MemoryStore()
    replicas = world(3, store, quorum=2, grace=0.05)
    arrays = [[np.full(1000, rank, np.float32)] for rank in range(3)]
    fast = reduce_all(replicas[:2], arrays[:2])
    late = replicas[2].allreduce(arrays[2])
    assert late[0].tobytes() == fast[0][0].tobytes() == fast[1][0].tobytes()
    assert fast[0][0][0] == 0.5
    assert not replicas[2].history[-1].outcome.counted
    assert replicas[2].history[-1].bytes_up < 1000
    reduce_all(replicas, arrays)  # it was announced for the round after this one
    reduce_all(replicas, arrays)
    assert set(replicas[0].history[-1].outcome.weights) == {0, 1, 2}


class PausingStore(MemoryStore):
    """Tells when somebody has looked, found that not all are there, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_at = threading.Event()

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        self.waited_at.set()
        super().wait_for_change(prefix, seconds)


def test_it_is_known_who_was_waited_for() -> None:
    store = PausingStore()
    early, late = world(2, store)

    def follow() -> list[Any]:
        assert store.waited_at.wait(30)
        return late.allreduce([np.zeros(10)])

    together([partial(early.allreduce, [np.zeros(10)]), follow])
    assert early.history[-1].outcome.waited_for == 1
    assert early.history[-1].waited > 0
    assert late.history[-1].outcome.waited_for is None


def test_whoever_does_not_come_was_waited_for() -> None:
    replicas = world(3, quorum=2, grace=0.05)
    arrays = [[np.zeros(10)]] * 3
    reduce_all(replicas[:2], arrays[:2])
    assert [replica.history[-1].outcome.waited_for for replica in replicas[:2]] == [2, 2]
    replicas[2].allreduce(arrays[2])
    assert replicas[2].history[-1].outcome.waited_for is None  # it waited for nobody: the others had waited for it


def test_the_world_may_change_between_rounds() -> None:
    store = MemoryStore()
    replicas = world(3, store)
    reduce_all(replicas, [[np.zeros(10)]] * 3)
    for replica in replicas[:2]:
        replica.resize(2)
    results = reduce_all(replicas[:2], [[np.zeros(10)], [np.ones(10)]])
    assert results[0][0][0] == 0.5


def test_old_rounds_are_removed_and_their_history_stays() -> None:
    store = MemoryStore()
    replicas = world(2, store, retain=1)
    for n in range(6):
        reduce_all(replicas, [[np.full(100, n + rank, np.float32)] for rank in range(2)])
    kept = [found.key for found in store.list("run/")]
    assert sum("/part-" in key for key in kept) <= 2 * 3
    assert sum("/manifest-" in key for key in kept) == 6
    with pytest.raises(RoundGone, match="catch up"):
        ObjectStoreAllReduce("memory://", 0, 2, store=store, timeout=30).allreduce([np.zeros(100, np.float32)])


def test_a_replica_goes_on_from_a_saved_state_with_its_residuals() -> None:
    store = MemoryStore()
    replicas = world(2, store, wire="int4")
    arrays = [[np.random.default_rng(rank).standard_normal(5000).astype(np.float32)] for rank in range(2)]
    reduce_all(replicas, arrays)
    saved = replicas[0].state_dict()
    first = reduce_all(replicas, arrays)
    restarted = ObjectStoreAllReduce("memory://", 0, 2, store=store, wire="int4", timeout=30)
    restarted.load_state_dict(saved)
    assert restarted.allreduce(arrays[0])[0].tobytes() == first[0][0].tobytes()


def test_another_run_in_the_same_place_is_not_seen() -> None:
    store = MemoryStore()
    reduce_all(world(2, store, run_id="first"), [[np.zeros(10)], [np.zeros(10)]])
    results = reduce_all(world(2, store, run_id="second"), [[np.ones(10)], [np.ones(10)]])
    assert results[0][0][0] == 1.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank": 2}, "not within a world"),
        ({"quorum": 3}, "cannot be had"),
        ({"wire": "int2"}, "choose fp32"),
        ({"run_id": "a/b"}, "letters, digits"),
        ({"uri": "/no/scheme"}, "file:///"),
        ({"uri": "file://relative"}, "absolute"),
        ({"timeout": 0}, "more than 0"),
    ],
)
def test_bad_settings_are_refused_with_advice(options: dict[str, Any], problem: str) -> None:
    given: dict[str, Any] = {"uri": "memory://x", "rank": 0, "world_size": 2, **options}
    with pytest.raises(ValueError, match=problem):
        ObjectStoreAllReduce(given.pop("uri"), given.pop("rank"), given.pop("world_size"), **given)


def test_what_cannot_be_averaged_is_refused() -> None:
    replica = ObjectStoreAllReduce("memory://refused", 0, 1)
    with pytest.raises(TypeError, match="cannot be averaged"):
        replica.allreduce([np.array(["text"])])
    with pytest.raises(ValueError, match=r"2\*\*53"):
        replica.allreduce([np.array([1 << 60])])
    with pytest.raises(ValueError, match="weight"):
        replica.allreduce([np.zeros(1)], weight=float("nan"))


def test_one_name_is_one_round_at_a_time() -> None:
    replica = ObjectStoreAllReduce("memory://one-at-a-time", 0, 2, timeout=5)
    store = MemoryStore.named("one-at-a-time")
    first = replica.submit([np.zeros(3)])
    while not store.list(""):
        store.wait_for_change("", 5)
    with pytest.raises(RuntimeError, match="running already"):
        replica.allreduce([np.zeros(3)])
    other = ObjectStoreAllReduce("memory://one-at-a-time", 1, 2, timeout=5)
    other.allreduce([np.zeros(3)])
    first.result(10)
    replica.close()


def test_one_all_reduce_is_taken_elsewhere_while_another_runs() -> None:
    """A replica that catches up must not lose what its own metrics, say, are doing meanwhile."""
    replicas = world(2)
    running = replicas[0].submit([np.ones(3)], name="metrics")
    replicas[0].go_on("model", round=7, chain="c", expected=(0, 1))
    replicas[1].allreduce([np.ones(3)], name="metrics")
    running.result(30)
    stands = replicas[0].state_dict()
    assert (stands["metrics"]["round"], stands["model"]["round"]) == (1, 7)
