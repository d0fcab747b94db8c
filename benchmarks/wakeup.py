"""From a rank's exit to the wake-up of a client that watches the run."""

import time
from collections.abc import Iterator

from benchmarks.harness import PYTHON, Figure, median, percentile, server

ROUNDS = 200
# The rank's last act is to print the time; the line is read after the end, so reading it costs the watcher nothing.
TELL_THE_TIME = "import os, time; os.write(1, repr(time.time()).encode()); os._exit(0)"


def run() -> Iterator[Figure]:
    delays = []
    with server() as process:
        client = process.client()
        for n in range(ROUNDS):
            run = client.wait(client.deploy(f"wake-{n}", [PYTHON, "-S", "-c", TELL_THE_TIME]), "succeeded")
            woken = time.time()
            delays.append(woken - float(run["distributed"]["rankExits"][0]["logTail"][0]))
    yield Figure("rank's exit to watcher's wake-up, median", median(delays) * 1000, "ms")
    yield Figure("rank's exit to watcher's wake-up, 99th percentile", percentile(delays, 99) * 1000, "ms", "< 10 ms")
