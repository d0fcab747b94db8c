"""`basilica train` against a server: what it prints, and how it exits. Nobody sits at a terminal here."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.lying_server import DROP, lying, run_body, sequence
from tests.support import probes
from tests.support.server import Command, Server, cli, ended, phase_is, serving, wait_for

Done = subprocess.CompletedProcess[str]
FOREVER = ("--", "sleep", "600")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("train")
    with serving(directory / "state", env=probes.path_with(probes.QUICK, directory / "quick")) as running:
        yield running


@pytest.fixture
def env(server: Server, tmp_path: Path) -> dict[str, str]:
    return {
        "BASILICA_API_URL": server.url,
        "BASILICA_API_TOKEN": server.key,
        "XDG_CONFIG_HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
    }


@pytest.fixture
def train(env: dict[str, str]) -> Callable[..., Done]:
    return lambda *arguments: cli("train", *arguments, env=env)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of the test's own."""
    return f"t{abs(hash(request.node.nodeid)) % 10**9}"


def look(server: Server, name: str) -> dict[str, Any]:
    with server.client() as client:
        body: dict[str, Any] = client.get(f"/deployments/{name}").json()
    return body


def settle(server: Server, name: str) -> dict[str, Any]:
    with server.client() as client:
        return wait_for(client, name, ended)


