"""A state directory that cannot be used: one sentence that says why, and no half-made server."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.disk import small_disk
from tests.support.server import DidNotStart, cli, cli_afresh, ended, run_request, serving, wait_for

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.getuid() == 0 else ()


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("basilica: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("keys", "create"), ("keys", "list")])
def test_a_file_is_no_state_directory(tmp_path: Path, command: tuple[str, ...]) -> None:
    place = tmp_path / "file"
    place.write_text("precious")
    for state in (place, place / "below"):
        said = sentence(cli(*command, "--state-dir", state))
        assert str(state) in said
        assert "choose another --state-dir" in said
    assert place.read_text() == "precious"


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("keys", "create")])
def test_a_directory_without_rights_is_named(state: Path, command: tuple[str, ...]) -> None:
    state.mkdir(mode=0o500)
    said = sentence(cli_afresh(*command, "--state-dir", state, prefix=WITHOUT_PRIVILEGES))
    assert f"cannot use the state directory {state}: Permission denied" in said
    said = sentence(cli_afresh(*command, "--state-dir", state / "below", prefix=WITHOUT_PRIVILEGES))
    assert f"cannot use the state directory {state / 'below'}: Permission denied" in said
    assert list(state.iterdir()) == []


@pytest.mark.parametrize("file", ["basilica.db", "basilica.db.lock", "api-key", "runs"])
def test_what_may_not_be_read_or_written_in_it_is_named(state: Path, file: str) -> None:
    with serving(state):
        pass
    (state / file).chmod(0)
    try:
        said = sentence(cli_afresh("serve", "--port", "0", "--state-dir", state, prefix=WITHOUT_PRIVILEGES))
    finally:
        (state / file).chmod(0o700)
    assert file.removesuffix(".lock") in said
    with serving(state):
        pass


def test_a_file_that_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "basilica.db").write_bytes(b"somebody's notes, which are no database\n" * 100)
    said = sentence(cli("serve", "--port", "0", "--state-dir", tmp_path))
    assert "is not a Basilica state file" in said
    assert (tmp_path / "basilica.db").read_bytes().startswith(b"somebody's notes")


@pytest.mark.parametrize("free", [0, 4 << 10, 40 << 10, 100 << 10, 200 << 10])
@as_root
def test_on_a_full_disk_it_starts_whole_or_says_so(tmp_path: Path, free: int) -> None:
    with small_disk(tmp_path / "disk", free) as ballast:
        state = tmp_path / "disk" / "state"
        try:
            with serving(state) as server, server.client() as client:
                assert client.get("/deployments").status_code == 200
        except DidNotStart as error:
            said = str(error)
            assert "Traceback" not in said
            assert said.splitlines()[-1].startswith("basilica: ")  # below what the log has to say
            assert "full" in said or "No space left" in said or "no space" in said
        else:
            assert free > 0
        ballast.unlink()
        with serving(state) as server, server.client() as client:  # what was begun does not stand in the way
            assert client.get("/deployments").status_code == 200


@as_root
def test_a_disk_that_fills_up_refuses_runs_and_recovers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 3 << 20) as ballast:
        state = tmp_path / "disk" / "state"
        with serving(state) as server, server.client() as client:
            client.post("/deployments", json=run_request("first", "exit 0")).raise_for_status()
            wait_for(client, "first", ended)
            filler = tmp_path / "disk" / "filler"
            with pytest.raises(OSError, match="No space left"):
                filler.write_bytes(bytes(8 << 20))
            large = run_request("large", "true", env={f"V{n}": "x" * 1000 for n in range(500)})
            answer = client.post("/deployments", json=large)
            assert answer.status_code == 507
            assert answer.json()["error"]["retryable"] is True
            assert "the disk is full" in answer.json()["error"]["message"]
            assert client.get("/deployments/large").status_code == 404
            assert client.get("/deployments/first").json()["phase"] == "succeeded"
            filler.unlink()
            ballast.unlink()
            client.post("/deployments", json=run_request("second", "exit 0")).raise_for_status()
            assert wait_for(client, "second", ended)["phase"] == "succeeded"
