"""A call that raised is repeated, whatever it was that failed: the numbers are right, and nobody is refused."""

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce
from basilica.diloco.bucket import Bucket
from basilica.diloco.effects import Range
from basilica.diloco.fragments import Options
from basilica.diloco.inspection import inspect_run
from basilica.diloco.outer import Array
from basilica.diloco.replica import Replica
from basilica.diloco.stores import ObjectStore
from basilica.diloco.stores.file import FileStore
from basilica.diloco.stores.memory import MemoryStore
from basilica.diloco.trainer import ArrayValues
from tests.diloco.faulty import Fault, FaultyStore, Request, repeated
from tests.diloco.test_run import inner, parameters

WORLD, ROUNDS, TIMEOUT = 2, 4, 60.0
H = 2


class Refused(OSError):
    """What a store raises."""


def together(work: Callable[[int], Any], world: int = WORLD) -> list[Any]:
    with ThreadPoolExecutor(world) as threads:
        return [future.result(60) for future in [threads.submit(work, rank) for rank in range(world)]]


def numbers(rank: int, round: int) -> Array:
    return np.arange(6, dtype=np.float32) * (1 + rank) + np.float32(10 * round + rank)


def reduce_rounds(views: Sequence[ObjectStore], **options: Any) -> list[Any]:
    """The means of all rounds on all replicas, each of which repeats what failed."""

    def replica(rank: int) -> list[list[float]]:
        with ObjectStoreAllReduce("memory://", rank, WORLD, store=views[rank], timeout=TIMEOUT, **options) as allreduce:
            means = []
            for round in range(ROUNDS):
                call = partial(allreduce.allreduce, [numbers(rank, round)])
                found, _ = repeated(call, Refused, KeyboardInterrupt)
                means.append(found[0].tolist())
            return means

    return together(replica)


RIGHT = [((numbers(0, round) + numbers(1, round)) / 2).tolist() for round in range(ROUNDS)]


def every_request(run: Callable[[Sequence[FaultyStore]], Any], rank: int) -> list[Request]:
    """What a replica asks of the store when nothing fails; of what it asks again and again, the first two times."""
    views = [FaultyStore(store) for store in [MemoryStore()] * WORLD]
    run(views)
    return [request for request in dict.fromkeys(views[rank].requests) if request.nth < 2]


def struck(run: Callable[[Sequence[FaultyStore]], Any], rank: int, fault: Fault) -> tuple[Any, bool]:
    """What the run gives with that fault at one of its replicas, and whether it came to that."""
    store = MemoryStore()
    views = [FaultyStore(store, fault if number == rank else None) for number in range(WORLD)]
    return run(views), views[rank].struck


@pytest.mark.parametrize(
    ("rank", "options"),
    [(0, {"retain": 0}), (1, {}), (0, {"wire": "int4"}), (1, {"quorum": 1, "grace": 1e6})],
    ids=str,
)
def test_an_all_reduce_is_right_whichever_of_its_requests_fails(rank: int, options: dict[str, Any]) -> None:
    def run(views: Sequence[ObjectStore]) -> Any:
        return reduce_rounds(views, **options)

    undisturbed = run([FaultyStore(store) for store in [MemoryStore()] * WORLD])
    assert undisturbed == [RIGHT] * WORLD or "wire" in options
    operations = set()
    for request in every_request(run, rank):
        for effect, error in ((False, Refused(errno.EIO, "no answer")), (True, KeyboardInterrupt())):
            means, hit = struck(run, rank, Fault(request, effect, error))
            assert means == undisturbed, (request, effect, error)
            operations |= {request.operation} if hit else set()
    assert operations == ({"create", "read", "list", "delete"} if rank == 0 else {"create", "read", "list"})