def one_line(done: Done, code: int = 1) -> str:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("basilica: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---- up --------------------------------------------------------------------------------------------------------------


def test_up_returns_once_min_ranks_are_up_and_says_how_to_go_on(train: Callable[..., Done], name: str) -> None:
    done = train("up", name, "--world-size", "1:2:4", *FOREVER)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{name} is ready: ")
    assert lines[1:] == [
        f"  basilica train watch {name}",
        f"  basilica train logs -f {name}",
        f"  basilica train scale {name} --target N",
        f"  basilica train cancel {name}",
    ]
    again = train("up", name, "--world-size", "1", *FOREVER)
    assert f"a live run is called '{name}' already" in one_line(again)


def test_a_name_is_made_when_none_is_given(train: Callable[..., Done]) -> None:
    made = json.loads(train("up", "--world-size", "1", "--json", "--", "true").stdout)
    assert made["friendlyName"].count("-") == 2


def test_all_options_reach_the_server(train: Callable[..., Done], server: Server, name: str, tmp_path: Path) -> None:
    (tmp_path / "vars").write_text("FROM_FILE=1\nBOTH=file\n")
    script = "env | sed 's/hidden/found/' | sort"
    done = train(
        *("up", name, "--world-size", "2:3:5", "--gpu-count", "0", "--gpu-model", "H100", "--gpu-model", "A100"),
        *("--min-gpu-memory-gb", "40", "--image", "img:1", "--cpu", "500m", "--memory", "1Gi", "--port", "1234"),
        *("--env", "A=b c", "--env", "PATH", "--env", "BOTH=option", "--env-file", str(tmp_path / "vars")),
        *("--secret", "S=hidden", "--nccl-env", "NCCL_DEBUG=WARN", "--provider", "x,y", "--exclude-provider", "z"),
        *("--topology-spread", "none", "--no-bench", "--bench-placement", "strict", "--rendezvous-backend", "c10d"),
        *("--max-restarts", "2", "--grace", "2s", "--ttl", "1h", "--deadline", "30m", "--start-deadline", "5m"),
        *("--resize", "restart", "--timeout", "30s", "--wait", "--logs", "--command", script),
    )
    assert done.returncode == 0, done.stderr
    lines = set(done.stdout.splitlines())
    for wanted in ("0| A=b c", "1| BOTH=option", "2| FROM_FILE=1", "0| S=found", "0| NCCL_DEBUG=WARN"):
        assert wanted in lines
    assert f"0| PATH={os.environ['PATH']}" in lines
    assert "0| BASILICA_WORLD_MAX=5" in lines
    assert "hidden" not in json.dumps(look(server, name))


@pytest.mark.parametrize("bench", [["--bench"], ["--bench", "on-start"], ["--bench=on-start"]])
def test_bench_takes_a_value_or_none(train: Callable[..., Done], name: str, bench: list[str]) -> None:
    made = json.loads(train("up", name, "--world-size", "1", *bench, "--json", *FOREVER).stdout)
    assert made["distributed"]["bench"]["mode"] == "on-start"


def test_a_script_runs_with_its_arguments_in_the_directory_that_is_shipped(
    train: Callable[..., Done], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import os, sys, other\nprint(os.environ['RANK'], sys.argv[1:], other.X)\n")
    (tmp_path / "other.py").write_text("X = 42\n")
    script = str(tmp_path / "train.py")
    done = train(
        "up", "--world-size", "2", "--wait", "--logs", "--workdir", str(tmp_path), script, "--", "--lr", "1e-3"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0| 0 ['--lr', '1e-3'] 42", "1| 1 ['--lr', '1e-3'] 42"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--world-size", "0", "--", "true"],
        ["--world-size", "2:1:3", "--", "true"],
        ["--world-size", "2"],
        ["--world-size", "2", "n", "python", "train"],
        ["--world-size", "2", "--rm", "--", "true"],
        ["--world-size", "2", "--logs", "--", "true"],
        ["--world-size", "2", "--wait", "-d", "--", "true"],
        ["--world-size", "2", "--ttl", "soon", "--", "true"],
        ["--world-size", "2", "--env", "NOT_SET_ANYWHERE", "--", "true"],
        ["--world-size", "2", "--bench", "--bench-placement", "lax", "--", "true"],
        ["--world-size", "2", "--workdir", "/no/such/place", "--", "true"],
        ["--world-size", "2", "no-such-script.py"],
    ],
)
def test_bad_usage_is_2_and_starts_nothing(train: Callable[..., Done], server: Server, arguments: list[str]) -> None:
    with server.client() as client:
        before = client.get("/deployments").json()["total"]
        done = train("up", *arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert client.get("/deployments").json()["total"] == before


def test_a_name_that_cannot_be_one_is_refused(train: Callable[..., Done]) -> None:
    assert "try 'no-good'" in one_line(train("up", "No Good", "--world-size", "1", "--", "true"))


def test_a_run_that_is_not_up_in_time_is_kept() -> None:
    with lying(sequence((200, run_body("pending", ready=0, generation=1, version=1)))) as server:
        env = {"BASILICA_API_URL": server.url}
        done = cli("train", "up", "run", "--world-size", "1", "--timeout", "0s", *FOREVER, env=env)
        assert "0 ready of 1 required" in one_line(done, 124)
        assert server.count("DELETE") == 0


# ---- waiting for the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -SEGV $$", 139), ("exit 255", 255)]
)
def test_up_wait_exits_as_the_run_does(train: Callable[..., Done], name: str, script: str, code: int) -> None:
    done = train("up", name, "--world-size", "1", "--wait", "--command", script)
    assert done.returncode == code, done.stderr
    assert ("succeeded" if code == 0 else "failed") in done.stdout
    assert train("wait", name).returncode == code
    again = json.loads(train("wait", name, "--for", "complete", "--json").stdout)
    assert again["phase"] == ("succeeded" if code == 0 else "failed")


def test_with_rm_nothing_is_left(train: Callable[..., Done], name: str) -> None:
    assert train("up", name, "--world-size", "1", "--wait", "--rm", "--", "false").returncode == 1
    assert "not found" in one_line(train("status", name))


def test_the_time_of_a_wait_may_be_up(train: Callable[..., Done], server: Server, name: str) -> None:
    done = train("up", name, "--world-size", "1", "--wait", "--timeout", "0.2s", *FOREVER)
    assert done.returncode == 124
    assert done.stderr.endswith("it goes on\n")
    one_line(train("wait", name, "--timeout", "0s"), 124)
    assert train("wait", name, "--for", "min").returncode == 0
    assert train("wait", name, "--for", "target", "--timeout", "20s").returncode == 0
    assert train("wait", name, "--for", "bench").stdout.startswith("the bench is off")
    assert look(server, name)["phase"] == "ready"


