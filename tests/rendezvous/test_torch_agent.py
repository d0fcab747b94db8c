"""The journal that torchrun agents write about their workers: real agents, with workers that need no torch."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from basilica.rendezvous import torch_agent
from basilica.reports.agents import Event, Journal, Meeting, RoundStarted, Stopped, WorkerExit, read_journal
from basilica.shipping.source import ship
from tests.support.python_etcd import without_python_etcd
from tests.support.torchrun_ranks import Rank, meeting

ALONE = "torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --nnodes=1 --nproc-per-node=3"
WITHIN_S = 1.0


class Watched(Rank):
    """A rank with a report file, whose agent is started here."""

    def __init__(self, directory: Path, number: int = 0) -> None:
        super().__init__(directory, number)
        self.report = directory / "reports" / f"{number}.4"
        self.env |= {
            "BASILICA_REPORT_FILE": str(self.report),
            "BASILICA_ATTEMPT": "4",
            "BASILICA_DEPLOYMENT": "run",
            "FOLDER": str(directory),
        }

    def journal(self, agent: "subprocess.Popen[str]") -> Journal | None:
        return read_journal(f"{self.report}.{agent.pid}.agent")

    def events(self, agent: "subprocess.Popen[str]") -> tuple[Event, ...]:
        found = self.journal(agent)
        return () if found is None else found.events

    def exits(self, agent: "subprocess.Popen[str]") -> list[WorkerExit]:
        return [event for event in self.events(agent) if isinstance(event, WorkerExit)]


@contextlib.contextmanager
def ended(agent: "subprocess.Popen[str]") -> Iterator[list[str]]:
    """End the agent with the context; the list gets what it has said by then."""
    said: list[str] = []
    try:
        yield said
    finally:
        if agent.poll() is None:
            agent.terminate()  # its workers have sessions of their own, and only it ends them
        said += agent.communicate(timeout=60)


def until(condition: Callable[[], Any], agent: "subprocess.Popen[str]", within: float = 60.0) -> Any:
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert agent.poll() is None, agent.communicate()
        assert time.monotonic() < deadline, f"not within {within:g} s"
        time.sleep(0.01)
    return found


SCRIPT = """
import os, pathlib, signal, time
folder, worker = pathlib.Path(os.environ["FOLDER"]), int(os.environ["LOCAL_RANK"])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.005)

def leave(what):
    (folder / f"left-{worker}").write_text(str(time.time()))
    return what

if worker == 0:
    leave(0)
elif worker == 1:
    wait_for("raise")
    raise leave(RuntimeError("boom" + chr(10) + "of two lines"))
else:
    signal.signal(signal.SIGTERM, lambda *_: None)
    wait_for("go")
"""


def test_each_worker_that_ends_by_itself_is_journalled_before_the_others_are_stopped(tmp_path: Path) -> None:
    """With nothing of ours installed: the hooks travel. One exits with 0 early, one raises, one takes long to stop."""
    rank = Watched(tmp_path)
    rank.env |= without_python_etcd(tmp_path / "without") | {"PYTHONSAFEPATH": "1"}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    agent = rank.start(ship(script, launcher=ALONE))
    with ended(agent):
        until(lambda: rank.exits(agent), agent)
        head, (meets, began, done) = rank.journal(agent), rank.events(agent)
        assert head is not None
        assert (head.pid, head.nproc) == (agent.pid, 3)
        started = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert head.start == int(started)
        assert isinstance(meets, Meeting)
        assert isinstance(began, RoundStarted)
        assert (began.round, began.group_rank, began.agents, began.world) == (1, 0, 1, 3)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        assert [(w.local_rank, w.torch_rank) for w in began.workers] == [(0, 0), (1, 1), (2, 2)]
        assert {str(w.pid) for w in began.workers[1:]} <= set(children)
        assert isinstance(done, WorkerExit)
        assert (done.worker, done.pid, done.code, done.kind) == (0, began.workers[0].pid, 0, "done")
        assert 0 <= done.seen_at - left(tmp_path, 0) < WITHIN_S
        assert left(tmp_path, 0) <= done.at <= done.seen_at

        (tmp_path / "raise").touch()
        _, raised = until(lambda: len(found := rank.exits(agent)) > 1 and found, agent)
        assert agent.poll() is None  # it waits for worker 2, which does not answer to SIGTERM
        assert time.time() - left(tmp_path, 1) < WITHIN_S
        (tmp_path / "go").touch()
        agent.wait(60)
        assert (raised.worker, raised.torch_rank, raised.pid) == (1, 1, began.workers[1].pid)
        assert (raised.code, raised.kind, raised.memory_kills) == (1, "own", 0)
        assert raised.message == "RuntimeError: boom of two lines"
        assert raised.traceback.startswith("Traceback (most recent call last):\n")
        assert raised.traceback.endswith("RuntimeError: boom\nof two lines\n")
        assert left(tmp_path, 1) - 0.011 <= raised.at <= raised.seen_at  # files have the time of the kernel's last tick
        assert isinstance(rank.events(agent)[-1], Stopped)
        assert [event.n for event in rank.events(agent)] == [1, 2, 3, 4, 5]
        assert stat.S_IMODE(Path(f"{rank.report}.{agent.pid}.agent").stat().st_mode) == 0o600


def left(folder: Path, worker: int) -> float:
    """When the worker began to end."""
    return float((folder / f"left-{worker}").read_text())


KILLED_ONCE = """
import os, pathlib, time
folder = pathlib.Path(os.environ["FOLDER"])
while not (folder / "go").exists():
    time.sleep(0.005)
