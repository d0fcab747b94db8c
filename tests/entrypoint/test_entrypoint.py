"""The first process of a rank in an image: gate, then init."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rendezvous.harness import Client, OurServer

SECONDS = 30.0
ENTRYPOINT = [sys.executable, "-m", "basilica.entrypoint"]


def start(*command: str, env: Mapping[str, str] | None = None, first: bool = False) -> subprocess.Popen[str]:
    """The entrypoint as a process; `first`: as process 1 of a container."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if first else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BASILICA_")}
    environment.pop("NODE_NAME", None)
    return subprocess.Popen(
        [*prefix, *ENTRYPOINT, "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | dict(env or {}),
    )


def run(*command: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    with start(*command, env=env) as process:
        out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
        ("kill -40 $$", 168),
    ],
)
def test_it_ends_as_the_rank_did(script: str, code: int) -> None:
    assert run("sh", "-c", script)[0] == code


def test_what_cannot_be_executed_says_so() -> None:
    code, _, err = run("/no/such/program", env={"BASILICA_MAX_RESTARTS": "3"})
    assert code == 127
    assert "cannot execute /no/such/program: No such file or directory" in err
    assert run(str(Path(__file__)))[0] == 126


def test_without_a_command_it_says_what_it_takes() -> None:
    done = subprocess.run(ENTRYPOINT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert "BASILICA_MAX_RESTARTS" in done.stderr


def test_a_failing_rank_starts_again_in_place_within_its_budget(tmp_path: Path) -> None:
    exits = tmp_path / "exits"
    script = f"echo x >> {tmp_path}/tries; exit $(wc -l < {tmp_path}/tries)"
    code, _, err = run("sh", "-c", script, env={"BASILICA_MAX_RESTARTS": "1", "BASILICA_EXIT_FILE": str(exits)})
    assert code == 2
    assert "restart 1 of 1" in err
    recorded = json.loads(exits.read_text())
    assert [each["exitCode"] for each in recorded] == [1, 2]
    assert all(each["finishedAt"] >= each["startedAt"] and each["signal"] is None for each in recorded)


def test_a_signal_reaches_the_rank_and_ends_its_restarts(tmp_path: Path) -> None:
    script = "trap 'echo told; exit 5' TERM; echo up; while :; do sleep 0.05; done"
    with start("sh", "-c", script, env={"BASILICA_MAX_RESTARTS": "5"}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "told\n"
        assert process.wait(SECONDS) == 5


def test_a_signal_while_it_waits_to_restart_ends_it() -> None:
    with start("sh", "-c", "exit 3", env={"BASILICA_MAX_RESTARTS": "9"}) as process:
        assert process.stderr is not None
        while "starts again" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 3


def test_what_the_rank_leaves_behind_is_ended_and_buried(tmp_path: Path) -> None:
    left = tmp_path / "left"
    script = f"sleep 1000 & echo $! > {left}; setsid sh -c 'exit 0' & wait $!; exit 4"
    assert run("sh", "-c", script)[0] == 4
    pid = int(left.read_text())
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a namespace of processes")
def test_as_process_one_it_obeys_signals_and_tells_of_a_crash() -> None:
    with start("sh", "-c", "kill -SEGV $$", first=True) as process:
        assert process.wait(SECONDS) == 139
    with start("sh", "-c", "echo up; exec sleep 1000", first=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        init = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        os.kill(int(init), signal.SIGTERM)
        assert process.wait(SECONDS) == 143


def test_the_rank_starts_when_the_gate_opens_and_knows_the_live_world(ours: OurServer) -> None:
    ours.fresh(3)
    env = {
        "NODE_NAME": "host-1",
        "BASILICA_RDZV_ENDPOINT": f"{ours.address[0]}:{ours.address[1]}",
        "WORLD_SIZE": "2",
        "BASILICA_MESH_TIMEOUT": str(SECONDS),
    }
    client = Client(ours.address)
    with start("sh", "-c", "echo $WORLD_SIZE $BASILICA_WORLD_TARGET", env=env) as process:
        assert process.stderr is not None
        assert "BEGIN node=host-1" in process.stderr.readline()
        assert process.poll() is None
        assert client.ask("PUT", "/v2/keys/basilica/world", 'value={"target": 3}').status == 201
        assert client.ask("PUT", "/v2/keys/basilica/mesh-ready/host-1", "value=ready").status == 201
        out, err = process.communicate(timeout=SECONDS)
    client.close()
    assert (process.returncode, out) == (0, "3 3\n")
    assert "mesh-wait: OK" in err


def test_a_signal_at_the_gate_ends_it(ours: OurServer) -> None:
    ours.fresh(3)
    env = {"NODE_NAME": "host-1", "BASILICA_RDZV_ENDPOINT": f"{ours.address[0]}:{ours.address[1]}"}
    with start("true", env=env) as process:
        assert process.stderr is not None
        assert "BEGIN" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 143