def test_output_to_a_pipe_is_what_the_ranks_wrote_to_the_byte(train: Callable[..., Done], name: str) -> None:
    script = r"printf '\033[31mred\033]0;t\007 \342\202\254\rx\n'"
    done = train("up", name, "--world-size", "1", "--wait", "--logs", "--command", script)
    line = "\x1b[31mred\x1b]0;t\x07 €\rx"
    assert done.stdout == f"{line}\n"
    assert train("logs", name).stdout == done.stdout
    assert json.loads(train("logs", name, "--json").stdout) == {"rank": 0, "line": line}


def test_json_of_a_wait_is_one_document_and_with_logs_one_per_line(train: Callable[..., Done], name: str) -> None:
    done = train("up", name, "--world-size", "1", "--wait", "--json", "--", "true")
    assert json.loads(done.stdout)["phase"] == "succeeded"
    done = train("rerun", name, "--wait", "--json", "--logs")
    assert json.loads(done.stdout.splitlines()[-1])["phase"] == "succeeded"
    done = train("up", "--world-size", "2", "--wait", "--json", "--logs", "--", "echo", "hi")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(entry["rank"] for entry in lines[:-1]) == [0, 1]
    assert lines[-1]["phase"] == "succeeded"


def test_an_interrupt_without_a_terminal_cancels_and_waits_for_the_end(
    env: dict[str, str], server: Server, name: str
) -> None:
    command = Command(["train", "up", name, "--world-size", "1", "--wait", *FOREVER], env)
    command.read_until(b" ready 1/1 ")
    command.signal(signal.SIGINT)
    assert "cancelled" in command.read_until(None)
    assert command.wait() == 130
    assert look(server, name)["distributed"]["settled"]


def test_a_second_interrupt_detaches(env: dict[str, str], server: Server, name: str) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 1; done"
    arguments = ["--world-size", "1", "--wait", "--logs", "--grace", "5s", "--command", script]
    command = Command(["train", "up", name, *arguments], env)
    command.read_until(b"up\n")
    command.signal(signal.SIGINT)
    with server.client() as client:
        wait_for(client, name, phase_is("cancelled"))
        command.signal(signal.SIGINT)
        assert command.wait() == 125
        assert not look(server, name)["distributed"]["settled"]


def test_termination_detaches(env: dict[str, str], server: Server, name: str) -> None:
    command = Command(["train", "up", name, "--world-size", "1", "--wait", *FOREVER], env)
    command.read_until(b" ready 1/1 ")
    command.signal(signal.SIGTERM)
    assert command.wait() == 125
    assert f"detached; {name} goes on: basilica train watch {name}" in command.stderr
    assert look(server, name)["phase"] == "ready"


# ---- looking ---------------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first(train: Callable[..., Done], name: str) -> None:
    train("up", name, "--world-size", "1", "--wait", "--", "true")
    train("up", f"{name}-b", "--world-size", "1:2:3", *FOREVER)
    lines = train("ls").stdout.splitlines()
    assert lines[0].split() == ["NAME", "PHASE", "WORLD", "AGE", "MESSAGE"]
    assert [line.split()[0] for line in lines[1:3]] == [f"{name}-b", name]
    assert all(line == line.rstrip() for line in lines)
    assert train("ps").stdout.splitlines()[0] == lines[0]
    rows = json.loads(train("ls", "--live", "--json").stdout)
    assert name not in [row["friendlyName"] for row in rows]
    assert f"{name}-b" in [row["friendlyName"] for row in rows]


