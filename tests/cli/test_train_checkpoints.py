"""Stories of resuming, with real ranks and a real server: `checkpoints`, `rerun --resume`, `up --from`."""

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from basilica.machine.layout import Layout
from basilica.runtimes.local.snapshot_dirs import MEMORY, is_memory
from tests.support.server import Server, cli, ended, phase_is, serving, wait_for
from tests.support.snapshots import PROGRAM

Done = subprocess.CompletedProcess[str]

pytestmark = pytest.mark.skipif(not is_memory(MEMORY), reason="no memory file system here")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes as somebody else")
SNAPSHOTS = PROGRAM + 'write(f"{memory}/{rank}.0", 20, rank, world); write(f"{kept}/10/{rank}", 10, rank, world)\n'
TELL = SNAPSHOTS + "print(memory, os.environ.get('BASILICA_RESUME_FROM'), os.environ.get('BASILICA_RESUME_STEP'))\n"
LIST = """import os
for place in os.environ["BASILICA_RESUME_FROM"].split(os.pathsep):
    for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
        if name == "0.0": print(os.path.basename(place), name, len(open(f"{place}/{name}", "rb").read()))
print("step", os.environ.get("BASILICA_RESUME_STEP"))
"""


def trains(server: Server) -> Callable[..., Done]:
    env = {"BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": server.key}
    return lambda *arguments: cli("train", *arguments, env=env)


@pytest.fixture
def train(server: Server) -> Callable[..., Done]:
    return trains(server)


def rows(train: Callable[..., Done], name: str) -> set[tuple[int, str, int, int]]:
    found = json.loads(train("checkpoints", name, "--json").stdout)
    assert found["known"] is True
    return {(row["step"], row["tier"], row["ranks"], row["world"]) for row in found["checkpoints"]}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


ON_DISK = {(20, "disk", 2, 2), (10, "disk", 2, 2)}


def test_a_run_is_resumed_with_what_an_earlier_one_left(train: Callable[..., Done], server: Server) -> None:
    assert train("up", "llama", "--world-size", "2", "--wait", "--", sys.executable, "-c", TELL).returncode == 0
    memory, *nothing = train("logs", "llama", "--rank", "0").stdout.split()
    assert (Path(memory).parents[1], nothing) == (Path(MEMORY), ["None", "None"])
    until(lambda: rows(train, "llama") == ON_DISK)
    assert not Path(memory).exists(), "the memory of an ended run is free"
    table = train("checkpoints", "llama").stdout.splitlines()
    assert table[0].split() == ["STEP", "TIER", "RANKS", "SIZE", "AGE"]
    assert table[1].split()[:8] == ["20", "disk", "2", "of", "2", "14", "B", *table[1].split()[7:8]]
    first = Path(memory).name
    done = train("up", "second", "--world-size", "1", "--from", "llama@10", "--wait", "--", sys.executable, "-c", LIST)
    assert done.returncode == 0, done.stderr
    assert train("logs", "second").stdout.splitlines() == ["ended 0.0 4103", "step 10"]
    # A run that kept nothing passes on where it began.
    again = json.loads(train("rerun", "second", "--resume", "--wait", "--json").stdout)
    assert train("logs", again["instanceName"]).stdout.splitlines()[-1] == "step 10"
    resumed = json.loads(train("rerun", first, "--resume", "--wait", "--json").stdout)
    told = train("logs", resumed["instanceName"], "--rank", "0").stdout.split()
    assert (first in told[1], told[2]) == (True, "None")
    with server.client() as client:
        client.delete(f"/deployments/{first}", params={"wait": 20})
    gone = json.loads(train("rerun", "second", "--wait", "--json").stdout)
    assert train("logs", gone["instanceName"]).stdout.splitlines() == ["step 10"]


def test_what_cannot_be_resumed_is_refused_with_the_next_step(train: Callable[..., Done], server: Server) -> None:
    command = ("--", "sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done")
    train("up", "live", "--world-size", "1", *command)
    with server.client() as client:
        wait_for(client, "live", phase_is("ready"))
    for arguments, problem in (
        (("up", "new", "--world-size", "1", "--from", "missing", *command), "there is no such run"),
        (("up", "new", "--world-size", "1", "--from", "Bad_Name", *command), "must be RUN or RUN@STEP"),
        (("up", "new", "--world-size", "1", "--from", "live", *command), "has not ended; cancel it first"),
        (("rerun", "live", "--resume"), "has not ended; cancel it first"),
        (("up", "new", "--world-size", "1", "--checkpoint-uri", "http://x/y", *command), "s3://"),
    ):
        done = train(*arguments)
        assert done.returncode != 0
        assert problem in done.stderr
    assert "no snapshot is kept" in train("checkpoints", "live").stderr


