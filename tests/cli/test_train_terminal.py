"""`basilica train` at a terminal: the live view, what Ctrl-C asks, and what is left of the terminal afterwards."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import Server, cli, phase_is, run_request, serving, wait_for
from tests.support.terminal import CTRL_C, Terminal, at_terminal

FOREVER = ("--", "sh", "-c", "echo hello from $RANK; sleep 600")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("terminal") / "state") as running:
        yield running


@pytest.fixture
def env(server: Server, tmp_path: Path) -> dict[str, str]:
    return {"BASILICA_API_URL": server.url, "BASILICA_API_TOKEN": server.key, "XDG_CONFIG_HOME": str(tmp_path)}


def look(server: Server, name: str) -> dict[str, Any]:
    with server.client() as client:
        body: dict[str, Any] = client.get(f"/deployments/{name}").json()
    return body


def start(server: Server, name: str, script: str, *, target: int = 1) -> None:
    with server.client() as client:
        client.post("/deployments", json=run_request(name, script, target=target)).raise_for_status()
        wait_for(client, name, lambda body: body["distributed"]["worldSize"]["ready"] == target)


def left_as_it_was(terminal: Terminal) -> bool:
    shown = terminal.seen.rfind("\x1b[?25h") > terminal.seen.rfind("\x1b[?25l")
    return terminal.modes == terminal.before and (shown or "\x1b[?25l" not in terminal.seen)


# ---- up --wait -------------------------------------------------------------------------------------------------------


def test_ctrl_c_and_d_detach(server: Server, env: dict[str, str]) -> None:
    with at_terminal("train", "up", "detached", "--world-size", "2", "--wait", *FOREVER, env=env) as terminal:
        terminal.read_until("2 of 2 ranks up")
        terminal.type(CTRL_C)
        terminal.read_until(r"\[d\]etach or \[c\]ancel")
        terminal.type("d")
        assert terminal.wait() == 125
        assert "detached; detached goes on: basilica train watch detached" in terminal.text
        assert left_as_it_was(terminal)
    assert look(server, "detached")["phase"] == "ready"


def test_ctrl_c_and_c_cancel_and_wait_for_the_end(server: Server, env: dict[str, str]) -> None:
    with at_terminal("train", "up", "cancelled", "--world-size", "2", "--wait", *FOREVER, env=env) as terminal:
        terminal.read_until("2 of 2 ranks up")
        terminal.type(CTRL_C)
        terminal.read_until("etach or")
        terminal.type("c")
        assert terminal.wait() == 130
        assert terminal.text.rstrip().endswith("cancelled cancelled: cancelled by the user")
        assert left_as_it_was(terminal)
    assert look(server, "cancelled")["distributed"]["settled"]


def test_a_second_ctrl_c_detaches_and_another_key_watches_on(server: Server, env: dict[str, str]) -> None:
    with at_terminal("train", "up", "twice", "--world-size", "1", "--wait", *FOREVER, env=env) as terminal:
        terminal.read_until("1 of 1 ranks up")
        terminal.type(CTRL_C)
        terminal.read_until("etach or")
        terminal.type("x")
        terminal.read_until("1 of 1 ranks up")
        terminal.type(CTRL_C)
        terminal.read_until("etach or")
        terminal.type(CTRL_C)
        assert terminal.wait() == 125
        assert left_as_it_was(terminal)
    assert look(server, "twice")["phase"] == "ready"


def test_a_run_that_ends_while_it_is_asked_about_needs_no_answer(
    server: Server, env: dict[str, str], tmp_path: Path
) -> None:
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 4"
    arguments = ["train", "up", "ended", "--world-size", "1", "--wait", "--", "sh", "-c", script]
    with at_terminal(*arguments, env=env) as terminal:
        terminal.read_until("1 of 1 ranks up")
        terminal.type(CTRL_C)
        terminal.read_until("etach or")
        (tmp_path / "go").touch()
        assert terminal.wait() == 4
        assert "ended failed: rank 0 exited with code 4" in terminal.text
        assert left_as_it_was(terminal)


def test_the_live_view_shows_world_ranks_events_and_last_lines(env: dict[str, str]) -> None:
    arguments = ["train", "up", "shown", "--world-size", "2", "--wait", "--logs", "--gpu-count", "0", *FOREVER]
    with at_terminal(*arguments, env=env) as terminal:
        # Lines, states and events arrive in any order; a look-ahead for each waits until all were drawn.
        drawn = ("██████████", "RANK  STATE", "WorldReady", "hello from 0", "hello from 1", "running")
        terminal.read_until(r"(?s)\A" + "".join(f"(?=.*{part})" for part in drawn) + ".*Ctrl-C: detach or cancel")
        assert "\x1b[32mrunning" in terminal.seen
        terminal.type(CTRL_C)
        terminal.read_until("etach or")
        terminal.type("c")
        assert terminal.wait() == 130


# ---- watch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["q", CTRL_C])
def test_leaving_a_watch_does_not_touch_the_run(server: Server, env: dict[str, str], key: str) -> None:
    name = f"left-{ord(key)}"
    start(server, name, "sleep 600", target=2)
    with at_terminal("train", "watch", name, env=env) as terminal:
        terminal.read_until("q leaves")
        terminal.type(key)
        assert terminal.wait() == 0
        assert left_as_it_was(terminal)
    assert look(server, name)["phase"] == "ready"


def test_a_watch_redraws_when_the_run_changes_and_ends_with_it(server: Server, env: dict[str, str]) -> None:
    start(server, "watched", "sleep 600", target=2)
    with at_terminal("train", "watch", "watched", env=env) as terminal, server.client() as client:
        terminal.read_until("2 of 2 ranks up")
        client.post("/deployments/watched/scale-distributed", json={"target": 3}).raise_for_status()
        terminal.read_until("3 of 3 ranks up")
        client.post("/deployments/watched/cancel", json={}).raise_for_status()
        terminal.read_until("watched cancelled")
        assert terminal.wait() == 0
        assert left_as_it_was(terminal)


def test_a_watch_follows_the_size_of_the_terminal(server: Server, env: dict[str, str]) -> None:
    start(server, "resized", "sleep 600", target=4)
    with at_terminal("train", "watch", "resized", env=env, columns=90) as terminal:
        terminal.read_until("NODE(.|\n)*q leaves")
        terminal.resize(30, 50)
        terminal.read_until(r"RANK  STATE +RESTARTS *\r\n(.|\n)*q leaves")  # there is no room for the node
        terminal.type("q")
        assert terminal.wait() == 0


# ---- logs and questions ----------------------------------------------------------------------------------------------


def test_logs_cannot_act_on_the_terminal_unless_they_are_wanted_raw(server: Server, env: dict[str, str]) -> None:
    start(server, "evil", r"printf '\033]0;owned\007[red]loud[/red] \033[31mcolour\033[0m\n'; sleep 600", target=2)
    with at_terminal("train", "logs", "evil", "-f", env=env) as terminal:
        terminal.read_until(r"(0\| .*colour\r\n(?s:.*)1\| .*colour\r\n)|(1\| .*colour\r\n(?s:.*)0\| .*colour\r\n)")
        assert "\x1b]0;owned" not in terminal.seen
        assert "\\x1b]0;owned\\x07[red]loud[/red] colour" in terminal.text
        assert "\x1b[36m0| " in terminal.seen
        terminal.type(CTRL_C)
        assert terminal.wait() == 0
    with at_terminal("train", "logs", "evil", "--raw", env=env) as terminal:
        assert terminal.wait() == 0
        assert "\x1b]0;owned\x07[red]loud[/red] \x1b[31mcolour" in terminal.seen
    with at_terminal("train", "logs", "evil", env=env | {"NO_COLOR": "1"}) as terminal:
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.seen
        assert "\\x1b]0;owned" in terminal.seen


def test_without_colours_nothing_is_coloured_or_redrawn(server: Server, env: dict[str, str]) -> None:
    start(server, "plain", "sleep 600")
    for command in (["ls"], ["status", "plain"], ["events", "plain"]):
        with at_terminal("train", *command, env=env | {"NO_COLOR": "1"}) as terminal:
            assert terminal.wait() == 0
            assert "\x1b" not in terminal.seen
    with at_terminal("train", "watch", "plain", env=env | {"TERM": "dumb"}) as terminal:
        terminal.read_until(" ready 1/1 ")
        terminal.type(CTRL_C)
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.seen


def test_deleting_a_live_run_is_asked_about(server: Server, env: dict[str, str]) -> None:
    start(server, "dear", "sleep 600")
    with at_terminal("train", "down", "dear", env=env) as terminal:
        terminal.read_until(r"dear is ready. Stop and delete it\?")
        terminal.type("n\n")
        assert terminal.wait() == 0
        assert "dear is kept" in terminal.text
    assert look(server, "dear")["phase"] == "ready"
    with at_terminal("train", "down", "dear", env=env) as terminal:
        terminal.read_until(r"delete it\?")
        terminal.type("y\n")
        assert terminal.wait() == 0
    assert "error" in look(server, "dear")


def test_what_takes_longer_than_a_second_shows_that_it_is_at_work(server: Server, env: dict[str, str]) -> None:
    start(server, "long", "sleep 600")
    with at_terminal("train", "wait", "long", env=env) as terminal, server.client() as client:
        terminal.read_until("long ready: 1 of 1 ranks are up")
        client.post("/deployments/long/cancel", json={}).raise_for_status()
        wait_for(client, "long", phase_is("cancelled"))
        assert terminal.wait() == 130
        assert left_as_it_was(terminal)


def test_a_login_asks_for_the_key_without_showing_it(server: Server, env: dict[str, str], tmp_path: Path) -> None:
    only = {"XDG_CONFIG_HOME": str(tmp_path)}
    with at_terminal("login", server.url, env=only) as terminal:
        terminal.read_until("API key: ")
        terminal.type(f"{server.key}\n")
        assert terminal.wait() == 0
        assert server.key not in terminal.text
    assert cli("train", "ls", env=only).returncode == 0
    assert os.stat(tmp_path / "basilica" / "login.json").st_mode & 0o777 == 0o600
