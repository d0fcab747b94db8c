"""State that was lost or damaged is noticed, said loudly, and put right by an explicit command."""

import json
import os
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from basilica.machine.high_water import HighWaterMark
from basilica.machine.strays import with_environment
from tests.support.server import Json, Server, cli, ended, phase_is, run_request, serving, wait_for


def test_a_mark_is_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mark"
    mark = HighWaterMark(path)
    assert mark.read() == 0
    mark.open(7)
    mark.note(123456)
    mark.note(9)
    mark.close()
    assert HighWaterMark(path).read() == 9
    path.write_bytes(b"what is this")
    with pytest.raises(ValueError, match="what"):
        HighWaterMark(path).read()


def ranks_of(state: Path, instance: str) -> list[int]:
    return with_environment({f"BASILICA_CHECKPOINT_DIR={state}/runs/{instance}/checkpoints".encode()})


def start(client: httpx2.Client, name: str) -> str:
    client.post("/deployments", json=run_request(name, "echo hello; sleep 1000")).raise_for_status()
    return str(wait_for(client, name, phase_is("ready"))["instanceName"])


def kinds(client: httpx2.Client) -> set[str]:
    body = client.get("/health").json()
    troubles = body.get("troubles", [])
    assert body["status"] == ("degraded" if troubles else "healthy")
    return {trouble["kind"] for trouble in troubles}


def repaired(state: Path) -> list[Json]:
    done = cli("doctor", "--repair", "--yes", "--json", "--state-dir", state)
    assert done.returncode == 0, done.stderr
    found: list[Json] = json.loads(done.stdout)["repaired"]
    return found


def examined(state: Path) -> list[str]:
    findings = json.loads(cli("doctor", "--json", "--state-dir", state).stdout)
    return [f["detail"].partition(":")[0] for f in findings if f["name"] == "state directory" and not f["ok"]]


def without_database(state: Path) -> None:
    for name in ("basilica.db", "basilica.db-wal", "basilica.db-shm"):
        (state / name).unlink(missing_ok=True)


def overwritten(state: Path) -> None:
    (state / "basilica.db-wal").unlink(missing_ok=True)
    (state / "basilica.db").write_bytes(b"not a database at all" * 1000)


def test_a_database_that_is_gone_is_said_and_its_runs_are_taken_up_by_the_repair(state: Path) -> None:
    with serving(state) as server, server.client() as client:
        instance = start(client, "lost")
        server.kill()
    without_database(state)
    with serving(state) as server, server.client() as client:
        assert kinds(client) == {"StateLost", "ForgottenRuns"}
        assert "StateLost" in server.stderr
        assert client.get("/deployments").json()["total"] == 0
        other = client.post("/deployments", json=run_request("other", "sleep 1000")).json()
        assert other["version"] > 1
        assert "in trouble" in client.get("/deployments/other/why").json()["why"]
        assert set(examined(state)) == {"StateLost", "ForgottenRuns"}
        refused = cli("doctor", "--repair", "--yes", "--state-dir", state)
        assert refused.returncode == 1
        assert f"is in use by process {server.pid}" in refused.stderr
        assert ranks_of(state, instance)
    done = repaired(state)
    assert {d["kind"] for d in done} == {"StateLost", "ForgottenRuns"}
    assert ranks_of(state, instance) == []
    assert examined(state) == []
    with serving(state) as server, server.client() as client:
        assert kinds(client) == set()
        body = client.get(f"/deployments/{instance}").json()
        assert (body["phase"], body["friendlyName"]) == ("cancelled", "lost")
        assert [exit["rank"] for exit in body["distributed"]["rankExits"]] == [0]
        assert "hello" in client.get(f"/deployments/{instance}/logs").text
        assert client.delete(f"/deployments/{instance}", params={"wait": 20}).json()["state"] == "Deleted"


