"""The bucket is the run: replicas join, stop, are left behind and come back, with nothing but its prefix."""

import io
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from basilica.diloco import ArrayDiLoCo, BarrierTimeout, DiLoCo, ObjectStoreAllReduce, RoundConflict, RoundGone
from basilica.diloco.bucket import Bucket, State
from basilica.diloco.effects import Found
from basilica.diloco.fragments import Options
from basilica.diloco.outer import Array, Schedule, divide, fingerprint
from basilica.diloco.replica import FAILED, Replica
from basilica.diloco.stores import open_store
from basilica.diloco.stores.memory import MemoryStore
from basilica.diloco.trainer import ArrayValues
from tests.diloco.gang import SECONDS, Crossing, fresh_uri, gang
from tests.diloco.golden.scenarios import flat, inner_step, model, optimizer

H = 3


def parameters() -> list[Array]:
    return [np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.zeros(5, np.float32)]


def train(
    allreduce: ObjectStoreAllReduce, steps: int, arrays: list[Array] | None = None, **options: Any
) -> ArrayDiLoCo:
    """Pulls the parameters to a target that depends on rank and step: whoever goes on at a step goes on exactly."""
    arrays = parameters() if arrays is None else arrays
    with ArrayDiLoCo(arrays, allreduce, sync_every=H, **options) as diloco:
        while diloco.step_count < steps:
            inner(arrays, allreduce.rank, diloco.step_count)
            diloco.step(samples=2)
    return diloco


def inner(arrays: list[Array], rank: int, step: int) -> None:
    for array in arrays:
        array[...] -= np.float32(0.1) * (array - np.float32(np.sin(step) + rank))


def ends(allreduce: ObjectStoreAllReduce, steps: int, **options: Any) -> bytes:
    arrays = parameters()
    train(allreduce, steps, arrays, **options)
    return b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 2}], ids=str)
def test_a_run_goes_on_from_the_prefix_alone_as_if_it_had_never_stopped(options: dict[str, Any]) -> None:
    whole = gang(2, lambda allreduce: ends(allreduce, 12 * H, **options))
    uri = fresh_uri()
    gang(2, lambda allreduce: train(allreduce, 4 * H, **options), uri)
    parts = gang(2, lambda allreduce: ends(allreduce, 12 * H, **options), uri)
    assert whole[0] == whole[1] == parts[0] == parts[1]


def test_a_run_in_fragments_goes_on_at_the_right_one() -> None:
    options: dict[str, Any] = {"fragments": 2, "delay": 0}
    arrays = [np.ones(4, np.float32), np.ones(4, np.float32)]

    def replica(allreduce: ObjectStoreAllReduce, steps: int) -> bytes:
        mine = [a.copy() for a in arrays]
        with ArrayDiLoCo(mine, allreduce, sync_every=4, **options) as diloco:
            while diloco.step_count < steps:
                inner(mine, allreduce.rank, diloco.step_count)
                diloco.step()
            diloco.take_agreed()
        return mine[0].tobytes() + mine[1].tobytes()

    uri = fresh_uri()
    gang(2, lambda allreduce: replica(allreduce, 6), uri)
    bucket = Bucket(open_store(uri))
    done = [bucket.newest(f"fragment-{number}") for number in range(2)]
    assert [state.round for state in done if state] == [2, 1]
    first, second = gang(2, lambda allreduce: replica(allreduce, 16), uri)
    assert first == second


def test_the_world_may_have_another_size_when_a_run_goes_on() -> None:
    uri = fresh_uri()
    gang(2, lambda allreduce: train(allreduce, 2 * H), uri)
    found = gang(3, lambda allreduce: ends(allreduce, 5 * H), uri)
    assert found[0] == found[1] == found[2]


def test_all_begin_with_the_parameters_of_rank_0() -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> list[float]:
        arrays = [np.full(3, allreduce.rank, np.float32)]
        ArrayDiLoCo(arrays, allreduce, sync_every=H).close()
        return [float(number) for number in arrays[0]]

    assert gang(3, replica) == [[0.0] * 3] * 3


