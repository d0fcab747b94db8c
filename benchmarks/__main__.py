"""`python -m benchmarks [NAME…]`: measure, and print each figure beside its goal."""

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks import (
    diloco,
    diloco_training,
    elastic,
    gang,
    idle,
    ledger,
    mesh,
    planned,
    report,
    samples,
    throughput,
    wait,
    wakeup,
)
from benchmarks.harness import Figure

ALL = {
    "gang": gang,
    "wakeup": wakeup,
    "wait": wait,
    "throughput": throughput,
    "idle": idle,
    "report": report,
    "samples": samples,
    "elastic": elastic,
    "planned": planned,
    "ledger": ledger,
    "diloco": diloco,
    "diloco-training": diloco_training,
    "mesh": mesh,
}
LONG = {"diloco-training"}  # many minutes: only if asked for by name


def main(names: list[str]) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    figures: list[Figure] = []
    for name in names or [name for name in ALL if name not in LONG]:
        print(f"{name}: {(ALL[name].__doc__ or '').splitlines()[0]}", flush=True)
        for figure in ALL[name].run():
            print(figure, flush=True)
            figures.append(figure)
    results = os.environ.get("BENCH_RESULTS")
    if results:
        Path(results).write_text(json.dumps([asdict(f) for f in figures], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
