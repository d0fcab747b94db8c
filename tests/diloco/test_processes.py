"""Real processes: replicas that are killed, and replicas that are several processes themselves."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from basilica.diloco.bucket import Bucket
from basilica.diloco.stores import open_store
from tests.diloco.golden.scenarios import batch, flat, model, optimizer

ROOT = Path(__file__).parents[2]
SECONDS = 90.0


def start(entrypoint: str, rank: int, world: int, arguments: dict[str, Any], result: Path) -> "subprocess.Popen[bytes]":
    env = {**os.environ, "REPLICA_RANK": str(rank), "WORLD_SIZE": str(world), "ENTRYPOINT": entrypoint}
    env |= {"ENTRYPOINT_ARGS": json.dumps(arguments), "BASILICA_RESULT_FILE": str(result), "OMP_NUM_THREADS": "1"}
    with result.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "basilica.diloco.replica_entrypoint"],
            env={**env, "OPENBLAS_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )


class Replicas:
    """Processes by rank, started again as an executor would; nothing outlives the block."""

    def __init__(self, world: int, arguments: dict[str, Any], directory: Path) -> None:
        self._world, self._arguments, self._directory = world, arguments, directory
        self._processes = [self._start(rank) for rank in range(world)]

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        result = self._directory / f"{rank}.json"
        return start("tests.diloco.replicas:regression", rank, self._world, self._arguments, result)

    def kill(self, rank: int) -> None:
        """SIGKILL in the middle of whatever it does, and a new process in its place."""
        self._processes[rank].send_signal(signal.SIGKILL)
        self._processes[rank].wait()
        self._processes[rank] = self._start(rank)

    def results(self) -> list[float]:
        codes = [process.wait(timeout=SECONDS) for process in self._processes]
        logs = "\n".join(path.read_text() for path in self._directory.glob("*.log"))
        assert codes == [0] * self._world, logs
        return [json.loads((self._directory / f"{rank}.json").read_text()) for rank in range(self._world)]

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_for_round(uri: str, round: int) -> None:
    bucket, deadline = Bucket(open_store(uri)), time.monotonic() + SECONDS
    while len(bucket.store.list("run/log/fragment-0/")) < round:
        assert time.monotonic() < deadline, f"round {round} did not come"
        time.sleep(0.02)


def run(tmp_path: Path, name: str, kills: int, **options: Any) -> list[float]:
    """The losses of four replicas, with one of them killed every third round."""
    uri = f"file://{tmp_path}/{name}-bucket"
    (tmp_path / name).mkdir()
    rounds = 3 * (kills or 4) + 4
    arguments = {"rendezvous_uri": uri, "rounds": rounds, "pause": 0.004, **options}
    with Replicas(4, arguments, tmp_path / name) as replicas:
        for kill in range(kills):
            wait_for_round(uri, 3 * kill + 2)
            replicas.kill((kill + 1) % 4)
        losses = replicas.results()
    members = Bucket(open_store(uri)).documents("members")
    assert len(members) == 4 + kills
    assert len(Bucket(open_store(uri)).documents("log")) == rounds
    return losses


@pytest.mark.parametrize(
    "options", [{"timeout": 60}, {"quorum": 3, "grace": 0.3, "timeout": 60}], ids=["all", "quorum"]
)
def test_replicas_that_are_killed_every_few_rounds_change_nothing_but_noise(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    calm = run(tmp_path, "calm", 0, **options)
    hurt = run(tmp_path, "hurt", 4, **options)
    assert len(set(calm)) == len(set(hurt)) == 1
    assert hurt[0] < 1.25 * calm[0]


def _free_ports(count: int) -> int:
    """The first of some neighbouring ports that are free."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        try:
            for offset in range(1, count):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return port
    raise AssertionError("no free ports")


def of_two_processes_each(tmp_path: Path, **arguments: Any) -> list[list[float]]:
    """What the four processes of two replicas end with."""
    port = _free_ports(2)
    given = {"rendezvous_uri": f"file://{tmp_path}/bucket", "steps": 8, "port": port, **arguments}
    processes = [
        start(
            "tests.diloco.replicas:in_processes",
            rank,
            2,
            {**given, "member": member},
            tmp_path / f"{rank}-{member}.json",
        )
        for rank in range(2)
        for member in range(2)
    ]
    try:
        codes = [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert codes == [0] * 4, "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    return [json.loads((tmp_path / f"{rank}-{member}.json").read_text()) for rank in range(2) for member in range(2)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_replica_may_be_several_processes(tmp_path: Path, kind: str) -> None:
    """Two replicas of two processes each: the same as two replicas whose batches are twice as large."""
    ends = of_two_processes_each(tmp_path, kind=kind)
    assert ends[0] == ends[1] == ends[2] == ends[3]
    np.testing.assert_allclose(ends[0], _with_large_batches(8), rtol=1e-4, atol=1e-5)


def test_the_processes_of_a_replica_have_its_buffers(tmp_path: Path) -> None:
    ends = of_two_processes_each(tmp_path, kind="ddp", norm=True)
    assert ends[0] == ends[1] == ends[2] == ends[3]
    *_, batches = ends[0]
    assert batches == 8, "the last number is how many batches were seen"


def _with_large_batches(steps: int) -> list[float]:
    from basilica.diloco import DiLoCo, ObjectStoreAllReduce
    from tests.diloco.gang import gang

    def replica(allreduce: ObjectStoreAllReduce) -> list[float]:
        network = model()
        inner = optimizer(network.parameters())
        diloco = DiLoCo(network, inner, allreduce, sync_every=4)
        for step in range(steps):
            both = [batch(2 * allreduce.rank + member, step) for member in range(2)]
            inputs, targets = (torch.cat(parts) for parts in zip(*both, strict=True))
            inner.zero_grad()
            torch.nn.functional.mse_loss(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
            inner.step()
            diloco.step()
        diloco.close()
        return flat(network)

    return gang(2, replica)[0]
