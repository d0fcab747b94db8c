"""`basilica serve`: what it prints and refuses, and how it ends."""

import http.client
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.support.server import Server, cli, ended, phase_is, run_request, serving, wait_for


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a command that gave up said, once it is known to be one sentence and exit code 1."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("basilica: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_it_says_where_it_listens_and_where_its_key_is(server: Server, state: Path) -> None:
    assert server.printed.splitlines() == [
        f"Basilica listens on {server.url}",
        f"API key: {state / 'api-key'}",
    ]
    assert server.url.startswith("http://127.0.0.1:")
    assert (state / "api-key").stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    note = json.loads((state / "server.json").read_text())
    assert (note["url"], note["pid"], note["keyFile"]) == (server.url, server.pid, str(state / "api-key"))
    assert (state / "server.json").stat().st_mode & 0o777 == 0o600
    with server.client() as client:
        assert client.get("/deployments").json() == {"deployments": [], "total": 0}


def test_only_digests_of_keys_are_kept(server: Server, state: Path) -> None:
    with server.client() as client:
        client.get("/deployments").raise_for_status()
    files = [f for f in state.rglob("*") if f.is_file() and f.name != "api-key"]
    assert any(f.name == "basilica.db" for f in files)
    assert [f.name for f in files if server.key.encode() in f.read_bytes()] == []
    assert server.key not in server.stderr + server.printed


def test_a_second_server_on_the_same_state_is_refused_with_the_first_ones_pid(server: Server, state: Path) -> None:
    said = one_line(cli("serve", "--port", "0", "--state-dir", state))
    assert f"in use by process {server.pid}" in said
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert json.loads((state / "server.json").read_text())["pid"] == server.pid