def test_a_run_is_looked_at_from_all_sides(train: Callable[..., Done], name: str) -> None:
    script = "echo to $RANK; if [ $RANK = 1 ]; then echo bad >&2; exit 3; fi; sleep 600"
    train("up", name, "--world-size", "2", "--wait", "--command", script)
    status = train("status", name).stdout
    assert "failed" in status
    assert "<- failed first" in status
    assert json.loads(train("status", name, "--json").stdout)["friendlyName"] == name
    exits = train("exits", name).stdout
    assert exits.splitlines()[0].split()[:7] == ["RANK", "CODE", "REASON", "SIGNAL", "ROLE", "RESTARTS", "DURATION"]
    assert "1| bad" in exits
    facts = json.loads(train("exits", name, "--json").stdout)
    assert facts["culprit"]["rank"] == 1
    assert [e["rank"] for e in facts["exits"]] == [0, 1]
    assert train("why", name).stdout.startswith("failed: rank 1 exited with code 3")
    assert json.loads(train("why", name, "--json").stdout)["phase"] == "failed"
    rows = [line.split("\t") for line in train("events", name).stdout.splitlines()]
    assert rows[0][2] == "Created"
    assert {len(row) for row in rows} == {4}
    assert rows[-1][1:3] == ["Warning", "Failed"]
    events = json.loads(train("events", name, "--limit", "1", "--json").stdout)["events"]
    assert [event["reason"] for event in events] == ["Failed"]
    assert train("logs", name, "--rank", "1").stdout == "to 1\nbad\n"
    assert train("logs", name, "--rank", "1", "--tail", "1").stdout == "bad\n"
    assert sorted(train("logs", name, "--rank", "0", "--rank", "1", "--tail", "1").stdout.splitlines()) == [
        "0| to 0",
        "1| bad",
    ]
    assert "ranks 0 to 1" in one_line(train("logs", name, "--rank", "9"))


def test_logs_and_events_are_followed_to_the_end(
    env: dict[str, str], train: Callable[..., Done], name: str, tmp_path: Path
) -> None:
    script = f"echo begun; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo done"
    train("up", name, "--world-size", "1:2:2", "--command", script)
    logs = Command(["train", "logs", name, "-f"], env)
    events = Command(["train", "events", name, "--follow"], env)
    changes = Command(["train", "watch", name, "--json"], env)
    lines = Command(["train", "watch", name], env)
    first = logs.read_until(b"begun\n(.|\n)*begun\n")
    events.read_until(b"WorldReady")
    lines.read_until(b"\n")
    assert train("exec", name, "--", "touch", str(tmp_path / "go")).returncode == 0
    assert sorted((first + logs.read_until(None)).splitlines()) == ["0| begun", "0| done", "1| begun", "1| done"]
    assert "\tSucceeded\t" in events.read_until(None)
    assert [json.loads(line)["phase"] for line in changes.read_until(None).splitlines()][-1] == "succeeded"
    assert "succeeded 2/2" in lines.read_until(None).splitlines()[-1]
    assert [c.wait() for c in (logs, events, changes, lines)] == [0, 0, 0, 0]


def test_an_interrupt_ends_logs_quietly(env: dict[str, str], train: Callable[..., Done], name: str) -> None:
    train("up", name, "--world-size", "1", "--command", "echo begun; sleep 600")
    logs = Command(["train", "logs", name, "-f"], env)
    logs.read_until(b"begun\n")
    logs.signal(signal.SIGINT)
    assert logs.wait() == 0
    assert logs.stderr == ""


def test_the_bench_is_told_whatever_became_of_it(train: Callable[..., Done], name: str, tmp_path: Path) -> None:
    train("up", name, "--world-size", "1", "--bench", "--wait", "--", "true")
    picture = tmp_path / "link.png"
    done = train("bench", name, "--plot", str(picture))
    assert done.returncode == 0
    assert done.stdout.startswith("bench Skipped")
    assert done.stderr == "there is no result to draw yet\n"
    assert not picture.exists()
    assert json.loads(train("bench", name, "--json").stdout)["phase"] == "Skipped"


def test_a_run_is_benched_shown_and_drawn(train: Callable[..., Done], name: str, tmp_path: Path) -> None:
    train("up", name, "--world-size", "2", "--bench", *FOREVER)
    assert train("wait", name, "--for", "bench").stdout.startswith("bench Succeeded: measured over the loopback of ")
    shown = train("bench", name, "--plot", str(tmp_path / "link.svg"))
    assert shown.returncode == 0
    assert "An all-reduce of " in shown.stdout
    assert (tmp_path / "link.svg").read_text().startswith("<svg")
    assert train("bench", name, "--plot", str(tmp_path / "link.png")).returncode == 0
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")
    refused = train("bench", name, "--plot", str(tmp_path / "link.nonsense"))
    assert refused.returncode == 1
    assert "cannot draw into" in refused.stderr
    body = json.loads(train("bench", name, "--json").stdout)
    assert (body["phase"], body["lastAttemptOutcome"], body["result"]["method"]) == ("Succeeded", "success", "tcp")
    assert [point["sizeBytes"] for point in body["result"]["sweep"]] == body["result"]["sizeBytesSwept"]
    events = train("events", name).stdout
    assert "BenchStarted" in events
    assert "BenchSucceeded" in events
    assert train("cancel", name).returncode == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../deployments", "a b", "x?y#z", "ü", "%2e%2e", "a\x1b[31m"])
