"""What the benchmarks share: a server in a process of its own, a plain client, and figures beside their goals."""

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PYTHON = sys.executable


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement. `goal` is for a quiet machine: it is shown, never asserted."""

    name: str
    value: float
    unit: str
    goal: str = ""

    def __str__(self) -> str:
        goal = f"(goal: {self.goal})" if self.goal else ""
        return f"  {self.name:58} {self.value:10.3f} {self.unit:12} {goal}"


class Client:
    """One connection to a server; answers are parsed JSON."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
        self._headers = {"Authorization": f"Bearer {key}"}

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, self._headers)
        response = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status >= 400:
            raise RuntimeError(answer["error"]["message"])
        return answer

    def deploy(self, name: str, argv: Sequence[str], ranks: int = 1) -> dict[str, Any]:
        size = {"min": ranks, "target": ranks, "max": ranks}
        return self.call(
            "POST",
            "/deployments",
            {"instanceName": name, "command": list(argv), "distributed": {"worldSize": size}},
        )

    def wait(self, run: dict[str, Any], phase: str) -> dict[str, Any]:
        """Woken by the server, not by a timer."""
        while run["phase"] != phase:
            if run["phase"] in ("failed", "cancelled"):
                raise RuntimeError(f"{run['instanceName']} is {run['phase']}: {run.get('message')}")
            run = self.call("GET", f"/deployments/{run['instanceName']}/watch?since={run['version']}&wait=60")
        return run

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class ServerProcess:
    url: str
    key: str
    pid: int

    def client(self) -> Client:
        return Client(self.url, self.key)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(module: str = "basilica.cli.main", *options: str, prefix: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A server on a free port and a fresh state directory. `module` is run with the options of `basilica serve`."""
    with tempfile.TemporaryDirectory(prefix="basilica-bench-") as state:
        argv = [*prefix, PYTHON, "-m", module, "serve", "--port", "0", "--state-dir", state, "--log-level", "error"]
        process = subprocess.Popen([*argv, *options], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            process.stdout.readline()
            yield ServerProcess(url, (Path(state) / "api-key").read_text().strip(), process.pid)
        finally:
            process.terminate()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


def percentile(values: Sequence[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