def test_a_port_in_use_is_a_clear_error(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = one_line(cli("serve", "--port", str(port), "--state-dir", state))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert "choose another --port" in said


@pytest.mark.parametrize("host", ["no-such-host.invalid", "..", "300.1.1.1", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_a_clear_error(state: Path, host: str) -> None:
    options = ("--host", host, "--port", "0", "--state-dir", state)
    said = one_line(cli("serve", *options, env={"BASILICA_API_KEY": "a-key-long-enough"}))
    assert f"cannot listen on {host}:0: " in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_it_wants_a_key_first(state: Path, host: str) -> None:
    said = one_line(cli("serve", "--host", host, "--port", "0", "--state-dir", state))
    assert f"refusing to listen on {host} without any API key" in said
    assert "basilica keys create" in said
    assert not (state / "api-key").exists()


def test_with_a_key_it_listens_beyond_loopback_and_warns_of_plain_text(state: Path) -> None:
    key = cli("keys", "create", "--user", "alice", "--state-dir", state).stdout.strip()
    with serving(state, "--host", "0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx2.get(f"{url}/deployments", headers=headers, trust_env=False).status_code == 200
        assert "Keys travel unencrypted" in server.stderr


def test_a_key_can_be_given_in_a_file_or_in_the_environment(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  the-key-of-the-file\n")
    for options, env, key in (
        (("--api-key-file", str(file)), {}, "the-key-of-the-file"),
        ((), {"BASILICA_API_KEY": "key-of-the-environment"}, "key-of-the-environment"),
        ((), {"BASILICA_API_TOKEN": "key-of-the-token"}, "key-of-the-token"),
    ):
        with serving(state, *options, env=env) as server, server.client(key) as client:
            assert client.get("/deployments").status_code == 200
            assert client.get("/deployments", headers={"Authorization": "Bearer x"}).status_code == 401


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("a b", "printable"),
        ("ü", "printable"),
        ("fifteen-letters", "must have at least 16 characters"),
    ],
)
def test_a_key_that_no_header_can_carry_or_that_is_short_is_refused(
    state: Path, tmp_path: Path, content: str, problem: str
) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    assert problem in one_line(cli("serve", "--port", "0", "--state-dir", state, "--api-key-file", file))


def test_a_key_file_that_is_not_there_is_bad_usage(state: Path) -> None:
    done = cli("serve", "--port", "0", "--state-dir", state, "--api-key-file", "/no/such/file")
    assert done.returncode == 2
    assert "--api-key-file" in done.stderr


@pytest.mark.parametrize("broken", ["", "not a key\n", "\xff\0"])
def test_a_key_file_that_was_broken_is_made_anew(state: Path, broken: str) -> None:
    with serving(state):
        pass
    (state / "api-key").write_text(broken, encoding="latin-1")
    with serving(state) as server, server.client() as client:
        assert server.key.startswith("bsk_")
        assert client.get("/deployments").status_code == 200
        assert (state / "api-key").stat().st_mode & 0o777 == 0o600


def test_a_revoked_key_of_the_server_does_not_come_back_with_a_restart(state: Path) -> None:
    with serving(state) as server:
        old = server.key
        (row,) = json.loads(cli("keys", "list", "--json", "--state-dir", state).stdout)
        assert cli("keys", "revoke", row["id"], "--state-dir", state).returncode == 0
        with server.client() as client:
            assert client.get("/deployments").status_code == 401
    with serving(state) as server:
        assert server.key != old
        with server.client(old) as client:
            assert client.get("/deployments").status_code == 401
        with server.client() as client:
            assert client.get("/deployments").status_code == 200


def test_an_unknown_log_level_is_bad_usage_with_the_known_ones(state: Path) -> None:
    done = cli("serve", "--log-level", "loud", "--state-dir", state)
    assert done.returncode == 2
    assert "debug, info, warning or error" in done.stderr
    assert not state.exists()


def test_the_log_level_decides_what_is_said(state: Path) -> None:
    with serving(state, "--log-level", "error") as server:
        pass
    assert server.stderr == ""


# ---- the end --------------------------------------------------------------------------------------------------------


def test_a_terminated_server_ends_its_streams_cleanly_and_leaves_ranks_running(state: Path) -> None:
    with serving(state) as server:
        with server.client() as client:
            client.post("/deployments", json=run_request("train", "echo up; exec sleep 600")).raise_for_status()
            wait_for(client, "train", phase_is("ready"))
        watching, following = ask(server, "watch"), ask(server, "logs?follow=true")
        answers = [connection.getresponse() for connection in (watching, following)]
        first = [answer.readline() for answer in answers]
        polling = ask(server, "watch?wait=600&since=1000000")
        with server.client() as client:
            client.get("/health")  # it came later: the poll is being answered by now
        assert server.stop() == 0
    assert first == [b"event: status\n", b"0| up\n"]
    assert b"data: {" in answers[0].read()  # raises if the connection broke
    with pytest.raises(http.client.IncompleteRead):  # broken off: whoever follows goes on with the next server
        answers[1].read()
    last = polling.getresponse()
    assert (last.status, json.loads(last.read())["phase"]) == (200, "ready")
    for connection in (watching, following, polling):
        connection.close()
    assert not (state / "server.json").exists()
    assert "Traceback" not in server.stderr
    assert "Cancel" not in server.stderr
    with serving(state) as server, server.client() as client:
        assert client.get("/deployments/train").json()["phase"] == "ready"


def ask(server: Server, path: str) -> http.client.HTTPConnection:
    """A question about the run `train`, asked and not yet answered."""
    url = httpx2.URL(server.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
    connection.request("GET", f"/deployments/train/{path}", headers={"Authorization": f"Bearer {server.key}"})
    return connection


def test_two_interrupts_end_it_as_cleanly_as_one(state: Path) -> None:
    with serving(state) as server:
        server.signal(signal.SIGINT)
        server.signal(signal.SIGINT)
        assert server.wait() == 0
    assert not (state / "server.json").exists()


def test_after_a_kill_everything_goes_on(state: Path) -> None:
    with serving(state) as first:
        with first.client() as client:
            client.post("/deployments", json=run_request("long", "echo one; read x < $FIFO; echo two", env=fifo(state)))
            client.post("/deployments", json=run_request("short", "exit 3"))
            wait_for(client, "short", ended)
            seen = wait_for(client, "long", phase_is("ready"))
        pids = rank_pids(state)
        first.kill()
    assert (state / "server.json").exists()
    with serving(state) as second, second.client() as client:
        assert second.url != first.url or second.pid != first.pid
        assert client.get("/deployments/short").json()["phase"] == "failed"
        assert client.get("/deployments/long").json()["instanceName"] == seen["instanceName"]
        assert rank_pids(state) == pids
        with client.stream("GET", "/deployments/long/watch", headers={"Last-Event-ID": str(seen["version"])}) as stream:
            with (state.parent / "fifo").open("w") as pipe:
                pipe.write("go\n")
            text = "".join(stream.iter_text())
        assert '"phase":"succeeded"' in text
        assert text.rstrip().endswith("data: {}")
        assert client.get("/deployments/long/logs", params={"rank": 0}).text == "one\ntwo\n"
        body = client.get("/deployments/long").json()
        assert [e["exitCode"] for e in body["distributed"]["rankExits"]] == [0]
        assert body["distributed"]["ranks"][0]["attempt"] == 0


def fifo(state: Path) -> dict[str, str]:
    path = state.parent / "fifo"
    os.mkfifo(path)
    return {"FIFO": str(path)}


def rank_pids(state: Path) -> list[int]:
    """The processes whose environment names this state directory's runs."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue
            if f"BASILICA_CHECKPOINT_DIR={state}".encode() in environment:
                found.append(int(process.name))
    return sorted(found)


# ---- limits and retention -------------------------------------------------------------------------------------------


def test_limits_are_options_of_the_server(state: Path) -> None:
    with serving(state, "--max-deployments", "1", "--max-ranks", "2") as server, server.client() as client:
        error = client.post("/deployments", json=run_request("a", "exec sleep 60", target=3)).json()["error"]
        assert (error["code"], error["details"]["limit"]) == ("QuotaExceeded", 2)
        assert client.post("/deployments", json=run_request("a", "exec sleep 60")).status_code == 201
        error = client.post("/deployments", json=run_request("b", "exec sleep 60")).json()["error"]
        assert (error["code"], error["details"]["what"]) == ("QuotaExceeded", "deployments")


def test_retention_removes_what_ended_long_enough_ago(state: Path) -> None:
    with serving(state) as server, server.client() as client:
        client.post("/deployments", json=run_request("done", "exit 0"))
        wait_for(client, "done", ended)
        server.stop()
    with serving(state, "--retention", "1h") as server, server.client() as client:
        assert client.get("/deployments/done").status_code == 200
        server.stop()
    with serving(state, "--retention", "0s") as server, server.client() as client:
        with client.stream("GET", "/deployments/done/watch?since=1000000") as stream:
            stream.read()
        while client.get("/deployments").json()["total"]:
            pass
    assert list((state / "runs").iterdir()) == []


# ---- real ranks -----------------------------------------------------------------------------------------------------


def test_a_command_that_does_not_exist_fails_at_once_with_that_sentence(server: Server) -> None:
    with server.client() as client:
        plain = {"instanceName": "none", "command": ["/no/such/program"]}
        client.post("/deployments", json=plain).raise_for_status()
        body = wait_for(client, "none", ended)
        assert body["phase"] == "failed"
        assert "/no/such/program" in body["message"]
        assert "/no/such/program" in client.get("/deployments/none/why").json()["why"]
        client.post("/deployments", json=plain | {"instanceName": "nowhere", "workdir": "/no/such/directory"})
        assert "/no/such/directory" in wait_for(client, "nowhere", ended)["message"]


def test_an_image_is_not_used_and_the_events_say_so(server: Server) -> None:
    with server.client() as client:
        client.post(
            "/deployments", json=run_request("train", "echo ran", image="pytorch/pytorch:2.4")
        ).raise_for_status()
        assert wait_for(client, "train", ended)["phase"] == "succeeded"
        messages = [e["message"] for e in client.get("/deployments/train/events").json()["events"]]
        assert "image 'pytorch/pytorch:2.4' is not used: ranks are processes of this machine" in messages


def test_a_hundred_thousand_variables_reach_the_rank_or_are_refused_in_a_sentence(server: Server) -> None:
    few = {f"V{number}": "" for number in range(100_000)}
    with server.client() as client:
        answer = client.post("/deployments", json=run_request("many", "env | grep -c ^V", env=few))
        assert answer.status_code == 201
        body = wait_for(client, "many", ended)
        if body["phase"] == "succeeded":
            assert client.get("/deployments/many/logs", params={"rank": 0}).text == "100000\n"
        else:
            assert "Argument list too long" in body["message"]


def test_garbage_in_a_log_is_shown_as_well_as_it_can_be(server: Server) -> None:
    with server.client() as client:
        client.post(
            "/deployments", json=run_request("noise", r"printf 'a\377\376\000b\n'; head -c 100000 /dev/urandom")
        )
        wait_for(client, "noise", ended)
        answer = client.get("/deployments/noise/logs", params={"rank": 0})
        assert answer.status_code == 200
        assert answer.content.startswith("a\ufffd\ufffd\0b\n".encode())
        rows = client.get("/deployments/noise/logs", headers={"Accept": "application/x-ndjson"}).content
        parsed = [json.loads(row) for row in rows.split(b"\n") if row]
        assert parsed[0]["line"] == "a\ufffd\ufffd\0b"
        followed = client.get("/deployments/noise/logs", params={"rank": 0, "follow": True}).content
        assert followed == answer.content


def test_secrets_reach_the_rank_and_nothing_else(server: Server, state: Path) -> None:
    secret = "hunter2-marker"
    script = 'test "$TOKEN" = hunter2"-marker" && test "$PASSWORD" = hunter2"-marker"'
    with server.client() as client:
        request = run_request("train", script, env={"TOKEN": secret}, secrets={"PASSWORD": secret})
        client.post("/deployments", json=request).raise_for_status()
        assert wait_for(client, "train", ended)["phase"] == "succeeded"
        paths = ("", "/why", "/ranks", "/events", "/logs", "/watch")
        said = "".join(client.get(f"/deployments/train{path}").text for path in paths)
        said += client.get("/deployments").text + client.get("/metrics").text
    assert secret not in said + server.stderr + server.printed
    logs = [f for f in state.rglob("*") if f.is_file() and "basilica.db" not in f.name]
    assert [f for f in logs if secret.encode() in f.read_bytes()] == []
