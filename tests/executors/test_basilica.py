"""The executor on a control plane keeps the contract, on a server of its own and on the embedded one."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from basilica import BasilicaClient
from basilica.client import embedded
from basilica.executors import BasilicaExecutor, ReplicaHandle, ReplicaResult, ServerlessExecutor
from basilica.testing.executor_contract import SECONDS, ExecutorContract, until
from tests.support.server import Server, serving


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded server of this module."""
    before = dict(os.environ)
    directory = tmp_path_factory.mktemp("state")
    os.environ |= {"BASILICA_STATE_DIR": str(directory), "BASILICA_IDLE_EXIT": "300"}
    os.environ.pop("BASILICA_API_URL", None)
    yield directory
    embedded.shutdown(directory, cancel_runs=True)
    os.environ.clear()
    os.environ.update(before)


class TestBasilicaExecutor(ExecutorContract):
    runs_callables = True
    cancels_gang = True
    fails_together = True

    def maker(self, directory: Path) -> Callable[[], ServerlessExecutor]:
        return partial(BasilicaExecutor, grace_seconds=2)


def test_all_are_told_who_failed_first(tmp_path: Path) -> None:
    with BasilicaExecutor(grace_seconds=2) as executor:
        arguments = {"culprit": 1, "code": 3, "directory": str(tmp_path)}
        handles = executor.launch_replicas(3, "basilica.testing.replicas:leave_or_wait", arguments)
        results = executor.collect(handles, timeout=SECONDS)
    assert results[1]["error"] == "exited with code 3: rank 1 leaves with 3"
    assert [result["error"] for result in (results[0], results[2])] == ["stopped, since rank 1 failed first"] * 2
    assert all(result["exit_code"] for result in results)


def test_a_launch_that_is_interrupted_leaves_no_run(tmp_path: Path) -> None:
    with BasilicaClient() as client, BasilicaExecutor(client=client, run_id="interrupted") as executor:
        deploy = client.deploy_distributed
        names: list[str] = []

        def deploy_and_be_interrupted(name: str, **options: Any) -> None:
            deploy(name, **options)
            names.append(name)
            raise KeyboardInterrupt

        client.deploy_distributed = deploy_and_be_interrupted  # type: ignore[method-assign, assignment]
        arguments = {"directory": str(tmp_path)}
        with pytest.raises(KeyboardInterrupt):
            executor.launch_replicas(1, "basilica.testing.replicas:wait", arguments)
        handle = ReplicaHandle(0, "basilica", {"job_name": names[0]})
        assert executor.collect([handle], timeout=SECONDS)[0]["status"] == "cancelled"


def test_two_gangs_at_once_with_the_same_run_id() -> None:
    with BasilicaExecutor(run_id="same") as executor:
        gangs = [executor.launch_replicas(1, "basilica.testing.replicas:tell", {"steps": n}) for n in (1, 2)]
        results = executor.collect([gangs[1][0], gangs[0][0]], timeout=SECONDS)
    assert [result["result"]["arguments"] for result in results] == [{"steps": 2}, {"steps": 1}]
    assert all(result["job_name"].startswith("same-") for result in results)


def test_another_server_that_is_away_for_a_while(tmp_path: Path) -> None:
    """Its replicas go on, and whoever collects them waits for it."""
    with serving(tmp_path / "server") as server:
        port = server.url.rpartition(":")[2]
        executor = BasilicaExecutor(server.url, server.key, grace_seconds=2)
        path = {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
        arguments = {"directory": str(tmp_path)}
        handles = executor.launch_replicas(2, wait_here, {**arguments, "path": path["PYTHONPATH"]})
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        results: list[ReplicaResult] = []
        collecting = threading.Thread(target=lambda: results.extend(executor.collect(handles, timeout=SECONDS)))
        collecting.start()
        server.kill()
        again = Server(tmp_path / "server", "--port", port)
        (tmp_path / "gate").touch()
        collecting.join(SECONDS)
        assert [result["result"] for result in results] == ["rank 0 was here", "rank 1 was here"]
        executor.close()
        again.stop()


def wait_here(directory: str, path: str) -> str:
    import sys

    sys.path[:0] = path.split(":")
    from basilica.testing.replicas import wait

    return wait(directory)