def test_without_rank_0_a_run_does_not_begin_and_says_so() -> None:
    with (
        ObjectStoreAllReduce(fresh_uri(), 1, 2, timeout=0.2) as allreduce,
        pytest.raises(BarrierTimeout, match="no word from rank 0 within"),
    ):
        ArrayDiLoCo(parameters(), allreduce, sync_every=H)


class CountingStore(MemoryStore):
    """One whose every look costs something, and that cannot tell of changes."""

    looks = 0

    def list(self, prefix: str, after: str = "") -> tuple[Found, ...]:
        self.looks += 1
        return super().list(prefix, after)

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        time.sleep(seconds)


def test_waiting_for_rank_0_costs_fewer_and_fewer_requests() -> None:
    store = CountingStore()
    with (
        ObjectStoreAllReduce("memory://", 1, 2, store=store, timeout=2.0) as allreduce,
        pytest.raises(BarrierTimeout),
    ):
        ArrayDiLoCo(parameters(), allreduce, sync_every=H)
    assert store.looks < 15, "a look every twentieth of a second would be forty"


class FakeTeam:
    """Hears what a leader tells, or tells what a leader would."""

    def __init__(self, *, leads: bool, told: list[int] | None = None) -> None:
        self.leads, self._told = leads, told
        self.heard: list[list[int]] = []

    def tell(self, words: Sequence[int]) -> list[int]:
        self.heard.append(list(words))
        return list(words) if self._told is None else self._told

    def share(self, arrays: Sequence[Array]) -> None:
        pass


def test_a_leader_that_cannot_join_tells_its_processes_which_would_wait_for_it() -> None:
    team = FakeTeam(leads=True)
    with (
        ObjectStoreAllReduce(fresh_uri(), 1, 2, timeout=0.1) as allreduce,
        pytest.raises(BarrierTimeout),
    ):
        Replica(ArrayValues(parameters()), allreduce, Options(sync_every=H), team=team)
    assert team.heard == [[FAILED, 0]]
    with pytest.raises(RuntimeError, match="leader of this replica could not synchronize"):
        Replica(ArrayValues(parameters()), None, Options(sync_every=H), team=FakeTeam(leads=False, told=[FAILED, 0]))


@pytest.mark.parametrize("options", [{}, {"delay": 2}], ids=["at once", "in the background"])
def test_a_step_that_timed_out_can_be_repeated_and_nothing_is_lost(options: dict[str, Any]) -> None:
    whole = gang(2, lambda allreduce: ends(allreduce, 4 * H, **options))
    uri, missed = fresh_uri(), threading.Event()

    def patient(rank: int) -> bytes:
        arrays, failures = parameters(), 0
        with (
            ObjectStoreAllReduce(uri, rank, 2, timeout=1.0) as allreduce,
            ArrayDiLoCo(arrays, allreduce, H, **options) as diloco,
        ):
            while diloco.step_count < 4 * H:
                at = diloco.step_count
                inner(arrays, rank, at)
                while diloco.step_count == at and failures < 60:
                    try:
                        diloco.step(samples=2)
                    except BarrierTimeout:
                        failures += 1
                        if failures > 1:
                            missed.set()
        return b"".join(array.tobytes() for array in arrays)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(patient, 0)
        assert missed.wait(30), "rank 0 did not wait in vain"
        second = threads.submit(patient, 1)
        assert [first.result(60), second.result(60)] == whole


def test_a_run_of_another_model_is_refused() -> None:
    uri = fresh_uri()
    gang(1, lambda allreduce: train(allreduce, H), uri)
    with pytest.raises(RoundConflict, match="other parameters than this model"):
        gang(1, lambda allreduce: ArrayDiLoCo([np.zeros(2, np.float32)], allreduce, sync_every=H), uri)