"""


def test_an_agent_of_the_users_own_command_has_a_journal_and_rings(tmp_path: Path) -> None:
    """By any backend, where basilica is installed. A worker that is killed is told from one for want of memory."""
    rank = Watched(tmp_path)
    bell, memory = tmp_path / "bell", tmp_path / "memory.events"
    os.mkfifo(bell)
    memory.write_text("low 0\noom 3\noom_kill 3\noom_group_kill 0\n")
    rank.env |= {"BASILICA_REPORT_BELL": str(bell), "BASILICA_MEMORY_EVENTS": str(memory)}
    script = tmp_path / "train.py"
    script.write_text(KILLED_ONCE)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    heard = os.open(bell, os.O_RDONLY | os.O_NONBLOCK)
    agent = subprocess.Popen(command, env=rank.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ended(agent):
        first = until(lambda: rounds(rank, agent), agent)[0]
        assert os.read(heard, 1000).decode() == f"\nrun 0 4 agent {agent.pid}\n" * 2
        memory.write_text("low 0\noom 4\noom_kill 4\noom_group_kill 0\n")
        os.kill(first.workers[1].pid, signal.SIGKILL)
        killed = time.time()
        (found,) = until(lambda: rank.exits(agent), agent)
        assert time.time() - killed < WITHIN_S
        assert (found.worker, found.code, found.kind, found.memory_kills) == (1, -9, "own", 1)
        assert (found.message, found.traceback) == ("", "")
        assert abs(found.at - killed) < 0.1  # as the kernel tells it, not when torch looked
        assert abs(found.mono - time.monotonic() - (found.at - time.time())) < 0.01

        until(lambda: len(rounds(rank, agent)) == 2, agent)
        (tmp_path / "go").touch()
        assert agent.wait(60) == 0
        kinds = [type(event) for event in rank.events(agent)]
        assert kinds == [
            Meeting,
            RoundStarted,
            WorkerExit,
            Stopped,
            Meeting,
            RoundStarted,
            WorkerExit,
            WorkerExit,
            Stopped,
        ]
        later = rank.exits(agent)[1:]
        assert {(each.round, each.worker, each.kind, each.memory_kills) for each in later} == {
            (2, 0, "done", 0),
            (2, 1, "done", 0),
        }
    os.close(heard)


def rounds(rank: Watched, agent: "subprocess.Popen[str]") -> list[RoundStarted]:
    return [event for event in rank.events(agent) if isinstance(event, RoundStarted)]


FALLS = """
import os, pathlib, time
folder, name = pathlib.Path(os.environ["FOLDER"]), f"{os.environ['BASILICA_RANK']}-{os.environ['LOCAL_RANK']}"
(folder / f"rank-{name}").write_text(os.environ["GROUP_RANK"])
while not (folder / f"fall-{name}").exists():
    time.sleep(0.005)
