"""From a rank's exit to the return of the SDK's wait, beside the published client's in the same run."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from basilica import BasilicaClient, WorldSize
from benchmarks.harness import PYTHON, Figure, ServerProcess, median, percentile, server

ROUNDS = 100
PUBLISHED = Path(__file__).parents[1] / ".venvs/official-0.36.8/bin/python"
PUBLISHED_ROUNDS = 5
# Lives long enough for the wait to begin; its last act is to print the time.
TELL_THE_TIME = "import os, time; time.sleep({}); os.write(1, repr(time.time()).encode()); os._exit(0)"
WAIT = """
import json, sys, time, basilica
url, key, rounds, argv = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
client = basilica.BasilicaClient(base_url=url, api_key=key)
delays = []
for n in range(rounds):
    training = client._deploy_distributed_impl(
        f"published-{n}", command=argv, world_size=basilica.WorldSize(1, 1, 1), gpu_count=0, timeout=10
    )
    training.wait_until_complete(timeout=60)
    delays.append(time.time() - float(training.logs().strip()))
print(json.dumps(delays))
"""


def run() -> Iterator[Figure]:
    with server() as process:
        ours = _ours(process)
        yield Figure("rank's exit to join()'s return, median", median(ours) * 1000, "ms")
        yield Figure("rank's exit to join()'s return, 99th percentile", percentile(ours, 99) * 1000, "ms", "< 10 ms")
        if PUBLISHED.exists():
            theirs = _theirs(process)
            yield Figure("the published client's wait_until_complete, median", median(theirs) * 1000, "ms")
            yield Figure("ours against the published client's", median(ours) / median(theirs), "times")


def _ours(process: ServerProcess) -> list[float]:
    delays = []
    argv = [PYTHON, "-S", "-c", TELL_THE_TIME.format(0.05)]
    with BasilicaClient(process.url, process.key) as client:
        for n in range(ROUNDS):
            training = client.deploy_distributed(
                f"ours-{n}", command=argv, world_size=WorldSize(1, 1, 1), gpu_count=0, wait=False
            )
            training.join()
            woken = time.time()
            delays.append(woken - float(training.rank_exits[0].log_tail[0]))
    return delays


def _theirs(process: ServerProcess) -> list[float]:
    argv = json.dumps([PYTHON, "-S", "-c", TELL_THE_TIME.format(1.5)])
    command = [str(PUBLISHED), "-c", WAIT, process.url, process.key, str(PUBLISHED_ROUNDS), argv]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    delays: list[float] = json.loads(done.stdout)
    return delays
