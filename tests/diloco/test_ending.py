"""A replica that fails with an exchange in flight ends at once, and neither it nor the others are the worse for it."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from basilica.diloco import ArrayDiLoCo, ObjectStoreAllReduce
from basilica.diloco.background import Background
from basilica.diloco.bucket import Bucket
from basilica.diloco.stores import open_store
from basilica.diloco.stores.memory import MemoryStore
from tests.diloco.gang import fresh_uri
from tests.diloco.test_processes import start

SECONDS = 90.0
"""Long for a process to end, and short against the 600 seconds for which the exchange would wait."""
ENTRYPOINT = "tests.diloco.failing:train"


def begin(tmp_path: Path, rank: int, **arguments: Any) -> "subprocess.Popen[bytes]":
    given = {"rendezvous_uri": f"file://{tmp_path}/bucket", **arguments}
    return start(ENTRYPOINT, rank, 2, given, tmp_path / f"{rank}.json")


@pytest.mark.parametrize("closed", [True, False], ids=["in a block", "never closed"])
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("sigterm", 143)])
def test_a_failing_process_ends_at_once_and_the_run_goes_on(tmp_path: Path, how: str, code: int, closed: bool) -> None:
    gate = tmp_path / "go"
    processes = [begin(tmp_path, 0, how=how, closed=closed), begin(tmp_path, 1, gate=str(gate))]
    try:
        assert processes[0].wait(timeout=SECONDS) == code, (tmp_path / "0.log").read_text()
        bucket = Bucket(open_store(f"file://{tmp_path}/bucket"))
        assert bucket.store.list("run/rounds/fragment-0/00000000/part-00000"), "the exchange was not in flight"
        ends = [(end["rank"], end["outcome"]) for end in bucket.documents("exits")]
        assert ends == ([(0, "failed" if how == "raise" else "stopped")] if closed else [])
        processes.append(begin(tmp_path, 0))
        gate.touch()
        assert [process.wait(timeout=SECONDS) for process in processes[1:]] == [0, 0], (tmp_path / "1.log").read_text()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]


def test_a_block_that_fails_does_not_wait_for_the_others() -> None:
    """In a process that goes on: its exchange ends too, and does not go on writing behind its back."""
    futures = []

    def fails() -> None:
        with ObjectStoreAllReduce(fresh_uri(), 0, 2, timeout=600) as allreduce:
            futures.append(allreduce.submit([np.ones(4)]))
            raise ValueError("loss is NaN")

    began = time.monotonic()
    with pytest.raises(ValueError, match="NaN"):
        fails()
    with pytest.raises(CancelledError, match="was left"):
        futures[0].result(timeout=SECONDS)
    assert time.monotonic() - began < SECONDS


def test_a_block_that_ends_well_waits_for_what_was_submitted() -> None:
    uri = fresh_uri()
    futures = []

    def other() -> None:
        with ObjectStoreAllReduce(uri, 1, 2, timeout=30) as allreduce:
            futures.append(allreduce.submit([np.full(4, 2.0)]))

    with ObjectStoreAllReduce(uri, 0, 2, timeout=30) as allreduce:
        futures.append(allreduce.submit([np.ones(4)]))
        thread = threading.Thread(target=other)
        thread.start()
    thread.join()
    assert [future.done() and future.result()[0].tolist() for future in futures] == [[1.5] * 4] * 2


def test_a_store_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    """The request is under way in compiled code, and nothing comes back."""
    code = """
import sys
import numpy as np
from basilica.diloco import ObjectStoreAllReduce
options = {"endpoint": sys.argv[1], "region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
with ObjectStoreAllReduce("s3://bucket/run", 0, 2, store_options=options) as allreduce:
    allreduce.submit([np.ones(4)])
    sys.stdin.readline()
    raise ValueError("loss is NaN")
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", code, url], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        server.settimeout(SECONDS)
        connection, _ = server.accept()
        with connection:
            try:
                _, told = process.communicate("go\n", timeout=SECONDS)
            finally:
                process.kill()
    assert process.returncode == 1
    assert told.splitlines()[-1] == "ValueError: loss is NaN"


class BrokenStore(MemoryStore):
    """Takes nothing once it is broken, as a bucket whose credentials have expired."""

    broken = False

    def put_if_absent(self, key: str, size: int, buffers: Any) -> bool:
        if self.broken:
            raise OSError("the credentials have expired")
        return super().put_if_absent(key, size, buffers)


def test_the_error_that_ends_a_block_is_not_hidden_by_a_bucket_that_cannot_be_written() -> None:
    store = BrokenStore()

    def fails() -> None:
        with (
            ObjectStoreAllReduce("memory://", 0, 1, store=store) as allreduce,
            ArrayDiLoCo([np.zeros(4, np.float32)], allreduce, sync_every=2),
        ):
            store.broken = True
            raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="NaN") as failed:
        fails()
    assert any("credentials have expired" in note for note in failed.value.__notes__)


def test_work_in_the_background_is_done_in_order_by_as_many_threads_as_allowed() -> None:
    pool, seen, busy, most = Background("test", threads=3), [], 0, 0
    guard, gate = threading.Lock(), threading.Event()

    def work(number: int) -> int:
        nonlocal busy, most
        with guard:
            busy += 1
            most = max(most, busy)
            seen.append(number)
        gate.wait(30)
        with guard:
            busy -= 1
        return number

    futures = [pool.submit(work, number) for number in range(9)]
    gate.set()
    pool.close()
    assert [future.result(0) for future in futures] == list(range(9))
    assert most <= 3
    assert sorted(seen) == list(range(9))
    assert pool.submit(work, 9).result(30) == 9, "it can be used again"
    pool.close(wait=False)
    with pytest.raises(RuntimeError, match="was left"):
        pool.submit(work, 10)


def test_the_threads_of_a_pool_end_with_it() -> None:
    pool = Background("short-lived")
    pool.submit(int).result(30)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "short-lived-0"]
    del pool
    thread.join(30)
    assert not thread.is_alive()
