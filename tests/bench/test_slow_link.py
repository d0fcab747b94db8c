"""Between two hosts, which are network namespaces here, the probe measures the link that is there."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from basilica.bench.sweep import SIZES

MBIT = 40
BYTES_PER_S = MBIT * 1e6 / 8
ADDRESSES = ("10.231.7.1", "10.231.7.2")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root, ip and tc",
)


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces and a wire between them that carries 40 Mbit/s in each direction."""
    mark = uuid.uuid4().hex[:6]
    names = (f"bench-{mark}-a", f"bench-{mark}-b")
    try:
        for name in names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            sh("ip", "-n", name, "link", "set", "lo", "up")
            sh("ip", "-n", name, "link", "set", "wire", "up")
            shape = ("tbf", "rate", f"{MBIT}mbit", "burst", "16kb", "latency", "100ms")
            sh("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *shape)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine cannot shape a link: {error.stderr.decode()}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def measure(hosts: tuple[str, str], out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    ends = [
        {"node": name, "address": address, "enter": ["ip", "netns", "exec", name]}
        for name, address in zip(hosts, ADDRESSES, strict=True)
    ]
    command = [sys.executable, "-P", "-m", "basilica.bench.pair", "--out", str(out), "--ends", json.dumps(ends)]
    return subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.parametrize("method", ["tcp", "gloo"])
def test_a_slow_link_is_measured_and_the_sweep_stops_in_time(
    hosts: tuple[str, str], tmp_path: Path, method: str
) -> None:
    done = measure(hosts, tmp_path / "result.json", "--method", method, "--budget", "4", "--deadline", "100")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert (report["method"], report["node_a"], report["node_b"]) == (method, *hosts)
    sizes = [point["size"] for point in report["sweep"]]
    assert sizes[-1] < SIZES[-1]  # 64 MiB would take this link a minute
    # A busy machine can only make it slower: the wire carries no more, but for what its bucket holds.
    assert 0 < report["busbw_gbps"][1] * 1e9 < 1.15 * BYTES_PER_S
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_link_that_is_cut_is_told_in_a_line(hosts: tuple[str, str], tmp_path: Path) -> None:
    sh("ip", "-n", hosts[1], "link", "set", "wire", "down")
    done = measure(hosts, tmp_path / "result.json", "--method", "tcp", "--deadline", "2")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(("no probe answers at 10.231.7.1:", "the other probe did not come within 2 s"))
    assert not (tmp_path / "result.json").exists()