raise ConnectionResetError("Connection reset by peer")
"""


def test_a_worker_that_names_a_lost_peer_falls_as_an_echo_and_its_agent_meets_again(tmp_path: Path) -> None:
    """Its other worker, which it has to stop, is no fall of its own. The lines of the rendezvous go to a file."""
    ranks = [Watched(tmp_path, number) for number in range(2)]
    script = tmp_path / "train.py"
    script.write_text(FALLS)
    with meeting(ranks[0]):
        ranks[1].env |= {k: v for k, v in ranks[0].env.items() if k.startswith("BASILICA_RDZV")}
        ranks[1].env |= {"BASILICA_WORLD_MIN": "2", "BASILICA_WORLD_MAX": "2"}
        shipped = ship(script, launcher="torchrun --nproc-per-node=2")
        second = ranks[1].start(shipped)
        debug = Path(f"{ranks[1].report}.{second.pid}.debug")
        with ended(second) as said:
            until(lambda: debug.exists() and "as rank 0" in debug.read_text(), second)
            first = ranks[0].start(shipped)
            with ended(first):
                (began,) = until(lambda: rounds(ranks[1], second), second)
                assert (began.group_rank, began.agents, began.world) == (1, 2, 4)  # torch had numbered it 0
                assert [(w.local_rank, w.torch_rank) for w in began.workers] == [(0, 2), (1, 3)]
                until(lambda: (tmp_path / "rank-1-0").exists() and (tmp_path / "rank-0-0").exists(), second)
                assert [(tmp_path / f"rank-{number}-0").read_text() for number in range(2)] == ["0", "1"]
                (tmp_path / "fall-1-1").touch()
                (fell,) = until(lambda: ranks[1].exits(second), second)
                assert (fell.worker, fell.torch_rank, fell.kind) == (1, 3, "echo")
                assert fell.message == "ConnectionResetError: Connection reset by peer"
                until(lambda: len(ranks[1].events(second)) == 5, second)
                kinds = [type(event) for event in ranks[1].events(second)]
                assert kinds == [Meeting, RoundStarted, WorkerExit, Stopped, Meeting]
                # The first agent learns of it from the rendezvous, and has no exit of a worker to tell of.
                until(lambda: len(ranks[0].events(first)) >= 4, first)
                assert [type(e) for e in ranks[0].events(first)[:4]] == [Meeting, RoundStarted, Stopped, Meeting]
    assert "INFO" not in "".join(said)
    assert "Rendezvous version" in debug.read_text()
    assert stat.S_IMODE(debug.stat().st_mode) == 0o600


DEBUG_LINES = """
import importlib, logging, os
from basilica.rendezvous import torch_agent
importlib.import_module(torch_agent.ETCD)
log = logging.getLogger(torch_agent.ETCD)

def divert_and_say(words):
    torch_agent.divert_debug_lines("etcd")
    log.info(words)

os.environ["LOGLEVEL"] = "INFO"
divert_and_say("asked for")
os.environ["LOGLEVEL"] = "WARNING"
divert_and_say("diverted once")
divert_and_say("diverted again")
log.warning("a warning")
for number in range(4000):
    log.info("%06d %s", number, "x" * 100)
"""


def test_the_lines_of_a_rendezvous_go_to_a_bounded_file_unless_they_are_asked_for(tmp_path: Path) -> None:
    env = {**os.environ, "BASILICA_REPORT_FILE": str(tmp_path / "reports" / "0.0"), "PYTHONWARNINGS": "ignore"}
    line = [sys.executable, "-c", DEBUG_LINES]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(" ", 3)[3] for line in done.stderr.splitlines()] == ["asked for", "a warning"]
    (debug,) = (tmp_path / "reports").iterdir()
    lines = debug.read_text().splitlines()
    assert debug.stat().st_size <= torch_agent.FILE_BYTES_MAX
    assert len(lines) > 500
    numbers = [int(line.split()[3]) for line in lines]
    assert numbers == list(range(numbers[0], 4000))
    assert "diverted" not in debug.read_text()  # it was among the oldest


FUNCTION = """
import os, pathlib, time
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work():
    if os.environ["LOCAL_RANK"] == "1":
        raise ValueError("in a function")
    time.sleep(600)