def test_a_request_that_is_sent_twice_makes_one_run(server: Server) -> None:
    gang = {"worldSize": {"min": 1, "target": 1, "max": 1}, "graceSeconds": 1}
    first = {"instanceName": "llama", "distributed": gang | {"command": "true"}}
    again = {"instanceName": "llama", "distributed": gang | {"command": "sleep 1000", "resumeFrom": "llama"}}
    with server.client() as client:
        client.post("/deployments", json=first).raise_for_status()
        wait_for(client, "llama", lambda body: ended(body) and body["distributed"]["settled"])
        headers = {"Idempotency-Key": "one"}
        names = {client.post("/deployments", json=again, headers=headers).json()["instanceName"] for _ in range(3)}
        assert len(names) == 1


def test_a_server_that_is_killed_before_the_move_is_followed_by_one_that_makes_it(state: Path) -> None:
    wait = SNAPSHOTS + "import time\nwhile not os.path.exists(kept + '/go'): time.sleep(0.02)\n"
    with serving(state) as server:
        train = trains(server)
        train("up", "llama", "--world-size", "2", "-d", "--", sys.executable, "-c", wait)
        until(lambda: (20, "memory", 2, 2) in rows(train, "llama"))
        with server.client() as client:
            instance = client.get("/deployments/llama").json()["instanceName"]
        server.kill()
    (Layout(state).checkpoints(instance) / "snapshots" / "go").touch()  # they end while nobody looks
    with serving(state) as server:
        train = trains(server)
        until(lambda: rows(train, "llama") == ON_DISK)
        server.kill()
    # The end is recorded, and the move is not: put the snapshots back where they were.
    ended_dir = Layout(state).checkpoints(instance) / "snapshots" / "ended"
    with serving(state) as server:
        train = trains(server)
        train(
            "up",
            "other",
            "--world-size",
            "1",
            "--wait",
            "--",
            sys.executable,
            "-c",
            "import os; print(os.environ['BASILICA_SNAPSHOT_DIR'])",
        )
        home = Path(train("logs", "other").stdout.strip()).parent
        server.kill()
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "state-dir").write_bytes(bytes(state.resolve()))
    shutil.copytree(ended_dir, home / instance)
    shutil.rmtree(ended_dir)
    with serving(state) as server:
        train = trains(server)
        until(lambda: rows(train, "llama") == ON_DISK and not (home / instance).exists())
        assert {path.name for path in ended_dir.iterdir()} == {"0.0", "1.0"}


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="basilica-resume-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@as_root
def test_ranks_of_a_user_of_their_own_write_and_resume_their_snapshots(place: Path) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    tell = SNAPSHOTS + "print(os.stat(memory).st_uid, oct(os.stat(memory).st_mode)[-3:], memory)\n"
    tell += "try: print(os.listdir(os.path.dirname(memory)))\nexcept PermissionError: print('closed')\n"
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    with serving(place / "state", "--run-as", "nobody") as server:
        train = trains(server)
        done = train("up", "llama", "--world-size", "1", "--wait", "--logs", "--", python, "-c", tell)
        assert done.returncode == 0, done.stdout + done.stderr
        uid, mode, memory, closed = train("logs", "llama").stdout.split()
        assert (uid, mode, closed) == (str(nobody), "700", "closed")
        until(lambda: rows(train, "llama") == {(20, "disk", 1, 1), (10, "disk", 1, 1)})
        kept = place / "state/runs" / Path(memory).name / "checkpoints/snapshots/ended"
        for path in (kept, kept / "0.0"):
            assert path.stat().st_uid == nobody
        assert stat.S_IMODE((kept / "0.0").stat().st_mode) == 0o600
        train("up", "second", "--world-size", "1", "--from", "llama", "--wait", "--", python, "-c", LIST)
        assert train("logs", "second").stdout.splitlines()[0] == "ended 0.0 4103"