@pytest.mark.parametrize("command", ["status", "cancel", "logs"])
def test_a_strange_name_is_not_found_and_nothing_else(train: Callable[..., Done], command: str, name: str) -> None:
    said = one_line(train(command, name))
    assert "not found" in said
    assert "\x1b" not in said


# ---- acting ----------------------------------------------------------------------------------------------------------


def test_a_run_is_scaled_and_waited_for(train: Callable[..., Done], server: Server, name: str) -> None:
    train("up", name, "--world-size", "1:1:3", *FOREVER)
    done = train("scale", name, "--target", "3", "--wait")
    assert done.stdout == f"{name} is ready: 3 of 3 ranks up (min 1, max 3)\n"
    assert train("scale", name, "--target", "1").stdout.endswith("of 1 ranks up\n")
    assert "not within 1..3" in one_line(train("scale", name, "--target", "4"))
    scaled = json.loads(train("scale", name, "--target", "2", "--wait", "--json").stdout)
    assert scaled["distributed"]["worldSize"]["target"] == 2


def test_several_runs_are_cancelled_and_deleted_in_spite_of_one_that_is_not_there(
    train: Callable[..., Done], server: Server, name: str
) -> None:
    for n in "ab":
        train("up", f"{name}{n}", "--world-size", "1", *FOREVER)
    done = train("cancel", f"{name}a", "nobody", f"{name}b", "--wait")
    assert "'nobody' not found" in one_line(done)
    assert done.stdout == f"{name}a cancelled\n{name}b cancelled\n"
    assert look(server, f"{name}b")["distributed"]["settled"]
    assert train("cancel", f"{name}a").returncode == 0
    assert train("wait", f"{name}a").returncode == 130
    done = train("down", f"{name}a", "nobody", f"{name}b")
    assert done.returncode == 1
    assert done.stdout == f"deleted {name}a\ndeleted {name}b\n"
    assert train("down", f"{name}a").returncode == 1


def test_a_live_run_is_deleted_without_asking_where_nobody_can_be_asked(
    train: Callable[..., Done], server: Server, name: str
) -> None:
    train("up", name, "--world-size", "1", *FOREVER)
    instance = look(server, name)["instanceName"]
    assert json.loads(train("down", name, "--json").stdout) == {"deleted": [instance]}
    assert "error" in look(server, name)


def test_a_run_is_run_again(train: Callable[..., Done], server: Server, name: str) -> None:
    train("up", name, "--world-size", "1", "--wait", "--command", "echo once more; exit 5")
    first = look(server, name)["instanceName"]
    done = train("rerun", name, "--wait", "--logs")
    assert done.returncode == 5
    assert done.stdout == "once more\n"
    assert look(server, name)["instanceName"] != first


def test_a_command_beside_a_rank(train: Callable[..., Done], name: str) -> None:
    train("up", name, "--world-size", "2", "--env", "A=b", *FOREVER)
    done = train("exec", name, "--rank", "1", "--", "sh", "-c", "printf '%s %s' $RANK $A; echo err >&2; exit 9")
    assert (done.returncode, done.stdout, done.stderr) == (9, "1 b", "err\n")
    lines = [json.loads(line) for line in train("exec", name, "--json", "--", "echo", "--", "-x").stdout.splitlines()]
    assert "".join(line.get("text", "") for line in lines) == "-- -x\n"
    assert lines[-1] == {"exitCode": 0}
    assert train("exec", name, "--", "no-such-program").returncode == 127
    assert train("exec", name).returncode == 2
    assert train("exec", name, "--rank", "9", "--", "true").returncode == 1


