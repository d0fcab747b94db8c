"""What a report and a look for a notice cost a training, beside bare system calls, and what reports cost the server."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.harness import PYTHON, Figure, median, percentile, server

ROUNDS = 5
REPORTS = 20_000
LONG = 1_000_000
SECONDS = 10.0
MEASURE = f"""
import json, os, sys, time
import basilica

def each(call, count={REPORTS}):
    times = []
    for _ in range({ROUNDS}):
        begun = time.perf_counter()
        for step in range(count):
            call(step)
        times.append((time.perf_counter() - begun) / count)
    return min(times)

fd = os.open(os.environ["BARE"], os.O_RDWR | os.O_CREAT)
line = b'[100000,1700000000.000,12345.678,99999,0.0123456,{{"loss":0.123456789,"lr":0.001}},{{}},100000]' + bytes(1)
bare = each(lambda step: os.pwrite(fd, line, 0))
reported = each(lambda step: basilica.report(step=step, loss=0.123456789 / (step + 1), lr=0.001))
slow = []
for step in range({REPORTS}):
    begun = time.perf_counter()
    basilica.report(step=step, loss=0.5, lr=0.001)
    slow.append(time.perf_counter() - begun)
print(json.dumps([bare, reported, sorted(slow)[int(len(slow) * 0.999)]]))
"""
NOWHERE = f"""
import time, basilica
basilica.report(step=0)
begun = time.perf_counter()
for step in range({REPORTS}):
    basilica.report(step=step, loss=0.5)
print((time.perf_counter() - begun) / {REPORTS})
"""
LISTEN = f"""
import json, os, time, basilica
from basilica.progress.notice_file import PublishedNotice, write_notice

def each(call):
    times = []
    for _ in range({ROUNDS}):
        begun = time.perf_counter()
        for _ in range({REPORTS}):
            call()
        times.append((time.perf_counter() - begun) / {REPORTS})
    return min(times)

path = os.environ.get("BASILICA_NOTICE_FILE")
if path is None:
    print(json.dumps([each(basilica.notice)]))
else:
    write_notice(path, None)
    fd = os.open(path, os.O_RDONLY)
    bare = each(lambda: os.pread(fd, 8, 0))
    none = each(basilica.notice)
    write_notice(path, PublishedNotice(number=1, kind="scale", until=4e9, step=10))
    basilica.report(step=1)
    ahead = each(basilica.notice)
    print(json.dumps([none, bare, ahead]))
"""
A_WEEK_IN_SHORT = f"""
import os, basilica, glob
for step in range({LONG}):
    basilica.report(step=step, loss=0.123456789 / (step + 1), lr=0.001)
print(sum(os.path.getsize(path) for path in glob.glob(os.environ["BASILICA_REPORT_FILE"] + ".*")))
"""
TALK = (
    "import time, basilica\\nfor step in range(10**9):\\n    basilica.report(step=step, loss=0.5)\\n    time.sleep({})"
)


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="basilica-bench-") as place:
        bare, reported, slow = json.loads(_python(MEASURE, place))
        yield Figure("a report of a step and two numbers", reported * 1e6, "us", "< 20 us")
        yield Figure("the same line by a bare pwrite", bare * 1e6, "us")
        yield Figure("a report against a bare pwrite", reported / bare, "times")
        yield Figure("a report, 99.9th percentile", slow * 1e6, "us")
    yield Figure("a report outside a deployment", float(_python(NOWHERE, None)) * 1e6, "us")
    with tempfile.TemporaryDirectory(prefix="basilica-bench-") as place:
        none, bare, ahead = json.loads(_python(LISTEN, os.path.realpath(place)))
        yield Figure("a look for a notice, with none", none * 1e6, "us", "< 2 us")
        yield Figure("the same file by a bare pread", bare * 1e6, "us")
        yield Figure("a look for a notice that is for a later step", ahead * 1e6, "us")
    yield Figure("a look for a notice outside a deployment", json.loads(_python(LISTEN, None))[0] * 1e6, "us")
    with tempfile.TemporaryDirectory(prefix="basilica-bench-") as place:
        size = int(_python(A_WEEK_IN_SHORT, place))
        yield Figure(f"file after {LONG:,} reports", size / 1024, "KiB", "< 512 KiB")
    yield from _server()


def _python(code: str, place: str | None) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if place is not None:
        env |= {"BASILICA_REPORT_FILE": f"{place}/reports/0.0", "BARE": f"{place}/bare"}
        env |= {"BASILICA_NOTICE_FILE": f"{place}/notice"}
    return subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True, env=env).stdout


def _server() -> Iterator[Figure]:
    """Ranks that report a hundred times a second, and nobody who looks; then how quickly somebody is told."""
    with server() as process:
        client = process.client()
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(TALK.format(0.01).replace("\\n", "\n"))
            script.flush()
            client.wait(client.deploy("talk", [PYTHON, script.name], ranks=8), "ready")
            time.sleep(3)  # until all of them have begun
            before = process.cpu_seconds()
            time.sleep(SECONDS)
            share = (process.cpu_seconds() - before) / SECONDS * 100
            yield Figure("8 ranks that report 100 times a second", share, "% of a core", "< 1 %")
            looks = []
            for _ in range(50):
                begun = time.perf_counter()
                client.call("GET", "/deployments/talk/series?points=200")
                looks.append(time.perf_counter() - begun)
            yield Figure("series of 8 ranks, median", median(looks) * 1000, "ms")
            yield Figure("series of 8 ranks, 99th percentile", percentile(looks, 99) * 1000, "ms")
            client.call("DELETE", "/deployments/talk?wait=30")
