"""Probes as processes of their own, and a peer that a test plays itself."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from basilica.bench import meet
from basilica.bench.link import Deadline, Link

PATIENCE_S = 100.0
HOST = "127.0.0.1"
Json = dict[str, Any]


class Probe:
    """One end. `report()` waits for its end."""

    def __init__(self, folder: Path, rank: int, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.out = folder / f"report-{rank}.json"
        command = [sys.executable, "-P", "-m", "basilica.bench.probe", "--rank", str(rank), "--node", f"node-{rank}"]
        self.process = subprocess.Popen(
            [*command, "--out", str(self.out), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        )
        self.said = ""

    def report(self) -> Json:
        _, self.said = self.process.communicate(timeout=PATIENCE_S)
        found: Json = json.loads(self.out.read_text())
        assert (self.process.returncode == 0) == ("error" not in found), self.said
        return found

    def problem(self) -> str:
        """Why it failed: one line, the same on stderr and in the report."""
        problem: str = self.report()["error"]
        assert self.process.returncode == 1
        assert self.said.splitlines()[-1].endswith(problem)
        assert "\n" not in problem
        assert "Traceback" not in self.said
        return problem

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Ends:
    """Starts probes; what is left of them ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._probes: list[Probe] = []

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def probe(self, rank: int, *arguments: str, env: Mapping[str, str] | None = None) -> Probe:
        where = [] if "--rendezvous" in arguments else [("--listen", "--peer")[rank], self.address]
        probe = Probe(self.folder, rank, *where, *arguments, env=env)
        self._probes.append(probe)
        return probe

    def pair(self, *arguments: str) -> tuple[Probe, Probe]:
        return self.probe(0, *arguments), self.probe(1, *arguments)

    def close(self) -> None:
        for probe in self._probes:
            if probe.process.poll() is None:
                probe.kill()
            if probe.process.stderr is not None:
                probe.process.stderr.close()


def free_port() -> int:
    with socket.create_server((HOST, 0)) as held:
        port: int = held.getsockname()[1]
        return port


def dial(port: int) -> socket.socket:
    """A plain connection to a probe that may still be on its way up."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the probe does not listen"
            time.sleep(0.01)


@contextmanager
def playing_rank_1(port: int) -> Iterator[Link]:
    """The test is the other end, and has said hello."""
    link, _ = meet.call((HOST, port), {"token": "", "node": "test", "methods": ["tcp"]}, Deadline(PATIENCE_S))
    try:
        yield link
    finally:
        link.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sockets_of(pid: int) -> int:
    """How many sockets the process has open."""
    folder = Path(f"/proc/{pid}/fd")
    found = 0
    for entry in folder.iterdir():
        try:
            found += os.readlink(entry).startswith("socket:")
        except OSError:
            continue  # closed meanwhile
    return found