def test_a_write_ahead_log_that_is_lost_is_noticed(state: Path) -> None:
    with serving(state) as server, server.client() as client:
        start(client, "first")
        with closing(sqlite3.connect(state / "basilica.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        instance = start(client, "second")
        server.kill()
    (state / "basilica.db-wal").unlink()
    (state / "basilica.db-shm").unlink(missing_ok=True)
    with serving(state) as server, server.client() as client:
        assert "StateLost" in kinds(client)
        assert client.get("/deployments/second").status_code == 404
        assert ranks_of(state, instance)
    repaired(state)
    with serving(state) as server, server.client() as client:
        assert client.get("/deployments/second").json()["phase"] == "cancelled"
        assert ranks_of(state, instance) == []


def test_a_damaged_database_is_put_aside_and_what_can_be_read_is_taken_over(state: Path) -> None:
    with serving(state) as server, server.client() as client:
        instance = start(client, "lost")
        server.kill()
    overwritten(state)
    refused = cli("serve", "--port", "0", "--state-dir", state)
    assert refused.returncode == 1
    assert "basilica doctor --repair" in refused.stderr
    assert examined(state) == ["StateFileDamaged"]
    assert {d["kind"] for d in repaired(state)} >= {"StateFileDamaged", "ForgottenRuns"}
    (aside,) = (state / "quarantine").iterdir()
    assert (aside / "basilica.db").read_bytes().startswith(b"not a database")
    assert aside.stat().st_mode & 0o777 == 0o700
    with serving(state) as server, server.client() as client:
        assert client.get(f"/deployments/{instance}").json()["phase"] == "cancelled"
        assert ranks_of(state, instance) == []


def test_pages_that_are_damaged_cost_only_what_was_on_them(state: Path) -> None:
    with serving(state) as server, server.client() as client:
        for number in range(20):
            client.post("/deployments", json=run_request(f"run-{number}", "exit 0")).raise_for_status()
        for number in range(20):
            wait_for(client, f"run-{number}", ended)
        key = server.key
        server.kill()
    with closing(sqlite3.connect(state / "basilica.db")) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'events'").fetchone()
    with (state / "basilica.db").open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(os.urandom(4096))
    assert "StateFileDamaged" in examined(state)
    repaired(state)
    assert examined(state) == []
    with serving(state) as server, server.client(key) as client:
        listed = client.get("/deployments").json()["deployments"]
        assert [row["phase"] for row in listed] == ["succeeded"] * 20


def test_a_state_directory_deleted_under_the_server_takes_no_new_runs(state: Path) -> None:
    with serving(state) as server:
        key = server.key
        with server.client(key) as client:
            instance = start(client, "first")
            shutil.move(state, state.with_name("away"))
            answer = client.post("/deployments", json=run_request("second", "true"))
            assert answer.status_code == 503
            assert "was deleted or replaced while the server used it" in answer.json()["error"]["message"]
            assert kinds(client) == {"StateDirectoryGone"}
            assert "was deleted or replaced" in client.get("/deployments/first/why").json()["why"]
            wait_for_text(server, "was deleted or replaced")
            shutil.move(state.with_name("away"), state)
            assert kinds(client) == set()
            shutil.rmtree(state)
            assert client.post("/deployments", json=run_request("second", "true")).status_code == 503
            server.kill()
    assert ranks_of(state, instance)
    state.mkdir(mode=0o700)
    assert examined(state) == ["ForgottenRuns"]
    assert [d["kind"] for d in repaired(state)] == ["ForgottenRuns"]
    assert ranks_of(state, instance) == []


def wait_for_text(server: Server, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in server.stderr:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_damaged_record_is_repaired_by_ending_its_run(state: Path) -> None:
    with serving(state) as server, server.client() as client:
        instance = start(client, "spoilt")
        server.kill()
    with closing(sqlite3.connect(state / "basilica.db", isolation_level=None)) as connection:
        connection.execute("UPDATE specs SET spec = '{'")
    assert examined(state) == ["DamagedRuns"]
    repaired(state)
    (kept,) = (state / "quarantine").glob("*/*.json")
    assert json.loads(kept.read_text())["spec"] == "{"
    with serving(state) as server, server.client() as client:
        assert wait_for(client, instance, ended)["phase"] == "cancelled"
        assert ranks_of(state, instance) == []


def test_a_directory_that_is_whole_is_left_alone(state: Path) -> None:
    with serving(state) as server, server.client() as client:
        client.post("/deployments", json=run_request("fine", "exit 0")).raise_for_status()
        wait_for(client, "fine", ended)
    assert examined(state) == []
    assert repaired(state) == []
    assert not (state / "quarantine").exists()


def test_without_yes_it_asks_first(state: Path) -> None:
    with serving(state):
        pass
    (state / "runs" / "nobody-s-1").mkdir()
    done = cli("doctor", "--repair", "--state-dir", state)
    assert done.returncode == 1
    assert "ForgottenRuns" in done.stdout
    assert not (state / "quarantine").exists()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_state_directory_that_others_can_write_is_refused(state: Path, mode: int) -> None:
    state.mkdir()
    state.chmod(mode)
    done = cli("serve", "--port", "0", "--state-dir", state)
    assert done.returncode == 1
    assert f"run 'chmod 700 {state}'" in done.stderr
    assert list(state.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_state_directory_of_another_user_is_refused(state: Path) -> None:
    state.mkdir(mode=0o700)
    os.chown(state, 65534, 65534)
    done = cli("serve", "--port", "0", "--state-dir", state)
    assert done.returncode == 1
    assert "belongs to another user" in done.stderr


def test_whatever_the_umask_state_is_for_its_owner_alone(state: Path) -> None:
    before = os.umask(0)
    try:
        with serving(state) as server, server.client() as client:
            request = run_request("open", "echo hello; sleep 1000", target=2)
            client.post("/deployments", json=request).raise_for_status()
            wait_for(client, "open", phase_is("ready"))
            client.post("/deployments/open/cancel").raise_for_status()
            wait_for(client, "open", ended)
            found = subprocess.run(
                ["find", state, "-perm", "/077", "!", "-type", "l"], capture_output=True, text=True, check=True
            )
            assert found.stdout == ""
    finally:
        os.umask(before)
