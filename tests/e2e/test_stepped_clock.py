"""A server whose wall clock is set while it works: nothing that it counts jumps, and nothing that is due is missed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.server import processes_of
from tests.support.server import clean_environment, ended, phase_is, run_request, wait_for
from tests.support.stepped_clock import SteppedClock

HOUR, DAY = 3600, 86400
Json = dict[str, Any]


class Server:
    """`basilica serve` in an interpreter of its own, which lives by a clock of its own."""

    def __init__(self, state: Path, clock: SteppedClock, port: str = "0") -> None:
        command = [sys.executable, "-m", "basilica.cli.main", "serve", "--port", port, "--state-dir", str(state)]
        environment = clean_environment() | clock.environment
        self.errors = state.with_name("errors")
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert self.process.stdout is not None
        printed = self.process.stdout.readline().decode()
        found = re.search(r"listens on (\S+)", printed)
        assert found is not None, printed + self.errors.read_text()
        self.url, self.port = found[1], found[1].rpartition(":")[2]
        self.key = (state / "api-key").read_text().strip()

    def client(self) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False)

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def serving(state: Path, clock: SteppedClock, port: str = "0") -> Iterator[tuple[Server, httpx2.Client]]:
    server = Server(state, clock, port)
    try:
        with server.client() as client:
            yield server, client
            if server.process.poll() is None:
                for run in client.get("/deployments").json()["deployments"]:
                    client.delete(f"/deployments/{run['instanceName']}", params={"wait": 20})
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGTERM)
            for pid in processes_of(state):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def clock(tmp_path: Path) -> SteppedClock:
    return SteppedClock(tmp_path)


def create(client: httpx2.Client, name: str, script: str, target: int = 1, **gang: Any) -> str:
    request = run_request(name, script, target=target)
    top = {key: gang.pop(key) for key in ("ttlSeconds",) if key in gang}
    request["distributed"] |= gang
    return str(client.post("/deployments", json=request | top).raise_for_status().json()["instanceName"])


def all_up(body: Json) -> bool:
    return bool(body["distributed"]["worldSize"]["ready"] == body["distributed"]["worldSize"]["target"])


def usage(body: Json) -> float:
    return float(body["distributed"]["usage"]["rankSeconds"])


def age(moment: str) -> float:
    """Of a moment as it is shown, by the real wall clock."""
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


@pytest.mark.parametrize("step", [HOUR, -DAY])
def test_rank_seconds_are_those_that_passed_and_times_are_shown_as_the_clock_is_set(
    tmp_path: Path, clock: SteppedClock, step: int
) -> None:
    go = tmp_path / "go"
    with serving(tmp_path / "state", clock) as (_, client):
        began = time.monotonic()
        name = create(client, "count", f"until [ -e {go} ]; do sleep 0.05; done", target=2)
        wait_for(client, name, all_up)
        up = time.monotonic()
        clock.step(step)
        create(client, "later", "exit 0")
        later = wait_for(client, "later", ended)
        assert abs(age(later["createdAt"]) + step) < 60
        now = client.get(f"/deployments/{name}").json()
        at_least, at_most = 2 * (time.monotonic() - up), 2 * (time.monotonic() - began)
        assert at_least * 0.5 < usage(now) < at_most + 0.2  # counted up to the moment of asking
        assert abs(age(now["createdAt"]) + step) < 60
        at_least = 2 * (time.monotonic() - up)
        go.touch()
        done = wait_for(client, name, ended)
        at_most = 2 * (time.monotonic() - began)
        assert done["phase"] == "succeeded"
        assert at_least - 0.2 < usage(done) < at_most + 0.2
        for exit in done["distributed"]["rankExits"]:
            assert abs(age(exit["finishedAt"]) + step) < 60
        account = client.get("/usage").json()["usage"]
        assert sum(row["rankSeconds"] for row in account) < at_most + 2


def test_a_restart_and_a_time_to_live_come_when_they_are_due(tmp_path: Path, clock: SteppedClock) -> None:
    fails_three_times = "[ $BASILICA_ATTEMPT -ge 3 ] || exit 1"
    with serving(tmp_path / "state", clock) as (_, client):
        again = create(client, "again", fails_three_times, maxRestarts=3)
        short = create(client, "short", "sleep 600", ttlSeconds=6)
        wait_for(client, again, lambda body: "restart 3 of 3" in body["distributed"]["blockedOn"])
        clock.step(-DAY)
        waiting = client.get(f"/deployments/{again}").json()["distributed"]["blockedOn"]
        left = re.search(r"to start again in (\d+) s", waiting)
        assert left is None or int(left[1]) <= 4, waiting  # None: it has started by now
        assert wait_for(client, again, ended)["phase"] == "succeeded"
        over = wait_for(client, short, ended)
        assert (over["phase"], "time to live" in over["message"]) == ("cancelled", True)


@pytest.mark.parametrize("step", [HOUR, -DAY])
def test_a_server_that_is_killed_leaves_its_time_line_to_the_next(
    tmp_path: Path, clock: SteppedClock, step: int
) -> None:
    go, state = tmp_path / "go", tmp_path / "state"
    began = time.monotonic()
    with serving(state, clock) as (server, client):
        name = create(client, "count", f"until [ -e {go} ]; do sleep 0.05; done", target=2)
        wait_for(client, name, all_up)
        up = time.monotonic()
        server.end(signal.SIGKILL)
    clock.step(step)
    with serving(state, clock, server.port) as (_, client):
        wait_for(client, name, phase_is("ready"))
        at_least = 2 * (time.monotonic() - up)
        go.touch()
        done = wait_for(client, name, ended)
        assert done["phase"] == "succeeded"
        assert at_least - 0.2 < usage(done) < 2 * (time.monotonic() - began) + 0.2
        assert abs(age(done["createdAt"]) + step) < 60