def test_ended_runs_are_pruned(train: Callable[..., Done], env: dict[str, str], server: Server, name: str) -> None:
    train("up", name, "--world-size", "1", "--wait", "--", "true")
    instance = settle(server, name)["instanceName"]
    assert train("prune").stdout == "no run ended more than 7d ago\n"
    assert f"removed {instance}\n" in train("prune", "--older-than", "0s").stdout
    assert json.loads(cli("prune", "--json", env=env).stdout) == {"deleted": []}


# ---- the server ------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_told(env: dict[str, str]) -> None:
    one_line(cli("train", "ls", env=env | {"BASILICA_API_TOKEN": "wrong"}))


def test_a_server_that_does_not_answer_is_named(env: dict[str, str]) -> None:
    said = one_line(cli("train", "ls", env=env | {"BASILICA_API_URL": "http://me:secret@127.0.0.1:1/x"}))
    assert said.startswith("basilica: http://127.0.0.1:1/x does not answer (")
    assert "secret" not in said


def test_a_list_is_one_request() -> None:
    rows = [run_body(phase) for phase in ("ready", "failed", "succeeded")]
    with lying(sequence((200, {"deployments": rows, "total": 3}))) as server:
        done = cli("train", "ls", env={"BASILICA_API_URL": server.url})
        assert len(done.stdout.splitlines()) == 4
        assert server.asked == [("GET", "/deployments")]


def test_what_a_hostile_server_says_does_not_act_on_the_terminal() -> None:
    error = {"code": "X", "message": "\x1b]0;owned\x07", "timestamp": "2026-01-01T00:00:00Z", "retryable": False}
    with lying(sequence((418, {"error": error}))) as server:
        assert "\\x1b]0;owned\\x07" in one_line(cli("train", "ls", env={"BASILICA_API_URL": server.url}))


def test_a_server_without_generations_is_watched_by_asking_it_again() -> None:
    states = [run_body("pending", ready=0), run_body("pending", ready=0), run_body("ready"), run_body("succeeded")]
    with lying(sequence(*((200, state) for state in states))) as server:
        done = cli("train", "watch", "run", env={"BASILICA_API_URL": server.url})
    assert [line.split()[1:3] for line in done.stdout.splitlines()] == [
        ["pending", "0/2"],
        ["ready", "2/2"],
        ["succeeded", "2/2"],
    ]


def test_a_connection_that_drops_does_not_end_a_watch() -> None:
    first = (200, run_body("ready", generation=1, version=1))
    last = (200, run_body("succeeded", generation=1, version=2, settled=True))
    with lying(sequence(first, first, DROP, DROP, (502, {}), last)) as server:
        done = cli("train", "watch", "run", "--json", env={"BASILICA_API_URL": server.url})
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["phase"] for line in done.stdout.splitlines()] == ["ready", "succeeded"]


def test_the_commands_complete_names_of_runs(train: Callable[..., Done], env: dict[str, str], name: str) -> None:
    train("up", name, "--world-size", "1", "--wait", "--", "true")
    train("up", name, "--world-size", "1", "--wait", "--", "true")
    words = {
        "COMP_WORDS": f"basilica train status {name[:5]}",
        "COMP_CWORD": "3",
        "_BASILICA_COMPLETE": "complete_bash",
    }
    script = "import sys; sys.argv[0] = 'basilica'; from basilica.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], env=env | words, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [name]


@pytest.mark.timeout(120)
def test_a_launcher_may_have_options(train: Callable[..., Done], name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print('workers', os.environ['WORLD_SIZE'])\n")
    options = "torchrun --max-restarts=0 --nproc-per-node=2"
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    done = train("up", name, "--launcher", options, "--env", path, "--world-size=1", "--wait", "--logs", str(script))
    assert done.returncode == 0, done.stderr
    assert "workers 2" in done.stdout


def test_another_launcher_is_refused_in_one_sentence(train: Callable[..., Done], name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = train("up", name, "--launcher", "mpirun -n 2", "--world-size", "1", str(script))
    assert "must be 'python' or 'torchrun', which may have options after it" in one_line(done)
