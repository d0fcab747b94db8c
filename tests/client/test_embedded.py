"""The server in the background: found or started by whoever needs it, one per state directory, gone when idle."""

import fcntl
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import httpx2
import pytest

from basilica.client import embedded
from basilica.client.drivers import Endpoint
from basilica.client.embedded import CannotStart, CannotStop
from basilica.core.errors import AuthenticationError, ValidationError
from basilica.machine.places import start_of
from tests.support.server import ended, phase_is, run_request, serving, wait_for

SECONDS = 30.0
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.getuid() == 0 else ()

_processes = multiprocessing.get_context("forkserver")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BASILICA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BASILICA_IDLE_EXIT", "60")  # should a test forget one


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory, of which nothing runs any more after the test."""
    yield tmp_path / "state"
    embedded.shutdown(tmp_path / "state", cancel_runs=True)


def pid_of(state: Path) -> int:
    running = embedded.find(state)
    assert running is not None
    return running.pid


def talk(endpoint: Endpoint) -> httpx2.Client:
    return httpx2.Client(base_url=endpoint.url, headers=endpoint.headers(), timeout=SECONDS, trust_env=False)


def start_run(endpoint: Endpoint, name: str, script: str) -> None:
    with talk(endpoint) as client:
        client.post("/deployments", json=run_request(name, script)).raise_for_status()
        wait_for(client, name, phase_is("ready"))


@contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """A function that says whether the process has ended within so many seconds."""
    fd = os.pidfd_open(pid)
    try:
        yield lambda seconds: bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def kill(pid: int) -> None:
    with watched(pid) as ended_within:
        os.kill(pid, signal.SIGKILL)
        assert ended_within(SECONDS)


# ---- found or started -----------------------------------------------------------------------------------------------


def test_the_first_use_starts_it_and_the_second_finds_it(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded.find(state) is None
    assert not state.exists()
    first = embedded.locate(state)
    assert first.url.startswith("http://127.0.0.1:")
    with talk(first) as client:
        assert client.get("/deployments").json()["total"] == 0
    pid = pid_of(state)
    assert embedded.locate(state) == first
    assert embedded.locate(Path(os.path.relpath(state))) == first
    assert pid_of(state) == pid
    assert {f.name: f.stat().st_mode & 0o777 for f in state.iterdir() if f.name.startswith("s") and f.is_file()} == {
        "server.json": 0o600,
        "server.log": 0o600,
        "start.lock": 0o600,
        "supervisor.log": (state / "supervisor.log").stat().st_mode & 0o777,
    }
    seen = embedded.status(state)
    assert seen is not None
    assert (seen.url, seen.pid, seen.live_runs) == (first.url, pid, 0)
    assert (seen.state_dir, seen.log_file, seen.key_file) == (state, state / "server.log", state / "api-key")
    assert "listens on" in (state / "server.log").read_text()
    with monkeypatch.context() as without:  # finding takes no request, no process and no lock
        without.setattr(httpx2, "Client", None)
        without.setattr(subprocess, "Popen", None)
        without.setattr(fcntl, "flock", None)
        assert embedded.locate(state) == first


def test_one_that_somebody_started_by_hand_is_found(state: Path) -> None:
    with serving(state) as server:
        assert embedded.locate(state) == Endpoint(server.url, server.key)
        seen = embedded.status(state)
        assert seen is not None
        assert (seen.pid, seen.log_file) == (server.pid, None)


def _locate_together(state: Path, together: Barrier, answers: Any) -> None:
    together.wait(SECONDS)
    answers.put((embedded.locate(state).url, pid_of(state)))


def test_ten_processes_at_once_share_one(state: Path) -> None:
    _processes.set_forkserver_preload(["tests.support.entry", "basilica.client.embedded"])
    together, answers = _processes.Barrier(10), _processes.Queue()
    crowd = [_processes.Process(target=_locate_together, args=(state, together, answers)) for _ in range(10)]
    for process in crowd:
        process.start()
    found = {answers.get(timeout=SECONDS) for _ in crowd}
    for process in crowd:
        process.join(SECONDS)
    answers.close()
    assert found == {(embedded.locate(state).url, pid_of(state))}
    log = (state / "server.log").read_text()
    assert log.count("listens on") == 1
    assert "in use" not in log  # nobody else has tried


def test_a_script_gets_nothing_on_its_output_no_child_and_may_die(state: Path) -> None:
    """It interrupts its whole process group, as a Ctrl-C at a terminal does."""
    script = (
        "import os, signal, sys; from pathlib import Path; from basilica.client import embedded\n"
        "print(embedded.locate(Path(sys.argv[1])).url, flush=True)\n"
        "try: os.wait()\n"
        "except ChildProcessError: print('no child', flush=True)\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL); os.killpg(0, signal.SIGINT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(state)],
        capture_output=True,  # to its end: nobody else holds these pipes
        text=True,
        check=False,
        timeout=SECONDS,
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""
    url, *rest = done.stdout.splitlines()
    assert rest == ["no child"]
    assert embedded.locate(state).url == url
    with talk(embedded.locate(state)) as client:
        assert client.get("/deployments").status_code == 200


def test_a_killed_one_is_replaced_and_its_runs_are_taken_up(state: Path) -> None:
    start_run(embedded.locate(state), "train", "exec sleep 600")
    killed = pid_of(state)
    kill(killed)
    assert (state / "server.json").exists()
    assert embedded.find(state) is None
    with talk(embedded.locate(state)) as client:
        assert client.get("/deployments/train").json()["phase"] == "ready"
        assert [e["reason"] for e in client.get("/deployments/train/events").json()["events"]].count("Created") == 1
    assert pid_of(state) != killed


@pytest.mark.parametrize(
    "note",
    [
        "",
        "nonsense \xff",
        "[]",
        "null",
        '{"url": "http://127.0.0.1:1"}',
        '{"url": "http://127.0.0.1:1", "pid": "me", "keyFile": "k"}',
        '{"url": "http://127.0.0.1:1", "pid": -1, "keyFile": "k", "startTicks": 1}',
        '{"url": "http://127.0.0.1:1", "pid": PID, "keyFile": "k"}',
        '{"url": "http://127.0.0.1:1", "pid": PID, "keyFile": "k", "startTicks": 1}',
        '{"url": "http://127.0.0.1:1", "pid": 1e400, "keyFile": "k", "startTicks": {}}',
    ],
)
def test_a_note_of_nobody_or_of_another_process_is_no_server(tmp_path: Path, note: str) -> None:
    (tmp_path / "server.json").write_text(note.replace("PID", str(os.getpid())), encoding="latin-1")
    assert embedded.find(tmp_path) is None
    assert embedded.status(tmp_path) is None
    assert embedded.shutdown(tmp_path) is False


def test_a_stale_note_whose_pid_is_somebody_elses_by_now_is_replaced(state: Path) -> None:
    state.mkdir()
    note = {
        "url": "http://127.0.0.1:1",
        "pid": os.getpid(),
        "keyFile": "k",
        "startTicks": (start_of(os.getpid()) or 0) + 1,
    }
    (state / "server.json").write_text(json.dumps(note))
    with (state / "server.log").open("wb") as log:
        log.truncate(embedded.LOG_BYTES + 1)
    with talk(embedded.locate(state)) as client:
        assert client.get("/deployments").status_code == 200
    assert pid_of(state) != os.getpid()
    assert (state / "server.log").stat().st_size < 10_000


@contextmanager
def owner_of(state: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the state file in use and leaves no note; it ends when its input does."""
    state.mkdir(exist_ok=True)
    script = (
        "import fcntl, os, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(str(os.getpid())); file.flush(); print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(state / "basilica.db.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        yield owner


def test_while_the_last_one_is_closing_the_next_one_waits(state: Path) -> None:
    found: list[Endpoint] = []
    with owner_of(state) as owner:
        waiting = threading.Thread(target=lambda: found.append(embedded.locate(state)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert not (state / "server.log").exists()
    assert owner.returncode == 0
    waiting.join(SECONDS)
    assert found == [embedded.locate(state)]


def test_one_that_is_starting_is_waited_for(state: Path) -> None:
    found: list[Endpoint] = []
    with owner_of(state) as owner:
        waiting = threading.Thread(target=lambda: found.append(embedded.locate(state)))
        waiting.start()
        (state / "api-key").write_text("the key\n")
        note = {"url": "http://127.0.0.1:1", "pid": owner.pid, "keyFile": str(state / "api-key")}
        (state / "server.json.new").write_text(json.dumps(note | {"startTicks": start_of(owner.pid)}))
        (state / "server.json.new").rename(state / "server.json")
        waiting.join(SECONDS)
        assert found == [Endpoint("http://127.0.0.1:1", "the key")]
    assert not (state / "server.log").exists()


# ---- what cannot be started -----------------------------------------------------------------------------------------


def test_an_owner_who_cannot_be_found_is_named(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_SECONDS", 0.1)
    with owner_of(state) as owner:
        with pytest.raises(CannotStart, match=f"process {owner.pid} has its state in use"):
            embedded.locate(state)
        with pytest.raises(CannotStop, match=f"process {owner.pid} has its state in use"):
            embedded.shutdown(state, timeout=0.1)


def test_a_state_file_from_the_future_is_told_in_a_sentence(state: Path) -> None:
    state.mkdir()
    code = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('PRAGMA user_version = 99'); db.close()"
    with serving(state):
        pass
    subprocess.run([sys.executable, "-c", code, state / "basilica.db"], check=True)
    with pytest.raises(CannotStart) as caught:
        embedded.locate(state)
    said = str(caught.value)
    assert "was written by a newer Basilica" in said
    assert "upgrade Basilica" in said
    assert str(state / "server.log") in said
    assert "\n" not in said
    assert embedded.find(state) is None


def pretend(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that does something else."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n" + python)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


def test_of_one_that_crashes_the_last_lines_are_shown(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend("seq 1000\necho 'ImportError: no' >&2; exit 1", tmp_path, monkeypatch)
    state.mkdir()
    (state / "server.log").write_text("what the last one said\n")
    with pytest.raises(CannotStart) as caught:
        embedded.locate(state)
    assert caught.value.state_dir == str(state)
    assert caught.value.said == "\n".join([*map(str, range(982, 1001)), "ImportError: no"])
    assert str(caught.value).endswith("ImportError: no")
    pretend("exit 1", tmp_path, monkeypatch)
    with pytest.raises(CannotStart) as caught:
        embedded.locate(state)
    assert caught.value.said == ""


def test_one_that_does_not_come_up_in_time_is_ended(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[subprocess.Popen[bytes]] = []
    spawn = embedded._spawn

    def noting_spawn(directory: Path, log: int, ready: int) -> subprocess.Popen[bytes]:
        spawned.append(spawn(directory, log, ready))
        return spawned[-1]

    monkeypatch.setattr(embedded, "START_SECONDS", 0.1)
    monkeypatch.setattr(embedded, "_spawn", noting_spawn)
    pretend("exec sleep 600", tmp_path, monkeypatch)
    with pytest.raises(CannotStart, match="does not serve yet"):
        embedded.locate(state)
    assert [process.returncode for process in spawned] == [-signal.SIGKILL]


@pytest.mark.parametrize("python", ["", "/no/such/python"])
def test_without_a_python_nothing_starts(state: Path, monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(CannotStart, match="basilica local start" if not python else "No such file"):
        embedded.locate(state)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_an_idle_time_that_is_none_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BASILICA_IDLE_EXIT", text)
    with pytest.raises(ValidationError, match="BASILICA_IDLE_EXIT"):
        embedded.locate(state)


def test_a_directory_that_cannot_be_written_is_named(state: Path, tmp_path: Path) -> None:
    state.mkdir(mode=0o500)
    script = (
        "import sys; from pathlib import Path; from basilica.client import embedded\n"
        "for place in sys.argv[1:]:\n"
        "    try: embedded.locate(Path(place))\n"
        "    except embedded.CannotStart as error: print(error)"
    )
    (tmp_path / "file").write_text("precious")
    places = [str(state), str(state / "below"), str(tmp_path / "file")]
    command = [*WITHOUT_PRIVILEGES, sys.executable, "-c", script, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0].rpartition(" ")[2] for line in lines] == places
    assert ["Permission denied" in line for line in lines] == [True, True, False]
    assert all("BASILICA_STATE_DIR" in line for line in lines)
    assert list(state.iterdir()) == []


def test_a_server_whose_key_is_gone_is_told_with_what_to_do(state: Path) -> None:
    with serving(state):
        (state / "api-key").rename(state / "away")
        with pytest.raises(AuthenticationError, match="basilica local stop"):
            embedded.locate(state)
        seen = embedded.status(state)
        assert seen is not None
        assert seen.live_runs is None
        (state / "away").rename(state / "api-key")


def test_a_server_gets_no_settings_of_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("BASILICA_API_URL", "BASILICA_API_TOKEN", "BASILICA_DEPLOYMENT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PYTHONPATH", "src:/opt")
    given = embedded._environment()
    assert [name for name in given if name.startswith("BASILICA_")] == []
    assert given["PYTHONPATH"] == f"{tmp_path}/src:/opt"
    assert given["PATH"] == os.environ["PATH"]


# ---- the end --------------------------------------------------------------------------------------------------------


def test_an_idle_one_ends_but_not_while_a_run_is_live(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASILICA_IDLE_EXIT", "0.8")
    os.mkfifo(tmp_path / "fifo")
    start_run(embedded.locate(state), "train", f"read x < {tmp_path / 'fifo'}")
    with watched(pid_of(state)) as ended_within:
        assert not ended_within(1.7)
        (tmp_path / "fifo").write_text("go\n")
        assert ended_within(SECONDS)
    assert not (state / "server.json").exists()
    assert "idle: no run is live" in (state / "server.log").read_text()
    monkeypatch.setenv("BASILICA_IDLE_EXIT", "60")
    with talk(embedded.locate(state)) as client:
        assert client.get("/deployments/train").json()["phase"] == "succeeded"


def test_one_that_is_shut_down_leaves_its_runs_running(state: Path) -> None:
    start_run(embedded.locate(state), "train", f"echo $$ > {state}/rank; exec sleep 600")
    pid = pid_of(state)
    assert embedded.shutdown(state) is True
    assert start_of(pid) is None
    assert embedded.find(state) is None
    assert embedded.shutdown(state) is False
    with talk(embedded.locate(state)) as client:
        assert client.get("/deployments/train").json()["phase"] == "ready"
    rank = int((state / "rank").read_text())
    assert start_of(rank) is not None
    assert embedded.shutdown(state, cancel_runs=True) is True
    assert start_of(rank) is None


def test_one_that_closes_is_not_found_any_more(state: Path) -> None:
    endpoint = embedded.locate(state)
    start_run(endpoint, "train", "exec sleep 600")
    with talk(endpoint) as client, client.stream("GET", "/deployments/train/watch") as stream:
        changes = stream.iter_lines()
        assert next(changes) == "event: status"
        os.kill(pid_of(state), signal.SIGTERM)
        assert list(changes)[-1] == ""  # the server has ended its answer, and is not gone yet
        assert not (state / "server.json").exists()
    with talk(embedded.locate(state)) as client:
        assert client.get("/deployments/train").json()["phase"] == "ready"


def test_where_nothing_ever_ran_there_is_nothing_to_shut_down(tmp_path: Path) -> None:
    assert embedded.shutdown(tmp_path / "none") is False
    assert not (tmp_path / "none").exists()


def test_one_that_does_not_end_in_time_is_told(state: Path) -> None:
    embedded.locate(state)
    pid = pid_of(state)
    os.kill(pid, signal.SIGSTOP)
    with watched(pid) as ended_within:
        with pytest.raises(CannotStop, match=f"process {pid} has been told to stop"):
            embedded.shutdown(state, timeout=0.1)
        os.kill(pid, signal.SIGCONT)
        assert ended_within(SECONDS)


def test_a_run_that_does_not_end_in_time_keeps_the_server(state: Path) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 1; done"
    endpoint = embedded.locate(state)
    with talk(endpoint) as client:
        client.post("/deployments", json=run_request("stubborn", script)).raise_for_status()  # it has 1 s of grace
        wait_for(client, "stubborn", phase_is("ready"))
        with pytest.raises(CannotStop, match="stubborn"):
            embedded.shutdown(state, cancel_runs=True, timeout=0.2)
        assert embedded.locate(state) == endpoint
        assert wait_for(client, "stubborn", ended)["phase"] == "cancelled"