def train(views: Sequence[ObjectStore], **options: Any) -> list[bytes]:
    """The parameters in the end, of replicas that repeat what failed."""

    def replica(rank: int) -> bytes:
        arrays = parameters()
        with ObjectStoreAllReduce("memory://", rank, WORLD, store=views[rank], timeout=TIMEOUT) as allreduce:
            diloco, _ = repeated(lambda: ArrayDiLoCo(arrays, allreduce, H, **options), Refused)
            while diloco.step_count < 4 * H:
                inner(arrays, rank, diloco.step_count)
                repeated(lambda: diloco.step(samples=3 + rank), Refused)
            repeated(diloco.close, Refused)
        return b"".join(array.tobytes() for array in arrays)

    return together(replica)


@pytest.mark.parametrize(
    ("rank", "options"),
    [(0, {}), (1, {}), (0, {"delay": 1, "mix": 0.5}), (0, {"fragments": 2}), (0, {"checkpoint_every": 3})],
    ids=str,
)
def test_a_training_is_the_same_whichever_of_its_requests_fails(rank: int, options: dict[str, Any]) -> None:
    def run(views: Sequence[FaultyStore]) -> Any:
        return train(views, **options), _kept(views[0].store)

    undisturbed = run([FaultyStore(store) for store in [MemoryStore()] * WORLD])
    kinds = set()
    for request in every_request(run, rank):
        for effect in (False, True):
            found, hit = struck(run, rank, Fault(request, effect, Refused(errno.EIO, "no answer")))
            assert found == undisturbed, (request, effect)
            kinds |= {(request.operation, [*request.key.split("/"), ""][1])} if hit else set()
    assert kinds >= {("create", "states"), ("create", "members"), ("create", "exits"), ("create", "rounds")}
    if rank == 0:
        assert kinds >= {("create", "log"), ("delete", "rounds")}


def _kept(store: ObjectStore) -> list[tuple[str, int, str, float]]:
    """The log of the rounds, which is complete whatever failed."""
    found = inspect_run(Bucket(store))
    return [(entry["name"], entry["round"], entry["digest"], entry["samples"]) for entry in found.rounds]


class FailingValues(ArrayValues):
    """A model whose `nth` access fails, as a device does that is out of memory."""

    def __init__(self, arrays: Sequence[Array], nth: int) -> None:
        super().__init__(arrays)
        self.left, self.accesses = nth, 0

    def read(self, index: int) -> Array:
        self._access()
        return super().read(index)

    def write(self, index: int, value: Array) -> None:
        super().write(index, value)
        self._access()

    def _access(self) -> None:
        self.accesses += 1
        self.left -= 1
        if not self.left:
            raise Refused("the device is out of memory")


@pytest.mark.parametrize("options", [{}, {"delay": 1, "mix": 0.5}, {"fragments": 2}], ids=str)
def test_a_training_is_the_same_whichever_access_to_its_model_fails(options: dict[str, Any]) -> None:
    def run(nth: int) -> tuple[bytes, int]:
        arrays, values = parameters(), None
        with ObjectStoreAllReduce("memory://", 0, 1, store=MemoryStore(), timeout=TIMEOUT) as allreduce:
            values = FailingValues(arrays, 0)
            replica = Replica(values, allreduce, Options(sync_every=H, **options))
            values.left, values.accesses = nth, 0
            while replica.step_count < 3 * H:
                inner(arrays, 0, replica.step_count)
                repeated(replica.step, Refused)
            replica.close()
        return b"".join(array.tobytes() for array in arrays), values.accesses

    undisturbed, accesses = run(0)
    assert accesses > 6
    for nth in range(1, accesses + 1):
        assert run(nth)[0] == undisturbed, f"access {nth} of {accesses}"


def test_a_checkpoint_of_a_step_that_is_half_done_is_refused_and_the_repeated_step_finishes_it() -> None:
    arrays = parameters()
    with ObjectStoreAllReduce("memory://", 0, 1, store=MemoryStore(), timeout=TIMEOUT) as allreduce:
        values = FailingValues(arrays, 0)
        replica = Replica(values, allreduce, Options(sync_every=1))
        inner(arrays, 0, 0)
        values.left = 3  # two reads, for what is given; then the first write
        with pytest.raises(Refused):
            replica.step()
        for use in (replica.state_dict, replica.take_agreed):
            with pytest.raises(RuntimeError, match=r"half applied: repeat it first"):
                use()
        assert replica.step()
        assert replica.state_dict()["step"] == replica.step_count == 1
        replica.close()


