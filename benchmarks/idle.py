"""What a thousand runs cost while nothing changes."""

import time
from collections.abc import Iterator

from benchmarks.harness import Figure, ServerProcess, server

RUNS = 1000
SECONDS = 60.0


def run() -> Iterator[Figure]:
    with server() as process:
        client = process.client()
        for n in range(RUNS - 1):
            client.wait(client.deploy(f"done-{n}", ["true"]), "succeeded")
        live = client.deploy("live", ["sleep", "3600"])
        client.wait(live, "ready")
        yield Figure("999 finished runs and one live, idle", _share(process), "% of a core", "< 1 %")
        client.call("DELETE", "/deployments/live?wait=30")
    with server("benchmarks.fake_server") as process:
        client = process.client()
        for n in range(RUNS):
            client.deploy(f"live-{n}", ["true"])
        yield Figure("1,000 live runs, idle, no-op runtime", _share(process), "% of a core", "< 1 %")


def _share(process: ServerProcess) -> float:
    time.sleep(2)  # let what was under way end; what is measured is the rest
    before = process.cpu_seconds()
    time.sleep(SECONDS)
    return (process.cpu_seconds() - before) / SECONDS * 100
