"""From the write of a host's key to the return of `mesh_wait`, on our rendezvous and on real etcd.

What it is compared with: a process that blocks in one long poll of its own and does nothing else.
"""

import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import Figure, median, percentile
from tests.mesh.peers import Etcd, free_ports

ROUNDS = 200
NODE = "host-1"
KEY = f"/v2/keys/basilica/mesh-ready/{NODE}"

WAITER = f"""
import os, sys, time
os.environ["NODE_NAME"] = "{NODE}"
os.environ["BASILICA_RDZV_ENDPOINT"] = sys.argv[1]
sys.stderr = open(os.devnull, "w")
from basilica.mesh import mesh_wait
print("up", flush=True)
for line in sys.stdin:
    mesh_wait(30)
    print(repr(time.time()), flush=True)
"""

BARE = f"""
import http.client, sys, time
line = http.client.HTTPConnection(*sys.argv[1].split(":"))
print("up", flush=True)
for _ in sys.stdin:
    line.request("GET", "{KEY}?wait=true")
    line.getresponse().read()
    print(repr(time.time()), flush=True)
"""


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {"our rendezvous": stack.enter_context(ours(Path(folder) / "ours"))}
        if shutil.which("etcd"):
            etcd = Etcd(Path(folder) / "etcd", v2=True).start()
            stack.callback(etcd.stop)
            servers["etcd 3.4"] = etcd.endpoint
        for name, endpoint in servers.items():
            bare, gate = measure(endpoint, BARE), measure(endpoint, WAITER)
            yield Figure(f"key written to mesh_wait's return, {name}, median", median(gate) * 1000, "ms", "< 5 ms")
            yield Figure(f"  99th percentile, {name}", percentile(gate, 99) * 1000, "ms")
            yield Figure(f"  a bare long poll on {name}, median", median(bare) * 1000, "ms")


@contextmanager
def ours(data_dir: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "basilica.rendezvous", "--data-dir", str(data_dir), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def measure(endpoint: str, program: str) -> list[float]:
    """Seconds from the moment at which the write was sent; half of the writer's own round trip is in it."""
    delays = []
    host, _, port = endpoint.partition(":")
    writer = http.client.HTTPConnection(host, int(port))
    command = [sys.executable, "-c", program, endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_clean()) as waiter:
        assert waiter.stdin is not None
        assert waiter.stdout is not None
        waiter.stdout.readline()
        for _ in range(ROUNDS):
            _ask(writer, "DELETE", None)
            waiter.stdin.write("wait\n")
            waiter.stdin.flush()
            time.sleep(0.02)  # it must have begun to wait: this is not in the figure
            written = time.time()
            _ask(writer, "PUT", "value=ready")
            delays.append(float(waiter.stdout.readline()) - written)
        waiter.stdin.close()
    writer.close()
    return delays


def _ask(connection: http.client.HTTPConnection, method: str, body: str | None) -> None:
    connection.request(method, KEY, body, {"Content-Type": "application/x-www-form-urlencoded"})
    connection.getresponse().read()


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("BASILICA_")}
