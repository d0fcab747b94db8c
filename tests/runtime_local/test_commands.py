"""Commands beside ranks end with whoever asked for them, however that ended, and stay within their rank's limits."""

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any

import httpx2
import pytest

from basilica.core.environment import COMMAND_MARK
from basilica.machine.layout import Layout
from tests.support.server import SECONDS, Server, phase_is, run_request, serving, wait_for

FOR_EVER = "exec sleep 1000"


class Command:
    """A command that was asked for over HTTP. `lines` gets what its answer brings, and at last None."""

    def __init__(self, server: Server, *argv: str, rank: int = 0) -> None:
        self.lines: Queue[dict[str, object] | None] = Queue()
        self._request = (server.url, server.key, {"rank": rank, "command": list(argv)})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        url, key, body = self._request
        headers = {"Authorization": f"Bearer {key}"}
        with (
            suppress(httpx2.HTTPError),
            httpx2.Client(base_url=url, headers=headers, timeout=SECONDS, trust_env=False) as client,
            client.stream("POST", "/deployments/train/exec", json=body) as answer,
        ):
            for line in answer.iter_lines():
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def rest(self) -> list[dict[str, object]]:
        found = []
        while (line := self.lines.get(timeout=SECONDS)) is not None:
            found.append(line)
        return found

    def pids(self, count: int) -> list[int]:
        """The pids that it writes, a line each."""
        text = ""
        while text.count("\n") < count:
            line = self.lines.get(timeout=SECONDS)
            assert line is not None, text
            text += str(line["text"])
        return [int(word) for word in text.split()]


LEAVES_TWO = "setsid sh -c 'echo $$; exec sleep 1000' & echo $$; exec sleep 1000"


@contextmanager
def a_run(state: Path, script: str = FOR_EVER, **more: Any) -> Iterator[tuple[Server, httpx2.Client]]:
    with serving(state) as server, server.client() as client:
        client.post("/deployments", json=run_request("train", script, **more)).raise_for_status()
        wait_for(client, "train", phase_is("ready", "running"))
        yield server, client


def wait_until_gone(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError), closing(_Pidfd(pid)) as process:
            ready, _, _ = select.select([process.fd], [], [], SECONDS)
            assert ready, f"{pid} is still there: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"


class _Pidfd:
    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)

    def close(self) -> None:
        os.close(self.fd)


def attendants_of(server: Server) -> list[int]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"attendant.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_command_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    with a_run(tmp_path) as (server, _):
        pids = Command(server, "sh", "-c", LEAVES_TWO).pids(2)
        server.kill()
        wait_until_gone(pids)
        with serving(tmp_path):  # takes the run up, and deletes it
            pass


def test_a_command_whose_attendant_was_killed_with_the_server_ends_when_the_next_starts(tmp_path: Path) -> None:
    with a_run(tmp_path) as (server, _):
        pids = Command(server, "sh", "-c", LEAVES_TWO).pids(2)
        [attendant] = attendants_of(server)
        server.signal(signal.SIGSTOP)
        os.kill(attendant, signal.SIGKILL)
        server.kill()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        with serving(tmp_path):
            wait_until_gone(pids)


def test_a_command_whose_attendant_is_killed_is_lost_and_ends(tmp_path: Path) -> None:
    with a_run(tmp_path) as (server, _):
        command = Command(server, "sh", "-c", LEAVES_TWO)
        pids = command.pids(2)
        for pid in attendants_of(server):
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids)
        assert "was ended by signal 9" in str(command.rest()[-1]["text"])


def test_what_is_left_of_a_command_ends_when_its_run_is_deleted(tmp_path: Path) -> None:
    with a_run(tmp_path) as (server, client):
        assert Command(server, "true").rest()[-1] == {"exitCode": 0}
        [run] = client.get("/deployments").json()["deployments"]
        layout = Layout(tmp_path)
        directory = str(layout.checkpoints(run["instanceName"]))
        left = {COMMAND_MARK: "lost", "BASILICA_CHECKPOINT_DIR": directory}
        elsewhere = {**left, "BASILICA_CHECKPOINT_DIR": f"{directory}-2"}
        stray, other = (subprocess.Popen(["/bin/sleep", "1000"], env=env) for env in (left, elsewhere))
        try:
            client.delete("/deployments/train", params={"wait": 20}).raise_for_status()
            assert stray.wait(SECONDS) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            for process in (stray, other):
                process.kill()
                process.wait()


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_command_ends_with_its_run_and_its_answer_says_so(tmp_path: Path, how: str) -> None:
    with a_run(tmp_path) as (server, client):
        command = Command(server, "sh", "-c", LEAVES_TWO)
        pids = command.pids(2)
        if how == "cancel":
            client.post("/deployments/train/cancel").raise_for_status()
        else:
            client.delete("/deployments/train").raise_for_status()
        wait_until_gone(pids)
        last = command.rest()[-1]
        assert "the rank that the command ran beside was stopped" in str(last["text"])


def test_a_graceful_end_of_the_server_ends_commands_with_a_last_line(tmp_path: Path) -> None:
    with a_run(tmp_path) as (server, _):
        command = Command(server, "sh", "-c", LEAVES_TWO)
        pids = command.pids(2)
        assert server.stop() == 0
        assert "the server is going away" in str(command.rest()[-1]["text"])
        wait_until_gone(pids)
        assert "Traceback" not in server.stderr
        with serving(tmp_path):
            pass


def test_a_command_is_in_the_control_groups_of_its_rank(tmp_path: Path) -> None:
    with a_run(tmp_path, f"cat /proc/self/cgroup; {FOR_EVER}") as (server, client):
        out = "".join(str(line.get("text", "")) for line in Command(server, "cat", "/proc/self/cgroup").rest())
        deadline = time.monotonic() + SECONDS
        while not (log := client.get("/deployments/train/logs", params={"rank": 0}).text):
            assert time.monotonic() < deadline
        if "basilica" not in log:
            pytest.skip("ranks have no control groups here")
        assert out == log


HUNGRY = ("python3", "-c", "x = bytearray(400 << 20); print('had it')")


@pytest.mark.parametrize("script", [FOR_EVER, "exit 0"])
def test_a_command_stays_within_the_memory_of_its_rank(tmp_path: Path, script: str) -> None:
    resources = {"cpu": "1", "memory": "64Mi"}
    with serving(tmp_path) as server, server.client() as client:
        client.post("/deployments", json=run_request("train", script, resources=resources)).raise_for_status()
        wait_for(client, "train", phase_is("succeeded" if script == "exit 0" else "ready"))
        lines = Command(server, *HUNGRY).rest()
        assert {"stream": "stdout", "text": "had it\n"} not in lines
        assert lines[-1]["exitCode"] in (1, 137)
        assert client.get("/deployments/train").json()["phase"] == ("succeeded" if script == "exit 0" else "ready")
        assert Command(server, "echo", "still").rest()[0] == {"stream": "stdout", "text": "still\n"}