def test_who_cannot_begin_says_so_in_the_bucket_and_those_who_wait_hear_of_it() -> None:
    uri = fresh_uri()
    with ObjectStoreAllReduce(uri, 0, 3, timeout=0.1) as allreduce:
        first = ArrayDiLoCo(parameters(), allreduce, sync_every=1)
        with ObjectStoreAllReduce(uri, 1, 3) as other, pytest.raises(RoundConflict, match="of another model"):
            ArrayDiLoCo([np.zeros(2, np.float32)], other, sync_every=1)
        with pytest.raises(BarrierTimeout) as caught:
            first.step()
        first.close()
    conflict, never = caught.value.__notes__
    assert conflict.startswith("Rank 1 has failed: RoundConflict: the state of 'fragment-0'")
    assert never == "Rank 2 has never begun."


def test_replicas_with_other_settings_than_each_other_are_refused() -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> None:
        diloco = ArrayDiLoCo(parameters(), allreduce, sync_every=1 + allreduce.rank)
        while diloco.step_count < 4:
            diloco.step()

    with pytest.raises(RoundConflict, match="disagree: sync_every is"):
        gang(2, replica)


def test_a_replica_with_other_parameters_than_agreed_is_refused() -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> None:
        arrays = parameters()
        diloco = ArrayDiLoCo(arrays, allreduce, sync_every=1)
        if allreduce.rank == 1:
            state = diloco.state_dict()
            state["fragments"]["fragment-0"]["agreed"][0] = np.ones_like(arrays[0])
            diloco.load_state_dict(state)
        diloco.step()

    with pytest.raises(RoundConflict, match="disagree: base is"):
        gang(2, replica)


def test_a_replica_that_was_left_behind_catches_up_from_the_bucket() -> None:
    """It sleeps until the others have removed the round that it is in."""
    crossing = Crossing(3)

    def replica(allreduce: ObjectStoreAllReduce) -> tuple[str, int]:
        arrays = parameters()
        with ArrayDiLoCo(arrays, allreduce, sync_every=H) as diloco:
            crossing.wait()
            if allreduce.rank == 2:
                for step in range(H - 1):
                    inner(arrays, 2, step)
                    diloco.step()
                crossing.wait()
            while diloco.step_count < 10 * H:
                inner(arrays, allreduce.rank, diloco.step_count)
                if diloco.step() and diloco.round == 8 and allreduce.rank != 2:
                    crossing.wait()
            return fingerprint(arrays, None), diloco.round

    found = gang(3, replica, quorum=2, grace=0.05)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == 10


def test_who_is_left_behind_by_a_run_that_keeps_no_states_is_told_so_at_once() -> None:
    crossing = Crossing(3)

    def replica(allreduce: ObjectStoreAllReduce) -> str:
        arrays = parameters()
        diloco = ArrayDiLoCo(arrays, allreduce, sync_every=1, checkpoint_every=0)
        crossing.wait()
        if allreduce.rank == 2:
            crossing.wait()
            with pytest.raises(RoundGone, match="with checkpoint_every=0 the bucket has no state") as gone:
                diloco.step()
            return str(gone.value)
        for _ in range(6):
            diloco.step()
        crossing.wait()
        diloco.close()
        return ""

    assert "round 0 of 'fragment-0'" in gang(3, replica, quorum=2, grace=0.05)[2]


def test_a_start_is_counted_and_an_end_recorded() -> None:
    uri = fresh_uri()

    def failing(allreduce: ObjectStoreAllReduce) -> None:
        with ArrayDiLoCo(parameters(), allreduce, sync_every=H):
            raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="NaN"):
        gang(1, failing, uri)
    (diloco,) = gang(1, lambda allreduce: train(allreduce, H), uri)
    assert diloco.incarnation == 1
    bucket = Bucket(open_store(uri))
    assert [(m["rank"], m["incarnation"]) for m in bucket.documents("members")] == [(0, 0), (0, 1)]
    exits = [(e["outcome"], e["round"], e.get("error")) for e in bucket.documents("exits")]
    assert exits == [("failed", 0, "ValueError: loss is NaN"), ("finished", 1, None)]
    (entry,) = bucket.documents("log")
    assert entry["weights"] == {"0": 6.0}
    assert entry["samples"] == diloco.samples == 6.0