class Outer(Exception):
    """An interruption in the middle of the outer step."""


@pytest.mark.parametrize("nth", [1, 2])
def test_an_outer_step_that_was_interrupted_is_not_made_twice(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(fails_at: int) -> list[bytes]:
        arrays, copied = parameters(), 0
        copy = np.copyto

        def copyto(target: Array, source: Array, *more: Any, **options: Any) -> None:
            nonlocal copied
            copy(target, source, *more, **options)
            copied += target.dtype == np.float32
            if copied == fails_at:
                copied = 100
                raise Outer

        with ObjectStoreAllReduce("memory://", 0, 1, store=MemoryStore(), timeout=TIMEOUT) as allreduce:
            replica = Replica(ArrayValues(arrays), allreduce, Options(sync_every=1))
            for step in range(3):
                inner(arrays, 0, step)
                with monkeypatch.context() as patched:
                    patched.setattr("basilica.diloco.replica.np.copyto", copyto)
                    copied = 0 if step == 1 else 100
                    repeated(replica.step, Outer)
            replica.close()
        return [array.tobytes() for array in arrays]

    assert run(nth) == run(0)


def test_a_step_that_was_interrupted_while_it_waited_for_its_round_is_repeated() -> None:
    """The round goes on in the background, and is decided before the step is repeated."""
    store, arrays = MemoryStore(), parameters()
    with ObjectStoreAllReduce("memory://", 0, 1, store=store, timeout=TIMEOUT) as allreduce:
        replica = Replica(ArrayValues(arrays), allreduce, Options(sync_every=2, delay=1))
        inner(arrays, 0, 0)
        replica.step()
        given = replica._fragments[0].given
        assert given is not None
        assert given.means is not None
        future, given.means = given.means, _Interrupted(given.means)  # type: ignore[assignment]
        inner(arrays, 0, 1)
        with pytest.raises(KeyboardInterrupt):
            replica.step()
        future.result(TIMEOUT)
        assert replica.step()
        assert (replica.round, allreduce.state_dict()["fragment-0"]["round"]) == (1, 1)
        replica.close()


class _Interrupted:
    """A future at which somebody is interrupted, once; it goes on all the same."""

    def __init__(self, future: Any) -> None:
        self._future, self._interrupted = future, False

    def result(self) -> Any:
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        return self._future.result()

    def done(self) -> bool:
        return self._interrupted and bool(self._future.done())

    def cancel(self) -> None:
        self._future.cancel()


# Troubles that last.


class NoDelete(MemoryStore):
    """Of a role that may not delete."""

    allowed = False
    tries = 0

    def delete(self, keys: Sequence[str]) -> None:
        self.tries += 1
        if not self.allowed:
            raise PermissionError(errno.EACCES, "AccessDenied: s3:DeleteObject")
        super().delete(keys)


def test_a_role_that_may_not_delete_gets_right_means_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    store = NoDelete()
    with ObjectStoreAllReduce("memory://", 0, 1, store=store, timeout=TIMEOUT) as allreduce:
        with caplog.at_level(logging.WARNING, logger="basilica.diloco"):
            for round in range(100):
                assert allreduce.allreduce([numbers(0, round)])[0][0] == 10 * round
        assert sum("removing old rounds of 'default'" in record.message for record in caplog.records) == 1
        assert "AccessDenied" in caplog.text
        assert store.tries < 12, "it is tried less and less often"
        assert "removing old rounds of 'default' in run 'run' fails" in allreduce.history[-1].troubles[0]
        store.allowed = True
        for round in range(100, 180):
            allreduce.allreduce([numbers(0, round)])
        assert not allreduce.history[-1].troubles
        left = {key.split("/")[3] for key in (f.key for f in store.list("run/rounds/")) if "/part-" in key}
        assert len(left) <= 4, "what could not be removed then is removed now"


class NoStates(MemoryStore):
    """A bucket that takes no states, and then none at all."""

    refused: tuple[str, ...] = ("/states/",)

    def put_if_absent(self, key: str, size: int, buffers: Any) -> bool:
        if any(kind in key for kind in self.refused) and "/00000000/" not in key:
            raise Refused(errno.ENOSPC, "No space left")
        return super().put_if_absent(key, size, buffers)


def test_a_state_that_cannot_be_saved_stops_no_step_is_told_and_is_saved_in_the_end() -> None:
    store, arrays = NoStates(), parameters()
    store.refused = ("/states/", "/log/")
    with ObjectStoreAllReduce("memory://", 0, 1, store=store, timeout=TIMEOUT) as allreduce:
        diloco = ArrayDiLoCo(arrays, allreduce, sync_every=1)
        for step in range(5):
            inner(arrays, 0, step)
            assert diloco.step()
        with pytest.raises(Refused, match="No space left"):
            diloco.close()
        works = [trouble.work for trouble in allreduce.troubles.current]
        assert works == ["recording the rounds of run 'run'", "saving the states of 'fragment-0' in run 'run'"]
        store.refused = ()
        diloco.close()
    newest = Bucket(store).newest("fragment-0")
    assert newest is not None
    assert newest.round == 5
    found = inspect_run(Bucket(store))
    assert [entry["round"] for entry in found.rounds] == list(range(5))
    assert any("saving the states" in text for text in found.troubles)


def test_the_last_complete_states_stay_when_newer_ones_cannot_be_completed() -> None:
    """Rank 1 can save nothing: what rank 0 writes alone is no state, and the old ones are all that there is."""
    store = MemoryStore()

    class Mine(NoStates):
        def put_if_absent(self, key: str, size: int, buffers: Any) -> bool:
            if "/states/" in key and "/00000000/" not in key and "/00000001/" not in key:
                raise Refused("no")
            return store.put_if_absent(key, size, buffers)

    views: list[Any] = [store, _view(Mine(), store)]

    def replica(rank: int) -> None:
        arrays = parameters()
        with ObjectStoreAllReduce("memory://", rank, WORLD, store=views[rank], timeout=TIMEOUT) as allreduce:
            diloco = ArrayDiLoCo(arrays, allreduce, sync_every=1)
            for step in range(8):
                inner(arrays, rank, step)
                diloco.step()
            try:
                diloco.close()
            except Refused:
                assert rank == 1

    together(replica)
    newest = Bucket(store).newest("fragment-0")
    assert newest is not None
    assert newest.round == 1


def _view(puts: MemoryStore, store: MemoryStore) -> FaultyStore:
    """A store whose creates go one way, and all else another."""
    view = FaultyStore(store)
    view.put_if_absent = puts.put_if_absent  # type: ignore[method-assign]
    return view


class Doubting(MemoryStore):
    """Its client repeats every create, as after a lost answer, and is told that something is there."""

    def put_if_absent(self, key: str, size: int, buffers: Any) -> bool:
        super().put_if_absent(key, size, buffers)
        return False


def test_a_create_that_finds_what_it_has_itself_written_is_one_start_and_one_round() -> None:
    store, arrays = Doubting(), parameters()
    with ObjectStoreAllReduce("memory://", 0, 1, store=store, timeout=TIMEOUT) as allreduce:
        diloco = ArrayDiLoCo(arrays, allreduce, sync_every=1)
        assert diloco.incarnation == 0
        inner(arrays, 0, 0)
        assert diloco.step()
        diloco.close()
    found = inspect_run(Bucket(store))
    assert [(member.rank, member.incarnation, member.outcome) for member in found.members] == [(0, 0, "finished")]
    assert [entry["round"] for entry in found.rounds] == [0]


# Files, at the boundary of the operating system.


@pytest.mark.parametrize("call", ["unlink", "scandir", "link", "write", "open", "preadv"])
def test_a_disk_that_fails_at_any_call_gives_an_error_or_the_right_mean(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO once, at the first use of a system call by both replicas together, at the second, and so on."""
    real, root, hits = getattr(os, call), str(tmp_path), 0
    fails_at, uses, guard = 0, 0, threading.Lock()

    def failing(*given: Any, **options: Any) -> Any:
        nonlocal uses, hits
        ours = call in ("write", "preadv") or any(isinstance(x, str) and x.startswith((root, "/proc")) for x in given)
        with guard:
            uses += ours
            strikes = ours and uses == fails_at
        if strikes:
            hits += 1
            raise Refused(errno.EIO, os.strerror(errno.EIO))
        return real(*given, **options)

    monkeypatch.setattr(f"basilica.diloco.stores.file.os.{call}", failing)
    for fails_at in range(1, 13):
        uses = 0
        stores = [FileStore(f"{root}/{fails_at}")] * WORLD
        assert reduce_rounds(stores, retain=0) == [RIGHT] * WORLD, f"{call} number {fails_at}"
    assert hits >= 3


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One that every user reaches, unlike those that pytest makes."""
    with tempfile.TemporaryDirectory(prefix="basilica-rounds-") as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


def test_a_directory_that_may_not_be_written_any_more_stops_no_round(open_directory: Path) -> None:
    """The real thing: another user than the one who owns the old rounds. Root may do all, so it becomes somebody."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setuid(65534)
            store = FileStore(str(open_directory / "bucket"))
            allreduce = ObjectStoreAllReduce("memory://", 0, 1, store=store, timeout=TIMEOUT, retain=0)
            means = []
            for round in range(ROUNDS):
                means.append(float(allreduce.allreduce([numbers(0, round)])[0][0]))
                os.chmod(open_directory / f"bucket/run/rounds/default/{round:08d}", 0o555)
            told = [str(trouble) for trouble in allreduce.troubles.current]
            right = means == [10.0 * round for round in range(ROUNDS)]
            code = 0 if right and "PermissionError" in told[0] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# Reads that go on after their call has failed.


class Parallel(MemoryStore):
    """Reads in threads. Of the pieces of a result that one replica reads at once, the first fails and the next hang."""

    parallel = 4
    piece_bytes = 16 << 10

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.hung = 0
        self._guard = threading.Lock()
        self._seen = threading.local()
        self._pieces = 0

    def read(self, range: Range) -> memoryview | None:
        if range.key.endswith("result-000-00001") and range.length == self.piece_bytes:
            with self._guard:
                self._pieces += 1
                piece = self._pieces
            if piece == 1:
                raise Refused("no answer")
            if piece <= 3:
                assert self.goes_on.wait(TIMEOUT)
                self.hung += 1
        return super().read(range)


def test_a_read_that_outlives_its_call_writes_into_nobodys_memory() -> None:
    """`out` belongs to the caller again once the call has raised."""
    store = Parallel()
    mine = [np.full(200_000, 1 + rank, np.float32) for rank in range(WORLD)]

    def replica(rank: int) -> None:
        out = [np.zeros_like(mine[rank])]
        allreduce = ObjectStoreAllReduce("memory://", rank, WORLD, store=store, timeout=TIMEOUT)
        if rank == 0:
            with pytest.raises(Refused):
                allreduce.allreduce([mine[rank]], out=out)
            out[0][...] = 7
            store.goes_on.set()
            allreduce.close()  # the reads that were under way are over
            assert (out[0] == 7).all(), "a thread has written into the caller's memory"
        (mean,) = allreduce.allreduce([mine[rank]], out=out)
        assert (mean == 1.5).all()
        allreduce.close()

    together(replica)
    assert store.hung
