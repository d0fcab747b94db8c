"""`basilica local`: the server in the background, as people start, look at and stop it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from basilica.client import embedded
from basilica.machine.places import start_of
from tests.support.server import Json, cli, phase_is, run_request, wait_for

ENV = {"BASILICA_IDLE_EXIT": "60"}  # should a test forget one


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    embedded.shutdown(tmp_path / "state", cancel_runs=True)


def local(command: str, state: Path, *options: str, code: int = 0) -> str:
    done = cli("local", command, "--state-dir", state, *options, env=ENV)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    return done.stdout


def local_json(command: str, state: Path, *options: str, code: int = 0) -> Json:
    found: Json = json.loads(local(command, state, "--json", *options, code=code))
    return found


def test_where_none_runs_status_exits_1_and_stop_has_nothing_to_do(state: Path) -> None:
    assert local("status", state, code=1) == f"no server runs on {state}\n"
    assert local_json("status", state, code=1) == {"running": False, "stateDir": str(state)}
    assert local("stop", state) == f"no server runs on {state}\n"
    assert local_json("stop", state) == {"stopped": False, "runsGoingOn": 0, "runsCancelled": 0}
    assert not state.exists()


def test_it_is_started_once_looked_at_and_stopped(state: Path) -> None:
    first = local("start", state).splitlines()
    facts = local_json("start", state)
    assert facts.pop("started") is False
    assert first == [
        f"Basilica listens on {facts['url']} (pid {facts['pid']})",
        f"API key: {state / 'api-key'}",
        f"Log: {state / 'server.log'}",
    ]
    assert local("start", state).splitlines()[0] == f"{first[0][:-1]}, as before)"
    assert facts.pop("startedAt") > 1e9
    assert facts == {
        "running": True,
        "url": embedded.locate(state).url,
        "pid": facts["pid"],
        "stateDir": str(state),
        "keyFile": str(state / "api-key"),
        "logFile": str(state / "server.log"),
        "liveRuns": 0,
    }
    seen = local_json("status", state)
    assert seen.pop("startedAt") > 1e9
    assert seen == facts
    assert local("status", state).splitlines() == [
        f"Basilica listens on {facts['url']} (pid {facts['pid']}); 0 runs live",
        f"State: {state}",
        f"API key: {state / 'api-key'}",
        f"Log: {state / 'server.log'}",
    ]
    assert local("stop", state) == f"stopped (pid {facts['pid']})\n"
    assert start_of(facts["pid"]) is None


def test_stop_says_how_many_runs_go_on_and_cancels_them_if_asked(state: Path) -> None:
    facts = local_json("start", state)
    assert facts["started"] is True
    headers = {"Authorization": f"Bearer {(state / 'api-key').read_text().strip()}"}
    with httpx2.Client(base_url=facts["url"], headers=headers, timeout=30, trust_env=False) as client:
        client.post("/deployments", json=run_request("train", "exec sleep 600")).raise_for_status()
        wait_for(client, "train", phase_is("ready"))
    assert local("status", state).startswith(f"Basilica listens on {facts['url']} (pid {facts['pid']}); 1 run live\n")
    assert local("stop", state).splitlines() == [
        f"stopped (pid {facts['pid']})",
        "1 run still live, without a server: the next one takes them up",
    ]
    assert local_json("start", state)["liveRuns"] == 1
    assert local_json("stop", state, "--cancel-runs") == {"stopped": True, "runsGoingOn": 0, "runsCancelled": 1}


def test_what_keeps_it_from_starting_is_one_line(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("precious")
    done = cli("local", "start", "--state-dir", place, env=ENV)
    assert done.returncode == 1
    assert done.stderr.startswith(f"basilica: cannot start a local server on {place}: ")
    assert done.stderr.count("\n") == 1
    done = cli("local", "start", "--state-dir", tmp_path, env={"BASILICA_IDLE_EXIT": "soon"})
    assert done.returncode == 1
    assert "BASILICA_IDLE_EXIT" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_end_time_that_is_none_is_bad_usage(state: Path) -> None:
    assert cli("local", "stop", "--timeout", "soon", "--state-dir", state).returncode == 2
    assert cli("serve", "--idle-exit", "soon", "--state-dir", state).returncode == 2
    assert not os.path.exists(state)