def test_old_states_are_removed() -> None:
    uri = fresh_uri()
    gang(2, lambda allreduce: train(allreduce, 9 * H), uri)
    keys = [found.key for found in open_store(uri).list("run/states/")]
    assert sorted({key.split("/")[3] for key in keys}) == ["00000007", "00000008", "00000009"]


def _state(round: int, value: float) -> State:
    arrays, velocity = [np.full(7, value, np.float32)], [np.full(7, -value, np.float32)]
    return State(
        name="model",
        round=round,
        chain="c",
        expected=(0, 1),
        samples=1.0,
        parameters=arrays,
        velocity=velocity,
        digest=fingerprint(arrays, velocity),
    )


def test_a_state_counts_only_if_all_its_pieces_are_there_and_fit() -> None:
    store = open_store(fresh_uri())
    bucket = Bucket(store)
    bucket.save(_state(1, 1.0))
    bucket.save(_state(2, 2.0), 0, 2)
    newest = bucket.newest("model")
    assert newest is not None
    assert newest.round == 1
    bucket.save(_state(2, 2.0), 1, 2)
    newest = bucket.newest("model")
    assert newest is not None
    assert newest.round == 2
    assert newest.velocity is not None
    assert newest.velocity[0].tolist() == [-2.0] * 7
    for key in ("run/states/model/00000002/00001-of-00002",):
        data = bytearray(store.read(_all(key)) or b"")
        data[3] ^= 1
        store.put(key, len(data), iter([memoryview(data)]))
    newest = bucket.newest("model")
    assert newest is not None
    assert newest.round == 1
    data = bytearray(store.read(_all("run/states/model/00000001/00000-of-00001")) or b"")
    store.put("run/states/model/00000001/00000-of-00001", 20, iter([memoryview(data)[:20]]))
    assert bucket.newest("model") is None


