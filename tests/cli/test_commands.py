"""`basilica keys`, `doctor`, `prune` and the help of them all."""

import json
import os
from pathlib import Path

import pytest

from tests.support.server import Server, cli, cli_afresh, ended, run_request, wait_for
from tests.test_public_names import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example_that_names_it(command: str) -> None:
    done = cli(*command.split(), "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout
    assert f"\n    basilica {command}" in done.stdout or f"$(basilica {command}" in done.stdout


def test_help_does_not_import_what_only_running_needs() -> None:
    done = cli_afresh("serve", "--help", env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert imported & {"fastapi", "uvicorn", "httpx2", "torch", "sqlite3"} == set()


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_keys_are_made_listed_and_revoked_without_a_server(state: Path) -> None:
    key = cli("keys", "create", "--user", "alice", "--note", "laptop", "--state-dir", state).stdout.strip()
    assert key.startswith("bsk_")
    made = json.loads(cli("keys", "create", "--user", "bob", "--json", "--state-dir", state).stdout)
    assert made.keys() == {"id", "user", "key"}
    rows = json.loads(cli("keys", "list", "--json", "--state-dir", state).stdout)
    assert [(row["user"], row["note"]) for row in rows] == [("alice", "laptop"), ("bob", "")]
    table = cli("keys", "list", "--state-dir", state).stdout
    assert "alice" in table
    assert key not in table
    assert key.encode() not in (state / "basilica.db").read_bytes()
    revoked = cli("keys", "revoke", made["id"], "--json", "--state-dir", state)
    assert json.loads(revoked.stdout) == {"id": made["id"], "revoked": True}
    assert len(json.loads(cli("keys", "list", "--json", "--state-dir", state).stdout)) == 1


def test_a_key_works_and_stops_working_at_once_on_a_running_server(server: Server, state: Path) -> None:
    made = json.loads(cli("keys", "create", "--user", "alice", "--json", "--state-dir", state).stdout)
    with server.client(made["key"]) as client:
        assert client.get("/deployments").status_code == 200
        client.post("/deployments", json=run_request("hers", "exit 0")).raise_for_status()
        assert wait_for(client, "hers", ended)["userId"] == "alice"
        with server.client() as local:
            assert local.get("/deployments/hers").status_code == 404
        assert cli("keys", "revoke", made["id"], "--state-dir", state).stdout == f"revoked {made['id']}\n"
        assert client.get("/deployments").status_code == 401


def test_revoking_what_is_not_there_is_an_error(state: Path) -> None:
    done = cli("keys", "revoke", "nobody", "--state-dir", state)
    assert done.returncode == 1
    assert done.stderr == "basilica: no key has the id 'nobody'; see 'basilica keys list'\n"


@pytest.mark.parametrize("user", ["", "Alice", "a b", "../x", "ü", "x" * 49])
def test_a_user_whose_name_cannot_be_a_namespace_is_refused(state: Path, user: str) -> None:
    done = cli("keys", "create", "--user", user, "--state-dir", state)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("basilica: user: ")
    assert not state.exists()


# ---- doctor ---------------------------------------------------------------------------------------------------------


def test_the_doctor_says_what_there_is_and_what_to_do_about_the_rest(tmp_path: Path) -> None:
    done = cli("doctor", env={"PATH": str(tmp_path)})
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok       python ") for line in lines)
    assert any(line.startswith("missing  etcd ") for line in lines)
    assert any("-> " in line and "etcd" in line for line in lines)
    assert cli("doctor", "--strict", env={"PATH": str(tmp_path)}).returncode == 1


def test_the_doctors_findings_are_json_for_machines() -> None:
    findings = json.loads(cli("doctor", "--json").stdout)
    assert {finding["name"] for finding in findings} >= {
        "platform",
        "python",
        "memory limits",
        "cpu limits",
        "GPUs",
        "etcd",
        "torchrun",
    }
    for finding in findings:
        assert finding.keys() == {"name", "ok", "detail", "hint"}
        assert isinstance(finding["ok"], bool)
        assert finding["detail"]


# ---- prune ----------------------------------------------------------------------------------------------------------


def test_prune_removes_ended_runs_with_their_files(server: Server, state: Path) -> None:
    with server.client() as client:
        client.post("/deployments", json=run_request("done", "echo out")).raise_for_status()
        instance = wait_for(client, "done", ended)["instanceName"]
        assert cli("prune", "--state-dir", state).stdout == "no run ended more than 7d ago\n"
        assert (state / "runs" / instance).exists()
        done = cli("prune", "--older-than", "0s", "--state-dir", state)
        assert done.stdout == f"removed {instance}\n1 run removed\n"
        while client.get("/deployments").json()["total"]:
            pass
        assert not (state / "runs" / instance).exists()
        assert json.loads(cli("prune", "--json", "--state-dir", state).stdout) == {"deleted": []}


@pytest.mark.parametrize("age", ["soon", "-1d", "5y", "", "1d2h", "nan"])
def test_an_age_that_is_no_duration_is_bad_usage(state: Path, age: str) -> None:
    done = cli("prune", f"--older-than={age}", "--state-dir", state)
    assert done.returncode == 2
    assert "write 90s, 15m, 12h, 7d or 2w" in done.stderr


@pytest.mark.parametrize(
    "note",
    [
        None,
        "",
        "{}",
        "[]",
        "nonsense",
        '{"url": "http://127.0.0.1:1", "keyFile": "KEY"}',
        '{"url": "http://127.0.0.1:1", "keyFile": "/no/such/file"}',
    ],
)
def test_without_a_server_prune_says_how_to_start_one(tmp_path: Path, note: str | None) -> None:
    (tmp_path / "api-key").write_text("k")
    if note is not None:
        (tmp_path / "server.json").write_text(note.replace("KEY", str(tmp_path / "api-key")))
    done = cli("prune", "--state-dir", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"basilica: no server runs on {tmp_path}: start one with 'basilica serve'")
    assert "Traceback" not in done.stderr


def test_what_a_killed_server_left_is_not_taken_for_a_server(server: Server, state: Path) -> None:
    server.kill()
    assert (state / "server.json").exists()
    done = cli("prune", "--state-dir", state)
    assert done.returncode == 1
    assert "no server runs" in done.stderr


# ---- where the state is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"BASILICA_STATE_DIR": "{tmp}/a"}, "a"),
        ({"XDG_STATE_HOME": "{tmp}/x"}, "x/basilica"),
        ({"HOME": "{tmp}/home"}, "home/.local/state/basilica"),
        ({"BASILICA_STATE_DIR": "~/b", "HOME": "{tmp}"}, "b"),
    ],
)
def test_the_state_directory_is_found_in_the_environment(tmp_path: Path, variables: dict[str, str], place: str) -> None:
    env = {name: value.format(tmp=tmp_path) for name, value in variables.items()}
    assert cli("keys", "create", env=env).returncode == 0
    assert (tmp_path / place / "basilica.db").exists()
    assert os.stat(tmp_path / place / "basilica.db").st_mode & 0o777 == 0o600
