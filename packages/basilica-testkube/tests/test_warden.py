"""A cluster whose process is killed leaves none of its pods' processes behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from basilica_testkube import KubeServer
from manifests import pod

PODS = 3
PATIENCE_S = 30.0
CLUSTER = """
import os, sys, time
from basilica_testkube import KubeServer
from manifests import job

kube = KubeServer().start()
kube.create(job("gang", {pods}, "sh", "-c", {script!r}))
{then}
time.sleep(1000)
"""
# Each pod: a shell that is deaf to requests, its child, a grandchild in a session of its own, and what hides for ever.
SCRIPT = (
    "trap '' TERM; echo $$$$ > {folder}/shell-$JOB_COMPLETION_INDEX; "
    "sleep 1000 & echo $! > {folder}/child-$JOB_COMPLETION_INDEX; "
    "setsid sh -c 'echo $$$$ > {folder}/session-$JOB_COMPLETION_INDEX; exec sleep 1000' & "
    '(setsid sh -c \'trap "" TERM HUP INT; echo $$$$ > {folder}/restless-$JOB_COMPLETION_INDEX; '
    "while :; do sleep 0.01; done' &); "
    "wait"
)
NAMES = ("shell", "child", "session", "restless")


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@contextmanager
def cluster(folder: Path, then: str = "") -> "Iterator[tuple[subprocess.Popen[bytes], list[int]]]":
    """A process with a cluster in it, and all the processes of its pods."""
    code = CLUSTER.format(pods=PODS, script=SCRIPT.format(folder=folder), then=then)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
    files = [folder / f"{name}-{index}" for name in NAMES for index in range(PODS)]
    pids: list[int] = []
    try:
        until(lambda: all(f.exists() and f.read_text().strip() for f in files), "the pods did not start")
        pids = [int(file.read_text()) for file in files]
        assert all(alive(pid) for pid in pids)
        yield process, pids
    finally:
        process.kill()
        process.wait()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def wardens() -> set[int]:
    return {pid for pid in children(os.getpid()) if b"strays.py" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_what_pods_started_ends_when_the_process_of_their_cluster_is_killed(tmp_path: Path, by: signal.Signals) -> None:
    with cluster(tmp_path) as (process, pids):
        process.send_signal(by)
        assert process.wait(PATIENCE_S) == -by
        until(lambda: not any(alive(pid) for pid in pids), "processes of pods run on")


def test_a_fork_of_the_cluster_that_lives_on_keeps_no_pod_alive(tmp_path: Path) -> None:
    """It holds all that its parent had open."""
    fork = f"open({str(tmp_path / 'fork')!r}, 'w').write(str(child)) if (child := os.fork()) else None"
    with cluster(tmp_path, fork) as (process, pids):
        until(lambda: (tmp_path / "fork").exists() and (tmp_path / "fork").read_text(), "no fork")
        child = int((tmp_path / "fork").read_text())
        try:
            process.kill()
            process.wait()
            until(lambda: not any(alive(pid) for pid in pids), "processes of pods run on")
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_command_in_a_container_ends_too(tmp_path: Path) -> None:
    run = "kube.wait_for(lambda: all(p['status']['phase'] == 'Running' for p in kube.pods('gang')))\n" + (
        "from kubernetes.client import CoreV1Api; from kubernetes.stream import stream\n"
        "script = 'echo $$ > FILE; exec sleep 1000'\n"
        "stream(CoreV1Api(kube.api_client()).connect_get_namespaced_pod_exec, kube.pods('gang')[0]['metadata']['name'],"
        " 'default', command=['sh', '-c', script], stdout=True, _preload_content=False)\n"
    ).replace("FILE", str(tmp_path / "exec"))
    with cluster(tmp_path, run) as (process, pids):
        until(lambda: (tmp_path / "exec").exists() and (tmp_path / "exec").read_text().strip(), "no command")
        pid = int((tmp_path / "exec").read_text())
        assert alive(pid)
        process.kill()
        until(lambda: not any(alive(each) for each in (pid, *pids)), "processes of pods run on")


def test_a_warden_is_there_while_pods_may_run_and_goes_with_the_cluster() -> None:
    before = wardens()
    with KubeServer() as kube:
        assert wardens() == before, "no process has started"
        kube.create(pod("a", "sleep", "1000"))
        kube.wait_for(lambda: wardens() != before)
        (warden,) = wardens() - before
        kube.create(pod("b", "sleep", "1000"))
        kube.wait_for(lambda: all(each["status"].get("phase") == "Running" for each in kube.pods()))
        assert wardens() - before == {warden}
    assert wardens() == before
    assert not alive(warden)


def test_a_cluster_without_processes_has_no_warden() -> None:
    before = wardens()
    with KubeServer(processes=False) as kube:
        kube.create(pod("a", "sleep", "1000"))
        kube.wait_for(lambda: kube.pods()[0]["status"].get("phase") == "Running")
        assert wardens() == before