@pytest.mark.parametrize("writers", [1, 3])
def test_a_large_state_is_written_in_several_pieces_by_each(writers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basilica.diloco.bucket.LARGEST_PIECE", 10)
    bucket = Bucket(open_store(fresh_uri()))
    for writer in range(writers):
        assert bucket.newest("model") is None
        bucket.save(_state(1, 1.0), writer, writers)
    found = bucket.newest("model")
    assert found is not None
    assert found.parameters[0].tolist() == [1.0] * 7
    assert len(bucket.store.list("run/states/")) == 6


class SlowStore(MemoryStore):
    """Takes its time for one state."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def put_if_absent(self, key: str, size: int, buffers: Any) -> bool:
        if "/states/fragment-0/00000001/" in key:
            assert self.goes_on.wait(30)
        return super().put_if_absent(key, size, buffers)


def test_what_was_agreed_on_does_not_change_while_it_is_written() -> None:
    """A replica that catches up takes another state; the one that it still writes must stay whole."""
    store = SlowStore()
    with ObjectStoreAllReduce("memory://", 0, 1, store=store) as allreduce, ThreadPoolExecutor(1) as threads:
        arrays = parameters()
        replica = Replica(ArrayValues(arrays), allreduce, Options(sync_every=1))
        inner(arrays, 0, 0)
        replica.step()
        first = Bucket(store).newest("fragment-0")
        assert first is not None
        assert first.round == 0
        taking = threads.submit(replica._take, replica._fragments[0], first)
        with pytest.raises(TimeoutError):
            taking.result(0.2)
        store.goes_on.set()
        taking.result(30)
        written = Bucket(store).newest("fragment-0")
        assert written is not None
        assert written.round == 1
        replica.close()


def _all(key: str) -> Any:
    from basilica.diloco.effects import Range

    return Range(key, 0, 1 << 20)


# Checkpoints.


@pytest.mark.parametrize("at", [5, 7, 8])
@pytest.mark.parametrize("settings", [{"sync_every": 4}, {"sync_every": 4, "delay": 2, "mix": 0.5}], ids=str)
def test_a_checkpoint_in_the_middle_of_a_round_goes_on_exactly(at: int, settings: dict[str, Any]) -> None:
    def steps(allreduce: ObjectStoreAllReduce, stop: int, saved: bytes | None) -> tuple[bytes, list[float]]:
        network = model()
        inner_optimizer = optimizer(network.parameters())
        diloco = DiLoCo(network, inner_optimizer, allreduce, **settings)
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            network.load_state_dict(state["model"])
            diloco.load_state_dict(state["diloco"])
        while diloco.step_count < stop:
            inner_step(network, inner_optimizer, allreduce.rank, diloco.step_count)
            diloco.step()
        file = io.BytesIO()
        torch.save({"model": network.state_dict(), "diloco": diloco.state_dict()}, file)
        diloco.close()
        return file.getvalue(), flat(network)

    whole = gang(2, lambda allreduce: steps(allreduce, 16, None)[1])
    uri = fresh_uri()
    # A replica that closes gives up a round that it has not begun, and the other waits for it in vain.
    kept = gang(2, lambda allreduce: steps(allreduce, at, None)[0], uri, timeout=SECONDS / 3)
    found = gang(2, lambda allreduce: steps(allreduce, 16, kept[allreduce.rank])[1], uri)
    assert found == whole


def test_a_checkpoint_with_other_fragments_is_refused() -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> None:
        diloco = ArrayDiLoCo(parameters(), allreduce, sync_every=4, fragments=2)
        with pytest.raises(ValueError, match="made with other settings"):
            diloco.load_state_dict({"fragments": {"fragment-0": {}}, "step": 0})

    gang(1, replica)


# The schedule.


def test_each_fragment_is_given_and_applied_once_in_sync_every_steps() -> None:
    schedule = Schedule(12, fragments=3, delay=2)
    given = [(step, n % 3) for step in range(1, 25) if (n := schedule.given(step)) is not None]
    applied = [(step, n % 3) for step in range(1, 25) if (n := schedule.applied(step)) is not None]
    assert given == [(2, 0), (6, 1), (10, 2), (14, 0), (18, 1), (22, 2)]
    assert applied == [(step + 2, fragment) for step, fragment in given]
    assert schedule.start_of([1, 1, 0]) == 8
    assert schedule.start_of([2, 1, 1]) == 16


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sync_every": 0}, "sync_every must be at least 1"),
        ({"sync_every": 10, "fragments": 3}, "must be a multiple of fragments=3"),
        ({"sync_every": 10, "fragments": 2, "delay": 5}, "delay=5 must be less than the 5 steps"),
        ({"sync_every": 10, "outer_lr": 0}, "outer_lr must be more than 0"),
        ({"sync_every": 10, "outer_momentum": 1}, "outer_momentum must be at least 0"),
        ({"sync_every": 10, "outer_warmup": -1}, "outer_warmup must be 0"),
        ({"sync_every": 10, "mix": 2}, "mix must be from 0 to 1"),
        ({"sync_every": 9, "fragments": 3}, "2 parameters cannot be divided into 3 fragments"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], problem: str) -> None:
    with ObjectStoreAllReduce(fresh_uri(), 0, 1) as allreduce, pytest.raises(ValueError, match=problem):
        ArrayDiLoCo(parameters(), allreduce, **settings)


def test_fragments_are_of_about_the_same_size() -> None:
    assert divide([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert divide([100, 1, 1], 3) == [range(1), range(1, 2), range(2, 3)]
    assert divide([1, 1, 100], 2) == [range(2), range(2, 3)]
