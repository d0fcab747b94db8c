"""One contract for every object store: memory, files, and S3 as moto's server speaks it."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from basilica.diloco.allreduce import ObjectStoreAllReduce
from basilica.diloco.effects import Range
from basilica.diloco.replica_entrypoint import store_result
from basilica.diloco.stores import ObjectStore, open_store
from basilica.diloco.stores.file import FileStore
from basilica.executors.results import read_results

S3_SETTINGS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server with a bucket called `bucket`."""
    server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bucket")
    yield url
    running.stop()


def s3_options(url: str) -> dict[str, Any]:
    keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
    return {"endpoint": url, "client_options": {"allow_http": True}, **keys}


@pytest.fixture(params=["memory", "file", "file without unnamed files", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "s3":
        prefix = tmp_path.name
        return open_store(f"s3://bucket/{prefix}", s3_options(request.getfixturevalue("s3")))
    if request.param == "memory":
        return open_store(f"memory://{tmp_path.name}")
    if request.param == "file without unnamed files":
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_EXCL)
    return open_store(f"file://{tmp_path}/a%20directory")


def put(store: ObjectStore, key: str, *texts: bytes) -> None:
    store.put(key, sum(map(len, texts)), iter([memoryview(text) for text in texts]))


def create(store: ObjectStore, key: str, *texts: bytes) -> bool:
    return store.put_if_absent(key, sum(map(len, texts)), iter([memoryview(text) for text in texts]))


def read(store: ObjectStore, key: str, start: int, length: int) -> bytes | None:
    answer = store.read(Range(key, start, length))
    return None if answer is None else bytes(answer)


def test_what_was_written_is_read(store: ObjectStore) -> None:
    put(store, "a/one", b"hello ", b"world")
    assert read(store, "a/one", 0, 11) == b"hello world"
    assert read(store, "a/one", 6, 3) == b"wor"
    put(store, "a/one", b"other")
    assert read(store, "a/one", 0, 5) == b"other"


def test_a_range_ends_where_the_object_ends(store: ObjectStore) -> None:
    put(store, "a/one", b"0123456789")
    assert read(store, "a/one", 8, 100) == b"89"
    assert read(store, "a/one", 10, 5) == b""
    assert read(store, "a/one", 500, 5) == b""
    assert read(store, "a/none", 0, 5) is None


def test_reading_into_memory_that_is_there(store: ObjectStore) -> None:
    put(store, "a/one", b"0123456789")
    memory = bytearray(4)
    assert store.read(Range("a/one", 2, 4, memoryview(memory))) is not None
    assert memory == b"2345"


def test_a_create_has_one_winner(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as threads:
        texts = [b"writer %d" % n for n in range(8)]
        won = list(threads.map(lambda text: create(store, "a/register", text), texts))
    assert sum(won) == 1
    assert read(store, "a/register", 0, 100) == texts[won.index(True)]
    assert not create(store, "a/register", b"too late")


def test_listing_is_by_prefix_in_order_and_behind_a_key(store: ObjectStore) -> None:
    for key in ("r/2/part-1", "r/1/part-0", "r/1/part-1", "r/10/x", "s/1"):
        put(store, key, b"12345")
    assert [(f.key, f.size) for f in store.list("r/1/")] == [("r/1/part-0", 5), ("r/1/part-1", 5)]
    assert [f.key for f in store.list("r/1/part-1")] == ["r/1/part-1"]
    assert [f.key for f in store.list("r/", after="r/1/part-0")] == ["r/1/part-1", "r/10/x", "r/2/part-1"]
    assert store.list("nothing/") == ()


def test_deleting_what_is_gone_is_fine(store: ObjectStore) -> None:
    put(store, "a/one", b"x")
    store.delete(["a/one"])
    store.delete(["a/one"])
    assert store.list("a/") == ()
    assert read(store, "a/one", 0, 1) is None


def test_empty_objects_exist(store: ObjectStore) -> None:
    assert create(store, "joins/3-00001")
    assert [(f.key, f.size) for f in store.list("joins/3-")] == [("joins/3-00001", 0)]


def test_an_all_reduce_goes_through(store: ObjectStore) -> None:
    replicas = [ObjectStoreAllReduce("memory://", rank, 3, store=store, timeout=60, retain=0) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for n in range(3):
            arrays = [[np.full(70_000, n + rank, np.float32), np.arange(9.0)] for rank in range(3)]
            futures = [threads.submit(r.allreduce, a) for r, a in zip(replicas, arrays, strict=True)]
            for result in (future.result(60) for future in futures):
                assert (result[0] == n + 1).all()
                assert (result[1] == np.arange(9.0)).all()
    assert len({replica.history[-1].outcome.chain for replica in replicas}) == 1
    for replica in replicas:
        replica.close()


def test_a_writer_that_is_killed_leaves_no_object_that_can_be_seen(tmp_path: Path) -> None:
    code = """
import os, sys
from basilica.diloco.stores.file import FileStore
def buffers():
    yield memoryview(b"half of it")
    os.kill(os.getpid(), 9)
FileStore(sys.argv[1]).put_if_absent("a/one", 100, buffers())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert FileStore(str(tmp_path)).list("") == ()
    assert create(FileStore(str(tmp_path)), "a/one", b"whole")


@pytest.mark.parametrize(("used_before", "answer"), [(False, "2 objects"), (True, "fork before the first all-reduce")])
def test_a_child_may_be_forked_before_the_store_is_used_and_is_told_so_after(
    s3: str, tmp_path: Path, used_before: bool, answer: str
) -> None:
    code = f"""
import os
from basilica.diloco.stores import open_store
store = open_store("s3://bucket/forked-{used_before}")
if {used_before}:
    store.put("a", 1, iter([memoryview(b"1")]))
child = os.fork()
if not child:
    try:
        for key in "ab":
            store.put(key, 1, iter([memoryview(b"2")]))
        print(len(store.list("")), "objects", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    environment = {**os.environ, **S3_SETTINGS, "AWS_ENDPOINT_URL": s3}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the child too: it would outlive its parent
        process.communicate()
        raise
    assert answer in printed


def test_files_can_be_read_by_other_users_however_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of several users meet on one disk: only the umask decides."""
    store = FileStore(str(tmp_path))
    put(store, "a/replaced", b"x")
    create(store, "a/created", b"x")
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_EXCL)
    create(store, "a/drafted", b"x")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {modes["created"]}


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_directory_that_is_removed_while_an_object_is_written_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    """Whoever deletes the last object of a directory deletes that too; a late piece of an old state finds it gone."""
    if not unnamed:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_EXCL)
    store = FileStore(str(tmp_path))
    put(store, "a/old", b"x")

    def buffers() -> Iterator[memoryview]:
        yield memoryview(b"half, ")
        store.delete(["a/old"])
        yield memoryview(b"whole")

    assert store.put_if_absent("a/new", 11, buffers())
    assert read(store, "a/new", 0, 100) == b"half, whole"


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/a/one'"):
        create(FileStore(str(tmp_path)), "a/one", b"x")


def test_an_object_that_no_request_can_create_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"part-00000 would have 6\.4 GB.* more `fragments`"):
        open_store("s3://bucket/run").put_if_absent("part-00000", 6 << 30, iter(()))


def test_results_are_stored_where_the_replicas_met_also_without_tls(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**S3_SETTINGS, "AWS_ENDPOINT_URL": s3}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    environment = {"RENDEZVOUS_URI": "s3://bucket/with-results", "REPLICA_JOB": "job"}
    store_result(environment, 1, {"exit_code": 0, "result": 7})
    found = read_results(environment["RENDEZVOUS_URI"], "job", [0, 1])
    assert {rank: stored["result"] for rank, stored in found.items()} == {1: 7}
