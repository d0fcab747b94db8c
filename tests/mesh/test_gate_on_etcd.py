"""The gate against real etcd, once through the v2 keys API and once through the v3 gateway."""

import statistics
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from basilica.mesh import mesh_status, mesh_wait
from tests.mesh.conftest import Pod
from tests.mesh.peers import Etcd

ROUNDS = 15
ODD_NODES = ["a/b", "100%", "%2F", "a b", "käse-節", "a?wait=true", "a#b", "a;b&c=d", "n" * 250, "a\nb", "\udcff"]


def waiting(timeout: float = 20) -> "Future[float]":
    """A wait in the background; its result is the moment when it returned."""

    def wait() -> float:
        mesh_wait(timeout)
        return time.monotonic()

    future: Future[float] = Future()
    threading.Thread(target=lambda: future.set_result(wait()), daemon=True).start()
    return future


@pytest.mark.parametrize("keys", [["mesh-ready"], ["mesh-degraded"], ["mesh-degraded", "mesh-ready"]], ids="+".join)
def test_a_key_that_is_there_releases_at_once_and_ready_wins(
    etcd: Etcd, pod: Pod, capsys: pytest.CaptureFixture[str], keys: list[str]
) -> None:
    pod(etcd.endpoint)
    for key in keys:
        etcd.write(key, "host-1")
    began = time.monotonic()
    mesh_wait()
    assert time.monotonic() - began < 1
    begin, end = capsys.readouterr().err.splitlines()
    assert begin.startswith("mesh-wait: BEGIN ")
    if "mesh-ready" in keys:
        assert mesh_status() == "ready"
        assert end == "mesh-wait: OK after=0s"
    else:
        assert mesh_status() == "degraded"
        assert end.startswith("mesh-wait: DEGRADED after=0s node=host-1")


def test_timeout_zero_sees_a_key_that_is_there(etcd: Etcd, pod: Pod) -> None:
    pod(etcd.endpoint)
    etcd.write("mesh-ready", "host-1")
    mesh_wait(0)
    assert mesh_status() == "ready"


def test_without_keys_the_wait_times_out_and_leaves_no_watcher(
    etcd: Etcd, pod: Pod, capsys: pytest.CaptureFixture[str]
) -> None:
    pod(etcd.endpoint)
    etcd.write("mesh-ready", "another-host")
    began = time.monotonic()
    mesh_wait(0.3)
    assert 0.3 <= time.monotonic() - began < 1.3
    assert mesh_status() == "timeout"
    assert "mesh-wait: TIMEOUT after=0s node=host-1" in capsys.readouterr().err
    etcd.until_watchers(0)


@pytest.mark.parametrize(("key", "status"), [("mesh-ready", "ready"), ("mesh-degraded", "degraded")])
def test_a_key_written_later_releases_within_milliseconds(etcd: Etcd, pod: Pod, key: str, status: str) -> None:
    pod(etcd.endpoint)
    since_asked, since_written = [], []
    for _ in range(ROUNDS):
        etcd.reset()
        etcd.until_watchers(0)
        wait = waiting()
        etcd.until_watchers(2)
        asked = time.monotonic()
        etcd.write(key, "host-1")
        written = time.monotonic()
        returned = wait.result(10)
        assert mesh_status() == status
        since_asked.append((returned - asked) * 1000)
        since_written.append((returned - written) * 1000)
    median = statistics.median(since_written)
    print(
        f"\n{'v2' if etcd.v2 else 'v3'} {key}: returned {median:.2f} ms after etcd had answered the write, "
        f"{statistics.median(since_asked):.2f} ms after it was sent (medians of {ROUNDS}; worst {max(since_asked):.2f})"
    )
    assert median < 5


def test_degraded_then_ready_is_ready_for_the_next_wait(etcd: Etcd, pod: Pod) -> None:
    pod(etcd.endpoint)
    etcd.write("mesh-degraded", "host-1")
    mesh_wait()
    assert mesh_status() == "degraded"
    etcd.write("mesh-ready", "host-1")
    mesh_wait()
    assert mesh_status() == "ready"


def test_a_key_that_a_reset_took_away_does_not_release_and_its_return_does(etcd: Etcd, pod: Pod) -> None:
    pod(etcd.endpoint)
    etcd.write("mesh-ready", "host-1")
    mesh_wait()
    assert mesh_status() == "ready"
    etcd.reset()
    wait = waiting()
    etcd.until_watchers(2)
    etcd.write("mesh-ready", "host-1")
    wait.result(10)
    assert mesh_status() == "ready"


@pytest.mark.parametrize("node", ODD_NODES)
def test_any_node_name_finds_its_key(etcd: Etcd, pod: Pod, capsys: pytest.CaptureFixture[str], node: str) -> None:
    pod(etcd.endpoint, node)
    mesh_wait(0)
    assert mesh_status() == "timeout"
    etcd.write("mesh-ready", node)
    mesh_wait(5)
    assert mesh_status() == "ready"
    assert all(line.startswith("mesh-wait: ") for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("v2", [True, False])
def test_an_etcd_that_comes_late_and_is_replaced_by_an_empty_one_still_releases(pod: Pod, v2: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="basilica-etcd-") as folder:
        etcd = Etcd(Path(folder) / "first", v2=v2)
        pod(etcd.endpoint)
        wait = waiting(60)
        try:
            etcd.start()
            etcd.until_watchers(2)
            etcd.stop()
            etcd.data = Path(folder) / "second"
            etcd.start()
            etcd.until_watchers(2)
            etcd.write("mesh-ready", "host-1")
            wait.result(10)
        finally:
            etcd.stop()
    assert mesh_status() == "ready"


def test_many_waits_at_once_are_all_released(etcd: Etcd, pod: Pod) -> None:
    pod(etcd.endpoint)
    with ThreadPoolExecutor(16) as pool:
        waits = [pool.submit(mesh_wait, 20) for _ in range(16)]
        etcd.until_watchers(32)
        began = time.monotonic()
        etcd.write("mesh-ready", "host-1")
        for wait in waits:
            wait.result(10)
    assert time.monotonic() - began < 1
