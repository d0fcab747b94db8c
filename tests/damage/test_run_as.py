"""Ranks as a user of their own: they reach what is theirs, and nothing else of the state directory."""

import json
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from basilica.runtimes.local.run_as import User, may_enter
from tests.support.server import Json, cli, ended, phase_is, run_request, serving, wait_for

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes as somebody else")
NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def place() -> Iterator[Path]:
    """Where that user may go, unlike where pytest keeps its own."""
    directory = Path(tempfile.mkdtemp(prefix="basilica-run-as-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def output(client: httpx2.Client, name: str, script: str, **more: str) -> tuple[Json, list[str]]:
    client.post("/deployments", json=run_request(name, script) | more).raise_for_status()
    body = wait_for(client, name, ended)
    return body, client.get(f"/deployments/{name}/logs", params={"rank": 0}).text.splitlines()


LOOK = """
id -u; id -g; id -G; echo "$HOME $USER"
echo to-stderr >> /dev/stderr
echo kept > "$BASILICA_CHECKPOINT_DIR/file" && echo '{"a": 1}' > "$BASILICA_RESULT_FILE" && echo wrote
for f in STATE STATE/runs STATE/runs/$BASILICA_DEPLOYMENT STATE/archives STATE/rendezvous; do
  ls $f >/dev/null 2>&1 && echo "lists $f"; done
for f in STATE/basilica.db STATE/basilica.db-wal STATE/api-key STATE/server.json STATE/supervisor.log STATE/reserve \
  STATE/runs/$BASILICA_DEPLOYMENT/ports.json STATE/runs/$BASILICA_DEPLOYMENT/rank-0/0.record \
  STATE/runs/$BASILICA_DEPLOYMENT/rank-0/0.log; do
  head -c1 $f >/dev/null 2>&1 && echo "reads $f"; { echo x >> $f; } 2>/dev/null && echo "writes $f"; done
touch STATE/mine STATE/runs/mine STATE/runs/$BASILICA_DEPLOYMENT/mine STATE/runs/$BASILICA_DEPLOYMENT/rank-0/mine \
  2>/dev/null && echo "makes files"
grep -h -E '^(CapEff|CapPrm|Groups):' /proc/self/status
kill -9 $PPID 2>/dev/null && echo "kills its supervisor"
echo done
"""


@as_root
def test_a_rank_runs_as_that_user_and_reaches_only_what_is_its_own(place: Path) -> None:
    state = place / "state"
    with serving(state, "--run-as", "nobody") as server, server.client() as client:
        body, lines = output(client, "look", LOOK.replace("STATE", str(state)))
        assert body["phase"] == "succeeded", lines
        assert lines[:4] == [str(NOBODY.pw_uid), str(NOBODY.pw_gid), str(NOBODY.pw_gid), f"{NOBODY.pw_dir} nobody"]
        none = ["0000000000000000"] * 2
        assert lines[4:6] == ["to-stderr", "wrote"]
        assert [line.split() for line in lines[6:-1]] == [["Groups:"], ["CapPrm:", none[0]], ["CapEff:", none[1]]]
        assert lines[-1] == "done"
        assert client.get("/deployments/look/results").json()["results"]
        instance = body["instanceName"]
        for path, mode in (("", 0o710), ("runs", 0o710), (f"runs/{instance}", 0o710)):
            assert stat.S_IMODE((state / path).stat().st_mode) == mode
        assert (state / f"runs/{instance}/checkpoints/file").stat().st_uid == NOBODY.pw_uid


@as_root
def test_reports_errors_exec_and_unpacked_directories_work_as_that_user(place: Path) -> None:
    state = place / "state"
    with serving(state, "--run-as", "nobody") as server, server.client() as client:
        archive = packed(place, {"train.sh": "echo from-the-archive; touch made && ls -ln made | cut -d' ' -f3"})
        digest = client.put("/archives", content=archive).json()["archive"]
        body, lines = output(client, "packed", "sh train.sh", workdirArchive=digest)
        assert (body["phase"], lines) == ("succeeded", ["from-the-archive", str(NOBODY.pw_uid)])
        error = {"message": {"message": "boom", "extraInfo": {"py_callstack": "Traceback: boom", "timestamp": "1"}}}
        script = f"echo '{json.dumps(error)}' > $TORCHELASTIC_ERROR_FILE; exit 1"
        body, _ = output(client, "fails", script)
        assert "boom" in body["distributed"]["rankExits"][0]["traceback"]
        client.post("/deployments", json=run_request("live", "sleep 1000")).raise_for_status()
        wait_for(client, "live", phase_is("ready"))
        answer = client.post("/deployments/live/exec", json={"rank": 0, "command": ["id", "-u"]})
        said = [json.loads(line) for line in answer.text.splitlines()]
        assert f"{NOBODY.pw_uid}\n" in [line.get("text", line.get("data")) for line in said]
        missing = client.post("/deployments/live/exec", json={"rank": 0, "command": ["no-such-program"]})
        assert json.loads(missing.text.splitlines()[-1])["exitCode"] == 127
        bell = state / "wake"
        assert (bell.stat().st_gid, stat.S_IMODE(bell.stat().st_mode)) == (NOBODY.pw_gid, 0o620)


@as_root
def test_a_directory_that_the_user_may_not_enter_is_a_clear_start_error(place: Path) -> None:
    (place / "closed").mkdir(mode=0o700)
    with serving(place / "state", "--run-as", "nobody") as server, server.client() as client:
        body, _ = output(client, "closed", "pwd", workdir=str(place / "closed"))
        assert body["phase"] == "failed"
        assert "may not enter the directory" in client.get("/deployments/closed/why").json()["why"]


@as_root
def test_ranks_are_adopted_and_stopped_by_the_next_server(place: Path) -> None:
    state = place / "state"
    with serving(state, "--run-as", "nobody") as server, server.client() as client:
        client.post("/deployments", json=run_request("live", "sleep 1000")).raise_for_status()
        wait_for(client, "live", phase_is("ready"))
        server.kill()
    with serving(state, "--run-as", "nobody") as server, server.client() as client:
        assert client.delete("/deployments/live", params={"wait": 20}).json()["state"] == "Deleted"


@as_root
@pytest.mark.parametrize(
    ("user", "problem"), [("no-such-user", "there is no user 'no-such-user'"), ("root", "without privileges")]
)
def test_a_user_that_ranks_cannot_run_as_is_refused(place: Path, user: str, problem: str) -> None:
    done = cli("serve", "--port", "0", "--state-dir", place / "state", "--run-as", user)
    assert done.returncode == 1
    assert problem in done.stderr


@as_root
def test_a_state_directory_that_the_user_cannot_reach_is_refused(place: Path) -> None:
    (place / "closed").mkdir(mode=0o700)
    done = cli("serve", "--port", "0", "--state-dir", place / "closed" / "state", "--run-as", "nobody")
    assert done.returncode == 1
    assert f"that user may not enter {place / 'closed'}" in done.stderr


def packed(place: Path, files: dict[str, str]) -> bytes:
    source = place / "source"
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    return Path(shutil.make_archive(str(place / "packed"), "gztar", source)).read_bytes()


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "enters"),
    [
        (7, 0, 0o700, True),
        (7, 0, 0o077, False),
        (0, 8, 0o710, True),
        (0, 8, 0o701, False),
        (0, 0, 0o701, True),
        (0, 0, 0o770, False),
    ],
)
def test_who_may_pass_through_a_directory(uid: int, gid: int, mode: int, enters: bool) -> None:
    user = User(name="u", uid=7, gid=8, home="/", shell="/bin/sh")
    found = os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))
    assert may_enter(found, user) is enters
