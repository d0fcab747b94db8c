"""2,000 runs created and finished through the API: server on one core, load from another process on another.

The store is as safe as in production: every answer to a create is on the disk before it is sent.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Figure, ServerProcess, server

RUNS = 2000
CONNECTIONS = 16


def run() -> Iterator[Figure]:
    cores = sorted(os.sched_getaffinity(0))
    prefix = ["taskset", "-c", str(cores[0])]
    os.sched_setaffinity(0, {cores[-1]})
    try:
        with server("benchmarks.fake_server", "--finish", prefix=prefix) as process:
            began = time.perf_counter()
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(lambda n: _create(process, n), range(CONNECTIONS)))
            client = process.client()
            while not all(d["phase"] == "succeeded" for d in client.call("GET", "/deployments")["deployments"]):
                time.sleep(0.02)
            took = time.perf_counter() - began
    finally:
        os.sched_setaffinity(0, cores)
    yield Figure("runs created and finished through the API", RUNS / took, "per second", "> 500")


def _create(process: ServerProcess, worker: int) -> None:
    client = process.client()
    for n in range(worker, RUNS, CONNECTIONS):
        client.deploy(f"run-{n}", ["true"])
    client.close()
