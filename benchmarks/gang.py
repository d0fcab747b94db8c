"""32 trivial ranks, until a client sees `succeeded`, beside a bare loop of subprocesses and beside torchrun."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import PYTHON, Client, Figure, median, server

RANKS = 32
ROUNDS = 7
TRIVIAL = [PYTHON, "-c", "pass"]


def run() -> Iterator[Figure]:
    bare, ours = [], []
    with server() as process:
        client = process.client()
        _deploy(client, "warm-up")
        for n in range(ROUNDS):
            bare.append(_bare())
            ours.append(_deploy(client, f"gang-{n}"))
    yield Figure("bare subprocess loop, 32 ranks", median(bare) * 1000, "ms")
    yield Figure("deploy 32 ranks until succeeded", median(ours) * 1000, "ms")
    yield Figure("deploy against the bare loop", median(ours) / median(bare), "times", "< 2")
    torchrun = shutil.which("torchrun", path=str(Path(PYTHON).parent))
    if torchrun is None:
        return
    theirs = median([_torchrun(torchrun) for _ in range(3)])
    yield Figure("torchrun --nproc-per-node 32", theirs * 1000, "ms")
    yield Figure("deploy against torchrun", median(ours) / theirs, "times", "< 0.33")


def _bare() -> float:
    began = time.perf_counter()
    for process in [subprocess.Popen(TRIVIAL) for _ in range(RANKS)]:
        process.wait()
    return time.perf_counter() - began


def _deploy(client: Client, name: str) -> float:
    began = time.perf_counter()
    client.wait(client.deploy(name, TRIVIAL, RANKS), "succeeded")
    return time.perf_counter() - began


def _torchrun(program: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "trivial.py"
        script.write_text("pass\n")
        began = time.perf_counter()
        argv = [program, "--nproc-per-node", str(RANKS), str(script)]
        subprocess.run(argv, check=True, capture_output=True)
        return time.perf_counter() - began