if __name__ == "__main__":
    meeting = dict(rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="run", max_restarts=0)
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **meeting), work)()
"""


@pytest.mark.slow
def test_workers_that_are_functions_of_the_users_program_are_followed_as_well(tmp_path: Path) -> None:
    """torch stops the others of these before it closes them: they did not end by themselves."""
    rank = Watched(tmp_path)
    script = tmp_path / "launch.py"
    script.write_text(FUNCTION)
    pipe = subprocess.PIPE
    agent = subprocess.Popen([sys.executable, str(script)], env=rank.env, stdout=pipe, stderr=pipe, text=True)
    with ended(agent):
        assert agent.wait(100) == 1
        assert [type(event) for event in rank.events(agent)] == [Meeting, RoundStarted, WorkerExit, Stopped]
        (fell,) = rank.exits(agent)
        assert (fell.worker, fell.code, fell.kind, fell.message) == (1, 1, "own", "ValueError: in a function")


def test_a_journal_that_is_left_out_by_a_full_disk_goes_on_when_there_is_room(
    journal: torch_agent.Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.add("meeting")
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda *_: 3)  # so many bytes had room
        journal.add("stopped")
    journal.add("meeting")
    found = read_journal(str(written(tmp_path)))
    assert found is not None
    assert [event.n for event in found.events] == [1, 3]


# ---- without an agent ----------------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch_agent.Journal:
    monkeypatch.setenv("BASILICA_REPORT_FILE", str(tmp_path / "reports" / "0.0"))
    monkeypatch.delenv("BASILICA_REPORT_BELL", raising=False)
    return torch_agent.Journal()


def written(tmp_path: Path) -> Path:
    return tmp_path / "reports" / f"0.0.{os.getpid()}.agent"


EXIT: dict[str, Any] = {
    "round": 1,
    "worker": 0,
    "torch_rank": 0,
    "pid": 7,
    "code": 1,
    "memory_kills": 0,
    "kind": "own",
    "message": "",
    "traceback": "",
    "seen_at": 1.5,
}


@pytest.mark.parametrize("traceback", ["short", "x" * 4000, "\u00e9" * 4000, "\U0001f600" * 4000, "\0" * 4000])
def test_a_journal_stays_small_and_ends_with_its_newest_events(
    journal: torch_agent.Journal, tmp_path: Path, traceback: str
) -> None:
    read: dict[int, Event] = {}
    for _ in range(2000 if traceback == "short" else 200):
        journal.add("exit", **{**EXIT, "traceback": traceback})
        assert written(tmp_path).stat().st_size <= torch_agent.FILE_BYTES_MAX
        found = read_journal(str(written(tmp_path)))
        assert found is not None
        read |= {event.n: event for event in found.events}
        assert found.events[-1].n == max(read)
    assert sorted(read) == list(range(1, len(read) + 1))
    assert len(read) == (2000 if traceback == "short" else 200)
    last = read[len(read)]
    assert isinstance(last, WorkerExit)
    assert last.traceback
    assert traceback.endswith(last.traceback)


@pytest.mark.parametrize(
    "fields",
    [
        {"traceback": "\0" * 20_000, "message": "m" * 20_000},
        {"workers": [[n, n, 10_000 + n] for n in range(5000)]},
        {"message": "\ud800"},
        {},
    ],
)
def test_a_line_is_cut_to_its_bound(fields: dict[str, Any]) -> None:
    line = torch_agent.line_of({"n": 1, **fields})
    assert len(line) <= torch_agent.LINE_BYTES_MAX
    assert line.endswith(b"}\n")
    assert json.loads(line)["n"] == 1
    assert json.loads(line).keys() == {"n", *fields}


def test_of_the_journals_of_an_attempt_the_newest_are_kept(journal: torch_agent.Journal, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    for number in range(20):
        for name in (f"0.0.{number}.agent", f"0.0.{number}.debug", f"0.0.{number}", f"0.1.{number}.agent"):
            (reports / name).touch()
            os.utime(reports / name, (number, number))
    journal.add("meeting")
    kept = {path.name for path in reports.glob("0.0.*.agent")}
    assert kept == {written(tmp_path).name, *(f"0.0.{number}.agent" for number in range(13, 20))}
    assert len(list(reports.iterdir())) == 60 + 8


def test_a_journal_without_a_place_costs_nothing_but_itself(
    journal: torch_agent.Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BASILICA_REPORT_FILE")
    journal.add("meeting")
    assert not (tmp_path / "reports").exists()


def test_the_hooks_leave_a_torch_of_another_shape_alone() -> None:
    class Agent:
        def _rendezvous(self) -> None: ...

    before = dict(vars(Agent))
    torch_agent.keep_journal(Agent)
    assert dict(vars(Agent)) == before


@pytest.mark.parametrize(
    ("events", "kills"),
    [
        ("low 0\noom 5\noom_kill 2\noom_group_kill 1\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        ("", 0),
        ("oom_kill", 0),
    ],
)
def test_the_kernels_count_of_kills_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: str, kills: int
) -> None:
    (tmp_path / "events").write_text(events)
    monkeypatch.setenv("BASILICA_MEMORY_EVENTS", str(tmp_path / "events"))
    assert torch_agent.memory_kills() == kills


def test_a_child_that_ended_is_looked_at_and_not_reaped() -> None:
    for command, code in (("exit 3", 3), ("kill -9 $$", -9)):
        child = subprocess.Popen(["sh", "-c", command])
        assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert torch_agent.peeked(child.pid) == code
        assert child.wait() == code
        assert torch_agent.peeked(child.pid) is None


def test_the_end_of_a_process_is_noted_while_nobody_looks() -> None:
    children = {number: subprocess.Popen(["sleep", "600"]) for number in (4, 5)}
    ends = torch_agent.watch_ends({number: child.pid for number, child in children.items()})
    before = time.time(), time.monotonic()
    for number in (5, 4):
        children[number].kill()
        deadline = time.monotonic() + 20
        while number not in ends:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for moment, earlier, later in zip(ends[number], before, (time.time(), time.monotonic()), strict=True):
            assert earlier <= moment <= later
    assert [child.wait() for child in children.values()] == [-9, -9]  # they are not reaped by others
    assert list(ends) == [5, 4]
