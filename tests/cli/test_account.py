"""`basilica login`, `logout`, `config` and `completion`."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.client.lying_server import RawBody, lying, sequence
from tests.support.server import Server, cli


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "BASILICA_STATE_DIR": str(tmp_path / "unused")}


def test_a_login_is_used_until_the_logout(server: Server, state: Path, env: dict[str, str], tmp_path: Path) -> None:
    done = cli("login", server.url + "/", "--key-file", state / "api-key", env=env)
    assert done.stdout == f"logged in to {server.url}/; saved in {tmp_path}/config/basilica/login.json\n"
    assert json.loads(cli("train", "ls", "--json", env=env).stdout) == []
    facts = json.loads(cli("config", "--json", env=env).stdout)
    assert facts["server"] == server.url
    assert facts["why"].startswith("saved login in ")
    assert facts["key"] == f"{tmp_path}/config/basilica/login.json"
    assert facts["serverVersion"] == facts["version"]
    for shown in (json.dumps(facts), cli("config", env=env).stdout, done.stdout + done.stderr):
        assert server.key not in shown
    assert cli("logout", env=env).stdout == f"removed {tmp_path}/config/basilica/login.json\n"
    assert cli("logout", env=env).stdout == "there is no saved login\n"
    assert json.loads(cli("logout", "--json", env=env).stdout) == {"loggedOut": False}


def test_a_key_from_the_environment(server: Server, env: dict[str, str]) -> None:
    done = cli("login", server.url, "--json", env=env | {"BASILICA_API_KEY": server.key})
    assert json.loads(done.stdout)["url"] == server.url
    shadowed = cli("login", server.url, env=env | {"BASILICA_API_KEY": server.key, "BASILICA_API_URL": "http://x"})
    assert shadowed.stderr == "BASILICA_API_URL is set, and wins over the login\n"


def test_a_login_that_does_not_work_is_not_saved(server: Server, env: dict[str, str], tmp_path: Path) -> None:
    key = {"BASILICA_API_KEY": "wrong"}
    with lying(sequence((200, RawBody(b"<html>hello</html>")))) as other, lying(sequence((200, []))) as list_server:
        for url in (server.url, other.url, list_server.url, "http://127.0.0.1:1", "ftp://x", "nonsense"):
            done = cli("login", url, env=env | key)
            assert done.returncode == 1, url
            assert done.stderr.startswith("basilica: ")
            assert done.stderr.count("\n") == 1
            assert done.stdout == ""
        assert "is no Basilica server" in cli("login", list_server.url, env=env | key).stderr
        unreachable = cli("login", "http://127.0.0.1:1", env=env | key).stderr
        assert unreachable.startswith("basilica: http://127.0.0.1:1 does not answer: ")
    assert not (tmp_path / "config").exists()
    assert cli("login", server.url, "--key-file", "/no/such/file", env=env).returncode == 2


def test_without_a_login_the_configuration_says_what_would_be_used(env: dict[str, str], tmp_path: Path) -> None:
    facts = json.loads(cli("config", "--json", env=env).stdout)
    assert facts["server"] is None
    assert "a local server, started when needed" in facts["why"]
    assert facts["stateDir"] == str(tmp_path / "unused")
    assert not (tmp_path / "unused").exists()
    text = cli(
        "config", env=env | {"BASILICA_API_URL": "http://me:secret@127.0.0.1:1", "BASILICA_API_KEY": "k3y"}
    ).stdout
    assert "http://127.0.0.1:1\n" in text
    assert "BASILICA_API_URL is set" in text
    assert "it does not answer" in text
    assert "secret" not in text
    assert "k3y" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    script = cli("completion", shell).stdout
    assert "_BASILICA_COMPLETE=complete_" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert cli("completion", "powershell").returncode == 2
